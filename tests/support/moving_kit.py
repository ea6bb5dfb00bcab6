"""What the tests of moving runs share: an agent on its way."""

from __future__ import annotations

from typing import Any

from lab import Lab

import perdure
from perdure.runs.journal.blobs import BLOB_MIN_BYTES


def agent_of(lab: Lab) -> Any:
    @lab.step(name="search")
    def search(place: str) -> list[str]:
        lab.ran.append("search")
        return [f"{place}1", f"{place}2"]

    @lab.step(name="large")
    def large(size: int) -> str:
        import random

        lab.ran.append("large")
        return random.Random(size).randbytes(size).hex()

    @lab.effect(name="book", undo=lambda flight: lab.ran.append(("cancel", flight)))
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        lab.ran.append(("book", flight, str(key)))
        return f"B-{flight}"

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent(place: str) -> list[Any]:
        state = perdure.state({"plan": [place]})
        flights = await lab(search(place))
        state["flights"] = flights
        first = await lab(book(flights[0]))
        text = await lab(large(BLOB_MIN_BYTES * 2))
        perdure.emit("asking")
        chosen = await lab(perdure.ask("Which?", options=flights))
        message = await lab(perdure.receive("news"))
        second = await lab(book(chosen))
        state["done"] = True
        return [first, second, len(text), message, dict(state)]

    return agent
