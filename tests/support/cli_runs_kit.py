"""What the tests of commands share: how one is called, and the agents that commands about runs are tried on.

`APP` is the text of a module, for processes that import it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Run = Callable[..., tuple[int, str, str]]  # the fixture `run`: arguments to exit code, output, complaints


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


APP_FILE = "cli_runs_app.py"
APP = """
import perdure

lose = []  # what happens to the next booking

@perdure.step
def search(dest: str) -> list[str]:
    return [f"{dest} 1", f"{dest} 2"]

def cancelled(result: str) -> None:
    pass

@perdure.effect(timeout_s=0.01, undo=cancelled)
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    if lose:
        raise lose.pop()
    return f"B-{flight}"

@perdure.durable(version="1")
def travel(dest: str) -> str:
    flights = search(dest)
    perdure.emit({"found": len(flights)})
    flight = perdure.ask("Which flight?", options=flights)
    return book(flight)

@perdure.durable(version="1")
def doubtful(dest: str) -> str:
    return book(dest)

@perdure.durable(version="1")
def sold_out(dest: str) -> str:
    raise ValueError(f"no seats to {dest}")

@perdure.durable(version="1")
def listener() -> list:
    return [perdure.receive("news"), perdure.receive("news")]

@perdure.durable(version="1")
def quorum() -> str:
    return perdure.ask("Pay?", schema=int, approvers=["ann", "bob", "eve"], quorum=2)

@perdure.effect(approve="Refund {cents}?")
def refund(cents: int, api_token: str) -> None: ...

@perdure.durable(version="1")
def refunds() -> None:
    refund(900, "tok-7")

@perdure.durable(version="1")
def both() -> list:
    return perdure.gather(lambda: perdure.ask("One?"), lambda: perdure.ask("Two?", options=["1", "2"]))

@perdure.durable(version="1")
def broken() -> None:
    raise ValueError("no such place")

@perdure.durable(version="1")
def sleeper() -> None:
    perdure.sleep(86_400)
"""
