"""What is neither registered nor trusted: refused when it is saved, named when it is loaded. And nothing is shared:
whoever changes a value that was given to a saver, or got from one, changes nothing that is stored.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy
import pydantic
import pytest
from graph_kit import MODES, Runner, at, id_of, talking
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, empty_checkpoint
from langgraph.graph import START, StateGraph
from test_types import Held, assert_same, holding

from perdure.errors import UnknownType, Unstorable
from perdure.langgraph import PerdureSaver


@dataclasses.dataclass
class Trusted:
    """Not registered: kept by savers that trust this module."""

    text: str

    class Kind(enum.Enum):
        ONE = 1


class TrustedModel(pydantic.BaseModel):
    items: list[Decimal]


class Thing:
    """No data class at all."""


TRUSTED = [Trusted("x"), Trusted.Kind.ONE, TrustedModel(items=[Decimal("0.10")]), {"in": (Trusted("y"),)}]
REFUSED: dict[str, Callable[[], Any]] = {
    "a dataclass": lambda: Trusted("x"),
    "an enum": lambda: Trusted.Kind.ONE,
    "a model": lambda: TrustedModel(items=[]),
    "an object": Thing,
    "a function": lambda: len,
    "an exception": lambda: ValueError("x"),
    "a generator": lambda: iter(()),
}


def blank(**values: Any) -> Checkpoint:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, 1)
    return checkpoint


class Calls:
    """A saver as LangGraph calls it, blocking or awaited."""

    def __init__(self, saver: PerdureSaver, mode: str) -> None:
        self.saver = saver
        self.waits = mode == "async"

    async def put(self, config: RunnableConfig, checkpoint: Checkpoint) -> RunnableConfig:
        config = {"configurable": {"checkpoint_ns": "", **config["configurable"]}}
        versions = checkpoint["channel_versions"]
        metadata: Any = {"source": "loop", "step": 1, "parents": {}}
        if self.waits:
            return await self.saver.aput(config, checkpoint, metadata, versions)
        return self.saver.put(config, checkpoint, metadata, versions)

    async def write(self, config: RunnableConfig, *writes: tuple[str, Any]) -> None:
        if self.waits:
            await self.saver.aput_writes(config, writes, "task")
        else:
            self.saver.put_writes(config, writes, "task")

    async def get(self, config: RunnableConfig) -> CheckpointTuple:
        found = await self.saver.aget_tuple(config) if self.waits else self.saver.get_tuple(config)
        assert found is not None
        return found

    async def list(self, config: RunnableConfig) -> list[CheckpointTuple]:
        if self.waits:
            return [found async for found in self.saver.alist(config)]
        return list(self.saver.list(config))


# --- strict


def test_trusted_classes_are_kept_and_named_where_they_are_not_trusted(saver_url: str) -> None:
    value = TRUSTED
    with PerdureSaver(saver_url, trust=[__name__]) as saver:
        holding(saver, value).invoke({}, at("t"))
    with PerdureSaver(saver_url, trust=[__name__]) as saver:
        assert_same(holding(saver, value).get_state(at("t")).values["value"], value)
    with PerdureSaver(saver_url) as saver:
        graph = holding(saver, value)
        for read in (
            lambda: graph.get_state(at("t")),
            lambda: saver.get_tuple(at("t")),
            lambda: list(saver.list(at("t"))),
            lambda: graph.invoke(None, at("t")),
        ):
            with pytest.raises(UnknownType, match=r'perdure\.register.*trust=\["test_types_strict') as caught:
                read()
            assert caught.value.type_name.startswith("test_types_strict.Trusted")
        assert saver.store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
async def test_put_refuses_what_it_cannot_keep(saver: PerdureSaver, mode: str) -> None:
    calls = Calls(saver, mode)
    for name, make in REFUSED.items():
        first = await calls.put(at(name), blank(plan="old"))
        with pytest.raises(Unstorable, match=r"channel .plan.") as caught:
            await calls.put(first, blank(good=[1], plan=[0, {"deep": (make(),)}]))
        assert caught.value.path == 'state["plan"][1]["deep"][0]'
        assert caught.value.path in str(caught.value)
        with pytest.raises(Unstorable, match=r"channel .plan.") as caught:
            await calls.write(first, ("good", 1), ("plan", [{"deep": make()}]))
        assert caught.value.path.endswith('[0]["deep"]')
        assert caught.value.path in str(caught.value)
        left = await calls.list(at(name))
        assert [found.checkpoint["channel_values"] for found in left] == [{"plan": "old"}]
        assert left[0].pending_writes == []
    assert saver.store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_graph_that_returns_what_cannot_be_kept_fails(saver: PerdureSaver, mode: str, durability: Any) -> None:
    good = Runner(holding(saver, "old"), mode)
    await good.invoke({}, at("t"))
    bad = Runner(holding(saver, {"deep": [1, Trusted("x")]}), mode)
    with pytest.raises(Unstorable, match=r"channel .value.") as caught:
        await bad.invoke({}, at("t"), durability=durability)
    assert '["deep"][1]' in caught.value.path
    assert "test_types_strict.Trusted" in str(caught.value)
    assert (await good.state(at("t"))).values["value"] == "old"
    await good.invoke({}, at("t"))
    assert saver.store.ops.verify().ok


@pytest.mark.parametrize("mode", MODES)
async def test_an_input_that_cannot_be_kept_is_refused_too(saver: PerdureSaver, mode: str) -> None:
    graph = Runner(holding(saver, 1), mode)
    with pytest.raises(Unstorable, match=r"test_types_strict\.Thing") as caught:
        await graph.invoke({"value": [Thing()]}, at("t"))
    assert '["value"][0]' in caught.value.path
    with pytest.raises(Unstorable, match=r"channel .value.*test_types_strict\.Thing"):
        await graph.update(at("t"), {"value": Thing()}, "give")


# --- nothing is shared


def changing() -> dict[str, Any]:
    """Values that can be changed in place, of every kind."""
    return {
        "messages": [HumanMessage("hi", id="1"), AIMessage("yes", id="2", additional_kwargs={"k": [1]})],
        "nested": {"list": [1, {"deep": [2]}], "set": {1}, "bytes": bytearray(b"ab")},
        "array": numpy.arange(3),
        "same": [[1]] * 2,
    }


def change(value: Any) -> None:
    """Change everything inside that can be changed."""
    if isinstance(value, dict):
        for inner in value.values():
            change(inner)
        value["changed"] = True
    elif isinstance(value, list):
        for inner in value:
            change(inner)
        value.append("changed")
    elif isinstance(value, set):
        value.add("changed")
    elif isinstance(value, bytearray):
        value.extend(b"changed")
    elif isinstance(value, numpy.ndarray):
        value[:] = 99
    elif isinstance(value, BaseMessage):
        change(value.additional_kwargs)
        value.content = "changed"
    elif isinstance(value, tuple):
        for inner in value:
            change(inner)


def mutable(value: Any) -> Iterator[Any]:
    """Everything in a value that can be changed."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from mutable(inner)
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        for inner in value:
            yield from mutable(inner)
    elif isinstance(value, set | bytearray | numpy.ndarray):
        yield value
    elif isinstance(value, BaseMessage):
        yield value
        yield from mutable(vars(value))


@pytest.mark.parametrize("mode", MODES)
async def test_what_was_given_may_be_changed_afterwards(saver: PerdureSaver, mode: str) -> None:
    calls = Calls(saver, mode)
    values = changing()
    checkpoint = blank(**values)
    stored = await calls.put(at("t"), checkpoint)
    written = changing()
    await calls.write(stored, ("nested", written))
    for given in (checkpoint["channel_values"], checkpoint["channel_versions"], written):
        change(given)
    found = await calls.get(at("t"))
    assert_same(found.checkpoint["channel_values"], changing())
    assert set(found.checkpoint["channel_versions"]) == set(changing())
    assert_same([value for _, _, value in found.pending_writes or []], [changing()])


@pytest.mark.parametrize("mode", MODES)
async def test_what_was_got_may_be_changed(saver: PerdureSaver, mode: str) -> None:
    calls = Calls(saver, mode)
    first = await calls.put(at("t"), blank(**changing()))
    second = await calls.put(first, blank(**changing()))
    await calls.write(second, ("nested", changing()))
    for _ in range(2):
        for found in [await calls.get(at("t")), await calls.get(first), *await calls.list(at("t"))]:
            assert_same(found.checkpoint["channel_values"], changing())
            if id_of(found.config) == id_of(second):
                assert_same([value for _, _, value in found.pending_writes or []], [changing()])
            assert set(found.metadata) == {"source", "step", "parents"}
            change(found)
    third = await calls.put(second, blank(**changing()))
    assert_same((await calls.get(third)).checkpoint["channel_values"], changing())
    assert_same((await calls.get(second)).checkpoint["channel_values"], changing())


@pytest.mark.parametrize("mode", MODES)
async def test_two_reads_share_nothing_that_can_be_changed(saver: PerdureSaver, mode: str) -> None:
    graph = Runner(talking(saver), mode)
    for number in range(3):
        await graph.invoke({"messages": [HumanMessage(f"m{number}", additional_kwargs={"k": [number]})]}, at("t"))
    calls = Calls(saver, mode)
    read = [*await calls.list(at("t")), await calls.get(at("t")), await calls.get(at("t"))]
    assert len(read) == 11
    owners: dict[int, int] = {}
    for number, found in enumerate(read):
        parts = list(mutable(found))
        assert len(parts) > 5
        for part in parts:
            assert owners.setdefault(id(part), number) == number, f"{part!r} is in two results"


@pytest.mark.parametrize("mode", MODES)
async def test_a_node_may_change_what_it_returned_before(saver: PerdureSaver, mode: str) -> None:
    """The live object goes on to be changed; each checkpoint keeps it as it was."""
    kept: list[Any] = [{"n": [0]}]

    def first(state: Held) -> dict[str, Any]:
        return {"value": kept}

    def second(state: Held) -> dict[str, Any]:
        kept[0]["n"].append(1)
        kept.append("more")
        return {"after": "done"}

    builder = StateGraph(Held)
    builder.add_node("first", first)
    builder.add_node("second", second)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    graph = Runner(builder.compile(checkpointer=saver), mode)
    await graph.invoke({}, at("t"), durability="sync")
    history = await graph.history(at("t"))
    assert history[1].values == {"value": [{"n": [0]}]}
    kept.clear()
    state = await graph.state(at("t"))
    state.values["value"].append("by the reader")
    assert (await graph.history(at("t")))[1].values == {"value": [{"n": [0]}]}
    assert (await graph.state(at("t"))).values["value"] == history[0].values["value"]
