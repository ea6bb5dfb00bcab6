"""What the tests of effects share: a receiver that remembers what reached it."""

from __future__ import annotations

from typing import Any

from lab import Lab

import perdure


class Receiver:
    """The outside world of a test: what was done, under which key."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []  # key, what
        self.asked: list[tuple[Any, ...]] = []  # by reconcile

    def act(self, key: str, what: str) -> str:
        self.done.append((key, what))
        return f"done: {what}"

    def find(self, key: str, flight: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
        self.asked.append((key, flight))
        return perdure.outcome.Done(f"done: {flight}") if (key, flight) in self.done else perdure.outcome.NotDone()


def booking(lab: Lab, receiver: Receiver, **options: Any) -> Any:
    """An agent with one effect."""

    @lab.effect(name="book", **options)
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        return receiver.act(key, flight)

    @lab.durable(name="agent")
    async def agent(flight: str) -> Any:
        return await lab(book(flight))

    return agent
