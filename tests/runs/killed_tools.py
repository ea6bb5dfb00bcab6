"""An agent with tools and progress for test_tools_killed.py: what it books stands in a file, by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from striking import die_at

import perdure
from perdure.runs.execution import hooks

CALLS: list[dict[str, Any]] = [
    {"id": "a", "name": "look", "arguments": {"city": "Rome"}},
    {"id": "b", "name": "book", "arguments": {"folder": "", "room": "7"}},
    {"id": "c", "name": "fail", "arguments": {}},
    {"id": "d", "name": "unknown", "arguments": {}},
]
RESULT = [["seen Rome", "booked 7", "Error: LookupError: no", "Error: there is no tool 'unknown'"], ["all"]]


def look(city: str) -> str:
    return f"seen {city}"


async def alook(city: str) -> str:
    return f"seen {city}"


def fail() -> None:
    raise LookupError("no")


def find(key: perdure.IdempotencyKey, folder: str, room: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    booked = f"{key} {room}" in ledger(folder)
    return perdure.outcome.Done(f"booked {room}") if booked else perdure.outcome.NotDone()


@perdure.effect(reconcile=find, timeout_s=0.5, name="killed_tools.book")
def book(folder: str, room: str, key: perdure.IdempotencyKey) -> str:
    with open(f"{folder}/ledger.txt", "a") as file:
        file.write(f"{key} {room}\n")
    return f"booked {room}"


def ledger(folder: str) -> list[str]:
    path = Path(folder) / "ledger.txt"
    return path.read_text().splitlines() if path.exists() else []


def calls(folder: str) -> list[dict[str, Any]]:
    return [
        {**call, "arguments": {**call["arguments"], "folder": folder}} if call["name"] == "book" else call
        for call in CALLS
    ]


SYNC: dict[str, Any] = {"look": look, "book": book, "fail": fail}
TOOLS = perdure.tools(SYNC)
ASYNC: dict[str, Any] = {"look": alook, "book": book, "fail": fail}
ATOOLS = perdure.tools(ASYNC)


@perdure.step
def think(messages: list[Any]) -> list[str]:
    return [message["content"].partition(": the tools")[0] for message in messages]


@perdure.durable(name="killed_tools.agent")
def agent(folder: str) -> list[Any]:
    perdure.progress(goal="Rome", next="all", file=f"{folder}/PROGRESS.md")
    said = think(TOOLS.call(calls(folder)))
    return [said, perdure.progress(done="all").done]


@perdure.durable(name="killed_tools.aagent")
async def aagent(folder: str) -> list[Any]:
    await perdure.progress(goal="Rome", next="all", file=f"{folder}/PROGRESS.md")
    said = think(await ATOOLS.call(calls(folder)))
    return [said, (await perdure.progress(done="all")).done]


def work(say: Any, url: str, folder: str, mode: str, deadly: int) -> None:
    """Resume the run; die at the point with this number. Say how it ended."""
    hooks.hook = die_at(deadly)
    with perdure.open(url, durability="normal", lease_s=0.1 if deadly else 30) as store:
        run = store.run(agent if mode == "sync" else aagent, folder, id=f"{Path(folder).name}")
        result = run.result(timeout_s=30)
        found = perdure.progress.latest(store, run)
        say([result, None if found is None else found.done])
