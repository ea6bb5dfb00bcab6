"""Schedules for tests: time that passes without waiting, and workers in processes of their own."""

from __future__ import annotations

from typing import Any

import perdure
from perdure.runs.journal.claiming import ServedTenants
from perdure.runs.schedules import firing
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.testing.processes import Say


@perdure.durable(name="schedule_kit.job")
def job(what: str = "x") -> str:
    return what


def let_pass(store: perdure.Store, seconds: int) -> None:
    """Move all schedules into the past, as if that time had passed. For intervals, whole multiples of them."""

    shift = Sql("UPDATE schedule SET last_at = last_at - :by, next_at = next_at - :by WHERE paused = 0")

    def program() -> Program[None]:
        yield Batch(shift(by=seconds * 1_000_000), last=True)

    drive(store._context.driver, write(program))


def fire(store: perdure.Store) -> None:
    """Start what is due, as a worker does."""
    tenants = ServedTenants(drive(store._context.driver, store._context.ensure_tenant()))
    drive(store._context.driver, firing.fire_due(store._context, tenants, 0))


def work(store: perdure.Store, *functions: Any) -> None:
    perdure.Worker(store, list(functions) or [job]).run(until_idle=True)


def runs_of(store: perdure.Store, name: str) -> list[str]:
    """The instants that have a run, in order."""
    found = (info.id for info in store.runs(limit=None))
    return sorted(run.removeprefix(f"{name}@") for run in found if run.startswith(f"{name}@"))


def fire_forever(say: Say, url: str) -> None:
    """In a child: a worker that fires few schedules at a time, until it is killed."""
    firing._PAGE = 5
    with perdure.open(url) as store:
        say("ready")
        worker = perdure.Worker(store, [job])
        worker._find_work = lambda most, ends: 0.0  # type: ignore[method-assign]  # it executes none
        worker.run()
