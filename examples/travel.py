"""A travel agent that survives: kill it anywhere, run the same line again, and nothing is booked twice.

    python examples/travel.py Lisbon      # searches flights, asks a person which one, and ends: nothing has to wait
    perdure questions                         # the question; it is on disk, not in a process
    perdure answer trip-Lisbon "LIS-0715 at 07:15, 109 EUR"
    python examples/travel.py Lisbon      # resumes: books the flight and the hotel, and writes the itinerary

Interrupt it, `kill -9` it, switch the machine off: the last line resumes where it was, and so does a worker, `perdure
worker examples/travel.py`. The run is kept in agent.db in the current directory, the pretend airline's ledger in
airline.db. With `--sold-out` the hotel is full: the run fails, and the flight is cancelled again.
"""

from __future__ import annotations

import argparse
import atexit
from typing import Any

import perdure
from perdure.testing.fake_airline import Airline, AirlineProcess, SoldOut

EFFECT_S = 5.0  # after this time a request that was sent cannot arrive any more


_started: dict[str, AirlineProcess] = {}


def start_airline(ledger: str, **behaviour: Any) -> AirlineProcess:
    """Start an airline that ends with this process. The next one on the same ledger knows its bookings."""
    process = _started[ledger] = AirlineProcess(ledger, **behaviour).__enter__()
    atexit.register(process.__exit__)
    return process


def reach(airline: str, timeout_s: float = 30.0) -> Airline:
    """Reach an airline by its URL, or by its ledger: then the process that runs the agent starts it."""
    url = airline if "://" in airline else (_started.get(airline) or start_airline(airline)).url
    return Airline(url, timeout_s=timeout_s)


@perdure.step(retries=2)
def search(airline: str, dest: str) -> dict[str, Any]:
    """Recorded once: the flights that the person sees are the flights that are booked."""
    return reach(airline).search(dest)


def find(key: perdure.IdempotencyKey, airline: str, item: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """After a crash in the middle of a booking: did the airline get it?"""
    found = reach(airline).bookings(key)
    return perdure.outcome.Done(found[0].booking) if found else perdure.outcome.NotDone()


@perdure.effect(on_doubt="retry", timeout_s=EFFECT_S)  # cancelling again does no harm: no need to find out first
def cancel(airline: str, result: str, key: perdure.IdempotencyKey) -> None:
    """If the run fails later on: the way back. `result` is what the booking gave, `key` the cancellation's own."""
    reach(airline).cancel(result, key=key)


@perdure.effect(reconcile=find, undo=cancel, timeout_s=EFFECT_S)
def book_flight(airline: str, item: str, key: perdure.IdempotencyKey) -> str:
    """An effect: it touches the outside world. Perdure makes the key; the airline books a key once."""
    return reach(airline, timeout_s=EFFECT_S - 1).book("flight", item, key=key)


@perdure.effect(reconcile=find, undo=cancel, timeout_s=EFFECT_S)
def book_hotel(airline: str, item: str, key: perdure.IdempotencyKey) -> str:
    return reach(airline, timeout_s=EFFECT_S - 1).book("hotel", item, key=key)


@perdure.step
def itinerary(dest: str, flight: str, hotel: str) -> str:
    """Stands for a call of a model."""
    return f"To {dest}: your flight is {flight}, your hotel {hotel}. Have a good trip!"


@perdure.durable(undo_on=SoldOut)
def travel(dest: str, airline: str) -> str:
    """The agent: plain Python, with a question to a person in the middle."""
    offers = search(airline, dest)
    choice = perdure.ask("Which flight?", options=offers["flights"])
    flight = book_flight(airline, choice)
    hotel = book_hotel(airline, offers["hotel"])  # sold out? Then the flight is cancelled
    return itinerary(dest, f"{choice} ({flight})", f"{offers['hotel']} ({hotel})")


def tell(store: perdure.Store, run: perdure.Run) -> None:
    """What has become of the run, in words."""
    for question in store.questions(run.id):
        print(f"{run.id} asks: {question.text}", *(question.options or []), sep="\n    ", flush=True)
        return
    try:
        print(run.result(), flush=True)  # if it is still waiting for something else, so do we
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
        tell(store, store.run(travel, options.dest, options.airline or "airline.db", id=f"trip-{options.dest}"))


if __name__ == "__main__":
    main()
