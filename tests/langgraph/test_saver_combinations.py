"""Combinations that once went wrong: each test failed before its fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import config_of
from graph_kit import at, counting, human, talking
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.errors import Damaged, Unstorable, UsageError
from perdure.langgraph import PerdureSaver
from perdure.storage.program import Batch, Program, Sql, drive, write

SOME = {"total": 0, "log": []}


@dataclass
class Allowed:
    value: int


def one(saver: PerdureSaver, values: dict[str, Any], *, thread: str = "t", **metadata: Any) -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, 1)
    said: Any = {"source": "loop", "step": 1, "parents": {}, **metadata}
    return saver.put(config_of(thread), checkpoint, said, {})


def change(saver: PerdureSaver, statement: str, **params: Any) -> None:
    def program() -> Program[None]:
        yield Batch(Sql(statement)(**params), last=True)

    drive(saver.store._context.driver, write(program))


def test_allowed_classes_come_back_from_writes_and_metadata_too(saver: PerdureSaver) -> None:
    allowing = saver.with_allowlist([(Allowed.__module__, "Allowed")])
    assert isinstance(allowing, PerdureSaver)
    stored = one(allowing, {"x": Allowed(1)}, extra=Allowed(2))
    allowing.put_writes(stored, [("x", Allowed(3))], "task")
    found = allowing.get_tuple(at("t"))
    assert found is not None
    assert found.pending_writes == [("task", "x", Allowed(3))]
    assert [item.checkpoint["id"] for item in allowing.list(at("t"), filter={"extra": Allowed(2)})] == [
        found.checkpoint["id"]
    ]


def test_another_serializer_takes_nothing_over_from_the_one_before(saver: PerdureSaver) -> None:
    graph = counting(saver)
    graph.invoke(SOME, at("t"))
    saver.serde = JsonPlusSerializer()
    graph.invoke({"total": 1, "log": ["more"]}, at("t"))
    assert graph.get_state(at("t")).values["log"] == ["a", "b", "more", "a", "b"]
    assert len(list(graph.get_state_history(at("t")))) == 8


def test_a_list_of_one_namespace_of_all_threads_is_whole(saver: PerdureSaver) -> None:
    for thread in range(5):
        for _ in range(20):
            one(saver, {"x": 1}, thread=f"t{thread}")
            checkpoint = empty_checkpoint()
            saver.put(config_of(f"t{thread}", ns="child:1"), checkpoint, {}, {})
    assert len(list(saver.list({"configurable": {"checkpoint_ns": ""}}))) == 100
    assert len(list(saver.list({"configurable": {"checkpoint_ns": "child:1"}}))) == 100
    assert len(list(saver.list({"configurable": {"checkpoint_ns": "child:1"}}, limit=7))) == 7


@pytest.mark.parametrize("name", ["^odd", "a\ud800"])
def test_channels_whose_name_json_cannot_keep_are_refused(saver: PerdureSaver, name: str) -> None:
    with pytest.raises(Unstorable, match="channel"):
        one(saver, {name: 1, "x": 2})
    assert saver.get_tuple(at("t")) is None


def test_an_id_that_points_at_another_checkpoint_is_damage(saver: PerdureSaver) -> None:
    graph = counting(saver)
    graph.invoke(SOME, at("t"))
    newest, before = list(saver.list(at("t"), limit=2))
    change(saver, "UPDATE label SET record = (SELECT max(record) FROM label)")
    with pytest.raises(Damaged):
        saver.get_tuple(before.config)
    with pytest.raises(Damaged):
        list(saver.list(at("t")))
    assert saver.get_tuple(newest.config) is not None
    assert not saver.store.ops.verify().ok


def test_verify_finds_damaged_writes(saver: PerdureSaver) -> None:
    graph = talking(saver)
    graph.invoke({"messages": [human("some words " * 40)]}, at("t"), durability="sync")
    assert saver.store.ops.verify().ok
    change(saver, "UPDATE write SET key = 'other' WHERE key = 'messages'")
    assert not saver.store.ops.verify().ok


def test_checkpoints_leaves_a_subgraphs_memory(saver_url: str) -> None:
    """A subgraph with `checkpointer=True` keeps its namespace; those of single calls go with their callers."""
    with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(checkpoints=3)
        config = one(saver, {"x": 1})
        saver.put(config_of("t", ns="memory"), empty_checkpoint(), {}, {})
        saver.put(config_of("t", ns="call:1"), empty_checkpoint(), {}, {})
        for _ in range(20):
            config = saver.put(config, empty_checkpoint(), {}, {})
        saver.store.ops.compact(vacuum=True)
        assert len(list(saver.list(config_of("t")))) == 3
        assert saver.get_tuple(config_of("t", ns="memory")) is not None
        assert saver.get_tuple(config_of("t", ns="call:1")) is None
        assert saver.store.ops.verify().ok


def test_names_given_as_one_text_are_refused(saver: PerdureSaver) -> None:
    with pytest.raises(UsageError, match="list"):
        saver.prune("t")
    with pytest.raises(UsageError, match="list"):
        saver.delete_for_runs("run")
