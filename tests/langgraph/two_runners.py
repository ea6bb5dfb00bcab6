"""The children of the tests with two processes on one thread: a graph that books twice, and stops at gates.

A gate is a FIFO that the test has made: the child says that it is there, and waits until the test writes to it. Where
there is no FIFO, there is no gate.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import START, StateGraph

import perdure
import perdure.storage.postgres.driver  # the fork server imports everything once
from perdure.langgraph import PerdureSaver
from perdure.testing.processes import Say

CONFIG: Any = {"configurable": {"thread_id": "trip"}}


class Trip(TypedDict, total=False):
    booked: Annotated[list[str], operator.add]


def make_graph(saver: PerdureSaver, folder: Path, role: str, say: Say) -> Any:
    """plan, flight (books), think, hotel (books); the nodes after `plan` in a subgraph for the role "inner…"."""

    def gate(name: str) -> None:
        fifo = folder / f"{role} {name}"
        if fifo.exists():
            say(name)
            with open(fifo) as waiting:
                waiting.read()

    @perdure.effect(name="book", timeout_s=60)
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        gate(item)
        with open(folder / "bookings", "a") as log:
            log.write(f"{item} {key}\n")
        return item

    def node(name: str, item: str | None) -> Any:
        def run(state: Trip) -> Trip:
            gate(name)
            return {"booked": [book(item)]} if item else {}

        return run

    nodes = (("plan", None), ("flight", "LH400"), ("think", None), ("hotel", "Grand"))
    inner = StateGraph(Trip)
    previous = START
    for name, item in nodes:
        inner.add_node(name, node(name, item))
        inner.add_edge(previous, name)
        previous = name
    if not role.startswith("inner"):
        return inner.compile(checkpointer=saver)
    outer = StateGraph(Trip)
    outer.add_node("inner", inner.compile())
    outer.add_edge(START, "inner")
    return outer.compile(checkpointer=saver)


def child(say: Say, url: str, folder: str, role: str, durability: str, *rounds: str) -> None:
    """Invoke the graph once for each of `rounds`: with a new input ("begin"), or to resume ("resume")."""
    with PerdureSaver(url) as saver:
        graph = make_graph(saver, Path(folder), role, say)
        for number, how in enumerate(rounds):
            fifo = Path(folder) / f"{role} round {number}"
            if fifo.exists():
                say(f"round {number}")
                with open(fifo) as waiting:
                    waiting.read()
            try:
                result = graph.invoke({"booked": []} if how == "begin" else None, CONFIG, durability=durability)
                say({"booked": result["booked"]})
            except perdure.PerdureError as error:
                say({"error": type(error).__name__, "text": str(error)})


def bookings(folder: Path) -> list[str]:
    """What was booked, in order, with repetitions."""
    log = folder / "bookings"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
