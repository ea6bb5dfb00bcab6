"""What the tests of forks share: agents that count what they do."""

from __future__ import annotations

from lab import Lab

import perdure


class Agents:
    """An agent with steps, and one with effects."""

    def __init__(self, lab: Lab) -> None:
        @lab.step(name="add")
        def add(number: int) -> int:
            lab.ran.append(("add", number))
            return number + 1

        @lab.effect(name="book", undo=lambda flight: lab.ran.append(("cancel", flight)))
        def book(flight: str, key: perdure.IdempotencyKey) -> str:
            lab.ran.append(("book", flight, str(key)))
            return f"B-{flight}"

        @lab.durable(name=f"counting-{id(self)}")
        async def counting(start: int) -> int:
            number = start
            for _ in range(4):
                number = await lab(add(number))
            return number

        @lab.durable(name=f"booking-{id(self)}", undo_on=RuntimeError)
        async def booking(name: str, fail: bool = False) -> str:
            number = await lab(add(1))
            first = await lab(book(f"{name}{number}"))
            number = await lab(add(number))
            second = await lab(book(f"{name}{number}"))
            if fail and not lab.ran.count("mended"):
                raise RuntimeError("sold out")
            return f"{first} {second}"

        self.add, self.book, self.counting, self.booking = add, book, counting, booking
