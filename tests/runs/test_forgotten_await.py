"""A call that was not awaited did not run: the run does not end as if it had, and the error says what is missing."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from lab import Lab

import perdure

ran: list[str] = []


@perdure.effect(name="await.book")
async def book(flight: str) -> str:
    ran.append(flight)
    return f"booked {flight}"


async def helper() -> int:
    return 1


def stuck(lab: Lab, agent: Any, name: str) -> str:
    ran.clear()
    run = lab.run(perdure.durable(name=f"await.{name}")(agent), id=name)
    with pytest.raises(perdure.RunStuck) as caught:
        run.result()
    assert ran == []
    return str(caught.value)


def test_a_call_that_is_dropped_or_returned(sync_lab: Lab) -> None:
    async def dropped() -> str:
        book("LIS")  # type: ignore[unused-coroutine]
        return "done"

    async def returned() -> Any:
        return book("LIS")

    for agent in (dropped, returned):
        assert "book was called and never awaited" in stuck(sync_lab, agent, agent.__name__)


def test_another_coroutine_as_a_result(sync_lab: Lab) -> None:
    made = []

    async def returned() -> Any:
        made.append(helper())
        return made[0]

    assert "it is a coroutine: an await is missing" in stuck(sync_lab, returned, "helper")
    made[0].close()


def test_an_async_effect_in_a_blocking_run(sync_lab: Lab) -> None:
    @perdure.durable(name="await.blocking")
    def agent() -> None:
        book("LIS")  # type: ignore[unused-coroutine]

    with pytest.raises(
        (perdure.RunFailed, perdure.RunStuck), match=r"effect 'await\.book' is async, and was called in run 'b'"
    ):
        sync_lab.run(agent, id="b").result()


def test_calls_that_are_awaited_later_or_cancelled_are_none(sync_lab: Lab) -> None:
    @perdure.durable(name="await.later")
    async def agent() -> list[str]:
        asyncio.create_task(book("never")).cancel()
        calls = [book("A"), book("B")]
        return [await book("C"), *await asyncio.gather(*calls)]

    assert sync_lab.run(agent, id="l").result() == ["booked C", "booked A", "booked B"]
    assert inspect.iscoroutinefunction(book)
    assert asyncio.iscoroutinefunction(book)
