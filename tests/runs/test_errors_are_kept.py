"""What a run keeps of an error that its code catches again after a crash."""

from __future__ import annotations

from typing import Any

from lab import Lab, Once, again


class SoldOut(Exception):
    __slots__ = ("seats",)

    def __init__(self, seats: int, connection: object) -> None:
        super().__init__("sold out")
        self.seats, self.connection, self.flight = seats, connection, "LIS-0715"


def test_what_of_an_error_can_be_stored_is_there_again_though_another_part_cannot(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def book() -> None:
        raise SoldOut(3, object())

    @lab.durable
    async def agent() -> list[Any]:
        try:
            await lab(book())
        except SoldOut as error:
            once.interrupt()
            return [error.seats, error.flight, hasattr(error, "connection")]
        return []

    assert again(lab, agent, id="r").result() == [3, "LIS-0715", True]
