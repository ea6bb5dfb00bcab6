"""Compaction that is struck at every statement, run beside readers and writers, and run twice: nothing live is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from keeping_kit import PLACES, Clock, Hook, fill, hashes, opened, place, seen, sound, struck_everywhere

import perdure

_tenants = itertools.count()


@dataclass
class Pair:
    """The same database twice: a plain store, and one that can be struck. Each scene is a tenant of its own."""

    plain: perdure.Store
    struck: perdure.Store
    hook: Hook
    clock: Clock

    def scene(self) -> tuple[perdure.Store, perdure.Store]:
        name = f"scene {next(_tenants)}"
        plain, struck = self.plain.tenant(name), self.struck.tenant(name)
        for store in (plain, struck):
            store._context.clock_us = self.clock
        prepare(plain, self.clock)
        return plain, struck


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    url, hook, clock = place(request, request.param), Hook(), Clock()
    with opened(url, clock) as plain, opened(url, clock, hook=hook) as struck:
        yield Pair(plain, struck, hook, clock)


@perdure.durable(name="struck.asks")
def asks() -> str:
    state = perdure.state({"n": 0})
    state["n"] = 1
    return str(perdure.ask("Go on?", options=["yes", "no"]))


def prepare(store: perdure.Store, clock: Clock) -> None:
    saved = fill(store.thread("main"), 8)
    store.thread("main").save({"branch": 1}, parent=saved[2], note="branch")
    fill(store.thread("gone"), 4)
    fill(store.thread("pinned"), 6)
    store.thread("pinned").pin(next(c for c in store.thread("pinned").history() if c.step == 2), name="p")
    clock.days(40)
    fill(store.thread("main").fork(saved[4], name="fork"), 3, start=30)
    fill(store.thread("new"), 6)
    store.run(asks, id="asks")
    store.ops.retention(threads=timedelta(days=30), checkpoints=2)


def live(store: perdure.Store) -> dict[str, Any]:
    found = seen(store)
    return {name: (line[:2], pins) for name, (line, pins, _) in found.items()}


def test_struck_anywhere_it_goes_on_the_next_time(pair: Pair) -> None:
    plain, struck = pair.scene()
    before = live(plain)
    expected = struck.ops.compact()
    assert (expected.threads, expected.held) == (2, 1)
    after = seen(plain)

    def check(scene: tuple[perdure.Store, perdure.Store], point: int) -> None:
        plain, struck = scene
        sound(plain)
        now = live(plain)
        for name in ("fork", "new", "pinned", "run:asks"):  # what is live is there at any moment
            assert now[name] == before[name], f"{name} has lost something at {point}"
        struck.ops.compact()
        assert seen(plain) == after
        sound(plain)
        again = plain.ops.compact(dry_run=True)
        assert (again.threads, again.checkpoints) == (0, 0)

    assert struck_everywhere(pair.scene, lambda scene: scene[1].ops.compact(), pair.hook, check) > 20


def test_a_dry_run_that_is_struck_has_changed_nothing(pair: Pair) -> None:
    def check(scene: tuple[perdure.Store, perdure.Store], point: int) -> None:
        assert scene[0].ops.compact(dry_run=True).threads == 2

    struck_everywhere(pair.scene, lambda scene: scene[1].ops.compact(dry_run=True), pair.hook, check)


@pytest.mark.parametrize("where", PLACES)
def test_readers_and_writers_go_on_beside_it(request: pytest.FixtureRequest, where: str) -> None:
    """Writers save without pause, readers load whatever is there, and compaction shortens it all the time."""
    with perdure.open(place(request, where), durability="normal") as store:
        for name in ("a", "b"):
            fill(store.thread(name), 20)
        pinned = store.thread("a").get_head()
        assert pinned is not None
        store.thread("a").pin(pinned, name="p")
        store.ops.retention(checkpoints=3)
        stop, problems = threading.Event(), []
        written = {"a": 20, "b": 20}

        def guarded(work: Any, *args: Any) -> None:
            try:
                while not stop.is_set():
                    work(*args)
            except BaseException as error:
                problems.append(error)
                stop.set()

        def write_to(name: str, thread: perdure.Thread) -> None:
            checkpoint = thread.save({"log": ["x" * (written[name] % 50)] * 20, "n": written[name]})
            assert checkpoint.is_head
            written[name] += 1

        def read_from(name: str) -> None:
            head = store.thread(name).load(strict=True)
            assert head.state["n"] <= written[name]
            assert store.thread("a").load(pinned.id, strict=True).state == pinned.state

        works = [(write_to, name, store.thread(name)) for name in written] + [(read_from, name) for name in written]
        threads = [threading.Thread(target=guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        for _ in range(15):
            store.ops.compact()
        stop.set()
        for thread in threads:
            thread.join()
        assert problems == []
        before = hashes(store)
        store.ops.compact()
        assert all(before[key] == found for key, found in hashes(store).items())
        for name, count in written.items():
            assert [one.state["n"] for one in store.thread(name).history()] == [count - 1, count - 2, count - 3]
        sound(store)


@pytest.mark.parametrize("where", PLACES)
def test_two_compactions_at_once(request: pytest.FixtureRequest, where: str) -> None:
    clock = Clock()
    url = place(request, where)
    with opened(url, clock) as one, opened(url, clock) as two:
        prepare(one, clock)
        results: list[perdure.ops.Compacted] = []
        threads = [threading.Thread(target=lambda s=s: results.append(s.ops.compact())) for s in (one, two, one)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        assert sum(result.threads for result in results) == 2
        sound(one)
        assert one.ops.compact(dry_run=True).checkpoints == 0
