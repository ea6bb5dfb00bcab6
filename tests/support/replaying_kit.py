"""What the tests of replays share."""

from __future__ import annotations

from typing import Any

from lab import Lab

import perdure
from perdure.storage.program import Batch, Program, Sql, drive, read


def everything(lab: Lab) -> list[Any]:
    """All rows of the run tables, to see that none was touched."""
    tables = ("run", "run_value", "journal", "ask", "answer", "mail", "blob", "run_blob")

    def program() -> Program[list[Any]]:
        return (yield Batch(*(Sql(f"SELECT * FROM {table} ORDER BY 1, 2, 3")() for table in tables)))

    return drive(lab.store._context.driver, read(program))


class Broken:
    """Steps whose bodies fail the test once `armed` is set."""

    def __init__(self, lab: Lab) -> None:
        self.armed = False

        @lab.step(name="search")
        def search(place: str) -> list[str]:
            assert not self.armed, "a body ran in a replay"
            return [f"{place}1", f"{place}2"]

        def look(key: str, flight: str) -> perdure.outcome.Unknown:
            assert not self.armed, "a reconcile ran in a replay"
            return perdure.outcome.Unknown()

        @lab.effect(name="book", reconcile=look)
        def book(flight: str, key: perdure.IdempotencyKey) -> str:
            assert not self.armed, "an effect ran in a replay"
            return f"B-{flight}"

        @lab.step(name="fails")
        def fails() -> None:
            assert not self.armed, "a body ran in a replay"
            raise LookupError("sold out")

        self.search, self.book, self.fails = search, book, fails
