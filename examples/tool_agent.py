"""An agent with tools that is killed in the middle of a booking, waits for a person, and books everything once.

The model is a script, so that nothing is needed but Perdure: it asks for two searches at the same time, then for two
bookings, of which one fails and one wants a person's agreement, and then for another hotel. The agent runs in
processes of its own; the first one that books the flight dies right after it.

python examples/tool_agent.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import perdure

LEDGER = Path("ledger.txt")  # what the airline and the hotels have booked, one line each


class SoldOut(Exception):
    """No room left."""


def search_flights(city: str) -> list[str]:
    """Find flights to a city."""  # a plain function: it is run as a step
    return [f"{city[:3].upper()}-0715", f"{city[:3].upper()}-1340"]


def search_hotels(city: str) -> list[str]:
    """Find hotels in a city."""
    return [f"Grand Hotel {city}", "Pension Sol"]


def find(key: perdure.IdempotencyKey) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """After a crash in the middle of a booking: is it in the ledger?"""
    found = [line.removeprefix(f"{key} ") for line in _ledger() if line.startswith(key)]
    return perdure.outcome.Done(f"booked {found[0]}") if found else perdure.outcome.NotDone()


@perdure.effect(reconcile=find, approve=True)
def book_flight(flight: str, key: perdure.IdempotencyKey) -> str:
    """Book a flight."""
    _write(f"{key} {flight}")
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the flight is booked, and this process never learns of it
    return f"booked {flight}"


@perdure.effect(reconcile=find)
def book_hotel(hotel: str, key: perdure.IdempotencyKey) -> str:
    """Book a hotel."""
    if hotel.startswith("Grand"):
        raise SoldOut(f"{hotel} is sold out")
    _write(f"{key} {hotel}")
    return f"booked {hotel}"


def _ledger() -> list[str]:
    return LEDGER.read_text().splitlines() if LEDGER.exists() else []


def _write(line: str) -> None:
    with LEDGER.open("a") as file:
        file.write(line + "\n")


tools = perdure.tools([search_flights, search_hotels, book_flight, book_hotel])

SCRIPT: list[Any] = [
    [("search_flights", '{"city": "Lisbon"}'), ("search_hotels", '{"city": "Lisbon"}')],
    [("book_flight", '{"flight": "LIS-0715"}'), ("book_hotel", '{"hotel": "Grand Hotel Lisbon"}')],
    [("book_hotel", '{"hotel": "Pension Sol"}')],
    "You fly with LIS-0715 and stay at Pension Sol.",
]


@perdure.step
def think(messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Stands for `client.chat.completions.create(messages=messages, tools=schemas)`: recorded, so paid for once."""
    turn = sum(message["role"] == "assistant" for message in messages)
    print(f"  the model is called (turn {turn + 1}, {len(schemas)} tools)", flush=True)
    answer = SCRIPT[turn]
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    calls = [
        {"id": f"call_{turn}_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in answer
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@perdure.durable
def agent(task: str) -> str:
    """The loop that every agent has."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    while True:
        reply = think(messages, tools.schemas())
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        answers = tools.call(reply["tool_calls"])
        for answer in answers:
            print(f"  {answer['tool_call_id']}: {answer['content']}", flush=True)
        messages += answers


def work() -> None:
    """One process: the same line each time."""
    with perdure.open("agent.db") as store:
        run = store.run(agent, "Three nights in Lisbon", id="trip")
        print(f"  {run.result() if run.status == 'done' else run.status}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "work"]
        print("1. The agent starts.", flush=True)
        subprocess.run(command, cwd=folder, check=True)

        with perdure.open(f"{folder}/agent.db") as store:
            [question] = store.questions("trip")
            print(f"2. A person is asked: {question.text} Yes.", flush=True)
            store.answer("trip", True, who="ann")

        print("3. The same line again.", flush=True)
        killed = subprocess.run(command, cwd=folder)
        print(f"  killed, exit code {killed.returncode}", flush=True)

        print("4. The same line again.", flush=True)
        subprocess.run(command, cwd=folder, check=True)

        print("5. The ledger.", flush=True)
        booked = [line.split(" ", 1)[1] for line in (Path(folder) / LEDGER).read_text().splitlines()]
        print(f"  {booked}", flush=True)
        assert booked == ["LIS-0715", "Pension Sol"]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else main()
