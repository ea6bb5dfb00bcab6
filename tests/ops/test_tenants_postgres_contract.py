"""Everything a store promises, as roles that the database holds: the contract suite, durable runs, LangGraph."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import pytest
from contracts import Harness, StoreContract, StoreSmoke
from langgraph.graph import END, START, StateGraph
from role_kit import Roles
from soak import SOAK

import perdure
from perdure.langgraph import PerdureSaver
from perdure.runs.streams import writer


@pytest.fixture
async def harness(roles: Roles) -> AsyncIterator[Harness]:
    """As the application's role. Async: blocking goes the same way through the driver."""
    made = Harness(partial(perdure.open, roles.app, durability="normal"), "async")
    yield made
    await made.finish()


class TestStoreAsTheApplication(StoreContract if SOAK else StoreSmoke):  # type: ignore[misc]
    """Everything a store promises. PERDURE_SOAK=1: the whole suite."""


@pytest.fixture(params=["app", "tenant", "operator"])
def url(request: pytest.FixtureRequest, roles: Roles) -> str:
    made: str = roles.tenant("acme") if request.param == "tenant" else getattr(roles, request.param)
    return made


def test_a_run_that_asks_sleeps_and_is_undone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_GRACE_S", 60.0)
    done: list[str] = []

    @perdure.effect(name="held booking", undo=lambda what: done.append(f"undo {what}"))
    def book(what: str) -> str:
        done.append(what)
        return what

    @perdure.step(name="held large step")
    def large() -> str:
        perdure.emit("word")
        return "x" * 2_000_000

    @perdure.durable(name="held trip", undo_on=ValueError)
    def trip() -> str:
        book("flight")
        large()
        perdure.sleep(0.01)
        if perdure.ask("go on?", options=["yes", "no"]) == "no":
            raise ValueError("they said no")
        return str(perdure.receive("word"))

    with perdure.open(url, tenant="acme") as store:
        for answer in ("yes", "no"):
            run = store.start(trip, id=f"trip {answer}")
            worker = perdure.Worker(store, [trip])
            while not store.questions(run.id):
                worker.run(until_idle=True)
            assert next(event.value for event in run.stream() if event.kind == "chunk") == "word"
            store.answer(run.id, answer)
            store.send(run.id, "hello", topic="word")
            worker.run(until_idle=True)
        assert store.get_run("trip yes").result() == "hello"
        assert store.get_run("trip no").status == "failed"
        assert done == ["flight", "flight", "undo flight"]
        fork = store.fork("trip yes", at=2, id="trip again", keys="same")
        assert fork.id == "trip again"
        assert store.ops.verify().ok
        store.ops.sweep_runs()
        store.delete_run("trip no")


def test_the_daily_maintenance(url: str) -> None:
    from perdure.runs.maintenance.retention import daily_maintenance
    from perdure.storage.program import drive

    with perdure.open(url, tenant="acme") as store:
        store.thread("t").save({"n": 1})
        context = store._context
        tenant = drive(context.driver, context.ensure_tenant())
        assert drive(context.driver, daily_maintenance(tenant, context.clock_us)) is not None
        assert drive(context.driver, daily_maintenance(tenant, context.clock_us)) is None


def test_operating_ones_own_tenant(url: str, tmp_path: Path) -> None:
    with perdure.open(url, tenant="acme") as store:
        thread = store.thread("t")
        for number in range(200):
            thread.save({"n": number, "text": "word " * number})
        store.ops.retention(checkpoints=100)
        assert store.ops.retention().checkpoints == 100
        thread.pin(name="kept")
        store.ops.compact(dry_run=True)
        store.ops.compact()
        assert thread.load().state["n"] == 199
        assert store.ops.verify().ok
        assert store.ops.health().threads == 1
        store.ops.transfer(tmp_path / "t.db", threads=["t"])
        store.ops.erase("t")
        assert store.threads() == []
        with perdure.open(tmp_path / "t.db", tenant=store._context.tenant_name) as copy:
            assert copy.ops.transfer(url, threads=["t"]).threads == 1
        assert store.thread("t").load().state["n"] == 199


def test_what_is_encrypted_stays_so(url: str) -> None:
    with perdure.open(url, tenant="acme", keys=b"k" * 32) as store:
        store.thread("t").save({"secret": "word"})
        assert store.thread("t").load().state == {"secret": "word"}


class _State(TypedDict):
    count: int


def _graph(saver: PerdureSaver) -> Any:
    builder = StateGraph(_State)
    builder.add_node("add", lambda state: {"count": state["count"] + 1})
    builder.add_edge(START, "add")
    builder.add_edge("add", END)
    return builder.compile(checkpointer=saver)


def test_langgraph(url: str, tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "graph"}}
    with PerdureSaver(url, tenant="acme") as saver:
        graph = _graph(saver)
        assert graph.invoke({"count": 1}, config) == {"count": 2}
        assert asyncio.run(graph.ainvoke({"count": 5}, config)) == {"count": 6}
        assert len(list(graph.get_state_history(config))) == 6
        saver.store.ops.compact(vacuum=True)
        saver.delete_thread("graph")
        assert list(graph.get_state_history(config)) == []
