"""Store your own classes: register them with a name and a version, and upgrade old values when they are loaded.

    python examples/custom_types.py

Loading never calls a stored name: it rebuilds a class only if you registered it, or trust its module.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import perdure

LAST_YEAR = """
from dataclasses import dataclass
from datetime import date
import sys, perdure

@perdure.register("travel.Trip")
@dataclass
class Trip:
    to: str
    day: date

with perdure.open(sys.argv[1]) as store:
    store.thread("trip-42").save({"trip": Trip("Lisbon, PT", date(2026, 11, 16))})
"""


def split_place(fields: dict[str, Any]) -> dict[str, Any]:
    """Upgrade version 1 to 2: split "Lisbon, PT" into a city and a country."""
    city, _, country = fields.pop("to").partition(", ")
    return {**fields, "city": city, "country": country}


@perdure.register("travel.Trip", version=2, upgrade={1: split_place})
@dataclass
class Trip:
    """The current class. Its stored name does not depend on the names of the module and the class."""

    city: str
    country: str
    day: date
    tags: set[str] = field(default_factory=set)  # a new field with a default needs no upgrade


class Money:
    """Not a data class: `register` gets functions that dump and load it."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


perdure.register(Money, name="travel.Money", dump=lambda money: money.cents, load=Money)


def main(path: str) -> None:
    subprocess.run([sys.executable, "-c", LAST_YEAR, path], check=True)  # the old release saves …
    with perdure.open(path) as store:
        thread = store.thread("trip-42")
        trip = thread.load().state["trip"]  # … and this one loads
        print("upgraded:", trip)
        print("as stored:", thread.load(raw=True).state["trip"])

        thread.save({"trip": trip, "price": Money(41900)})
        print("price in cents:", thread.load().state["price"].cents)

        try:
            thread.save({"plan": [{"then": print}]})
        except perdure.Unstorable as problem:
            print("refused, nothing written:", problem.path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(str(Path(folder, "agent.db")))
