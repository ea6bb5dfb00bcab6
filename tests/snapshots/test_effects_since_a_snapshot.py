"""A restore knows of every effect since its snapshot, also if the journal that had it was removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure

paid: list[str] = []


@perdure.effect(name="since.pay")
def pay(what: str, key: perdure.IdempotencyKey) -> str:
    paid.append(str(key))
    return what


@perdure.durable(name="since.once")
def once() -> Any:
    perdure.ask("Go?")
    return pay("rent")


@perdure.durable(name="since.twice")
def twice() -> Any:
    perdure.ask("Go?")
    perdure.ask("Really?")
    return pay("rent")


@perdure.durable(name="since.rounds")
def rounds(turn: int = 0, pays: bool = True) -> Any:
    perdure.ask("Go?")
    if pays:
        pay("rent")
    return "end" if turn else perdure.continue_as_new(1, pays)


@perdure.durable(name="since.parent")
def parent() -> Any:
    perdure.ask("Go?")
    return perdure.spawn(payer, id="child").result()


@perdure.durable(name="since.payer")
def payer() -> Any:
    return pay("rent")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store that keeps the journals of finished runs for no time."""
    url = str(tmp_path / "a.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    paid.clear()
    with perdure.open(url) as opened:
        opened.ops.retention(runs="0s")
        yield opened


def answered(store: perdure.Store, function: Any, *args: Any) -> perdure.Run:
    """The run "r", after the next question that it asks was answered."""
    store.run(function, *args, id="r")
    store.answer("r", True)
    return store.run(function, *args, id="r")


REMOVALS: dict[str, tuple[Any, Callable[[perdure.Store], object]]] = {
    "continue_as_new": (rounds, lambda store: None),
    "retention": (once, lambda store: store.ops.sweep_runs()),
    "deleted": (once, lambda store: store.delete_run("r")),
    "child deleted": (parent, lambda store: store.delete_run("child")),
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_rewind_is_refused_after_an_effect_whose_entries_are_gone(store: perdure.Store, removal: str) -> None:
    function, remove = REMOVALS[removal]
    store.run(function, id="r")
    snapshot = store.snapshot("s")
    answered(store, function)
    remove(store)
    assert len(paid) == 1
    with pytest.raises(perdure.UsageError, match=r'had effects since the snapshot \'s\'.*\(r\).*keys="same"'):
        store.restore(snapshot, runs="rewind")
    later = store.snapshot("later")
    if removal == "deleted":
        return
    store.restore(later, runs="rewind")  # it had none since this one
    later.release()  # removes what no snapshot needs: not what tells of the effect
    store.restore(snapshot, runs="rewind", keys="same")
    assert answered(store, function)
    assert len(set(paid)) == 1, "an effect that was repeated on purpose has its key"


def test_a_run_that_was_rewound_had_its_effects_nevertheless(store: perdure.Store) -> None:
    store.run(twice, id="r")
    first = store.snapshot("first")
    answered(store, twice)
    second = store.snapshot("second")
    answered(store, twice)
    undo = store.restore(second, runs="rewind", keys="same").undo
    with pytest.raises(perdure.UsageError, match="had effects since the snapshot 'first'"):
        store.restore(first, runs="rewind")
    store.restore(undo, runs="rewind")
    assert store.get_run("r").result() == "rent", "the journal of the undo has all effects: nothing is repeated"


def test_a_round_without_effects_is_no_reason_to_refuse(store: perdure.Store) -> None:
    store.run(rounds, 0, False, id="r")
    snapshot = store.snapshot("s")
    answered(store, rounds, 0, False)
    assert [str(change) for change in store.restore(snapshot, runs="rewind").changes] == ["set back run r"]


@pytest.mark.parametrize("keys", ["same", "new"])
def test_the_keys_of_a_rewound_run(store: perdure.Store, keys: Any) -> None:
    store.run(rounds, id="r")
    snapshot = store.snapshot("s")
    answered(store, rounds)
    assert answered(store, rounds).result() == "end"
    before = list(paid)
    store.restore(snapshot, runs="rewind", keys=keys)
    answered(store, rounds)
    assert answered(store, rounds).result() == "end"
    assert len(set(before)) == 2
    assert (paid[2:] == before) is (keys == "same"), "the next round's too"
    assert not set(paid[2:]).intersection(before) or keys == "same", "new ones: no receiver takes them for the old"
    assert store.ops.verify().ok


def test_a_run_that_continues_in_another_store_is_not_rewound_unawares(store: perdure.Store, tmp_path: Path) -> None:
    store.run(once, id="r")
    snapshot = store.snapshot("s")
    store.ops.transfer(tmp_path / "other.db", runs=["r"], move=True)
    with pytest.raises(perdure.UsageError, match=r"were moved.*\(r\)"):
        store.restore(snapshot, runs="rewind")


@perdure.effect(name="since.book", undo=lambda what: None)
def book(what: str, key: perdure.IdempotencyKey) -> str:
    paid.append(str(key))
    return what


@perdure.durable(name="since.booking")
def booking() -> Any:
    perdure.ask("Go?")
    return book("a seat")


def test_an_effect_that_was_undone_since_is_not_run_again_under_its_key(store: perdure.Store) -> None:
    """Its receiver would take it for the first request, and ignore it."""
    store.run(booking, id="r")
    snapshot = store.snapshot("s")
    answered(store, booking).undo()
    store.run(booking, id="r")
    with pytest.raises(perdure.UsageError, match=r"were undone since the snapshot 's' was taken \(r\).*keys=\"new\""):
        store.restore(snapshot, runs="rewind", keys="same")
    assert store.get_run("r").refresh().status == "undone"
    store.restore(snapshot, runs="rewind", keys="new")
    answered(store, booking)
    assert len(set(paid)) == len(paid) == 2
