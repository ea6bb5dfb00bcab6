"""Agents for the drill: one that is right, and one for each known way to be wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import perdure
from perdure import outcome


@perdure.step
def search(city: str) -> list[str]:
    return [f"{city}-1", f"{city}-2"]


@perdure.effect(timeout_s=0.2, name="drilled.book")
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"booked {flight} under {key}"


def cancel(flight: str) -> None:
    raise AssertionError("the drill has a stage of its own")


@perdure.effect(undo=cancel, reconcile=lambda key, flight: outcome.Unknown(), timeout_s=0.2, name="drilled.reserve")
def reserve(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"reserved {flight} under {key}"


class NoAirport(Exception):
    def __init__(self, city: str, nearest: str) -> None:
        super().__init__(f"{city} has no airport")
        self.nearest = nearest


@perdure.step(name="drilled.look_up")
def look_up(city: str) -> str:
    raise NoAirport(city, "EWR")


@perdure.durable
def right(city: str) -> str:
    try:
        airport = look_up(city)
    except NoAirport as error:  # after a kill it is raised again, and is the same
        airport = error.nearest
    flights = search(airport)
    choice = perdure.ask("Which flight?", options=flights)
    perdure.sleep(86_400)
    return f"{reserve(choice)} {book(choice)} {perdure.now().year > 2000}"


@perdure.durable(undo_on=RuntimeError)
def undone(city: str) -> str:
    reserve(city)
    raise RuntimeError("sold out")


@perdure.step
async def find(city: str) -> str:
    return f"{city}!"


@perdure.durable
async def right_async(city: str) -> str:
    found = await asyncio.gather(find(city), find(city + "2"))
    if await perdure.ask("Go?", options=[True, False]):
        return " ".join(found)
    return "no"


@perdure.step
async def draw(city: str) -> float:
    return random.random()


@perdure.effect
async def areserve(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"reserved {flight} under {key}"


@perdure.durable
async def in_tasks(city: str) -> str:
    return str(await asyncio.gather(draw(city), areserve(city)))


# --- an effect that nobody marked


@perdure.step
def pay(url: str) -> str:
    import urllib.request  # late: each process of a drill imports this file

    urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST"))
    return "paid"


@perdure.step
def write_file(path: str) -> str:
    Path(path).write_text("sent")
    return "written"


@perdure.step
async def write_later(path: str) -> str:
    await asyncio.sleep(0)
    Path(path).write_text("sent")
    return "written"


@perdure.step
async def write_elsewhere(path: str) -> str:
    await asyncio.to_thread(Path(path).write_text, "sent")
    return "written"


@perdure.step
def write_in_parts(path: str) -> Iterator[str]:
    yield "begun"
    Path(path).write_text("sent")
    yield "written"


@perdure.step
async def awrite_in_parts(path: str) -> AsyncIterator[str]:
    yield "begun"
    Path(path).write_text("sent")
    yield "written"


def _say_sent(path: str) -> None:
    with open(path, "a") as file:
        file.write("sent")


@perdure.durable
def main_body(path: str) -> str:
    search("NYC")
    _say_sent(path)
    search("LON")
    return "written"


@perdure.durable
async def unmarked(url: str, path: str) -> str:
    parts = [pay(url), write_file(f"{path}/file"), await write_later(f"{path}/later")]
    parts += [await write_elsewhere(f"{path}/elsewhere"), *write_in_parts(f"{path}/parts")]
    parts += [*await awrite_in_parts(f"{path}/aparts")]  # type: ignore[misc]
    _say_sent(f"{path}/main")
    return " ".join(parts)


# --- results that differ every time: pinned


@perdure.step
async def stamp() -> int:
    return time.time_ns()


@perdure.step
def stamps() -> Iterator[int]:
    yield time.time_ns()
    yield time.time_ns()


@perdure.step
def stamped() -> Generator[int, None, int]:
    yield 1
    return time.time_ns()


@perdure.step
async def astamps() -> AsyncIterator[int]:
    yield time.time_ns()


@perdure.durable
async def pinned(city: str) -> str:
    import json as lazily  # noqa: F401 - an import is no effect

    return f"{city} {await stamp()} {stamps()} {stamped()} {await astamps()}"  # type: ignore[misc]


# --- an undo that is repeated


@perdure.effect(on_doubt="retry", timeout_s=0.1)
def give_back(flight: str) -> None:
    raise AssertionError("the drill has a stage of its own")


@perdure.effect(undo=give_back, timeout_s=0.1)
def take(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"took {flight} under {key}"


@perdure.durable(undo_on=RuntimeError)
def undo_repeated(city: str) -> str:
    take(city)
    raise RuntimeError("sold out")


def put_back(path: str) -> None:
    with open(f"{path}.undone", "a") as file:
        file.write("undone\n")


@perdure.effect(undo=put_back, timeout_s=0.1)
def put(path: str, key: perdure.IdempotencyKey) -> str:
    return f"put {path} under {key}"


@perdure.durable(undo_on=RuntimeError)
def really_undone(path: str) -> str:
    put(path)
    raise RuntimeError("sold out")


# --- an effect that does not use its key (with --real)


@perdure.effect(on_doubt="retry", timeout_s=0.1)
def send_without_key(path: str, key: perdure.IdempotencyKey) -> str:
    with open(path, "a") as file:
        file.write("sent\n")
    return "sent"


@perdure.durable
def key_not_used(path: str) -> str:
    return send_without_key(path)


@perdure.effect(on_doubt="retry", timeout_s=0.1)
def send_with_key(path: str, key: perdure.IdempotencyKey) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    if key not in lines:
        Path(path).write_text("\n".join([*lines, key]))
    return "sent"


@perdure.durable
def key_used(path: str) -> str:
    return send_with_key(path)


# --- state in a global

_seen: list[str] = []


@perdure.step
def look(what: str) -> str:
    _seen.append(what)
    return what.upper()


@perdure.durable
def state_in_a_global(what: str) -> str:
    look(what)
    look(what + "2")
    return f"{what}: {len(_seen)} seen"


# --- an order that depends on time


@perdure.durable
def order_by_time(city: str) -> str:
    first = f"{city}-{time.time_ns()}"
    search(first)
    return "done"


@perdure.step(name=f"{__name__}.search_here")
def search_here(city: str) -> str:
    return city


@perdure.durable
def named_by_module(city: str) -> str:
    """Its step has another name in a worker than in the script that began the run."""
    return search_here(city)


@perdure.effect(reconcile=lambda key: {}[key], timeout_s=0.1, name="drilled.order")
def order(what: str, key: perdure.IdempotencyKey) -> str:
    return f"ordered {what}"


@perdure.durable
def looks_wrong(what: str) -> str:
    return order(what)


@perdure.durable
def talks_and_fails(city: str) -> str:
    print("on its way to", city, flush=True)
    search(city)
    raise LookupError("no seat")
