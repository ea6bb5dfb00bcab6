"""A run that is rewound has the journal it had, and its owner is fenced; effects are not repeated unawares."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from snapshot_kit import count, moment_between, seen

import perdure

booked: list[str] = []
held: list[int] = []
gates, entered = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]


@perdure.step(name="rewinding.note")
def note(text: str) -> str:
    state = perdure.state()
    state["notes"] = [*state.get("notes", []), text]
    return text * 40_000  # large: a blob


@perdure.effect(name="rewinding.book")
def book(seat: str, key: perdure.IdempotencyKey) -> str:
    booked.append(str(key))
    return seat


@perdure.durable(name="rewinding.trip")
def trip(pays: bool) -> Any:
    perdure.state({"notes": []})
    note("first")
    seat = perdure.ask("Which seat?")
    note(seat)
    return book(seat) if pays else seat


@perdure.durable(name="rewinding.parent")
def parent() -> Any:
    perdure.ask("Start?")
    return perdure.spawn(count, 3).result()


@perdure.durable(name="rewinding.booker")
def booker() -> Any:
    return book("aisle")


@perdure.durable(name="rewinding.child")
def child() -> Any:
    return perdure.spawn(booker).result()


@perdure.durable(name="rewinding.grandparent")
def grandparent() -> Any:
    perdure.ask("Start?")
    return perdure.spawn(child).result()


@perdure.step(name="rewinding.hold")
def hold(number: int) -> int:
    held.append(number)
    entered[number].set()
    assert gates[number].wait(30)
    return number


@perdure.durable(name="rewinding.slow")
def slow() -> list[int]:
    return [hold(number) for number in range(2)]


def test_a_run_goes_back(store: perdure.Store) -> None:
    for name in ("answered", "deleted", "waits"):
        store.run(trip, False, id=name)
    snapshot = store.snapshot("s")
    then, state = seen(store), [store.get_run(name).state_at() for name in ("answered", "deleted")]
    for name in ("answered", "deleted"):
        store.answer(name, "aisle")
        assert store.run(trip, False, id=name).result() == "aisle"
    store.delete_run("deleted")
    store.run(count, 2, id="later")
    assert not [change for change in store.restore(snapshot).changes if change.what == "run"]
    with pytest.raises(perdure.UsageError, match="deleted unfinished"):  # what it did since is not known
        store.restore(snapshot, runs="rewind")
    done = store.restore(snapshot, runs="rewind", keys="same")
    assert sorted(map(str, done.changes)) == ["bring back run deleted", "set back run answered"]
    assert store.get_run("later").status == "done", "a run that was made since is left alone"
    now = seen(store)
    assert sorted(now["asks"]) == sorted(then["asks"])
    assert [store.get_run(name).state_at() for name in ("answered", "deleted")] == state
    for name in ("answered", "deleted"):
        assert store.get_run(name).status == "queued"
        store.run(trip, False, id=name)
        store.answer(name, "window")
        assert store.run(trip, False, id=name).result() == "window"
    store.restore(done.undo, runs="rewind")
    assert store.get_run("answered").result() == "aisle"
    with pytest.raises(perdure.NotFound):
        store.get_run("deleted").status  # noqa: B018
    assert store.ops.verify().ok


def test_effects_refuse_unless_their_keys_stay(store: perdure.Store) -> None:
    booked.clear()
    store.run(trip, True, id="trip")
    snapshot = store.snapshot("s")
    store.answer("trip", "aisle")
    store.run(trip, True, id="trip")
    with pytest.raises(perdure.UsageError, match=r"had effects since.*trip.*keys=\"same\""):
        store.restore(snapshot, runs="rewind")
    assert len(store.snapshots()) == 1, "nothing was done"
    store.restore(snapshot, runs="rewind", keys="same")
    store.run(trip, True, id="trip")
    store.answer("trip", "aisle")
    assert store.run(trip, True, id="trip").result() == "aisle"
    assert len(booked) == 2
    assert len(set(booked)) == 1, "the receiver can tell that it is the same"


def test_a_deleted_run_that_was_brought_back_goes_when_that_is_undone(store: perdure.Store) -> None:
    store.run(trip, True, id="trip")
    booked.clear()
    store.answer("trip", "aisle")
    store.run(trip, True, id="trip")
    snapshot = store.snapshot("s")
    store.delete_run("trip")
    done = store.restore(snapshot, runs="rewind")
    assert [info.status for info in store.runs()] == ["done"]
    store.restore(done.undo, runs="rewind")
    assert store.runs() == []


def test_a_child_that_was_started_since_goes(store: perdure.Store) -> None:
    store.run(parent, id="parent")
    snapshot = store.snapshot("s")
    store.answer("parent", True)
    assert store.run(parent, id="parent").result() == 6
    [child] = [info.id for info in store.runs() if info.id != "parent"]
    store.restore(snapshot, runs="rewind")
    assert [info.id for info in store.runs()] == ["parent"]
    store.run(parent, id="parent")
    store.answer("parent", True)
    assert store.run(parent, id="parent").result() == 6
    assert child in [info.id for info in store.runs()]


def test_a_child_that_had_effects_stays_with_its_keys(store: perdure.Store) -> None:
    booked.clear()
    store.run(grandparent, id="top")
    snapshot = store.snapshot("s")
    store.answer("top", True)
    assert store.run(grandparent, id="top").result() == "aisle"
    done = store.restore(snapshot, runs="rewind", keys="same")
    assert [str(change) for change in done.changes] == ["set back run top"]
    store.run(grandparent, id="top")
    store.answer("top", True)
    assert store.run(grandparent, id="top").result() == "aisle"
    assert len(set(booked)) == 1


@pytest.mark.parametrize("goes_back", ["", "snapshot", "instant"])
def test_a_running_run_is_fenced_only_if_it_goes_back(store: perdure.Store, goes_back: str) -> None:
    for event in (*gates, *entered):
        event.clear()
    held.clear()
    thread = threading.Thread(target=lambda: store.run(slow, id="slow"))
    thread.start()
    assert entered[0].wait(30)
    instant = moment_between(store) if goes_back == "instant" else None
    snapshot = None if instant else store.snapshot("s")
    gates[0].set()
    assert entered[1].wait(30)
    done = store.restore(snapshot, at=instant, runs="rewind" if goes_back else None)
    run = store.get_run("slow")
    assert ([str(change) for change in done.changes], run.refresh().status, len(run.steps())) == (
        (["set back run slow"], "queued", 0) if goes_back else ([], "running", 1)
    )
    gates[1].set()
    thread.join()
    assert store.run(slow, id="slow").result() == [0, 1]
    assert held == ([0, 1, 0, 1] if goes_back else [0, 1]), "what the fenced process did is not in the journal"
