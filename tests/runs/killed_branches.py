"""An agent with parallel branches for test_parallel_killed.py: what it books stands in a file, by key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from striking import die_at

import perdure
from perdure.runs.execution import hooks


def ledger(folder: str) -> list[str]:
    path = Path(folder) / "ledger.txt"
    return path.read_text().splitlines() if path.exists() else []


def find(key: perdure.IdempotencyKey, folder: str, room: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    found = [line for line in ledger(folder) if line.startswith(f"{key} ")]
    return perdure.outcome.Done(f"booked {room}") if found else perdure.outcome.NotDone()


def _book(folder: str, room: str, key: perdure.IdempotencyKey) -> str:
    descriptor = os.open(f"{folder}/ledger.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{key} {room}\n".encode())
    os.close(descriptor)
    return f"booked {room}"


book = perdure.effect(name="kb_book", reconcile=find, timeout_s=0.05)(_book)


@perdure.effect(name="kb_abook", reconcile=find, timeout_s=0.05)
async def abook(folder: str, room: str, key: perdure.IdempotencyKey) -> str:
    return _book(folder, room, key)


@perdure.step
def look(what: str) -> str:
    return f"seen {what}"


@perdure.step
async def alook(what: str) -> str:
    return f"seen {what}"


@perdure.durable(name="kb_agent")
def agent(folder: str) -> Any:
    token = str(perdure.uuid())

    def trip(room: str) -> list[str]:
        return [look(room + token), book(folder, room), str(perdure.random())]

    both = perdure.gather(lambda: trip("1"), lambda: trip("2"))
    fastest = perdure.first(lambda: look("a"), lambda: look("b"), lambda: look("c"))
    rooms = perdure.map(lambda room: book(folder, room), ["3", "4", "5"], concurrency=2)
    again = look(str([both, fastest]))
    return [both, fastest, rooms, again == f"seen {[both, fastest]}"]


@perdure.durable(name="kb_aagent")
async def aagent(folder: str) -> Any:
    token = str(perdure.uuid())

    async def trip(room: str) -> list[str]:
        return [await alook(room + token), await abook(folder, room), str(perdure.random())]

    both = await perdure.gather(trip("1"), trip("2"))
    fastest = await perdure.first(alook("a"), alook("b"), alook("c"))
    rooms = await perdure.map(lambda room: abook(folder, room), ["3", "4", "5"], concurrency=2)
    again = await alook(str([both, fastest]))
    return [both, fastest, rooms, again == f"seen {[both, fastest]}"]


def work(say: Any, url: str, folder: str, mode: str, deadly: int) -> None:
    """Run the agent; die at the point with this number, in the order in which branches come to them."""
    hooks.hook = die_at(deadly)
    with perdure.open(url, durability="normal", lease_s=0.1 if deadly else 30) as store:
        chosen: Any = aagent if mode == "async" else agent
        run = store.run(chosen, folder, id=Path(folder).name)
        say(run.result(timeout_s=60))
