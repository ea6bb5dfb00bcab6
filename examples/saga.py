"""Book with three services, or with none: the third refuses, and the process is killed while the others are undone.

    python examples/saga.py        # books a flight and a hotel; there is no car; killed in the middle of undoing
    python examples/saga.py        # undoes what is left, newest first, each once

The run is in agent.db, the books of the three services in services.db, both in the current directory.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing

import perdure

KILL = not os.path.exists("agent.db")  # the first time


class NoCar(Exception):
    """The rental has no car."""


def book(service: str, key: str, what: str) -> str:
    """Stand in for a service: book once per key."""
    with closing(sqlite3.connect("services.db")) as services, services:
        services.execute("CREATE TABLE IF NOT EXISTS booking (key PRIMARY KEY, service, what, cancelled INT DEFAULT 0)")
        services.execute("INSERT OR IGNORE INTO booking (key, service, what) VALUES (?, ?, ?)", (key, service, what))
    print(f"  {service}: {what} booked", flush=True)
    return key


def cancel(service: str, booking: str) -> None:
    with closing(sqlite3.connect("services.db")) as services, services:
        services.execute("UPDATE booking SET cancelled = cancelled + 1 WHERE key = ?", (booking,))
    print(f"  {service}: cancelled", flush=True)


def find(key: perdure.IdempotencyKey, service: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    with closing(sqlite3.connect("services.db")) as services:
        rows = services.execute("SELECT key FROM booking WHERE key = ?", (str(key),)).fetchall()
    return perdure.outcome.Done(rows[0][0]) if rows else perdure.outcome.NotDone()


def is_cancelled(service: str, result: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look whether a cancellation was done before the process died."""
    with closing(sqlite3.connect("services.db")) as services:
        [(times,)] = services.execute("SELECT cancelled FROM booking WHERE key = ?", (result,))
    return perdure.outcome.Done(None) if times else perdure.outcome.NotDone()


@perdure.effect(reconcile=is_cancelled, timeout_s=2)
def cancel_it(service: str, result: str) -> None:
    cancel(service, result)
    if KILL and service == "hotel":
        os.kill(os.getpid(), signal.SIGKILL)  # cancelled, and not yet recorded


@perdure.effect(reconcile=find, undo=cancel_it, timeout_s=2)
def reserve(service: str, what: str, key: perdure.IdempotencyKey) -> str:
    if service == "rental":
        raise NoCar("no car is left")
    return book(service, str(key), what)


@perdure.durable(undo_on=NoCar)
def trip(city: str) -> list[str]:
    services = (("airline", f"flight to {city}"), ("hotel", f"room in {city}"), ("rental", f"car in {city}"))
    return [reserve(service, what) for service, what in services]


def main() -> None:
    with perdure.open("agent.db") as store:
        try:
            store.run(trip, "Lisbon", id="trip-1").result()
        except perdure.RunFailed as error:
            print(error)
    with closing(sqlite3.connect("services.db")) as services:
        for service, times in services.execute("SELECT service, cancelled FROM booking ORDER BY rowid"):
            print(f"{service}: cancelled {times} time")


if __name__ == "__main__":
    main()
