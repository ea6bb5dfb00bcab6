"""A 30-step agent with five bookings at a real airline, in a child that is killed at a random time or point."""

from __future__ import annotations

import os
import sys
from typing import Any

import crash_agents
from crash_agents import World, act
from lab import Code
from striking import die_at
from workshop import until

import perdure
from perdure.runs.execution import hooks
from perdure.testing.fake_airline import Airline
from perdure.testing.processes import Say

BOOKINGS, THOUGHTS = 5, 5  # 5 times 5 and 1: 30 steps
DEADLINE_S = 0.4  # how long a booking may be under way
DELAY_S = 0.15  # a slow network: some bookings arrive so much later, whatever became of whoever sent them


def agent_of(mode: str, variant: str, airline: Airline) -> Any:
    """honours: the airline knows keys, so a doubt is retried. reconciles: it does not, but can be asked. neither."""
    code = Code(mode)

    def find(key: str, item: str, number: int) -> perdure.outcome.Done | perdure.outcome.NotDone:
        found = airline.bookings(key)
        return perdure.outcome.Done(found[0].booking) if found else perdure.outcome.NotDone()

    rules: dict[str, dict[str, Any]] = {
        "honours": {"on_doubt": "retry"},
        "reconciles": {"reconcile": code.body(find)},
        "neither": {},
    }

    @code.step()
    def think(number: int) -> int:
        act("think")
        return number

    @code.effect(timeout_s=DEADLINE_S, **rules[variant])
    def book(item: str, number: int, key: perdure.IdempotencyKey) -> str:
        act("book", key)
        return airline.book("flight", item, key=key, delay_s=DELAY_S if number % 2 else 0.0)

    @code.durable(name="random_agent")
    async def agent(name: str) -> list[Any]:
        total, booked = 0, []
        for number in range(BOOKINGS):
            for thought in range(THOUGHTS):
                total += await code(think(number * THOUGHTS + thought))
            booked.append(await code(book(f"{name}:{number}", number)))
        return [total, booked]

    return agent


def live(say: Say, url: str, outside: str, airline: str, variant: str, mode: str, run_id: str, at: int | None) -> None:
    """Go on with a run until it has ended or is parked; die at the `at`-th point."""
    crash_agents.world = World(outside)
    agent = agent_of(mode, variant, Airline(airline))
    store = perdure.open(url, durability="normal", lease_s=0.1)
    say({"recorded": _recorded(store, run_id), "pid": os.getpid()})
    hooks.hook = die_at(at)
    run, status = until(lambda: _continued(store.run(agent, run_id, id=run_id)))
    hooks.hook = None
    if status in ("stuck", "failed"):
        print(run.refresh(), file=sys.stderr)
    say({"status": status, "result": run.result() if status == "done" else None})


def _continued(run: perdure.Run) -> tuple[perdure.Run, str] | None:
    """Return the run and its status; None while the lease of its killed process lasts (PostgreSQL)."""
    status = run.refresh().status
    return None if status == "running" else (run, status)


def _recorded(store: perdure.Store, run_id: str) -> list[str]:
    try:
        return [step.path for step in store.get_run(run_id).steps() if step.status in ("done", "failed")]
    except perdure.NotFound:
        return []
