"""`Schedule`, the handle of a schedule, and the part of a store that declares and lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Literal

from perdure.errors import Conflict, UsageError
from perdure.runs.calls.decorators import durable_call
from perdure.runs.calls.timeouts import check_seconds
from perdure.runs.handle import Run
from perdure.runs.journal.entries import compress
from perdure.runs.journal.rows import NEVER
from perdure.runs.journal.turns import OPEN_RUNS, OPEN_WITH_KEY, release_held
from perdure.runs.schedules import rows
from perdure.runs.schedules.firing import cancel_open, insert_runs
from perdure.runs.schedules.rows import ScheduleRow
from perdure.runs.schedules.timetable import check_timetable
from perdure.storage.program import Batch, Flow, Program, fetch, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads.actions import noted
from perdure.threads.checks import check_limit, check_name, check_priority, microseconds
from perdure.threads.context import Handle, StoreContext
from perdure.threads.models import moment
from perdure.values.safe_repr import shown

_NAME_MAX = 480  # with the instant it is the id of a run
_UPCOMING = 5
_BACKFILL_MAX = 10_000
_PAGE = 200
_OVERLAPS, _CATCH_UPS = ("skip", "queue", "cancel"), ("none", "last", "all")


@dataclass(frozen=True)
class Schedule(Handle):
    """A schedule as it was read: `store.schedule`, `store.get_schedule` and `store.schedules` return it.

    `upcoming` has its next five instants, and is empty while it is paused. `skipped` counts the instants that started
    no run, because one was open or no worker was there.
    """

    name: str
    function: str
    version: str
    cron: str | None
    every: timedelta | None
    timezone: str
    queue: str
    priority: int
    overlap: str
    catch_up: str
    jitter_s: float
    paused: bool
    upcoming: tuple[datetime, ...]
    last_run: str | None  # the id of the run of the last instant that started one
    skipped: int
    _context: StoreContext = field(repr=False, compare=False)

    @classmethod
    def _of(cls, ctx: StoreContext, row: ScheduleRow) -> Schedule:
        return cls(
            row.name,
            row.function,
            row.version,
            row.cron,
            None if row.every_us is None else timedelta(microseconds=row.every_us),
            row.timezone,
            row.queue,
            row.priority,
            row.overlap,
            row.catch_up,
            row.jitter_us / 1e6,
            bool(row.paused),
            tuple(map(moment, _upcoming(row))),
            row.last_run,
            row.skipped,
            ctx,
        )

    @blocking
    def refresh(self) -> Flow[Schedule]:
        """Read the schedule again. Raises NotFound if it was deleted."""
        return find(self._context, self.name)

    arefresh = awaited(refresh)

    @blocking
    def pause(self, *, who: str | None = None) -> Flow[Schedule]:
        """Start no more runs until `resume`. Open runs continue."""
        return noted(self._context, who, "pause", f"schedule {self.name}", self._place(paused=True))

    apause = awaited(pause)

    @blocking
    def resume(self, *, who: str | None = None) -> Flow[Schedule]:
        """Continue with the next instant from now on. Instants that passed meanwhile start nothing; see `backfill`."""
        return noted(self._context, who, "resume", f"schedule {self.name}", self._place(paused=False))

    aresume = awaited(resume)

    @blocking
    def trigger(self, *, who: str | None = None) -> Flow[Run]:
        """Start a run now, as if an instant had come, also of a paused schedule. Raises Conflict if it would overlap.

        With overlap="queue" the run waits for its turn; with overlap="cancel" the open runs are cancelled.
        """
        return noted(self._context, who, "trigger", f"schedule {self.name}", self._trigger())

    atrigger = awaited(trigger)

    def _trigger(self) -> Flow[Run]:
        tenant = yield from self._tenant()
        row = yield from read(partial(rows.find, tenant, self.name))
        if row.overlap == "cancel":
            open_runs = yield from fetch(OPEN_RUNS, tenant=tenant, key=row.run_key)
            yield from cancel_open(self._context, [run for (run,) in open_runs])
        now, seed = self._context.clock_us(), self._context.entropy(16)
        run = yield from write(partial(_trigger, tenant, self.name, now, seed))
        return Run(self._context, run, "queued")

    @blocking
    def backfill(self, since: datetime, until: datetime, *, who: str | None = None) -> Flow[list[str]]:
        """Start the runs of past instants, from `since` on and before `until`, that were not started yet.

        Return their ids. They do not skip or cancel others; with overlap="queue" they run one after another.
        """
        about = {"since": since, "until": until}
        return noted(self._context, who, "backfill", f"schedule {self.name}", self._backfill(since, until), **about)

    abackfill = awaited(backfill)

    def _backfill(self, since: datetime, until: datetime) -> Flow[list[str]]:
        tenant = yield from self._tenant()
        row = yield from read(partial(rows.find, tenant, self.name))
        first, last = (_microseconds(at, name) for at, name in ((since, "since"), (until, "until")))
        if first >= last:
            raise UsageError(f"backfill(since={since}, until={until}): the first is not before the second")
        if last > self._context.clock_us():
            raise UsageError(f"backfill(until={until}): instants that have not come yet are started by workers")
        instants = row.timetable.between(first, last, _BACKFILL_MAX + 1)
        if len(instants) > _BACKFILL_MAX:
            raise UsageError(f"backfill(…): more than {_BACKFILL_MAX:,} instants; name a shorter time")
        started: list[str] = []
        for at in range(0, len(instants), _PAGE):
            now, seed = self._context.clock_us(), self._context.entropy(16)
            some = instants[at : at + _PAGE]
            started += yield from write(partial(_start, tenant, self.name, some, now, seed))
        return started

    @blocking
    def delete(self, *, who: str | None = None) -> Flow[None]:
        """Delete the schedule. Its runs stay, and open ones continue."""
        tenant = yield from self._tenant()
        deleting = write(partial(rows.delete, tenant, self.name))
        yield from noted(self._context, who, "delete", f"schedule {self.name}", deleting)

    adelete = awaited(delete)

    def _place(self, *, paused: bool) -> Flow[Schedule]:
        tenant = yield from self._tenant()
        row = yield from write(partial(rows.place, tenant, self.name, self._context.clock_us(), paused=paused))
        return Schedule._of(self._context, row)

    def _tenant(self) -> Flow[int]:
        return self._context.ensure_tenant()


def _trigger(tenant: int, name: str, now: int, seed: bytes) -> Program[str]:
    row, now = yield from rows.lock(tenant, name, now)
    at = now if now % 1_000_000 else now + 1  # never the id of an instant
    if row.overlap == "skip":
        [open_runs] = yield Batch(OPEN_WITH_KEY(tenant=tenant, key=row.run_key))
        if open_runs:
            raise Conflict(f"schedule {name!r} starts no run while {open_runs[0][0]!r} is open: cancel that one first")
    while not all((yield from _insert(tenant, row, [at], now, seed))):
        at += 1  # another run was triggered in this microsecond
    return row.run_id(at)


def _start(tenant: int, name: str, instants: Sequence[int], now: int, seed: bytes) -> Program[list[str]]:
    """Start the runs of instants. Return the ids of those that did not exist."""
    row, now = yield from rows.lock(tenant, name, now)
    are_new = yield from _insert(tenant, row, instants, now, seed)
    return [row.run_id(at) for at, is_new in zip(instants, are_new, strict=True) if is_new]


def _insert(tenant: int, row: ScheduleRow, instants: Sequence[int], now: int, seed: bytes) -> Program[list[bool]]:
    [open_runs] = yield Batch(OPEN_WITH_KEY(tenant=tenant, key=row.run_key))
    row = row._replace(jitter_us=0)  # a person asked for them now
    statements = insert_runs(tenant, row, instants, now, seed, is_open=bool(open_runs))
    answers = yield Batch(*statements, *(release_held(tenant, row.run_key) if row.overlap == "queue" else ()))
    return [bool(answer) for answer in answers[: len(statements) : 2]]


def _upcoming(row: ScheduleRow) -> list[int]:
    """Return the next instants of a schedule; none if it is paused, or if this machine cannot read its timetable."""
    try:
        return list(islice(row.timetable.instants(row.next_at - 1), _UPCOMING)) if row.next_at < NEVER else []
    except UsageError:  # a list must show the other schedules
        return []


def _microseconds(at: datetime, name: str) -> int:
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise UsageError(f"backfill({name}={at!r}): a datetime with a time zone")
    if (instant := microseconds(at, f"backfill: {name}")) < 0:
        raise UsageError(f"backfill({name}={at!r}): instants are counted from 1970 on")
    return instant


def find(ctx: StoreContext, name: str) -> Flow[Schedule]:
    tenant = yield from ctx.tenant()
    if tenant is None:
        raise rows.no_schedule(name)
    return Schedule._of(ctx, (yield from read(partial(rows.find, tenant, check_name(name, "schedule")))))


class ScheduleStore(Handle):
    """Declares and lists the schedules of one tenant."""

    def __init__(self, context: StoreContext) -> None:
        self._context = context

    @blocking
    def schedule(
        self,
        name: str,
        fn: Callable[..., Any],
        cron: str | None = None,
        *,
        every: str | timedelta | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timezone: str = "UTC",
        queue: str = "default",
        priority: int = 0,
        overlap: Literal["skip", "queue", "cancel"] = "skip",
        catch_up: Literal["none", "last", "all"] = "none",
        jitter_s: float = 0.0,
        replace: bool = False,
    ) -> Flow[Schedule]:
        """Start a durable function at the times of a cron expression ("0 7 * * MON-FRI"), or `every` so often ("15m").

        Any worker starts the runs. The id of a run is the name and the instant, "nightly@2026-11-17T07:00:00Z": each
        instant starts one run, whatever happens to workers and clocks. If a run of the schedule is still open when an
        instant comes, `overlap` says what happens to the new one: it is skipped, it waits in the queue until the others
        have ended, or they are cancelled. If no worker was there when instants passed, `catch_up` says which of them
        start later: none (more than a minute late), the last, or all (at most 100; needs overlap="queue"). `jitter_s`
        delays each run by a random time up to that. Runs get the deployed version of the function, or the version of
        the code that last declared the schedule. The same declaration again changes nothing; another one under the
        same name needs `replace=True`.
        """
        if not isinstance(args, list | tuple):
            raise UsageError(f'schedule(args={shown(args)}): a list or tuple of the arguments, such as ("sales",)')
        if not isinstance(kwargs, Mapping | None):
            raise UsageError(f'schedule(kwargs={shown(kwargs)}): a mapping such as {{"team": "sales"}}')
        spec, args = durable_call(fn, tuple(args))
        if len(check_name(name, "schedule")) > _NAME_MAX:
            raise UsageError(f"a schedule's name has at most {_NAME_MAX} characters")
        table = check_timetable(cron, every, timezone)
        _check_choice("overlap", overlap, _OVERLAPS)
        _check_choice("catch_up", catch_up, _CATCH_UPS)
        if catch_up == "all" and overlap != "queue":
            raise UsageError('schedule(catch_up="all"): runs that catch up would overlap; say overlap="queue" too')
        jitter_us = int(check_seconds(jitter_s, "schedule(jitter_s=…)") * 1e6)
        if jitter_us < 0:
            raise UsageError(f"schedule(jitter_s={jitter_s!r}): seconds from 0 on")
        try:
            text = spec.binder.text(args, dict(kwargs or {}), self._context.codec)
        except TypeError as error:
            raise UsageError(f"schedule({name!r}): its runs could not call {error}: see args= and kwargs=") from error
        fields = {
            "name": name,
            "function": spec.name,
            "version": spec.version,
            "args": compress(text),
            **table._asdict(),
            "queue": check_name(queue, "queue"),
            "priority": check_priority(priority),
            "overlap": overlap,
            "catch_up": catch_up,
            "jitter_us": jitter_us,
        }
        tenant = yield from self._context.ensure_tenant()
        op = partial(rows.declare, tenant, fields, self._context.clock_us(), replace=replace)
        return Schedule._of(self._context, (yield from write(op)))

    aschedule = awaited(schedule)

    @blocking
    def get_schedule(self, name: str) -> Flow[Schedule]:
        """Return a schedule. Raises NotFound."""
        return find(self._context, name)

    aget_schedule = awaited(get_schedule)

    @blocking
    def schedules(self, *, limit: int | None = 1000) -> Flow[list[Schedule]]:
        """List the schedules by name, each with its next five instants."""
        most = check_limit(limit)
        tenant = yield from self._context.tenant()
        if tenant is None:
            return []
        schedule_rows = yield from read(partial(rows.listed, tenant, 2**62 if most is None else most))
        return [Schedule._of(self._context, row) for row in schedule_rows]

    aschedules = awaited(schedules)


def _check_choice(what: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"schedule({what}={value!r}): one of {', '.join(known)}")
