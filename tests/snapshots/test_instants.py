"""`store.at(time)` shows what the store held at an instant, or refuses: never something else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count as numbers
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from snapshot_kit import asks, count
from soak import SOAK

import perdure
from perdure.errors import HistoryGone, NotFound, ReadOnlyStore, UsageError
from perdure.snapshots.instants import Instant
from perdure.testing import Clock

BOTH = pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
NEXT = numbers()
STEP = timedelta(seconds=1)


def seen(store: Any) -> dict[str, Any]:
    """What the reads of a store or an instant answer. A run that is not done has a derived status."""
    infos = sorted(store.threads(), key=lambda info: info.name)
    infos = [info for info in infos if not info.name.startswith("run:")]
    runs = [store.get_run(info.id) for info in store.runs()]
    return {
        "threads": [(info.name, info.head) for info in infos],
        "history": [[(point.id, point.state) for point in store.thread(info.name).history()] for info in infos],
        "runs": sorted((run.id, run.refresh().status) for run in runs),
        "steps": sorted((run.id, [(step.name, step.status, step.result) for step in run.steps()]) for run in runs),
        "results": sorted((run.id, run.result()) for run in runs if run.refresh().status == "done"),
        "asks": [(ask.run, ask.text) for ask in store.questions()],
        "items": sorted((item.key, item.value, item.version) for item in store.memory().list()),
    }


def act(store: perdure.Store, name: str, number: int) -> None:
    """Do one thing to a store, of a random kind."""
    thread, memory = store.thread(name), store.memory("users", name)
    heads = [info.name for info in store.threads()]
    if number % 8 == 0 and name in heads:
        thread.rollback(list(thread.history())[-1])
    elif number % 8 == 1 and name in heads:
        thread.fork(name=f"{name}-{next(NEXT)}")
    elif number % 8 == 2:
        store.run(count, number, id=f"run-{next(NEXT)}")
    elif number % 8 == 3:
        store.run(asks, id=f"ask-{next(NEXT)}")
    elif number % 8 == 4 and (open_ := store.questions()):
        store.answer(open_[0].run, "window")
        store.run(asks, id=open_[0].run)
    elif number % 8 == 5:
        memory.put(f"k{number % 3}", {"n": number})
    elif number % 8 == 6:
        memory.delete("k1")
    else:
        thread.load() if name in heads else None
        thread.save({"n": number, "text": "x" * number})


@BOTH
def test_any_instant_of_a_random_history_is_shown_as_it_was(store: perdure.Store) -> None:
    clock = Clock(store, datetime.now(UTC) + timedelta(days=1))

    @settings(max_examples=40 if SOAK else 3, phases=(Phase.generate,))  # shrinking takes minutes
    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), min_size=5, max_size=8), st.booleans())
    def example(actions: list[tuple[str, int]], with_snapshot: bool) -> None:
        of_it = store.tenant(f"tenant-{next(NEXT)}")
        clock.advance(STEP)
        model = []
        for name, number in actions:
            act(of_it, name, number)
            model.append((clock.now, seen(of_it)))
            clock.advance(STEP)
        snapshot = of_it.snapshot() if with_snapshot else None
        clock.advance(STEP)
        act(of_it, "a", 7)
        for at, then in model:
            with of_it.at(at) as past:
                assert seen(past) == then
        if snapshot is not None:
            snapshot.release()

    example()


def reads_of_what_is_gone(past: Instant) -> dict[str, Callable[[], Any]]:
    return {
        "threads": past.threads,
        "threads were": lambda: past.thread("deleted"),
        "runs": past.runs,
        "runs were": lambda: past.get_run("deleted"),
        "versions of items": lambda: past.memory("m"),
    }


@BOTH
def test_what_was_removed_since_is_refused_with_the_true_reason(store: perdure.Store) -> None:
    clock = Clock(store, datetime.now(UTC) - timedelta(hours=1))
    thread, memory = store.thread("pruned"), store.memory("m")
    for number in range(3):
        thread.save({"n": number})
        memory.put("k", number)
        clock.advance(STEP)
    store.thread("deleted").save({})
    store.run(count, 1, id="deleted")
    clock.advance(STEP)
    at = clock.now - 2 * STEP  # before the last version
    assert store.at(at).thread("pruned").load().state == {"n": 2}
    thread.prune(keep=1)
    early = store.at(at - STEP)
    with pytest.raises(
        HistoryGone, match=r"the checkpoint that thread 'pruned' had .* was removed: its history begins at"
    ):
        early.thread("pruned")
    assert store.at(at).thread("pruned").load().state == {"n": 2}, "what is left is shown"
    store.delete_thread("deleted")
    store.delete_run("deleted")
    memory.erase("k")
    for is_of_snapshot in (False, True):
        if is_of_snapshot:
            store.snapshot("kept")
        past = store.at(at)
        assert (past.snapshot is not None) is is_of_snapshot
        for what, attempt in reads_of_what_is_gone(past).items():
            with pytest.raises(HistoryGone, match=f"{what}.* removed since .* is complete from .* removed later$"):
                attempt()
    assert past.thread("pruned").load().state == {"n": 2}, "of what is there, the history is"
    assert min(moment for moment in past.known_from().values() if moment) > at


@BOTH
def test_a_later_snapshot_shows_what_was_removed_after_it(store: perdure.Store) -> None:
    clock = Clock(store, datetime.now(UTC) - timedelta(hours=1))
    thread = store.thread("a")
    for number in range(3):
        thread.save({"n": number})
        store.memory("m").put("k", number)
        clock.advance(STEP)
    at = clock.now - 2 * STEP
    before = seen(store.at(at))
    store.snapshot("kept")
    store.delete_thread("a")
    store.run(count, 1, id="later")
    store.delete_run("later")
    past = store.at(at)
    assert past.snapshot is not None
    assert past.snapshot.name == "kept"
    assert seen(past) == before
    assert before["items"] == [("k", 1, 2)]


@pytest.mark.parametrize("store", ["encrypted"], indirect=True)
def test_an_instant_is_read_only(store: perdure.Store) -> None:
    store.thread("a").save({"n": 1})
    store.run(asks, id="r")
    now = datetime.now(UTC) + timedelta(milliseconds=2)
    store._context.clock_us = lambda: int(now.timestamp() * 1e6)
    past = store.at(now)
    for write in (lambda: past.thread("a").save({}), lambda: past.memory("m").put("k", 1), past.get_run("r").cancel):
        with pytest.raises((ReadOnlyStore, UsageError), match=r"snapshot|memory as of a time"):
            write()
    with pytest.raises(NotFound, match="no run 'none'"):
        past.get_run("none")
    assert store.at("1h ago").threads() == [] == store.at(timedelta(hours=1)).runs()


@pytest.mark.parametrize("text", ["tomorrow", "2999-01-01", ""])
def test_a_text_that_is_no_past_time_is_refused(text: str) -> None:
    with perdure.open(":memory:") as store, pytest.raises(UsageError, match=r"a time such as|still to come"):
        store.at(text)


def content(store: Any) -> tuple[Any, Any]:
    threads = {info.name: store.thread(info.name).load().state for info in store.threads() if info.name[:4] != "run:"}
    return threads, {(item.namespace, item.key): item.value for item in store.memory().list()}


@pytest.mark.parametrize("deletes", [False, True], ids=["changed", "deleted"])
@BOTH
def test_a_restore_to_an_instant_brings_back_threads_and_memory(store: perdure.Store, deletes: bool) -> None:
    clock = Clock(store, datetime.now(UTC) - timedelta(hours=1))
    for name in ("a", "b"):
        store.thread(name).save({"n": 1})
        store.memory(name).put("k", {"n": 1})
    store.memory("a").put("gone", "soon")
    then, at = content(store), clock.now
    clock.advance(STEP)
    store.snapshot() if deletes else None
    store.thread("a").save({"n": 2})
    store.thread("new").save({})
    store.memory("a").put("k", {"n": 2})
    store.memory("a").delete("gone")
    store.memory("a").put("new", 1)
    store.run(asks, id="r")
    if deletes:
        store.delete_thread("b")
    clock.advance(STEP)
    now = content(store)
    planned = store.restore(at=at, dry_run=True)
    assert content(store) == now
    assert store.restore(at=at, threads=["b"], dry_run=True).changes == planned.changes[1:2] * deletes
    assert [str(change) for change in planned.changes] == [
        "set back thread a",
        *(["bring back thread b"] if deletes else []),
        "delete thread new",
        "bring back item a/gone",
        "set back item a/k",
        "delete item a/new",
    ]
    assert [str(change) for change in planned.changes[0].paths()] == ["~ ['n']: 2 -> 1"]
    done = store.restore(at=at, who="ann")
    assert content(store) == then
    assert store.get_run("r").refresh().status == "waiting"
    assert [point.state for point in store.thread("a").history()] == [{"n": 1}, {"n": 2}, {"n": 1}]
    assert store.memory("a").search("soon")[0].key == "gone"
    clock.advance(STEP)
    store.restore(done.undo)
    assert content(store) == now
    assert "instant" in store.ops.actions()[0].subject
    assert store.ops.verify().problems == ()
