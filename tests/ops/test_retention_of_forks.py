"""Retention of threads that share history: each keeps what its own rule says, and a fork without a rule keeps all.

Before, a thread and a fork at its head each kept the whole line for the other, whatever both of them were told."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from keeping_kit import PLACES, Clock, fill, hashes, opened, place, query, sound, steps
from langgraph.graph import START, StateGraph

import perdure
from perdure.langgraph import PerdureSaver


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest) -> str:
    return place(request, request.param)


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[perdure.Store]:
    with opened(url, clock) as made:
        yield made


class Total(TypedDict):
    total: Annotated[int, operator.add]


def adds(state: Total) -> Total:
    return {"total": 1}


def at(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def forked_at_head(store: perdure.Store, count: int = 10) -> tuple[perdure.Thread, perdure.Thread]:
    thread = store.thread("main")
    fill(thread, count)
    return thread, thread.fork(name="fork")


def test_the_stores_rule_shortens_a_fork_at_the_head_and_its_source(store: perdure.Store) -> None:
    thread, fork = forked_at_head(store)
    before = hashes(store)
    store.ops.retention(checkpoints=3)
    foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
    assert foreseen.checkpoints == done.checkpoints == 7
    assert steps(thread) == steps(fork) == [9, 8, 7]
    sound(store)
    assert all(before[key] == found for key, found in hashes(store).items())
    generation = query(store, "SELECT max(generation) FROM thread")
    assert store.ops.compact().checkpoints == 0
    assert query(store, "SELECT max(generation) FROM thread") == generation  # writers noticed nothing
    fill(thread, 3, start=10)
    fill(fork, 1, start=20)
    assert store.ops.compact().checkpoints == 1  # what neither of them keeps
    assert (steps(thread), steps(fork)) == ([12, 11, 10, 9, 8], [10, 9, 8])
    sound(store)


def test_a_fork_without_a_rule_keeps_the_line(store: perdure.Store) -> None:
    thread, fork = forked_at_head(store)
    thread.retention(checkpoints=3)
    foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
    assert foreseen.checkpoints == done.checkpoints == 0
    assert len(steps(thread)) == len(steps(fork)) == 10
    fork.retention(checkpoints=5)  # now it has one: the longer of the two holds for what they share
    foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
    assert foreseen.checkpoints == done.checkpoints == 5
    assert steps(thread) == steps(fork) == [9, 8, 7, 6, 5]
    store.delete_thread("fork")
    assert store.ops.compact().checkpoints == 2
    assert steps(thread) == [9, 8, 7]
    sound(store)


def test_a_forks_rule_does_not_reach_its_source(store: perdure.Store) -> None:
    thread, fork = forked_at_head(store)
    fork.retention(checkpoints=2)
    assert store.ops.compact().checkpoints == 0
    assert len(steps(thread)) == 10
    fill(fork, 4, start=20)
    assert store.ops.compact().checkpoints == 2
    assert len(steps(thread)) == 10
    sound(store)


@perdure.durable(name="forks_kept.saver")
def saves_to_fork(url: str) -> str:
    _stores[url].thread("fork").save({"by": "the run"}, note="first")
    return str(perdure.ask("Go on?"))


_stores: dict[str, perdure.Store] = {}


def test_what_an_unfinished_run_saved_to_a_fork_stays(store: perdure.Store, url: str) -> None:
    thread, fork = forked_at_head(store)
    _stores[url] = store
    store.run(saves_to_fork, url, id="r")
    fill(fork, 5, start=30)
    store.ops.retention(checkpoints=2)
    foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
    assert foreseen.checkpoints == done.checkpoints
    assert steps(thread) == [9, 8]
    assert "first" in [one.note for one in fork.history()]
    sound(store)


def test_a_copy_of_a_graphs_thread_is_shortened_with_it(store: perdure.Store, url: str, clock: Clock) -> None:
    """Its ids go with its checkpoints, and what is left goes on."""
    with PerdureSaver(url) as saver:
        saver.store._context.clock_us = clock
        builder = StateGraph(Total)
        builder.add_node("node", adds)
        builder.add_edge(START, "node")
        graph: Any = builder.compile(checkpointer=saver)
        for _ in range(4):
            graph.invoke({"total": 1}, at("main"))
        saver.copy_thread("main", "copy")
        store.ops.retention(checkpoints=2)
        assert store.ops.compact().checkpoints == 10
        assert query(store, "SELECT count(*) FROM label") == [(4,)]
        sound(store)
        for name in ("main", "copy"):
            assert len(list(saver.list(at(name)))) == 2
            assert graph.get_state(at(name)).values == {"total": 8}
            assert graph.invoke({"total": 1}, at(name)) == {"total": 10}
        sound(store)


@pytest.mark.parametrize("seed", range(4))
def test_a_dry_run_tells_the_truth_and_every_thread_keeps_its_own(
    request: pytest.FixtureRequest, clock: Clock, seed: int
) -> None:
    """Random trees of forks with random rules: nobody loses what his rule keeps, and a second time nothing goes."""
    chance = random.Random(seed)
    with opened(place(request, "postgres" if seed == 3 else "sqlite"), clock) as store:
        names = ["t0"]
        fill(store.thread("t0"), 5)
        for number in range(1, 6):
            source = store.thread(chance.choice(names))
            line = list(source.history())
            names.append(f"t{number}")
            source.fork(chance.choice(line[:4]), name=names[-1])
            for name in chance.sample(names, min(3, len(names))):
                fill(store.thread(name), chance.randrange(4), start=chance.randrange(50))
        for name in names:
            if chance.random() < 0.7:
                store.thread(name).retention(checkpoints=chance.randrange(1, 6))
        lines = {name: [one.id for one in store.thread(name).history()] for name in names}
        states = {name: [one.state for one in store.thread(name).history()] for name in names}
        foreseen, done = store.ops.compact(dry_run=True), store.ops.compact()
        assert foreseen.checkpoints == done.checkpoints
        sound(store)
        for name in names:
            keep = store.thread(name).retention().checkpoints
            left = [one.id for one in store.thread(name).history()]
            assert left == lines[name][: len(left)]
            assert len(left) >= min(len(lines[name]), keep if keep is not None else len(lines[name]))
            assert [one.state for one in store.thread(name).history()] == states[name][: len(left)]
        assert store.ops.compact().checkpoints == 0
        for name in names:
            fill(store.thread(name), 1, start=90)
        sound(store)
