"""What the tests of the command line on LangGraph's threads share: graphs of many shapes, and how they are called."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from cli_runs_kit import Run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, Send, interrupt

from perdure.langgraph import PerdureSaver

AnyGraph = Pregel[Any, Any, Any, Any]
Shape = Callable[[PerdureSaver], AnyGraph]


def at(thread: str, **more: Any) -> RunnableConfig:
    """The config of a thread."""
    return {"configurable": {"thread_id": thread, **more}}


def shown(run: Run, *argv: str) -> dict[str, Any]:
    """What `show --json` says of LangGraph."""
    code, out, err = run("show", *argv, "--json")
    if (code, err) != (0, ""):
        raise AssertionError(f"show {argv}: {code} {err}")
    found: dict[str, Any] = json.loads(out)["langgraph"]
    return found


class Work(TypedDict, total=False):
    items: list[int]
    item: int
    found: Annotated[list[str], operator.add]


def note(name: str) -> Callable[[Work], dict[str, Any]]:
    return lambda state: {"found": [f"{name}{state.get('item', '')}"]}


def built(saver: PerdureSaver, edges: dict[str, Any], **options: Any) -> AnyGraph:
    """A graph of nodes that note their names. An edge leads to a name, to several, or where a function says."""
    builder = StateGraph(Work)
    for name in edges.keys() - {START}:
        builder.add_node(name, options.pop(name, note(name)), defer=name == "last")
    for name, target in edges.items():
        for one in target if isinstance(target, list) else [target]:
            if callable(one):
                builder.add_conditional_edges(name, one, list(edges.keys() - {START}))
            elif one.startswith("join "):
                builder.add_edge(one.split()[1:], name)
            else:
                builder.add_edge(name, one)
    return builder.compile(checkpointer=saver, **options)


def ran(graph: AnyGraph, *inputs: Any) -> AnyGraph:
    for given in inputs or ({"items": [1, 2, 3]},):
        try:
            graph.invoke(given, at("t"))
        except ZeroDivisionError:
            pass
    return graph


def asks(state: Work) -> dict[str, Any]:
    name = interrupt({"question": "name?"})
    return {"found": [f"{name} likes {interrupt('colour?')}"]}


def asks_of_two(state: Work) -> dict[str, Any]:
    if state["item"] == 2:
        interrupt("two?")
    return {"found": [str(state["item"])]}


def fails(state: Work) -> dict[str, Any]:
    raise ZeroDivisionError("no way")


def line(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: "a", "a": "b", "b": []}))


def stopped(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: "a", "a": "b", "b": []}, interrupt_before=["b"]))


def parallel(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: ["a", "b"], "a": [], "b": [], "c": "join a b"}, interrupt_before=["c"]))


def half_joined(saver: PerdureSaver) -> AnyGraph:
    edges = {START: ["a", "b"], "a": [], "b": "b+", "b+": [], "c": "join a b+"}
    return ran(built(saver, edges, interrupt_before=["b+"]))


def deferred(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: ["a", "last"], "a": "b", "b": [], "last": []}, interrupt_before=["b"]))


def conditional(saver: PerdureSaver) -> AnyGraph:
    edges = {START: "a", "a": lambda state: "b" if len(state["found"]) < 3 else "c", "b": "a", "c": []}
    return ran(built(saver, edges, interrupt_before=["c"]))


def commanded(saver: PerdureSaver) -> AnyGraph:
    goes = lambda state: Command(goto=["b", Send("c", {"item": 7})])  # noqa: E731
    return ran(built(saver, {START: "a", "a": [], "b": [], "c": []}, a=goes, interrupt_before=["b"]))


def asking(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: "ask", "ask": "b", "b": []}, ask=asks))


def asking_again(saver: PerdureSaver) -> AnyGraph:
    return ran(asking(saver), Command(resume="Bo"))


def asking_beside(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: ["a", "ask"], "ask": "b", "a": [], "b": []}, ask=asks))


def failing(saver: PerdureSaver) -> AnyGraph:
    return ran(built(saver, {START: ["a", "fail"], "a": [], "fail": "b", "b": []}, fail=fails))


def sending(saver: PerdureSaver) -> AnyGraph:
    sends = lambda state: [Send("work", {"item": item}) for item in state["items"]]  # noqa: E731
    return ran(built(saver, {START: "plan", "plan": sends, "work": "end", "end": []}, work=asks_of_two))


def answered(saver: PerdureSaver) -> AnyGraph:
    return ran(sending(saver), Command(resume="yes"), {"items": []})


def functional(saver: PerdureSaver) -> AnyGraph:
    @task
    def more(number: int) -> int:
        return number + 1

    @task
    def ask(number: int) -> Any:
        return interrupt(f"really {number}?")

    @entrypoint(checkpointer=saver)
    def flow(number: int) -> Any:
        return ask(more(number).result()).result()

    return ran(flow, 1)


def functional_again(saver: PerdureSaver) -> AnyGraph:
    return ran(functional(saver), Command(resume="yes"), 5)


SHAPES: list[Shape] = [
    line,
    stopped,
    parallel,
    half_joined,
    deferred,
    conditional,
    commanded,
    asking,
    asking_again,
    asking_beside,
    failing,
    sending,
    answered,
    functional,
    functional_again,
]


def talk(state: MessagesState) -> dict[str, Any]:
    said = str(state["messages"][-1].content)
    call = {"name": "search", "args": {"query": said, "n": 3}, "id": "call 1"}
    return {
        "messages": [
            AIMessage([{"type": "text", "text": "Let me see"}, {"type": "image"}], id=f"ai {said}", tool_calls=[call]),
            ToolMessage("x" * 500, id=f"tool {said}", name="search", tool_call_id="call 1"),
            AIMessage(f"Echo:\n{said}", id=f"echo {said}"),
        ]
    }


def talking(saver: PerdureSaver) -> AnyGraph:
    builder = StateGraph(MessagesState)
    builder.add_node("talk", talk)
    builder.add_edge(START, "talk")
    return builder.compile(checkpointer=saver)


def say(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=f"human {text}")]}


class Outer(TypedDict, total=False):
    topic: str
    found: Annotated[list[str], operator.add]


def nested(saver: PerdureSaver, *, ask: bool = True, keeps: bool | None = None) -> AnyGraph:
    """A graph with a graph in it, that asks, and that may keep its state from run to run."""
    inner = StateGraph(Outer)
    inner.add_node("read", lambda state: {"found": [f"read {state['topic']}"]})
    inner.add_node("ask", lambda state: {"found": [interrupt("go on?") if ask else "yes"]})
    inner.add_edge(START, "read")
    inner.add_edge("read", "ask")
    outer = StateGraph(Outer)
    outer.add_node("plan", lambda state: {"found": ["planned"]})
    outer.add_node("sub", inner.compile(checkpointer=keeps))
    outer.add_edge(START, "plan")
    outer.add_edge("plan", "sub")
    return outer.compile(checkpointer=saver)
