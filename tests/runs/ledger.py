"""The airline of perdure.testing.fake_airline for crash tests, and what is to be asserted of its ledger.

with airline(tmp_path) as outside:                  # a process with its own file; ends with the block
    ... outside.url ...                             # give it to the agent
    outside.client.behave(hold="after")             # acts, and keeps the answer back: no sleeping in tests
    outside.wait_for("booked")                      # the moment to kill the agent
    outside.client.behave(hold="")
    assert done_twice(outside) == {}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.testing.fake_airline import Airline, AirlineProcess, Booking, Refused, Request, SoldOut

__all__ = ["Airline", "AirlineProcess", "Booking", "Refused", "Request", "SoldOut", "airline", "done", "done_twice"]
ACTED = ("booked", "cancelled")


@contextmanager
def airline(folder: Path, name: str = "airline.db", **behaviour: Any) -> Iterator[AirlineProcess]:
    """An airline in a process of its own; `behaviour`: the fields of perdure.testing.fake_airline.Behaviour."""
    with AirlineProcess(folder / name, **behaviour) as process:
        yield process


def done(outside: AirlineProcess) -> list[tuple[str, str]]:
    """What the airline really did, in order: (booked or cancelled, the item). Replays and refusals are not in it."""
    items = {one.booking: one.item for one in outside.bookings()}
    acted = sorted((one for one in outside.requests() if one.outcome in ACTED), key=lambda one: one.acted_at or 0.0)
    return [(one.outcome, items[one.booking or ""]) for one in acted]


def done_twice(outside: AirlineProcess) -> dict[tuple[str, str], int]:
    """What it did more than once, and how often. Empty, if each booking of the test is of an item of its own."""
    return {what: times for what, times in Counter(done(outside)).items() if times > 1}
