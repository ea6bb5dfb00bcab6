"""Run a travel agent that survives: kill it anywhere, run the same line again, and it books nothing twice.

    python examples/travel.py Lisbon      # searches flights, asks a person which one, and ends: no process waits
    perdure questions                         # lists the question, which is in the store
    perdure answer trip-Lisbon "LIS-0715 at 07:15, 109 EUR"
    python examples/travel.py Lisbon      # resumes: books the flight and the hotel, and writes the itinerary

Interrupt it, `kill -9` it, or switch the machine off: the last line resumes the run, and so does a worker, `perdure
worker examples/travel.py`. The run is in agent.db in the current directory, the ledger of the fake airline in
airline.db. With `--sold-out` the hotel is full: the run fails, and Perdure cancels the flight.
"""

from __future__ import annotations

import argparse
import atexit
from typing import Any

import perdure
from perdure.testing.fake_airline import Airline, AirlineProcess, SoldOut

EFFECT_S = 5.0  # after this time a request can no longer arrive


_started: dict[str, AirlineProcess] = {}


def start_airline(ledger: str, **behaviour: Any) -> AirlineProcess:
    """Start an airline that ends with this process. Its bookings stay in the ledger."""
    process = _started[ledger] = AirlineProcess(ledger, **behaviour).__enter__()
    atexit.register(process.__exit__)
    return process


def reach(airline: str, timeout_s: float = 30.0) -> Airline:
    """Return a client of the airline at a URL, or of the one with this ledger, which is started if need be."""
    url = airline if "://" in airline else (_started.get(airline) or start_airline(airline)).url
    return Airline(url, timeout_s=timeout_s)


@perdure.step(retries=2)
def search(airline: str, dest: str) -> dict[str, Any]:
    """Search flights. The result is recorded once, so the run books from the flights that the person saw."""
    return reach(airline).search(dest)


def find(key: perdure.IdempotencyKey, airline: str, item: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the booking up after a crash in the middle of it."""
    bookings = reach(airline).bookings(key)
    return perdure.outcome.Done(bookings[0].booking) if bookings else perdure.outcome.NotDone()


@perdure.effect(on_doubt="retry", timeout_s=EFFECT_S)  # cancelling twice does no harm
def cancel(airline: str, result: str, key: perdure.IdempotencyKey) -> None:
    """Undo a booking. `result` is the result of the booking, `key` the key of this cancellation."""
    reach(airline).cancel(result, key=key)


@perdure.effect(reconcile=find, undo=cancel, timeout_s=EFFECT_S)
def book_flight(airline: str, item: str, key: perdure.IdempotencyKey) -> str:
    """Book a flight: an effect on the outside world. Perdure makes the key, and the airline books once per key."""
    return reach(airline, timeout_s=EFFECT_S - 1).book("flight", item, key=key)


@perdure.effect(reconcile=find, undo=cancel, timeout_s=EFFECT_S)
def book_hotel(airline: str, item: str, key: perdure.IdempotencyKey) -> str:
    return reach(airline, timeout_s=EFFECT_S - 1).book("hotel", item, key=key)


@perdure.step
def itinerary(dest: str, flight: str, hotel: str) -> str:
    """Stand in for a call of a model."""
    return f"To {dest}: your flight is {flight}, your hotel {hotel}. Have a good trip!"


@perdure.durable(undo_on=SoldOut)
def travel(dest: str, airline: str) -> str:
    """Search, ask a person, and book: plain Python."""
    offers = search(airline, dest)
    choice = perdure.ask("Which flight?", options=offers["flights"])
    flight = book_flight(airline, choice)
    hotel = book_hotel(airline, offers["hotel"])  # if it is sold out, Perdure cancels the flight
    return itinerary(dest, f"{choice} ({flight})", f"{offers['hotel']} ({hotel})")


def report(store: perdure.Store, run: perdure.Run) -> None:
    """Print the run's question, its result or its error."""
    for question in store.questions(run.id):
        print(f"{run.id} asks: {question.text}", *(question.options or []), sep="\n    ", flush=True)
        return
    try:
        print(run.result(), flush=True)  # waits if the run still waits for something else
    except perdure.RunFailed as error:
        undone = [step.name for step in run.steps() if step.kind == "undo" and step.status == "done"]
        print(error, *undone, sep="\n    ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A travel agent that survives.")
    parser.add_argument("dest", nargs="?", default="Lisbon")
    parser.add_argument("--store", default="agent.db", help="where its runs are kept (default: agent.db)")
    parser.add_argument("--airline", metavar="URL", help="default: starts one that keeps its ledger in airline.db")
    parser.add_argument("--sold-out", action="store_true", help="no hotel is left")
    options = parser.parse_args()
    if options.sold_out and not options.airline:
        start_airline("airline.db", sold_out=[f"Grand Hotel {options.dest}"])
    with perdure.open(options.store) as store:
        report(store, store.run(travel, options.dest, options.airline or "airline.db", id=f"trip-{options.dest}"))


if __name__ == "__main__":
    main()
