"""After a promotion, an effect that may have run in the world that was lost is in doubt, and not simply run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.regions import promote, replicate

DONE: list[str] = []


def know(name: str) -> Any:
    return perdure.outcome.Done(f"{name}, found") if name in DONE else perdure.outcome.NotDone()


@perdure.effect(reconcile=know, timeout_s=0.05)
def promoted_book(name: str) -> str:
    DONE.append(name)
    return name


@perdure.effect(timeout_s=0.05)
def promoted_pay(name: str) -> str:
    DONE.append(name)
    return name


@perdure.durable(name="promoted.travel")
def travel() -> Any:
    first = promoted_book("first")
    perdure.ask("Go?")
    return [first, promoted_book("second"), promoted_book("third")]


@perdure.durable
def spend() -> Any:
    perdure.ask("Go?")
    return promoted_pay("money")


@pytest.fixture
def target(tmp_path: Path) -> Any:
    """A replica of the time before the answers, promoted; the effects after them ran in the source."""
    DONE.clear()
    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        source.run(travel, id="trip")
        source.run(spend, id="spend")
        replicate(source, target)
        for run, function in (("trip", travel), ("spend", spend)):
            source.answer(run, "yes")
            source.run(function, id=run)
        assert DONE == ["first", "second", "third", "money"]
        promote(target)
        for run in ("trip", "spend"):
            target.answer(run, "yes")
        yield target


def test_the_receiver_is_asked(target: perdure.Store) -> None:
    assert target.run(travel, id="trip").result() == ["first", "second, found", "third, found"]
    assert DONE == ["first", "second", "third", "money"]


def test_what_did_not_happen_is_done(target: perdure.Store) -> None:
    DONE.remove("second")
    assert target.run(travel, id="trip").result() == ["first", "second", "third"]


def test_without_a_receiver_to_ask_a_person_is(target: perdure.Store) -> None:
    target.run(spend, id="spend")
    [ask] = target.questions("spend")
    assert ask.kind == "doubt"
    assert DONE.count("money") == 1


def test_what_begins_after_the_promotion_is_not_in_doubt(target: perdure.Store) -> None:
    target.run(spend, id="new")
    target.answer("new", "yes")
    target.run(spend, id="new")
    assert DONE.count("money") == 2
