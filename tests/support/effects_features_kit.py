"""What the tests of effects in nodes share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from graph_kit import Runner
from langgraph.graph import START, StateGraph

import perdure


class Trip(TypedDict, total=False):
    booked: Annotated[list[str], operator.add]
    turns: Annotated[int, operator.add]


class Broken(Exception):
    """What a test breaks a node with."""


class Office:
    """Steps and effects of one mode that note what they did."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.is_async = mode == "async"
        self.mode = mode
        self.keys: list[str] = []
        self.ran: list[str] = []
        self.trouble: list[BaseException] = []  # raised by the next bodies
        options.setdefault("timeout_s", 60.0)
        self.book: Callable[..., Any] = self.effect(self._book, name="book", **options)
        self.search: Callable[..., Any] = self.step(self._search, name="search")

    def _book(self, item: str, key: perdure.IdempotencyKey) -> str:
        self.keys.append(str(key))
        self.ran.append(f"book {item}")
        if self.trouble:
            raise self.trouble.pop(0)
        return f"{item}-{len(self.keys)}"

    def _search(self, what: str) -> str:
        self.ran.append(f"search {what}")
        if self.trouble:
            raise self.trouble.pop(0)
        return f"found {what}"

    def effect(self, body: Callable[..., Any], **options: Any) -> Any:
        return perdure.effect(**options)(self._body(body))

    def step(self, body: Callable[..., Any], **options: Any) -> Any:
        return perdure.step(**options)(self._body(body))

    def _body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        if not self.is_async:
            return body

        async def awaited(item: str, key: perdure.IdempotencyKey) -> Any:
            return body(item, key)

        async def plain(item: str) -> Any:
            return body(item)

        return plain if body == self._search else awaited

    async def __call__(self, value: Any) -> Any:
        return await value if self.is_async else value

    def node(self, fn: Callable[[Any], Any]) -> Any:
        """An async function as a node of this mode."""
        if self.is_async:
            return fn

        def node(state: Any) -> Any:
            try:
                fn(state).send(None)
            except StopIteration as stop:
                return stop.value
            raise AssertionError("a sync node waited")

        return node

    def line(self, saver: Any, *fns: Callable[[Any], Any], **options: Any) -> Runner:
        """A graph of these nodes, one after the other."""
        builder = StateGraph(Trip)
        previous = START
        for number, fn in enumerate(fns):
            builder.add_node(f"n{number}", self.node(fn), **options)
            builder.add_edge(previous, f"n{number}")
            previous = f"n{number}"
        return Runner(builder.compile(checkpointer=saver), self.mode)
