"""The child of the tests that kill an undo: a graph that books three things in two nodes and then fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from langgraph.graph import START, StateGraph
from two_runners import Trip

import perdure
import perdure.storage.postgres.driver  # the fork server imports everything once
from perdure.langgraph import PerdureSaver
from perdure.testing.processes import Say

CONFIG: Any = {"configurable": {"thread_id": "trip"}}
log = Path()  # what was booked and cancelled; set by `use`
dies_at = ""  # the item whose cancelling is the last thing that the process does


def use(folder: Path) -> None:
    global log
    log = folder / "log"


def _note(text: str) -> None:
    with log.open("a") as file:
        file.write(f"{text}\n")


def was_cancelled(item: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    return perdure.outcome.Done(None) if f"cancel {item}" in log.read_text() else perdure.outcome.NotDone()


@perdure.effect(name="cancel_trip_item", reconcile=was_cancelled)
def cancel(item: str) -> None:
    _note(f"cancel {item}")
    if item == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)


@perdure.effect(name="book_trip_item", undo=cancel)
def book(item: str) -> str:
    _note(f"book {item}")
    return item


def make_graph(saver: PerdureSaver, *, fails: bool = True) -> Any:
    def first(state: Trip) -> Trip:
        return {"booked": [book("train"), book("hotel")]}

    def second(state: Trip) -> Trip:
        book("boat")
        if fails:
            raise ValueError("no seat")
        return {"booked": ["boat"]}

    builder = StateGraph(Trip)
    builder.add_node("first", first)
    builder.add_node("second", second)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    return builder.compile(checkpointer=saver)


def child(say: Say, url: str, folder: str, item: str) -> None:
    """Undo the thread, and die when an item was cancelled, before that is recorded."""
    global dies_at
    use(Path(folder))
    dies_at = item
    with PerdureSaver(url) as saver:
        say(saver.undo(CONFIG))
