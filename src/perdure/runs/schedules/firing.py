"""Start the runs of the instants that have come. All workers do it, at the same time.

One transaction locks up to 200 due schedules that no other worker is firing, inserts the runs and moves the schedules
on. A run's id is the schedule and the instant. So an instant starts one run whatever happens: two workers, a kill, a
clock that is set back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from blake3 import blake3

from perdure.errors import NotFound, RunError
from perdure.runs.engine import flows
from perdure.runs.functions.inputs import digest
from perdure.runs.journal import rows
from perdure.runs.journal.claiming import ServedTenants, served
from perdure.runs.journal.entries import decompress
from perdure.runs.journal.rows import NEVER, NewRun
from perdure.runs.journal.turns import OPEN_WITH_KEY, release_held
from perdure.runs.schedules.rows import ScheduleRow
from perdure.runs.schedules.timetable import Due, Timetable, due
from perdure.runs.tables import SCHEDULE
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, read, write
from perdure.threads.context import StoreContext

_PAGE = 200
_OTHERS_US = 50_000  # when to look again if other workers are firing what is due
_BACK_US = 60_000_000  # a schedule that is this far ahead of the clock: the clock was set back
_log = logging.getLogger("perdure")


_OURS = served("s")
_FIRST = Sql(f"SELECT s.next_at FROM schedule s WHERE {_OURS} ORDER BY s.next_at LIMIT 1")
_COLUMNS = ", ".join("NULL" if name == "args" else f"s.{name}" for name in ScheduleRow._fields)
_DUE = Sql(
    f"""SELECT s.tenant, {{now}}, {_COLUMNS} FROM schedule s
    WHERE s.next_at <= (SELECT {{now}}) AND {_OURS} ORDER BY s.next_at LIMIT :limit {{skip_locked}}"""
)
# Read one by one, because each tenant has its own key. A damaged schedule is paused, and holds up no other.
_ARGS = Sql(
    "SELECT args FROM schedule WHERE tenant = :tenant AND name = :name",
    opens={0: SCHEDULE.encrypted("args")},
    tolerant=True,
    keyless=True,
)
_AHEAD = Sql(
    f"""SELECT s.tenant, s.name, s.cron, s.every_us, s.timezone, s.next_at, {{now}} FROM schedule s
    WHERE s.last_at > (SELECT {{now}}) + {_BACK_US} AND s.paused = 0 AND {_OURS} {{skip_locked}}"""
)
_MOVE = Sql(
    """UPDATE schedule SET last_at = :last_at, next_at = :next_at, skipped = skipped + :skipped,
        last_run = coalesce(CAST(:last_run AS text), last_run)
    WHERE tenant = :tenant AND name = :name AND next_at = :seen"""
)
_STOP = Sql(f"UPDATE schedule SET paused = 1, next_at = {NEVER} WHERE tenant = :tenant AND name = :name")


class Fired(NamedTuple):
    """What one transaction did. `cancel` are runs, with their tenants, that must be asked to end first."""

    any_seen: bool
    started: int = 0
    cancel: tuple[tuple[int, str], ...] = ()


def fire_due(ctx: StoreContext, tenants: ServedTenants, seen: int) -> Flow[tuple[int | None, int]]:
    """Start the runs of all instants that have come. Return the microseconds until the next one, and the time.

    `seen` is the time that the last call returned. If the clock shows less now, it was set back.
    """
    asked: set[tuple[int, str]] = set()
    while True:
        left, now = yield from read(partial(_first, tenants, ctx.clock_us()))
        if now < seen:
            yield from write(partial(set_back, tenants, ctx.clock_us()))
            seen = now
            continue
        if left is None or left > 0:
            return left, now
        fired = yield from write(partial(fire, tenants, ctx.clock_us(), ctx.entropy(16), frozenset(asked)))
        if fired.started:
            _log.debug("started %d scheduled runs", fired.started, extra=event("schedules.fired", runs=fired.started))
        if not fired.any_seen:
            return _OTHERS_US, now
        for tenant, run in fired.cancel:
            yield from cancel_open(replace(ctx, known_tenant=tenant), [run])
            asked.add((tenant, run))


def cancel_open(ctx: StoreContext, runs: Sequence[str]) -> Flow[None]:
    """Ask runs to end, for a schedule whose runs replace each other. One that cannot be cancelled is left alone."""
    for run in runs:
        try:
            yield from flows.request(ctx, run, "cancel")
        except (RunError, NotFound) as error:
            about = event("schedules.not_cancelled", run=run, error=type(error).__name__)
            _log.warning("run %s was to be cancelled for its schedule: %s", run, type(error).__name__, extra=about)


def _first(tenants: ServedTenants, now: int) -> Program[tuple[int | None, int]]:
    """Return the microseconds until the first instant of all schedules, or None, and the time."""
    times, [[now]] = yield Batch(_FIRST(**tenants.params(now)), rows.NOW(now=now), last=True)
    next_at = times[0][0] if times else NEVER
    return (next_at - now if next_at < NEVER else None), now


def fire(tenants: ServedTenants, now: int, seed: bytes, asked: frozenset[tuple[int, str]]) -> Program[Fired]:
    """Fire one page of due schedules. `asked` are runs that were asked to end. New runs' secrets come from `seed`."""
    [due_rows] = yield Batch(_DUE(**tenants.params(now), limit=_PAGE))
    if not due_rows:
        return Fired(False)
    now = due_rows[0][1]
    schedules = [(int(row[0]), ScheduleRow._make(row[2:])) for row in due_rows]
    read_args = [_ARGS(tenant=tenant, name=row.name) for tenant, row in schedules]
    find_open = [OPEN_WITH_KEY(tenant=tenant, key=row.run_key) for tenant, row in schedules]
    answers = yield Batch(*read_args, *find_open)
    inserts: list[Statement] = []
    others: list[Statement] = []
    cancel: list[tuple[int, str]] = []
    for (tenant, row), args, runs in zip(schedules, answers[: len(due_rows)], answers[len(due_rows) :], strict=True):
        open_runs = [(tenant, run) for (run,) in runs]
        if not args:  # its key is missing here: another worker may have it
            continue
        row = row._replace(args=args[0][0])
        try:
            chosen = due(row.timetable, row.next_at, now, row.catch_up)
            started, moves = _fire_one(tenant, row, chosen, bool(open_runs), now, seed)
        except Exception as error:  # garbage, or a time zone that this machine does not know: it must not stop others
            chosen, started, moves = None, [], [_stop(tenant, row.name, error)]
        if row.overlap == "cancel" and chosen is not None and chosen.instants:
            own = (tenant, row.run_id(chosen.instants[-1]))  # there already, if the clock was set back
            if left := [run for run in open_runs if run not in asked and run != own]:
                cancel += left
                continue
        inserts += started
        others += moves
    answers = yield Batch(*inserts, *others, last=True)
    return Fired(bool(others or cancel), sum(map(bool, answers[: len(inserts) : 2])), tuple(cancel))


def _fire_one(
    tenant: int, row: ScheduleRow, chosen: Due, is_open: bool, now: int, seed: bytes
) -> tuple[list[Statement], list[Statement]]:
    """Return the statements that insert the runs of one schedule, and those that move it on."""
    instants, skipped, last_at, next_at = chosen
    if row.overlap != "queue":
        kept = [] if is_open and row.overlap == "skip" else instants[-1:]
        skipped, instants = skipped + len(instants) - len(kept), kept
    last_run = row.run_id(instants[-1]) if instants else None
    position = {"seen": row.next_at, "last_at": last_at, "next_at": next_at, "skipped": skipped, "last_run": last_run}
    return (
        insert_runs(tenant, row, instants, now, seed, is_open=is_open),
        [_MOVE(tenant=tenant, name=row.name, **position), *_release(tenant, row)],
    )


def _stop(tenant: int, name: str, error: Exception) -> Statement:
    """Return the statement that pauses a schedule whose row cannot be understood."""
    about = event("schedule.paused", schedule=name, error=type(error).__name__)
    _log.error("schedule %s cannot be read and is paused: %r", name, error, extra=about)
    return _STOP(tenant=tenant, name=name)


def _release(tenant: int, row: ScheduleRow) -> list[Statement]:
    return release_held(tenant, row.run_key) if row.overlap == "queue" else []


def insert_runs(
    tenant: int, row: ScheduleRow, instants: Sequence[int], now: int, seed: bytes, *, is_open: bool
) -> list[Statement]:
    """Return the statements that insert the runs of instants: two for each. A run that exists stays as it is."""
    text = decompress(row.args)
    statements: list[Statement] = []
    for number, at in enumerate(instants):
        run_id = row.run_id(at)
        drawn = blake3(seed + run_id.encode()).digest(32)
        jitter = int.from_bytes(drawn[20:28]) % row.jitter_us if row.jitter_us else 0
        held = row.overlap == "queue" and (is_open or number > 0)
        new = NewRun(
            run_id,
            row.function,
            row.version,
            row.args,
            digest(text),
            drawn[:16],
            row.queue,
            row.priority,
            wake_at=NEVER if held else at + jitter if jitter else 0,
            bucket=int.from_bytes(drawn[16:20]) % flows.BUCKETS,
            key=row.run_key,
        )
        statements += rows.insert_statements(tenant, new, now, None, 0)
    return statements


def set_back(tenants: ServedTenants, now: int) -> Program[int]:
    """Let schedules that are far ahead of the clock continue from now: the clock was set back. Return how many.

    What was started for later instants stays, so the same instants start nothing when they come.
    """
    [ahead] = yield Batch(_AHEAD(**tenants.params(now)))
    moves = []
    for tenant, name, *table, seen, at in ahead:
        try:
            next_at = Timetable(*table).after(at)
        except Exception as error:
            moves.append(_stop(tenant, name, error))
            continue
        position = {"seen": seen, "last_at": at, "next_at": next_at, "skipped": 0, "last_run": None}
        moves.append(_MOVE(tenant=tenant, name=name, **position))
    if moves:
        yield Batch(*moves, last=True)
    return len(moves)
