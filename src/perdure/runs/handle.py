"""A handle of a run: its result, its steps, and what an operator can ask of it. Each operation blocking and async."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import RunStuck, UsageError
from perdure.runs.calls.children import outcome_error
from perdure.runs.engine import flows
from perdure.runs.engine.models import Event, RunInfo, Step, blob_in, moment, noted, value_text
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.waiting import Task, waits_for
from perdure.runs.journal import journal
from perdure.runs.journal.entries import KIND_NAMES, NOTE, Recorded, decompress
from perdure.runs.journal.rows import FINISHED, RunRow
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive, read
from perdure.values.codec import decode

if TYPE_CHECKING:
    from perdure.runs.engine.local import Job
    from perdure.threads.context import Context
    from perdure.threads.models import Change

T = TypeVar("T")
_log = logging.getLogger("perdure")
_POLL_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_NO_VALUE: Any = object()
_HOLE_S = 10.0  # how long to look for an entry whose number was passed over


class Run:
    """One execution of a durable function. `store.run` and `store.start` give it, and `store.get_run`."""

    def __init__(self, ctx: Context, run_id: str, *, drives: bool = False, lease_us: int, keep_us: int | None) -> None:
        self._ctx = ctx
        self._drives = drives  # waiting for its result goes on with it here
        self._lease_us = lease_us
        self._keep_us = keep_us
        self._due: list[RunRow] = []  # of its family: see next_in_family
        self._warned: set[Task] = set()  # what a person has to do, and the log has it
        self.id = run_id

    def __repr__(self) -> str:
        return f"<Run {self.id!r}>"

    @property
    def status(self) -> str:
        """queued, running, waiting, paused, stuck, done, failed, cancelled, rolled_back or exported."""
        return self._do(flows.locate(self._ctx, self.id))[1].status

    async def astatus(self) -> str:
        """`status`, awaited."""
        return (await self._ado(flows.locate(self._ctx, self.id)))[1].status

    def info(self) -> RunInfo:
        """The run as it stands: what it waits for, how often it was taken up, when it changed."""
        return RunInfo.of(self._do(flows.locate(self._ctx, self.id))[1])

    async def ainfo(self) -> RunInfo:
        """`info`, awaited."""
        return RunInfo.of((await self._ado(flows.locate(self._ctx, self.id)))[1])

    def result(self, timeout_s: float | None = None) -> Any:
        """What the function returned. Waits for it; a run that this process may run is resumed here meanwhile.

        A wait for a person (a question, an effect in doubt, a paused run) is logged as a warning, once, with the
        command that ends it. Raises RunFailed (the error is its cause), RunCancelled, RolledBack, RunStuck; after
        `timeout_s` TimeoutError, which says what the run waits for.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for pause in _pauses():
            tenant, row = self._do(flows.locate(self._ctx, self.id))
            if row.status in FINISHED:
                return self._outcome(row, self._do(flows.outcome(tenant, row)))
            self._check_waiting(row, self._do(flows.tasks_of_people(self._ctx, tenant, row)), deadline)
            job = self._do(self._next_job(tenant, row)) if self._drives else None
            if job is not None:
                job.run()
            else:
                time.sleep(pause)
        raise AssertionError("pauses never end")

    async def aresult(self, timeout_s: float | None = None) -> Any:
        """`result`, awaited."""
        import asyncio

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for pause in _pauses():
            tenant, row = await self._ado(flows.locate(self._ctx, self.id))
            if row.status in FINISHED:
                return self._outcome(row, await self._ado(flows.outcome(tenant, row)))
            self._check_waiting(row, await self._ado(flows.tasks_of_people(self._ctx, tenant, row)), deadline)
            job = await self._ado(self._next_job(tenant, row)) if self._drives else None
            if job is not None:
                await job.arun()
            else:
                await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    def steps(self, *, large: bool = True) -> list[Step]:
        """The journaled calls so far, in the order they began. `large=False` leaves out results of 64 KB and more,
        which are kept apart: their `result` is None, and `large` is how many bytes they take."""
        return self._do(flows.steps(self._ctx, self.id, large))

    async def asteps(self, *, large: bool = True) -> list[Step]:
        """`steps`, awaited."""
        return await self._ado(flows.steps(self._ctx, self.id, large))

    def state_at(self, step: Step | str | int | None = None) -> Any:
        """`perdure.state()` after a step: its path, its number or a Step; None: the newest. Runs no code.

        None if the run had no state by then. In a branch it is what that branch saw.
        """
        from perdure.runs.history import state_history

        return self._do(state_history.state_at(self._ctx, self.id, step))

    async def astate_at(self, step: Step | str | int | None = None) -> Any:
        """`state_at`, awaited."""
        from perdure.runs.history import state_history

        return await self._ado(state_history.state_at(self._ctx, self.id, step))

    def diff(self, a: Step | str | int, b: Step | str | int | None = None) -> list[Change]:
        """The changes of `perdure.state()` from step `a` to step `b` (None: the newest), path by path. 0: empty."""
        from perdure.runs.history import state_history

        return self._do(state_history.diff(self._ctx, self.id, a, b))

    async def adiff(self, a: Step | str | int, b: Step | str | int | None = None) -> list[Change]:
        """`diff`, awaited."""
        from perdure.runs.history import state_history

        return await self._ado(state_history.diff(self._ctx, self.id, a, b))

    def stream(self, after: int = 0) -> Iterator[Event]:
        """What happens in the run, from the beginning (or after an event's `seq`) until it ends: recorded entries, what
        it emits, and the chunks of generator steps that run in this process."""
        live: list[Event] = []
        stop, follower = self._listen(live), _Follower(after)
        try:
            for pause in _pauses():
                row, found = self._do(self._news(follower.floor))
                events = follower.fresh(row, found)
                yield from _drained(live)
                yield from events
                if row.status in FINISHED:
                    yield Event("status", "", row.function, row.status, moment(row.changed_at))
                    return
                if not events:
                    time.sleep(min(pause, 0.1))
        finally:
            stop()

    async def astream(self, after: int = 0) -> AsyncIterator[Event]:
        """`stream`, awaited."""
        import asyncio

        live: list[Event] = []
        stop, follower = self._listen(live), _Follower(after)
        try:
            for pause in _pauses():
                row, found = await self._ado(self._news(follower.floor))
                events = follower.fresh(row, found)
                for event in (*_drained(live), *events):
                    yield event
                if row.status in FINISHED:
                    yield Event("status", "", row.function, row.status, moment(row.changed_at))
                    return
                if not events:
                    await asyncio.sleep(min(pause, 0.1))
        finally:
            stop()

    def cancel(self) -> str:
        """Stop the run, and its children. Nothing is undone: `rollback` does that. Gives the status: "running" means
        that whoever runs it was told."""
        return self._do(flows.request(self._ctx, self.id, "cancel"))

    async def acancel(self) -> str:
        """`cancel`, awaited."""
        return await self._ado(flows.request(self._ctx, self.id, "cancel"))

    def pause(self) -> str:
        """Stop the run at its next step, until `resume`."""
        return self._do(flows.request(self._ctx, self.id, "pause"))

    async def apause(self) -> str:
        """`pause`, awaited."""
        return await self._ado(flows.request(self._ctx, self.id, "pause"))

    def resume(self) -> str:
        """Let a paused or stuck run go on, or a waiting one look again: it is queued for a worker."""
        return self._do(flows.request(self._ctx, self.id, "resume"))

    async def aresume(self) -> str:
        """`resume`, awaited."""
        return await self._ado(flows.request(self._ctx, self.id, "resume"))

    def rollback(self) -> str:
        """Undo what the run did: its effects, newest first. A worker, or waiting for its result, does it."""
        return self._do(flows.request(self._ctx, self.id, "rollback"))

    async def arollback(self) -> str:
        """`rollback`, awaited."""
        return await self._ado(flows.request(self._ctx, self.id, "rollback"))

    def resolve(
        self, step: Step | str | int, *, done: Any = _NO_VALUE, not_done: bool = False, who: str = "operator"
    ) -> None:
        """Settle an effect in doubt, by a person who looked: it happened, with this result; or it did not."""
        self._do(flows.resolve(self._ctx, self.id, step, _verdict(done, not_done), who))

    async def aresolve(
        self, step: Step | str | int, *, done: Any = _NO_VALUE, not_done: bool = False, who: str = "operator"
    ) -> None:
        """`resolve`, awaited."""
        await self._ado(flows.resolve(self._ctx, self.id, step, _verdict(done, not_done), who))

    # --- the same, as flows

    def _do(self, flow: Flow[T]) -> T:
        return drive(self._ctx.driver, flow)

    async def _ado(self, flow: Flow[T]) -> T:
        return await adrive(self._ctx.driver, flow)

    def _next_job(self, tenant: int, row: RunRow) -> Flow[Job | None]:
        """Something of this run's family to do here."""
        from perdure.runs.engine.local import Job

        runtime = runtime_of(self._ctx)
        found = yield from flows.next_in_family(self._ctx, tenant, row.root, runtime, self._lease_us, self._due)
        if found is None:
            return None
        claimed, spec = found
        return Job(self._ctx, runtime, tenant, claimed, spec, lease_us=self._lease_us, keep_us=self._keep_us)

    def _go_on(self, tenant: int, job: Job) -> None:
        """Run it, and whatever of its family is due then, until all is finished or parked."""
        next_job: Job | None = job
        while next_job is not None:
            status = next_job.run()
            if status in FINISHED and next_job.execution.row.id == self.id:
                return
            row = self._do(flows.locate(self._ctx, self.id))[1]
            next_job = None if row.status in FINISHED else self._do(self._next_job(tenant, row))

    async def _ago_on(self, tenant: int, job: Job) -> None:
        next_job: Job | None = job
        while next_job is not None:
            status = await next_job.arun()
            if status in FINISHED and next_job.execution.row.id == self.id:
                return
            row = (await self._ado(flows.locate(self._ctx, self.id)))[1]
            next_job = None if row.status in FINISHED else await self._ado(self._next_job(tenant, row))

    def _outcome(self, row: RunRow, text: bytes | None) -> Any:
        if row.status == "done":
            return decode(decompress(text or b"null"), self._ctx.codec)
        raise outcome_error(row.status, self.id, text, self._ctx.codec)

    def _raw_result(self) -> Any:
        """The result of a finished run in a readable form that needs no classes: for tools."""
        tenant, row = self._do(flows.locate(self._ctx, self.id))
        text = self._do(flows.outcome(tenant, row))
        if row.status == "done":
            return decode(decompress(text or b"null"), self._ctx.codec, raw=True)
        raise outcome_error(row.status, self.id, text, self._ctx.codec)

    def _deadline(self, path: str) -> datetime | None:
        """Until when the request of an effect may still arrive: for tools."""
        tenant, row = self._do(flows.locate(self._ctx, self.id))
        found: list[Recorded] = self._do(read(partial(journal.read_journal, tenant, row)))
        more = [recorded.entry.more or {} for recorded in found if recorded.entry.path == path]
        return next((moment(part["deadline"]) for part in reversed(more) if "deadline" in part), None)

    def _check_waiting(self, row: RunRow, tasks: list[Task], deadline: float | None) -> None:
        info = RunInfo.of(row)
        if row.status == "stuck":
            what = info.waiting_for or {}
            raise RunStuck(
                f"run {self.id!r} is stuck: {what.get('type', '')}: {what.get('error', '')} "
                f"(mend the cause, then run the same line again, or `perdure run resume {self.id}`)"
            )
        for task in tasks:
            if task not in self._warned:
                found = event("run.waits", run=task.run, step=task.step, kind=task.kind)
                _log.warning("run %s %s", self.id, self._asked_of(task), extra=found)
        self._warned = set(tasks)
        if deadline is not None and time.monotonic() >= deadline:
            asked = [self._asked_of(task) + (f" ({task.reason})" if task.reason else "") for task in tasks]
            reason = "; ".join(asked) or f"is {row.status}, waiting for {waits_for(info) or 'a worker'}"
            raise TimeoutError(f"run {self.id!r} has no result yet: it {reason}")

    def _asked_of(self, task: Task) -> str:
        via = "" if task.run == self.id else f"waits for run {task.run}, which "
        return f"{via}{task.text}. To continue: {task.command}"

    def _news(self, after: int) -> Flow[tuple[RunRow, list[Event]]]:
        tenant, row = yield from flows.locate(self._ctx, self.id)
        found: list[Recorded] = yield from read(partial(journal.read_after, tenant, row, after))
        events = []
        for recorded in found:
            key = blob_in(recorded.entry)
            bodies = yield from flows.bodies_of(tenant, [] if key is None else [key])
            events.append(self._event(recorded, bodies))
        return row, events

    def _event(self, recorded: Recorded, bodies: Mapping[bytes, bytes]) -> Event:
        entry = recorded.entry
        text = value_text(entry, bodies)
        value = decode(text, self._ctx.codec, raw=True) if text is not None else noted(entry.more)
        kind = "emit" if recorded.kind == NOTE else KIND_NAMES.get(recorded.kind, str(recorded.kind))
        return Event(kind, entry.path, entry.name, value, moment(entry.at), recorded.seq)

    def _listen(self, live: list[Event]) -> Any:
        tenant, row = self._do(flows.locate(self._ctx, self.id))

        def heard(path: str, name: str, chunk: Any) -> None:
            live.append(Event("chunk", path, name, chunk, datetime.now(UTC)))

        return runtime_of(self._ctx).listen(tenant, row.run, heard)


class _Follower:
    """Which entries were not given yet. Parallel branches commit in any order: a number may come after a greater."""

    def __init__(self, after: int) -> None:
        self.floor = after  # all up to here were given
        self._beyond: set[int] = set()
        self._waiting_since: float | None = None

    def fresh(self, row: RunRow, found: list[Event]) -> list[Event]:
        self.floor = max(self.floor, row.since, row.origin_seq)  # its own numbers begin behind these
        new = [event for event in found if event.seq not in self._beyond and (event.seq or 0) > self.floor]
        self._beyond.update(event.seq or 0 for event in new)
        while self.floor + 1 in self._beyond:
            self.floor += 1
            self._beyond.discard(self.floor)
        if not self._beyond:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > _HOLE_S:  # whoever drew the number has not written anything
            self.floor, self._waiting_since = max(self._beyond), None
            self._beyond.clear()
        return new


def _drained(live: list[Event]) -> list[Event]:
    taken = live[:]
    del live[: len(taken)]
    return taken


def _pauses() -> Iterator[float]:
    yield from _POLL_S
    while True:
        yield _POLL_S[-1]


def _verdict(done: Any, not_done: bool) -> dict[str, Any]:
    if (done is _NO_VALUE) != not_done:
        raise UsageError("resolve(): say done=RESULT or not_done=True, one of them")
    return {"not_done": True} if not_done else {"done": done}
