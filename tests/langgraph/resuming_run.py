"""The child of the tests that kill a worker while it resumes a graph: a graph that asks, books and stops at a gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from two_runners import Trip

import perdure
import perdure.storage.postgres.driver  # the fork server imports everything once
from perdure.langgraph import PerdureSaver
from perdure.testing.processes import Say


def make_graph(saver: PerdureSaver, folder: Path, *, is_async: bool, say: Say = print) -> Any:
    """ask: two questions, the first answer is booked; a gate stands before ("before") and after ("after") it."""

    def gate(name: str) -> None:
        if (folder / name).exists():
            say(name)
            with open(folder / name) as waiting:
                waiting.read()

    @perdure.effect(name="book", timeout_s=60)
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        with open(folder / "bookings", "a") as log:
            log.write(f"{item}\n")
        return item

    def ask(state: Trip) -> Trip:
        item = interrupt("Which flight?")
        gate("before")
        booked = book(item)
        gate("after")
        return {"booked": [booked]}

    async def ask_async(state: Trip) -> Trip:
        import asyncio

        item = interrupt("Which flight?")
        await asyncio.to_thread(gate, "before")
        booked = await asyncio.to_thread(book, item)
        await asyncio.to_thread(gate, "after")
        return {"booked": [booked]}

    builder = StateGraph(Trip)
    builder.add_node("ask", ask_async if is_async else ask)
    builder.add_node("end", lambda state: {"booked": ["end"]})
    builder.add_edge(START, "ask")
    builder.add_edge("ask", "end")
    return builder.compile(checkpointer=saver)


def child(say: Say, url: str, folder: str, is_async: bool) -> None:
    """Resume what is due, and say how it ended."""
    with PerdureSaver(url) as saver:
        worker = perdure.Worker(saver.store, graphs=[make_graph(saver, Path(folder), is_async=is_async, say=say)])
        say("ready")
        worker.run(until_idle=True)
        say(dict(worker.counts))
