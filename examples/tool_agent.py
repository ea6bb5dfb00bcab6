"""Run an agent with tools that is killed in the middle of a booking, waits for a person, and books everything once.

A script stands in for the model, so you need only Perdure. It calls two searches at the same time, then two bookings,
of which one fails and one needs a person's approval, and then books another hotel. The agent runs in processes of its
own. The first one that books the flight dies right after it.

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

LEDGER = Path("ledger.txt")  # the bookings of the airline and the hotels, one per line


class SoldOut(Exception):
    """No room left."""


def search_flights(city: str) -> list[str]:
    """Find flights to a city."""  # a plain function: it runs as a step
    return [f"{city[:3].upper()}-0715", f"{city[:3].upper()}-1340"]


def search_hotels(city: str) -> list[str]:
    """Find hotels in a city."""
    return [f"Grand Hotel {city}", "Pension Sol"]


def find(key: perdure.IdempotencyKey) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the booking up in the ledger after a crash in the middle of it."""
    booked = [line.removeprefix(f"{key} ") for line in _ledger() if line.startswith(key)]
    return perdure.outcome.Done(f"booked {booked[0]}") if booked else perdure.outcome.NotDone()


@perdure.effect(reconcile=find, approve=True)
def book_flight(flight: str, key: perdure.IdempotencyKey) -> str:
    """Book a flight."""
    _write(f"{key} {flight}")
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the airline has booked, but this process dies before it knows
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
    """Stand in for `client.chat.completions.create(messages=messages, tools=schemas)`. Recorded, so you pay once."""
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
    """Call the model and its tools in turn, until it answers without a tool call."""
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
    """Start or resume the run; every process executes the same line."""
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
