"""A copy of a graph's thread has what its tasks did: resumed there, no effect of them runs again."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from copy_kit import query
from graph_kit import AnyGraph, at
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from test_restoring_graphs import Trip, agent, booked

import perdure
from perdure.forensics import sandbox
from perdure.langgraph import PerdureSaver
from perdure.ops import open_bundle

reached, release = threading.Event(), threading.Event()
DONE = ["aisle", "beside", "plan", "yes"]
TASKS = "SELECT id, status, root FROM run WHERE function LIKE 'task:%' ORDER BY id"


@pytest.fixture(autouse=True)
def _clean() -> None:
    booked.clear()
    reached.clear()
    release.clear()


def resume(store: Any, thread: str = "t") -> Any:
    return sorted(agent(PerdureSaver(store)).invoke(Command(resume="yes"), at(thread))["log"])


def other_url(request: pytest.FixtureRequest, url: str, folder: Path) -> str:
    """A store of the other database."""
    return str(folder / "copy.db") if url.startswith("postgres") else str(request.getfixturevalue("postgres_url"))


def test_a_thread_in_the_other_database(saver_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    target = other_url(request, saver_url, tmp_path)
    with perdure.open(saver_url) as store:
        for name in ("t", "t/seat", "t-1"):  # one name begins with the other
            agent(PerdureSaver(store)).invoke({"log": []}, at(name))
        keys = [*booked]
        done = store.ops.transfer(target, threads=["t", "t-1"])
        assert (done.threads, done.runs) == (2, 0)
        with perdure.open(target) as copy:
            assert {id.partition(":")[0] for id, *_ in query(copy, TASKS)} == {"langgraph/t/seat", "langgraph/t-1/seat"}
            assert resume(copy) == resume(copy, "t-1") == DONE
            assert copy.ops.verify().ok
            copy.delete_thread("t")
            [(left, *_)] = query(copy, TASKS)
            assert left.startswith("langgraph/t-1/")
        assert resume(store) == resume(store, "t/seat") == DONE, "the source is as it was"
    assert booked == keys


def test_a_copy_that_lacks_an_effect_is_not_taken_for_the_same(tmp_path: Path) -> None:
    target = tmp_path / "b.db"
    with perdure.open(tmp_path / "a.db") as store:
        graph = agent(PerdureSaver(store))
        graph.invoke({"log": []}, at("t"), interrupt_before=["seat", "beside"])
        before = store.thread("t").info().head
        store.ops.transfer(target, threads=["t"])
        graph.invoke(None, at("t"))
        assert (len(booked), store.thread("t").info().head) == (1, before)
        with pytest.raises(perdure.UsageError, match="it has changed since"):
            store.ops.transfer(target, threads=["t"])
        with perdure.open(target) as copy:
            copy.delete_thread("t")
            for already in ((), ("t",)):
                assert store.ops.transfer(target, threads=["t"]).already == already
            assert resume(copy) == DONE
    assert len(booked) == 1


@pytest.mark.parametrize("move", [False, True])
def test_a_tenant(tmp_path: Path, move: bool) -> None:
    with perdure.open(tmp_path / "a.db", tenant="acme") as store, perdure.open(tmp_path / "b.db") as copy:
        agent(PerdureSaver(store)).invoke({"log": []}, at("t"))
        store.ops.transfer(tmp_path / "b.db", tenant="acme", move=move)
        assert resume(copy.tenant("acme")) == DONE
        assert len(booked) == 1


def test_a_plain_store_into_an_encrypted_one(tmp_path: Path) -> None:
    keys = os.urandom(32)
    with perdure.open(tmp_path / "a.db") as store:
        agent(PerdureSaver(store)).invoke({"log": []}, at("t"))
        store.ops.transfer(tmp_path / "b.db", keys=keys)
    with perdure.open(tmp_path / "b.db", keys=keys) as copy:
        assert resume(copy) == DONE
        assert len(booked) == 1


def test_a_thread_comes_back_from_an_archive(saver_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with perdure.open(saver_url) as store:
        graph = agent(PerdureSaver(store))
        graph.invoke({"log": []}, at("t"))
        asked = graph.get_state(at("t")).config
        with pytest.raises(perdure.UsageError, match="unfinished"):
            store.ops.archive("t", tmp_path / "archive.db")
        assert resume(store) == DONE
        with monkeypatch.context() as patched:
            patched.setattr("perdure.transfers.archive._finish", _killed)
            with pytest.raises(InterruptedError):
                store.ops.archive("t", tmp_path / "archive.db")
        assert len(query(store, TASKS)) == 1, "of a killed call a task is left"
        store.ops.unarchive("t")
        [(_, status, root)] = query(store, TASKS)
        assert (status, [(root,)]) == ("done", query(store, "SELECT thread FROM thread WHERE name = 't'"))
        agent(PerdureSaver(store)).invoke(Command(resume="yes"), asked)  # the old question again: the same task
        assert len(booked) == 1
        assert store.ops.verify().ok
        store.delete_thread("t")
        assert query(store, TASKS) == []


def _killed(*_: object) -> None:
    raise InterruptedError


def test_a_bundle_and_one_of_what_changed_since(tmp_path: Path) -> None:
    place = tmp_path / "since.db"
    with perdure.open(tmp_path / "a.db") as store:
        store.thread("other").save({})
        agent(PerdureSaver(store)).invoke({"log": []}, at("t"))
        first, part = store.snapshot("first"), tmp_path / "part.db"
        first.export(part, threads=["t"])
        agent(PerdureSaver(store)).invoke(Command(resume="yes"), at("t"))
        agent(PerdureSaver(store)).invoke({"log": []}, at("t"))
        store.snapshot("second").export(place, since=first)
    keys = [*booked]
    for path, effects in ((part, 1), (place, 2)):
        with perdure.open(path) as bundle:
            assert len(query(bundle, TASKS)) == effects
        with open_bundle(path) as found, sandbox(found) as box:
            box.thread("t")
            assert resume(box.store)[-1] == "yes"
    assert booked == keys


@perdure.effect(name="copying_graphs.slow")
def slow(key: perdure.IdempotencyKey) -> str:
    booked.append(str(key))
    reached.set()
    release.wait(30)
    return "booked"


def at_work(saver: PerdureSaver) -> AnyGraph:
    def node(state: Trip) -> dict[str, Any]:
        return {"log": [slow()]}

    builder = StateGraph(Trip)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder.compile(checkpointer=saver)


def test_a_task_that_a_process_is_at_is_in_doubt_in_the_copy(
    saver_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = other_url(request, saver_url, tmp_path)
    with perdure.open(saver_url) as store, perdure.open(target) as copy:
        source, place = at_work(PerdureSaver(store)), tmp_path / "incident.db"
        source.invoke({"log": []}, at("t"), interrupt_before=["node"])
        running = threading.Thread(target=source.invoke, args=(None, at("t")))
        running.start()
        assert reached.wait(30)
        store.snapshot("at work").export(place)
        with perdure.open(place) as bundle:
            assert len(query(bundle, TASKS)) == 1
        store.ops.transfer(target, threads=["t"], move=True)
        assert [status for _, status, _ in query(copy, TASKS)] == ["waiting"]
        with pytest.raises(perdure.InDoubt):
            at_work(PerdureSaver(copy)).invoke(None, at("t"))
        release.set()
        running.join()
        assert source.get_state(at("t")).values["log"] == ["booked"], "its process ends it in the source"
        assert len(booked) == 1
        assert copy.ops.verify().ok
