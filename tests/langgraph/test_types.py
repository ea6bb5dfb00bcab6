"""Types survive a graph: what a node returned comes back equal and of the same type, from a store opened anew."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import math
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypedDict
from zoneinfo import ZoneInfo

import msgspec
import numpy
import pydantic
import pytest
from graph_kit import MODES, AnyGraph, AnySaver, Runner, at
from langchain_core.agents import AgentAction, AgentActionMessageLog, AgentFinish, AgentStep
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)
from langchain_core.messages.tool import tool_call_chunk
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.graph import START, StateGraph
from langgraph.store.base import GetOp, Item
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy
from samples import every_type, same

import perdure
from perdure.adapters import Codec, decode, encode
from perdure.langgraph import PerdureSaver

NOON = datetime(2026, 3, 4, 12, 30, 15, 123456, tzinfo=UTC)


class Held(TypedDict, total=False):
    value: Any
    after: str


def holding(saver: AnySaver, value: Any) -> AnyGraph:
    """A node that returns the value, and one after it that is not run."""
    builder = StateGraph(Held)
    builder.add_node("give", lambda state: {"value": value})
    builder.add_node("after", lambda state: {"after": type(state["value"]).__name__})
    builder.add_edge(START, "give")
    builder.add_edge("give", "after")
    return builder.compile(checkpointer=saver, interrupt_before=["after"])


# --- classes


@perdure.register
class Mood(enum.Enum):
    CALM = "calm"


@perdure.register
class Level(enum.IntEnum):
    LOW = 1


@perdure.register
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@perdure.register
@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    goal: str
    steps: tuple[str, ...] = ()
    mood: Mood = Mood.CALM

    @perdure.register
    @dataclasses.dataclass
    class Step:
        """A class inside a class: LangGraph's own serializer brings it back as a dict."""

        what: str

        @perdure.register
        class Kind(enum.Enum):
            HARD = "hard"


@perdure.register
class Spot(NamedTuple):
    x: float
    y: float = 0.5


@perdure.register
class Struct(msgspec.Struct):
    name: str
    tags: set[str]


@perdure.register
class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str
    spot: Spot
    inner: Model | None = None


PLAIN: dict[str, Any] = {
    "tuple": (1, (2, [3, (4,)]), ()),
    "list and tuple": [[1], (1,)],
    "sets": [{1, 2}, frozenset({"a", ("b", 1)}), set()],
    "big ints": [2**63, -(2**64), 10**400],
    "bytes": [b"", bytes(range(256)), bytearray(b"x")],
    "text": ["", "汉字 👩‍👩‍👧", "\x00\x1f", "\ud800 lone", "^tuple"],
    "floats": [0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan],
    "times": [NOON, NOON.replace(tzinfo=None), date(2000, 2, 29), time(23, 59, fold=1), timedelta(-3, 7, 1)],
    "zones": [NOON.astimezone(ZoneInfo("UTC")), timezone(timedelta(hours=-5)), ZoneInfo("UTC")],
    "decimal": [Decimal("0.10"), Decimal("-1E+50"), Decimal("1.000"), Decimal("Infinity")],
    "uuid": uuid.UUID(int=7),
    "path": [Path("/tmp/some where"), PurePosixPath("relative/é")],
    "keys": {1: "int", (2, 3): "tuple", None: "none", False: "bool", "1": "text", 2.5: "float", b"k": "bytes"},
    "order": {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
    "collections": [
        deque([1, 2], maxlen=3),
        OrderedDict(b=1, a=2),
    ],
    "tags": {"^tuple": [1], "^obj": ["os.system", 1, {}]},
    "reserved": {"__line__": 1, "__start__": [2], "lc": 1, "type": "constructor"},
    "patterns": [re.compile("a+", re.IGNORECASE | re.DOTALL), re.compile(rb"b")],
    "addresses": [
        ipaddress.ip_address("10.0.0.1"),
        ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_interface("10.0.0.1/8"),
        ipaddress.ip_address("::1%eth0"),
        ipaddress.ip_network("fe80::/10"),
        ipaddress.ip_interface("fe80::1/64"),
    ],
    "arrays": [
        numpy.arange(24, dtype="<f4").reshape(2, 3, 4),
        numpy.array([], dtype="int64"),
        numpy.array([[1 + 2j]]),
        numpy.float64(0.5),
        numpy.int16(-7),
        numpy.array(["2026-03-04"], dtype="datetime64[D]"),
    ],
    "enums": [Mood.CALM, Level.LOW, Access.READ, Access.READ | Access.WRITE, {Mood.CALM: Level.LOW}],
    "dataclasses": [Plan("go", ("pack",)), Plan.Step("pack"), Plan.Step.Kind.HARD],
    "named tuples": [Spot(1.5), (Spot(1, 2), [Spot(3)])],
    "structs": Struct("s", {"a", "b"}),
    "models": Model(name="outer", spot=Spot(1), inner=Model(name="inner", spot=Spot(2), more=[1])),  # type: ignore[call-arg]
    "every type that the codec knows": every_type(),
    "nothing": None,
    "empty": {"dict": {}, "list": [], "tuple": ()},
}

CALL = {"name": "f", "args": {"x": [1, {"y": None}]}, "id": "c1", "type": "tool_call"}
MESSAGES: dict[str, BaseMessage] = {
    "HumanMessage": HumanMessage("hi", id="h", name="Ada", additional_kwargs={"k": [1]}),
    "HumanMessageChunk": HumanMessageChunk(content="hi", id="h"),
    "AIMessage": AIMessage(
        [{"type": "text", "text": "parts"}, "and text"],
        id="a",
        tool_calls=[CALL],
        invalid_tool_calls=[{"name": "g", "args": "{", "id": "c2", "error": "bad", "type": "invalid_tool_call"}],
        usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        response_metadata={"model": "m", "logprobs": [0.5, None]},
    ),
    "AIMessageChunk": AIMessageChunk(
        content="par", tool_call_chunks=[tool_call_chunk(name="f", args='{"x"', id="c", index=0)]
    ),
    "SystemMessage": SystemMessage("rules"),
    "SystemMessageChunk": SystemMessageChunk(content="rules"),
    "ChatMessage": ChatMessage(content="said", role="critic"),
    "ChatMessageChunk": ChatMessageChunk(content="said", role="critic"),
    "ToolMessage": ToolMessage("42", tool_call_id="c1", status="error", artifact={"raw": (1, b"\x00")}),
    "ToolMessageChunk": ToolMessageChunk(content="42", tool_call_id="c1"),
    "FunctionMessage": FunctionMessage(content="42", name="f"),
    "FunctionMessageChunk": FunctionMessageChunk(content="42", name="f"),
    "RemoveMessage": RemoveMessage(id="h"),
    "BaseMessage": BaseMessage("of no kind", type="odd"),
    "BaseMessageChunk": BaseMessageChunk(content="of no kind", type="odd"),
}

LANGGRAPH: dict[str, Any] = {
    "Document": Document("text", id="d", metadata={"page": 3}),
    "Send": [Send("node", {"item": (1,)}), Send("node", None, timeout=3.5)],
    "TimeoutPolicy": [TimeoutPolicy(run_timeout=3), TimeoutPolicy(idle_timeout=timedelta(seconds=3))],
    "Interrupt": Interrupt({"question": ("a", "b")}, id="i"),
    "Command": [
        Command(update={"a": (1,)}, goto=[Send("n", 1), "m"], resume={"k": "v"}),
        Command(graph=Command.PARENT, goto="up"),
    ],
    "Overwrite": Overwrite([1, (2,)]),
    "PregelTask": PregelTask("id", "name", ("path", 1), None, (Interrupt("v", id="i"),)),
    "StateSnapshot": StateSnapshot({"v": 1}, ("n",), at("t"), None, None, None, (), ()),
    "Item": Item(value={"v": 1}, key="k", namespace=("a", "b"), created_at=NOON, updated_at=NOON),
    "GetOp": GetOp(("a", "b"), "k"),
    "AgentAction": AgentAction("search", {"q": "tea"}, "thinking"),
    "AgentActionMessageLog": AgentActionMessageLog(tool="t", tool_input="i", log="l", message_log=[AIMessage("a")]),
    "AgentFinish": AgentFinish({"output": "tea"}, "done"),
    "AgentStep": AgentStep(action=AgentAction("search", "tea", ""), observation=[1]),
}

# One sample of each class on LangGraph's own list of what is safe to load.
SAFE: dict[str, Any] = {
    **MESSAGES,
    **LANGGRAPH,
    "datetime": NOON,
    "date": date(2026, 3, 4),
    "time": time(1, 2),
    "timedelta": timedelta(1),
    "timezone": timezone(timedelta(hours=2), "here"),
    "UUID": uuid.UUID(int=1),
    "Decimal": Decimal("1.10"),
    "set": {1},
    "frozenset": frozenset({1}),
    "deque": deque([1], maxlen=2),
    "IPv4Address": ipaddress.IPv4Address("10.0.0.1"),
    "IPv4Interface": ipaddress.IPv4Interface("10.0.0.1/8"),
    "IPv4Network": ipaddress.IPv4Network("10.0.0.0/8"),
    "IPv6Address": ipaddress.IPv6Address("::1"),
    "IPv6Interface": ipaddress.IPv6Interface("::1/64"),
    "IPv6Network": ipaddress.IPv6Network("fe80::/10"),
    "Path": Path("/a"),
    "PosixPath": Path("/a/b"),
    "ZoneInfo": ZoneInfo("UTC"),
    "compile": re.compile("a"),
}
NOT_ON_THIS_SYSTEM = {"WindowsPath"}


def assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    assert same(found, value), f"{found!r} is not {value!r}"


def survive(url: str, values: Mapping[str, Any]) -> None:
    """Each value as a channel's, as a pending write and inside a list; read by a saver opened anew."""
    with PerdureSaver(url) as saver:
        for name, value in values.items():
            holding(saver, value).invoke({}, at(name), durability="sync")
            saver.put_writes(newest(saver, name).config, [("value", [value]), ("other", value)], "task")
    with PerdureSaver(url) as saver:
        for name, value in values.items():
            graph = holding(saver, value)
            assert_same(graph.get_state(at(name)).values["value"], value)
            pending = newest(saver, name).pending_writes or []
            written = {channel: found for task, channel, found in pending if task == "task"}
            assert_same(written, {"value": [value], "other": value})
            assert graph.invoke(None, at(name))["after"] == type(value).__name__
        assert {info.name for info in saver.store.threads(limit=None)} == set(values)
        assert saver.store.ops.verify().ok


def newest(saver: PerdureSaver, name: str) -> CheckpointTuple:
    found = saver.get_tuple(at(name))
    assert found is not None
    return found


@pytest.mark.parametrize("values", [PLAIN, MESSAGES, LANGGRAPH], ids=["plain", "messages", "langgraph"])
def test_values_survive(saver_url: str, values: Mapping[str, Any]) -> None:
    survive(saver_url, values)


@pytest.mark.parametrize("name", sorted({names[1] for names in SAFE_MSGPACK_TYPES} - NOT_ON_THIS_SYSTEM))
def test_every_class_that_langgraph_calls_safe_survives(tmp_path: Path, name: str) -> None:
    survive(str(tmp_path / "a.db"), {name: SAFE[name]})


@pytest.mark.parametrize("name", LANGGRAPH)
def test_fields_of_another_version_of_langgraph_are_dropped_or_defaulted(name: str) -> None:
    """A deploy can be rolled back: what the newer version has stored is read."""
    value = LANGGRAPH[name]
    text = encode(value, Codec())
    newer = re.sub(rb'(\{"\^obj":\["lang[^"]*",1,\{)', rb'\1"of_next_year":[1],', text)
    assert newer != text
    assert_same(decode(newer, Codec()), value)
    if name == "Interrupt":
        older = text.replace(b',"response_schema":null', b"")
        assert older != text
        assert_same(decode(older, Codec()), value)


def test_deep_values_survive(saver_url: str) -> None:
    deep: Any = "bottom"
    for level in range(150):
        deep = [deep] if level % 2 else {"down": deep}
    survive(saver_url, {"deep": deep})


@perdure.register
class Form(pydantic.BaseModel):
    """A state that is itself a model: LangGraph keeps its fields as channels."""

    spot: Spot
    plans: list[Plan] = []


@perdure.register
@dataclasses.dataclass
class Sheet:
    """A state that is itself a dataclass."""

    spot: Spot
    plans: list[Plan] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schema", [Form, Sheet])
async def test_a_state_may_be_a_model_or_a_dataclass(saver: PerdureSaver, schema: Any, mode: str) -> None:
    seen: list[Any] = []

    def node(state: Any) -> dict[str, Any]:
        seen.append(state)
        return {"plans": [*state.plans, Plan("next")]}

    builder = StateGraph(schema)
    builder.add_node("node", node, input_schema=schema)
    builder.add_edge(START, "node")
    graph = Runner(builder.compile(checkpointer=saver), mode)
    await graph.invoke(schema(spot=Spot(1, 2), plans=[Plan("first")]), at("t"))
    await graph.update(at("t"), {"spot": Spot(3, 4)})
    result = await graph.invoke({"plans": [Plan("again")]}, at("t"))
    assert seen == [schema(spot=Spot(1, 2), plans=[Plan("first")]), schema(spot=Spot(3, 4), plans=[Plan("again")])]
    assert result == {"spot": Spot(3, 4), "plans": [Plan("again"), Plan("next")]}
    assert type((await graph.state(at("t"))).values["plans"][0]) is Plan
