"""The children of the kill tests, and the graphs they run: nodes and tools that book at a pretend airline.

Each graph is made once for both ways of running it, with an effect of one of three policies: the airline honours the
key ("key"), it can be asked what became of a request ("reconcile"), or neither ("ask": a person must say).
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send

import perdure
import perdure.storage.postgres.driver  # the fork_server imports everything once
from perdure import outcome
from perdure.langgraph import PerdureSaver
from perdure.testing.fake_airline import Airline
from perdure.testing.processes import Say

FLIGHT, HOTEL, TRAIN = "LH400", "Grand Hotel", "ICE 9"
BOOKED = {"node": 1, "tools": 2, "subgraph": 1, "deep": 1, "send": 3, "functional": 2}  # held at the same time
POLICIES: dict[str, dict[str, Any]] = {
    "key": {"on_doubt": "retry", "timeout_s": 1.0},  # so long is waited before the request is sent again
    "reconcile": {"timeout_s": 60.0},
    "ask": {"timeout_s": 60.0},
}


class Trip(TypedDict, total=False):
    found: str
    booked: Annotated[list[str], operator.add]
    item: str


class Agency:
    """Steps and effects that talk to an airline, and graphs that call them."""

    def __init__(self, url: str, way: str, policy: str) -> None:
        self.airline, self.is_async = Airline(url), way == "async"
        options = dict(POLICIES[policy])
        if policy == "reconcile":
            options["reconcile"] = self._look_async if self.is_async else self._look
        body = self._book_async if self.is_async else self._book
        search = self._search_async if self.is_async else self._search
        self.book: Callable[[str], Any] = perdure.effect(name="book", **options)(body)
        self.search: Callable[[], Any] = perdure.step(name="search")(search)
        self.searched = 0

    def _search(self) -> str:
        self.searched += 1
        return str(self.airline.search("Lisbon")["hotel"])

    async def _search_async(self) -> str:
        return await asyncio.to_thread(self._search)

    def _book(self, item: str, key: perdure.IdempotencyKey) -> str:
        return self.airline.book("trip", item, key=key)

    async def _book_async(self, item: str, key: perdure.IdempotencyKey) -> str:
        return await asyncio.to_thread(self._book, item, key)

    def _look(self, key: perdure.IdempotencyKey, item: str) -> outcome.Done | outcome.NotDone:
        found = self.airline.bookings(key)
        return outcome.Done(found[0].booking) if found else outcome.NotDone()

    async def _look_async(self, key: perdure.IdempotencyKey, item: str) -> outcome.Done | outcome.NotDone:
        return await asyncio.to_thread(self._look, key, item)

    def node(self, fn: Callable[..., Any]) -> Any:
        """An async function as a node of this way: in the sync one, nothing it awaits really waits."""
        if self.is_async:
            return fn

        def node(state: Any) -> Any:
            try:
                fn(state).send(None)
            except StopIteration as stop:
                return stop.value
            raise AssertionError("a sync node waited")

        node.__name__ = fn.__name__
        return node

    async def __call__(self, value: Any) -> Any:
        return await value if self.is_async else value

    # --- the graphs

    async def trip(self, state: Trip) -> dict[str, Any]:
        found = await self(self.search())
        flight = await self(self.book(FLIGHT))
        return {"found": found, "booked": [flight, await self(self.book(HOTEL))]}

    async def one(self, state: Trip) -> dict[str, Any]:
        return {"booked": [await self(self.book(state["item"]))]}

    def graph(self, shape: str, saver: Any) -> Any:
        return getattr(self, f"{shape}_graph")(saver)

    def node_graph(self, saver: Any) -> Any:
        return line(Trip, ("trip", self.node(self.trip))).compile(checkpointer=saver)

    def subgraph_graph(self, saver: Any, **options: Any) -> Any:
        inner = line(Trip, ("look", lambda state: {}), ("trip", self.node(self.trip))).compile(**options)
        return line(Trip, ("begin", lambda state: {}), ("inner", inner)).compile(checkpointer=saver)

    def deep_graph(self, saver: Any) -> Any:
        inner = line(Trip, ("trip", self.node(self.trip))).compile()
        middle = line(Trip, ("inner", inner)).compile()
        return line(Trip, ("middle", middle)).compile(checkpointer=saver)

    def send_graph(self, saver: Any) -> Any:
        builder = StateGraph(Trip)
        builder.add_node("one", self.node(self.one))
        items = [FLIGHT, HOTEL, TRAIN]
        builder.add_conditional_edges(START, lambda state: [Send("one", {"item": item}) for item in items], ["one"])
        return builder.compile(checkpointer=saver)

    def functional_graph(self, saver: Any) -> Any:
        agency = self

        @task
        async def aone(item: str) -> str:
            booked = await agency.book(item)
            return str(booked)

        @entrypoint(checkpointer=saver)
        async def aboth(given: Any) -> Any:
            return {"booked": list(await asyncio.gather(aone(FLIGHT), aone(HOTEL)))}

        @task
        def one(item: str) -> str:
            return str(agency.book(item))

        @entrypoint(checkpointer=saver)
        def both(given: Any) -> Any:
            return {"booked": [future.result() for future in [one(FLIGHT), one(HOTEL)]]}

        return aboth if self.is_async else both

    def tools(self) -> list[StructuredTool]:
        async def abook_trip(item: str) -> str:
            """Book something."""
            return str(await self.book(item))

        def book_trip(item: str) -> str:
            """Book something."""
            return str(self.book(item))

        made = abook_trip if self.is_async else book_trip
        kind = "coroutine" if self.is_async else "func"
        return [StructuredTool.from_function(**{kind: made}, name="book_trip", description="Book something.")]  # type: ignore[arg-type]

    def tools_graph(self, saver: Any, **options: Any) -> Any:
        builder = StateGraph(MessagesState)
        calls = [
            {"name": "book_trip", "args": {"item": item}, "id": f"call {item}", "type": "tool_call"}
            for item in (FLIGHT, HOTEL)
        ]
        builder.add_node("model", lambda state: {"messages": [AIMessage("", id="plan", tool_calls=calls)]})
        builder.add_node("tools", ToolNode(self.tools(), **options))
        builder.add_node("tell", lambda state: {"messages": [AIMessage("done", id="end")]})
        for before, after in ((START, "model"), ("model", "tools"), ("tools", "tell")):
            builder.add_edge(before, after)
        return builder.compile(checkpointer=saver)


def line(schema: Any, *nodes: tuple[str, Any]) -> StateGraph[Any, Any, Any, Any]:
    builder = StateGraph(schema)
    previous = START
    for name, node in nodes:
        builder.add_node(name, node)
        builder.add_edge(previous, name)
        previous = name
    return builder


def booked(shape: str, result: Any) -> list[str]:
    """The bookings that a graph's result tells of."""
    if shape == "tools":
        return [message.content for message in result["messages"] if message.type == "tool"]
    found: list[str] = result["booked"]
    return found


def go(agency: Agency, graph: Any, saver: PerdureSaver, **options: Any) -> Any:
    """The line that is run again after a crash: begins, or goes on."""
    config: Any = {"configurable": {"thread_id": "trip 1"}}
    given: Any = None if saver.get_tuple(config) is not None else {"booked": []}
    if agency.is_async:
        return asyncio.run(graph.ainvoke(given, config, **options))
    return graph.invoke(given, config, **options)


def child(say: Say, url: str, airline: str, shape: str, way: str, policy: str, durability: str, lease_s: float) -> None:
    """What the fork_server calls: run a graph, and say what it booked, or what is in doubt."""
    agency = Agency(airline, way, policy)
    with PerdureSaver(url, durability="normal", lease_s=lease_s) as saver:
        try:
            result = go(agency, agency.graph(shape, saver), saver, durability=durability)
        except perdure.InDoubt as doubt:
            say({"doubt": str(doubt), "run": doubt.run, "step": doubt.step, "key": doubt.key})
        else:
            say({"booked": booked(shape, result), "searched": agency.searched})
