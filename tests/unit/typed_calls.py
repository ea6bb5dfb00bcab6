"""Calls whose types are right, and calls whose types are wrong. This file is read by type checkers, and never run.

`make lint` checks it with mypy: `warn_unused_ignores` fails if a wrong call passes. test_types_of_calls.py: pyright.
"""

from __future__ import annotations

from typing import Any, assert_type

import perdure

store = perdure.open("agent.db")


@perdure.durable
def travel(dest: str) -> int:
    raise NotImplementedError


@perdure.durable(version="2")
async def atravel(dest: str) -> str:
    raise NotImplementedError


@perdure.step
def search(site: str, *, page: int = 1) -> list[str]:
    raise NotImplementedError


@perdure.step(retries=2)
async def asearch(site: str) -> list[str]:
    raise NotImplementedError


@perdure.effect
def pay(cents: int, to: str) -> str:
    raise NotImplementedError


@perdure.effect(timeout_s=2)
def book(flight: str, key: perdure.IdempotencyKey, seats: int = 1) -> str:
    raise NotImplementedError


@perdure.effect
async def abook(flight: str, seats: int, *, key: perdure.IdempotencyKey) -> bytes:
    raise NotImplementedError


@perdure.effect
def cancel(flight: str, reason: str = "", fee: int = 0) -> None:
    raise NotImplementedError


class Agent:
    @perdure.step
    def look(self, what: str) -> bytes:
        raise NotImplementedError

    @perdure.effect(approve=True)
    def send(self, to: str, key: perdure.IdempotencyKey) -> float:
        raise NotImplementedError

    @perdure.durable
    def work(self, days: int) -> dict[str, int]:
        raise NotImplementedError


def right(any_run: perdure.Run) -> None:
    assert_type(store.run(travel, "Oslo", id="a").result(), int)
    assert_type(store.start(atravel, "Oslo", tags={"a": 1}), perdure.Run[str])
    assert_type(store.run(Agent().work, 1), perdure.Run[dict[str, int]])
    assert_type(store.get_run("a").result(), Any)
    assert_type(travel("Oslo"), int)
    assert_type(search("a", page=2), list[str])
    assert_type(search.direct("a"), list[str])
    assert_type(Agent().look("x"), bytes)
    assert_type(pay(1, "x"), str)
    assert_type(pay(1, to="x"), str)
    assert_type(pay(to="x", cents=1), str)
    assert_type(book("x"), str)
    assert_type(book("x", seats=2), str)
    assert_type(book.direct("x", perdure.IdempotencyKey("k")), str)
    assert_type(Agent().send("x"), float)
    assert_type(Agent().send(to="x"), float)
    cancel("x")
    cancel("x", "ill", 3)
    right(store.run(travel, "Oslo"))


async def aright() -> None:
    assert_type(await store.arun(atravel, "Oslo"), perdure.Run[str])
    assert_type(await (await store.astart(travel, "Oslo")).aresult(), int)
    assert_type(await asearch("a"), list[str])
    assert_type(await search.on_thread("a"), list[str])
    assert_type(await abook("x", 2), bytes)


def wrong() -> None:
    travel(2)  # type: ignore[arg-type]
    store.run(travel, "Oslo", id=3)  # type: ignore[call-overload]
    _text: str = store.run(travel, "Oslo").result()  # type: ignore[assignment]
    search(1)  # type: ignore[arg-type]
    search("a", pages=2)  # type: ignore[call-arg]
    search()  # type: ignore[call-arg]
    Agent().look(2)  # type: ignore[arg-type]
    pay("1", "x")  # type: ignore[call-overload]
    book(1)  # type: ignore[call-overload]
    Agent().send(2)  # type: ignore[call-overload]
    cancel(2)  # type: ignore[call-overload]
    assert_type(book("x"), int)  # type: ignore[assert-type]


async def awrong() -> None:
    await asearch(1)  # type: ignore[arg-type]
    _run: perdure.Run[int] = await store.arun(atravel, "Oslo")  # type: ignore[arg-type]
