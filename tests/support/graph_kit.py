"""What the graph tests share: one way to call a graph in both modes, and a comparison that ignores random ids.

A test is written once, against a `Runner`; the fixture `mode` makes it call the blocking methods or the awaited
ones. `normal` turns snapshots into plain data in which ids and times are numbered in the order they appear, so
that the same run on two savers must give equal results.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import _messages_delta_reducer
from langgraph.pregel import Pregel
from langgraph.types import Interrupt, StateSnapshot, interrupt

from perdure.langgraph import PerdureSaver

MODES = ("sync", "async")
AnyGraph = Pregel[Any, Any, Any, Any]
AnySaver = BaseCheckpointSaver[Any]

_IDS = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")
_TIMES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.?\d*(?:\+00:00|Z)?")


def at(thread: str | int, **more: Any) -> RunnableConfig:
    """The config of a thread."""
    return {"configurable": {"thread_id": thread, **more}}


def id_of(config: RunnableConfig | None) -> str | None:
    """The checkpoint id in a config; None: there is none."""
    found = (config or {"configurable": {}})["configurable"].get("checkpoint_id")
    assert found is None or isinstance(found, str)
    return found


class Runner:
    """A graph as one calls it, blocking or awaited."""

    def __init__(self, graph: AnyGraph, mode: str) -> None:
        assert mode in MODES
        self.graph = graph
        self.waits = mode == "async"

    async def invoke(self, given: Any, config: RunnableConfig, **options: Any) -> Any:
        if self.waits:
            return await self.graph.ainvoke(given, config, **options)
        return self.graph.invoke(given, config, **options)

    async def stream(self, given: Any, config: RunnableConfig, **options: Any) -> list[Any]:
        if self.waits:
            return [part async for part in self.graph.astream(given, config, **options)]
        return list(self.graph.stream(given, config, **options))

    async def state(self, config: RunnableConfig, *, subgraphs: bool = False) -> StateSnapshot:
        if self.waits:
            return await self.graph.aget_state(config, subgraphs=subgraphs)
        return self.graph.get_state(config, subgraphs=subgraphs)

    async def history(self, config: RunnableConfig, **options: Any) -> list[StateSnapshot]:
        if self.waits:
            return [snapshot async for snapshot in self.graph.aget_state_history(config, **options)]
        return list(self.graph.get_state_history(config, **options))

    async def update(self, config: RunnableConfig, values: Any, as_node: str | None = None) -> RunnableConfig:
        if self.waits:
            return await self.graph.aupdate_state(config, values, as_node)
        return self.graph.update_state(config, values, as_node)

    async def bulk_update(self, config: RunnableConfig, supersteps: list[Any]) -> RunnableConfig:
        if self.waits:
            return await self.graph.abulk_update_state(config, supersteps)
        return self.graph.bulk_update_state(config, supersteps)


class _Numbering:
    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def text(self, text: str) -> str:
        return _TIMES.sub("(a time)", _IDS.sub(self._number, text))

    def _number(self, found: re.Match[str]) -> str:
        return self.seen.setdefault(found.group(), f"(id {len(self.seen) + 1})")

    def plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, BaseMessage):
            return [type(value).__name__, self.plain(value.model_dump())]
        if isinstance(value, BaseException):
            return self.text(repr(value))
        if isinstance(value, Interrupt):
            return ["Interrupt", self.plain(value.value), self.plain(value.id)]
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return [type(value).__name__, self.plain(value._asdict())]
        if isinstance(value, dict):
            return {self.plain(key): self.plain(value[key]) for key in sorted(value, key=str)}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        return value


def normal(value: Any) -> Any:
    """Plain data, with ids numbered in the order of their first appearance and times taken out."""
    return _Numbering().plain(value)


class Count(TypedDict):
    """A state with a number that is added to and a log that grows."""

    total: Annotated[int, operator.add]
    log: Annotated[list[str], operator.add]


def counting(saver: AnySaver, *names: str, interrupt_before: list[str] | None = None) -> AnyGraph:
    """A line of nodes; each adds one to the total and its name to the log."""
    builder = StateGraph(Count)
    previous = START
    for name in names or ("a", "b"):
        builder.add_node(name, lambda state, name=name: {"total": 1, "log": [name]})
        builder.add_edge(previous, name)
        previous = name
    builder.add_edge(previous, END)
    return builder.compile(checkpointer=saver, interrupt_before=interrupt_before)


def human(text: str, id: str | None = None) -> HumanMessage:
    """A message with an id: `add_messages` gives one in place otherwise, while the write may be under way."""
    return HumanMessage(text, id=id or f"human {text}")


def reply(state: MessagesState, text: str) -> dict[str, Any]:
    return {"messages": [AIMessage(text, id=f"reply {len(state['messages'])}")]}


def echo(state: MessagesState) -> dict[str, Any]:
    return reply(state, f"Echo: {state['messages'][-1].content}")


def talking(saver: AnySaver | None) -> AnyGraph:
    """A conversation: each message is echoed."""
    builder = StateGraph(MessagesState)
    builder.add_node("echo", echo)
    builder.add_edge(START, "echo")
    builder.add_edge("echo", END)
    return builder.compile(checkpointer=saver)


def texts(result: Any) -> list[str]:
    """The contents of the messages of a state."""
    return [message.content for message in result["messages"]]


class Work(TypedDict, total=False):
    items: list[int]
    item: int
    found: Annotated[list[str], operator.add]
    answer: str


def asking(saver: AnySaver, asked: list[str] | None = None) -> AnyGraph:
    """A node that asks twice and remembers what it was told."""

    def ask(state: Work) -> dict[str, Any]:
        if asked is not None:
            asked.append("begin")
        name = interrupt({"question": "name?"})
        colour = interrupt({"question": "colour?", "for": name})
        return {"answer": f"{name} likes {colour}", "found": [name]}

    builder = StateGraph(Work)
    builder.add_node("ask", ask)
    builder.add_node("done", lambda state: {"found": [f"done: {state['answer']}"]})
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "done")
    return builder.compile(checkpointer=saver)


class Outer(TypedDict, total=False):
    topic: str
    results: Annotated[list[str], operator.add]


class Topic(TypedDict):
    topic: str


class Results(TypedDict):
    results: Annotated[list[str], operator.add]


class Inner(TypedDict, total=False):
    topic: str
    notes: Annotated[list[str], operator.add]
    results: Annotated[list[str], operator.add]


def inner(*, ask: bool = False, checkpointer: bool | None = None) -> AnyGraph:
    """Two nodes with notes of their own; the second can ask."""

    def read(state: Inner) -> dict[str, Any]:
        return {"notes": [f"read {state['topic']}"]}

    def write(state: Inner) -> dict[str, Any]:
        said = interrupt(f"write about {state['topic']}?") if ask else "yes"
        return {"notes": [said], "results": [f"{state['topic']}: {len(state['notes'])} notes, {said}"]}

    builder = StateGraph(Inner, input_schema=Topic, output_schema=Results)
    builder.add_node("read", read)
    builder.add_node("write", write)
    builder.add_edge(START, "read")
    builder.add_edge("read", "write")
    return builder.compile(checkpointer=checkpointer)


def outer(saver: AnySaver, *subgraphs: AnyGraph) -> AnyGraph:
    builder = StateGraph(Outer)
    builder.add_node("plan", lambda state: {"results": ["planned"]})
    builder.add_edge(START, "plan")
    previous = "plan"
    for number, subgraph in enumerate(subgraphs):
        builder.add_node(f"sub{number}", subgraph)
        builder.add_edge(previous, f"sub{number}")
        previous = f"sub{number}"
    return builder.compile(checkpointer=saver)


class Long(TypedDict):
    """Messages that LangGraph itself keeps as differences."""

    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=3)]


def long_talking(saver: AnySaver, **options: Any) -> AnyGraph:
    builder = StateGraph(Long)
    builder.add_node("echo", echo, input_schema=Long)
    builder.add_edge(START, "echo")
    return builder.compile(checkpointer=saver, **options)


Scenario = Callable[[AnySaver, str], Awaitable[Any]]


async def on_both(scenario: Scenario, saver: AnySaver, mode: str) -> tuple[Any, Any]:
    """What a scenario saw on this saver and on LangGraph's own in memory. A store must verify afterwards."""
    mine = normal(await scenario(saver, mode))
    report = saver.store.ops.verify() if isinstance(saver, PerdureSaver) else None
    if report is not None and not (report.ok and report.checkpoints):
        raise AssertionError(f"after {scenario}: {report}")
    return mine, normal(await scenario(InMemorySaver(), mode))
