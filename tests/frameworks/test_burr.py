"""States of Burr's applications in a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_contract import SessionContract
from burr.core import ApplicationBuilder, State, action, when
from burr.core.persistence import SQLitePersister
from burr_shop import PerdurePersister

import perdure
from perdure.burr import AsyncPerdurePersister


class TestContract(SessionContract):
    module = "burr_shop"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "store.db"), durability="normal") as opened:
        yield opened


def test_a_state_is_loaded_by_application_and_number_as_from_burrs_own(store: perdure.Store, tmp_path: Path) -> None:
    stock: Any = SQLitePersister(str(tmp_path / "stock.db"))
    stock.initialize()
    for persister in (stock, PerdurePersister(store)):
        assert (persister.load("ann", "trip"), persister.list_app_ids("ann")) == (None, [])
        for number in range(3):
            persister.save("ann", "trip", number, "step", State({"number": number}), "completed")
        persister.save("ann", "trip", 3, "last", State({"number": 2}), "failed")
        persister.save(None, "a/b", 0, "step", State({}), "completed")
    ours: Any = PerdurePersister(store)
    for place in (("ann", "trip"), ("ann", "trip", 1), ("ann", "trip", 9), (None, "a/b"), ("bob", None)):
        expected, loaded = stock.load(*place), ours.load(*place)
        for each in (expected, loaded):
            each and each.pop("created_at")
        assert loaded == expected, place
    assert ours.load("ann", None) == ours.load("ann", "trip"), "the newest application"
    assert ours.list_app_ids("ann") == stock.list_app_ids("ann") == ["trip"]
    assert store.thread("burr/ann/trip").load().note == "3 last failed"
    stock.cleanup()


def test_of_two_writers_of_an_application_the_slower_one_is_refused(store: perdure.Store) -> None:
    persister = PerdurePersister(store)
    persister.save("", "trip", 0, "count", State({"count": 1}), "completed")
    persister.save("", "trip", 0, "count", State({"count": 1}), "completed")  # the same again
    with pytest.raises(perdure.Conflict, match="'trip' continued in another process"):
        persister.save("", "trip", 0, "count", State({"count": 2}), "completed")
    assert [saved.state["state"]["count"] for saved in store.thread("burr//trip").history()] == [1]


@action(reads=["count"], writes=["count"])
def count(state: State[Any]) -> State[Any]:
    return state.update(count=state["count"] + 1)


@action(reads=[], writes=["count"])
async def acount(state: State[Any]) -> State[Any]:
    return state.update(count=state["count"] + 1)


def built(persister: Any, step: Any, app: str = "trip", **fork: Any) -> Any:
    builder: Any = ApplicationBuilder().with_actions(count=step).with_transitions(("count", "count", when(count=99)))
    builder = builder.with_transitions(("count", "count")).with_identifiers(app_id=app).with_state_persister(persister)
    start: Any = {"default_state": {"count": 0}, "default_entrypoint": "count"}
    return builder.initialize_from(persister, resume_at_next_action=True, **start, **fork)


def test_an_application_goes_on_where_it_was_and_forks_from_an_earlier_state(store: perdure.Store) -> None:
    persister = PerdurePersister(store)
    for _ in range(2):
        app = built(persister, count).build()
        for _ in range(3):
            app.step()
    assert (app.state["count"], app.sequence_id) == (6, 5)
    fork = built(persister, count, "fork", fork_from_app_id="trip", fork_from_sequence_id=1).build()
    fork.step()
    assert (fork.state["count"], fork.sequence_id) == (3, 2)


async def test_an_async_application_goes_on_where_it_was(store: perdure.Store) -> None:
    persister = AsyncPerdurePersister(store)
    for _ in range(2):
        app = await built(persister, acount).abuild()
        for _ in range(3):
            await app.astep()
    assert app.state["count"] == 6
    loaded, none = await persister.load(None, "trip", 1), await persister.load("bob", None)
    assert loaded is not None
    assert (loaded["state"]["count"], none) == (2, None)
    assert await persister.load(None, None) == await persister.load(None, "trip")


def test_in_a_run_a_state_is_saved_once(store: perdure.Store) -> None:
    @perdure.durable(name="burr.run")
    def work() -> int:
        app = built(PerdurePersister(store), count).build()
        app.step()
        perdure.ask("Go on?")
        app.step()
        return int(app.state["count"])

    store.run(work, id="work")
    store.answer("work", "yes")
    assert store.run(work, id="work").result() == 2
    assert [saved.note for saved in store.thread("burr//trip").history()] == ["1 count completed", "0 count completed"]
