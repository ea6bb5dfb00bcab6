"""What an attacker found: removals beside writers, ids put again, clocks, late runs, damaged rows, odd names."""

from __future__ import annotations

import asyncio
import operator
import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from checkpoints import config_of
from graph_kit import at
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph

from perdure.errors import PerdureError, ThreadDeleted, Unstorable, UsageError
from perdure.langgraph import PerdureSaver
from perdure.storage.program import Batch, Program, Sql, drive, write

BIG = os.urandom(4500).hex()


def put(saver: PerdureSaver, values: dict[str, Any], parent: Any = None, **more: Any) -> Any:
    """A checkpoint; `id`, `ns`, `thread`, `versions`, `new`; the rest is metadata."""
    checkpoint = empty_checkpoint()
    checkpoint["id"] = more.pop("id", checkpoint["id"])
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = more.pop("versions", dict.fromkeys(values, 1))
    config = config_of(more.pop("thread", "t"), ns=more.pop("ns", ""))
    if parent is not None:
        config["configurable"]["checkpoint_id"] = parent["configurable"]["checkpoint_id"]
    new = more.pop("new", {})
    metadata: Any = {"source": "loop", "step": 1, "parents": {}, **more}
    return saver.put(config, checkpoint, metadata, new)


def change(saver: PerdureSaver, statement: str, **params: Any) -> None:
    def program() -> Program[None]:
        yield Batch(Sql(statement)(**params), last=True)

    drive(saver.store._context.driver, write(program))


# --- pending writes and removals


def test_a_write_is_not_stored_against_what_another_process_has_removed(saver_url: str) -> None:
    with PerdureSaver(saver_url) as one, PerdureSaver(saver_url) as other:
        first = put(one, {"m": BIG})
        other.get_tuple(at("t"))
        second = put(other, {"m": "small"}, first)
        other.prune(["t"])
        one.put_writes(second, [("m", BIG + "y")], "task")
        found = other.get_tuple(at("t"))
        assert found is not None
        assert found.pending_writes == [("task", "m", BIG + "y")]
        assert one.store.ops.verify().ok


def test_a_write_is_not_stored_against_what_a_removed_run_had(saver: PerdureSaver) -> None:
    first = put(saver, {"m": 1})
    put(saver, {"m": BIG}, ns="sub:1", run_id="R")
    saver.delete_for_runs(["R"])
    saver.put_writes(first, [("m", BIG)], "task")
    assert [item.pending_writes for item in saver.list(at("t"))] == [[("task", "m", BIG)]]
    assert saver.store.ops.verify().ok


def test_a_write_that_came_before_its_checkpoint_keeps_what_it_was_stored_against(saver: PerdureSaver) -> None:
    late = "1fffffff-0000-6000-8000-000000000009"
    first = put(saver, {"m": BIG})
    saver.put_writes(config_of("t", id=late), [("m", BIG)], "task")
    second = put(saver, {"m": 2}, first)
    saver.prune(["t"])
    put(saver, {"m": 3}, second, id=late)
    found = saver.get_tuple(at("t"))
    assert found is not None
    assert found.pending_writes == [("task", "m", BIG)]
    assert saver.store.ops.verify().ok


# --- DeltaChannels


class Logged(TypedDict):
    log: Annotated[list[int], DeltaChannel(lambda state, writes: [*(state or []), *(x for w in writes for x in w)])]
    idle: Annotated[list[int], DeltaChannel(lambda state, writes: [*(state or []), *(x for w in writes for x in w)])]
    total: Annotated[int, operator.add]


def logging(saver: PerdureSaver, turns: int) -> Any:
    builder = StateGraph(Logged)
    builder.add_node("add", lambda state: {"total": 1})
    builder.add_edge(START, "add")
    graph: Any = builder.compile(checkpointer=saver)
    for turn in range(turns):
        graph.invoke({"log": [turn], "total": 0}, at("t"))
    return graph


@pytest.mark.parametrize("serde", [None, JsonPlusSerializer()], ids=["own", "assigned"])
def test_delta_channels_survive_every_prune(saver_url: str, serde: JsonPlusSerializer | None) -> None:
    with PerdureSaver(saver_url, serde=serde) as saver:
        graph = logging(saver, 5)
        saver.prune(["t"])
        assert graph.get_state(at("t")).values["log"] == [0, 1, 2, 3, 4]
        saver.store.thread("t").prune(keep=1)
        assert graph.get_state(at("t")).values["log"] == [0, 1, 2, 3, 4]
        assert saver.store.ops.verify().ok


def test_a_channel_that_was_never_written_does_not_switch_retention_off(tmp_path: Path) -> None:
    """A DeltaChannel without a version: there is nothing in the ancestors to rebuild it from."""
    with PerdureSaver(str(tmp_path / "a.db")) as saver:
        saver.store.ops.retention(checkpoints=4)
        parent = None
        for number in range(12):
            parent = put(saver, {"x": number}, parent, counters_since_delta_snapshot={"log": [1, 1]})
        saver.store.ops.compact(vacuum=True)
        assert len(list(saver.list(at("t")))) == 4


# --- ids, clocks, runs


def test_nothing_is_taken_over_from_a_parent_that_was_put_again(saver_url: str) -> None:
    with PerdureSaver(saver_url) as one, PerdureSaver(saver_url) as other:
        first = put(one, {"x": "of one", "y": 1})
        id_ = first["configurable"]["checkpoint_id"]
        put(other, {"x": "of the other", "y": 1}, id=id_)
        found = one.get_tuple(first)
        assert found is not None
        assert found.checkpoint["channel_values"]["x"] == "of the other"
        put(one, {"x": "of the other", "y": 2}, first, versions={"x": 1, "y": 2}, new={"y": 2})
        newest = one.get_tuple(at("t"))
        assert newest is not None
        assert newest.checkpoint["channel_values"] == {"x": "of the other", "y": 2}


def test_a_state_is_stored_as_it_was_at_the_call_though_its_parent_was_put_again(
    saver_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph continues while its checkpoint is being stored, and nodes change lists in place."""
    with PerdureSaver(saver_url) as one, PerdureSaver(saver_url) as other:
        first = put(one, {"x": [1], "y": "kept"})
        put(other, {"x": [1], "y": "of the other"}, id=first["configurable"]["checkpoint_id"])
        values: dict[str, Any] = {"x": [1, 2], "y": "of the other"}
        monkeypatch.setattr(one._in_flight, "wait", lambda *_: values["x"].append(3))
        put(one, values, first, versions={"x": 2, "y": 1}, new={"x": 2})
        newest = other.get_tuple(at("t"))
        assert newest is not None
        assert newest.checkpoint["channel_values"] == {"x": [1, 2], "y": "of the other"}


def test_the_newest_of_a_namespace_survives_a_prune_after_a_clock_stepped_back(saver: PerdureSaver) -> None:
    high, low = "1f200000-0000-6000-8000-000000000000", "1f100000-0000-6000-8000-000000000000"
    put(saver, {"x": 0})
    first = put(saver, {"x": 1}, ns="sub", id=high)
    put(saver, {"x": 2}, first, ns="sub", id=low)
    saver.copy_thread("t", "copy")
    for thread in ("t", "copy"):
        saver.prune([thread])
        found = saver.get_tuple(config_of(thread, ns="sub"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"x": 2}
        assert found.checkpoint["id"] in [item.checkpoint["id"] for item in saver.list(config_of(thread, ns="sub"))]


def test_removing_a_run_leaves_what_was_saved_without_it(saver: PerdureSaver) -> None:
    thread = saver.store.thread("t")
    thread.save({"mine": 1})
    put(saver, {"x": 1}, run_id="R")
    thread.load()
    thread.save({"mine": 2})
    saver.delete_for_runs(["R"])
    assert saver.store.thread("t").load().state == {"mine": 2}
    assert saver.get_tuple(at("t")) is None
    assert saver.store.ops.verify().ok


def test_a_late_run_does_not_enter_a_thread_that_was_begun_anew(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        old = put(saver, {"x": "old"})
        for deleting in (saver, other):
            deleting.delete_thread("t")
            put(deleting, {"x": "new"})
            with pytest.raises(ThreadDeleted):
                put(deleting, {"x": "stale"}, old)
            deleting.put_writes(old, [("x", "late")], "task")
            found = deleting.get_tuple(at("t"))
            assert found is not None
            assert found.checkpoint["channel_values"] == {"x": "new"}
            old = found.config
        saver.delete_thread("t")
        assert saver.get_tuple(at("t")) is None
        saver.put_writes(old, [("x", "late")], "task")
        assert saver.store.threads() == []


def test_a_fork_at_a_state_whose_id_was_put_again_can_be_read(saver: PerdureSaver) -> None:
    first = put(saver, {"x": 1})
    thread = saver.store.thread("t")
    old = thread.load()
    put(saver, {"x": 2}, id=first["configurable"]["checkpoint_id"])
    thread.fork(old, name="f")
    found = saver.get_tuple(at("f"))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"x": 1}


# --- readers beside removals


@pytest.mark.parametrize("removal", ["prune", "delete"])
def test_a_list_goes_on_while_checkpoints_are_removed(saver: PerdureSaver, removal: str) -> None:
    config = None
    for step in range(20):
        config = put(saver, {"x": step, "m": BIG}, config)
    listing = saver.list(at("t"))
    assert next(listing).checkpoint["channel_values"]["x"] == 19
    if removal == "prune":
        saver.prune(["t"])
    else:
        saver.delete_thread("t")
    assert [item.checkpoint["channel_values"]["x"] for item in listing] == []


def test_a_subgraph_at_work_keeps_its_thread_alive(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(threads="10s")
        now = [saver.store._context.clock_us()]
        saver.store._context.clock_us = lambda: now[0]
        put(saver, {"x": 1})
        config = None
        for _ in range(5):
            now[0] += 6_000_000
            config = put(saver, {"x": 2}, config, ns="sub:1")
        assert saver.get_tuple(at("t")) is not None


# --- damage, odd names, forks of the process


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE label SET id = CAST('12345' AS {blob})",
        "UPDATE label SET record = 5",
        "UPDATE write SET value = CAST('' AS {blob})",
        "UPDATE write SET value = CAST('xxxxxxxxxxxxx' AS {blob})",
        "UPDATE write SET path = 'other'",
        "UPDATE write SET base = 77",
        "UPDATE space SET head = 77",
    ],
)
def test_damaged_rows_give_perdures_errors_or_what_was_stored(saver: PerdureSaver, statement: str) -> None:
    first = put(saver, {"m": BIG})
    saver.put_writes(first, [("m", BIG)], "task")
    put(saver, {"m": 2}, ns="sub:1")
    before = list(saver.list(None))
    change(saver, statement.format(blob="bytea" if "postgres" in repr(saver.store).lower() else "BLOB"))
    found: list[Any] = []
    try:
        found += saver.list(None)
    except PerdureError:
        pass
    try:
        found += [one for one in [saver.get_tuple(first)] if one is not None]
    except PerdureError:
        pass
    assert [one for one in found if one not in before] == []
    saver.store.ops.verify()


def test_names_that_cannot_be_stored_are_refused_clearly(saver: PerdureSaver) -> None:
    first = put(saver, {"m": 1})
    with pytest.raises((UsageError, Unstorable)):
        saver.put_writes(first, [("a\ud800", 1)], "task")
    with pytest.raises(UsageError):
        saver.put_writes(first, [("a", 1)], "task", "path\ud800")
    with pytest.raises(UsageError):
        put(saver, {"m": 1}, ns="n\ud800")
    with pytest.raises(UsageError):
        put(saver, {"m": 1}, ns="字" * 2000)
    with pytest.raises(UsageError):
        put(saver, {"m": 1}, id="字" * 2000)
    put(saver, {"m": 1}, first, source="s\ud800", **{"字" * 1000: "long"})
    assert saver.store.ops.verify().ok


async def test_a_blocking_put_on_a_loop_waits_for_no_task_of_another(saver: PerdureSaver) -> None:
    """Else two loops could wait for each other."""
    first = put(saver, {"m": 1})
    key = ("writes", "t", "", first["configurable"]["checkpoint_id"])
    begun, finish = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()

    async def elsewhere() -> None:
        with saver._in_flight.doing(key):
            here.call_soon_threadsafe(begun.set)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(finish.wait(), here))

    other = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    await begun.wait()
    put(saver, {"m": 2}, first)
    finish.set()
    await other
