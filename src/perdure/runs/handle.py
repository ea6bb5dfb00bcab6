"""`Run`, the handle of a run: wait for its result, read its steps, control it. Each operation is blocking and async."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perdure.errors import RunStuck, UsageError
from perdure.runs.calls.children import outcome_error
from perdure.runs.engine import flows, reading, searching
from perdure.runs.engine.claims import Hold, holding
from perdure.runs.engine.following import Follower
from perdure.runs.engine.models import Event, Step
from perdure.runs.engine.reading import Message, Outline, RunOutcome, Values
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.waiting import PersonTask, waits_for
from perdure.runs.journal import journal
from perdure.runs.journal.entries import decompress
from perdure.runs.journal.rows import FINISHED
from perdure.runs.run_table import RunInfo, RunRow
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive, either, read, sleep
from perdure.storage.twins import awaited, blocking
from perdure.threads.actions import noted
from perdure.threads.checks import check_limit, check_name
from perdure.values.codec import decode

if TYPE_CHECKING:
    import typing_extensions

    from perdure.runs.engine.local import RunExecution
    from perdure.threads.context import StoreContext
    from perdure.threads.models import Change

    Result = typing_extensions.TypeVar("Result", covariant=True, default=Any)  # `Run` alone is Run[Any]
else:
    Result = TypeVar("Result", covariant=True)  # defaults of type variables are younger than Python 3.11

T = TypeVar("T")
_log = logging.getLogger("perdure")
_POLL_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_NO_VALUE: Any = object()


class Run(Generic[Result]):
    """One execution of a durable function that returns a `Result`. `store.run`, `store.start`, `get_run` return it.

    `status` is what this handle last saw: `refresh`, `result` and the calls that control the run update it.
    """

    def __init__(self, ctx: StoreContext, run_id: str, status: str, *, drives: bool = False) -> None:
        self._ctx = ctx
        self._drives = drives  # True: result() executes the run in this process
        self._due: list[RunRow] = []  # due runs of its family: see next_in_family
        self._warned: set[PersonTask] = set()  # tasks that were logged: each is logged once
        self._status = status
        self.id = run_id

    def __repr__(self) -> str:
        return f"<Run {self.id!r}>"

    @property
    def status(self) -> str:
        """The status that this handle last saw. `refresh()` reads the current one.

        One of queued, running, waiting, paused, stuck, done, failed, cancelled, undone, exported.
        """
        return self._status

    @blocking
    def refresh(self) -> Flow[RunInfo]:
        """Read the run's current status, what it waits for, how often it was claimed and when it changed."""
        tenant, row = yield from self._locate()
        return (yield from reading.infos(tenant, [row]))[0]

    arefresh = awaited(refresh)

    @blocking
    def result(self, timeout_s: float | None = None) -> Flow[Result]:
        """Wait for the run to end and return what its function returned. Execute it here if this process may.

        If the run waits for a person (a question, an effect in doubt, a pause), a warning is logged once, with the
        command that ends the wait. Raises RunFailed (the error is its cause), RunCancelled, RunUndone or RunStuck.
        After `timeout_s` it raises TimeoutError, which says what the run waits for.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return holding(runtime_of(self._ctx).hold(self._ctx), partial(self._result, deadline))

    aresult = awaited(result)

    @blocking
    def steps(
        self, *, after: Step | str | None = None, limit: int | None = None, values: Values = True
    ) -> Flow[list[Step]]:
        """Return the journaled calls so far, in the order they began.

        With `limit`, return a page; `after` is the last step of the page before, or its `cursor`. A page reads its part
        of the journal only. `values="small"` leaves out results of 64 KB and more, which are stored apart:
        `result_bytes` is their size. `values=False` leaves out all results and arguments.
        """
        return reading.steps(self._ctx, self.id, values, after, check_limit(limit))

    asteps = awaited(steps)

    @blocking
    def step(self, step: Step | str | int) -> Flow[Step]:
        """Return one journaled call, with its values. `step` is a path, a number or a Step. Raises NotFound."""
        return reading.step(self._ctx, self.id, step)

    astep = awaited(step)

    @blocking
    def find_step(self, text: str, *, limit: int = 100) -> Flow[list[Step]]:
        """Return the first calls whose name, path, kind, status, key or error contains a text, without values."""
        return reading.find_steps(self._ctx, self.id, text, limit)

    afind_step = awaited(find_step)

    @blocking
    def outline(self, before: Outline | None = None) -> Flow[Outline]:
        """Return all calls so far in brief: kind, status and times of each. Quick for many thousands of steps.

        `before` is an earlier outline of this run: only what was recorded since is then read."""
        return reading.outline(self._ctx, self.id, before)

    aoutline = awaited(outline)

    @blocking
    def arguments(self, *, raw: bool = False) -> Flow[dict[str, Any]]:
        """Return the arguments of the function by name. With `raw`, values of classes are plain data."""
        return reading.arguments(self._ctx, self.id, raw)

    aarguments = awaited(arguments)

    @blocking
    def outcome(self, *, raw: bool = False) -> Flow[RunOutcome | None]:
        """Return how the run ended, with its result or its error and traceback; None if it has not ended.

        Unlike `result` it neither waits nor executes the run, and raises no error of the run."""
        return reading.outcome(self._ctx, self.id, raw)

    aoutcome = awaited(outcome)

    @blocking
    def children(self, *, before: str | None = None, limit: int | None = 100) -> Flow[list[RunInfo]]:
        """Return the runs that this run started, the newest first. `before` is the `cursor` of the last one."""
        rows = yield from searching.find_runs(self._ctx, {"parent": self.id}, before, check_limit(limit))
        return (yield from reading.infos((yield from self._ctx.tenant()) or 0, rows))

    achildren = awaited(children)

    @blocking
    def forks(self, *, limit: int | None = 100) -> Flow[list[RunInfo]]:
        """Return the runs that were forked from this run, the newest first."""
        return reading.forks(self._ctx, self.id, check_limit(limit))

    aforks = awaited(forks)

    @blocking
    def can_undo(self) -> Flow[bool]:
        """Return whether the run has effects with an undo that were not undone yet, or children."""
        return reading.can_undo(self._ctx, self.id)

    acan_undo = awaited(can_undo)

    @blocking
    def messages(self) -> Flow[list[Message]]:
        """Return the messages that were sent to the run, the oldest first, whether received or not."""
        return reading.messages(self._ctx, self.id)

    amessages = awaited(messages)

    @blocking
    def state_at(self, step: Step | str | int | None = None) -> Flow[Any]:
        """Return `perdure.state()` as it was after a step, without running code.

        `step` is a path, a number or a Step; None means the newest. The result is None if the run had no state yet. For
        a step in a parallel branch, it is the state that the branch saw.
        """
        from perdure.runs.history import state_history

        return state_history.state_at(self._ctx, self.id, step)

    astate_at = awaited(state_at)

    @blocking
    def diff(self, a: Step | str | int, b: Step | str | int | None = None) -> Flow[list[Change]]:
        """Return the changes of `perdure.state()` from step `a` to step `b`, path by path.

        `b=None` means the newest step. Step 0 is the empty state."""
        from perdure.runs.history import state_history

        return state_history.diff(self._ctx, self.id, a, b)

    adiff = awaited(diff)

    def stream(self, after: str = "", *, recorded: bool = True) -> Iterator[Event]:
        """Yield the run's events until it ends, from its beginning or after the `cursor` of an event.

        These are the entries of its journal and, while a step runs in any process, what its body emits. Each is yielded
        once, in order. See `Event` for their kinds. `recorded=False` leaves out the entries that exist already, and
        begins with what the steps that run now have emitted. Raises UsageError at once if `after` is not a cursor.
        """
        return self._events(Follower(self._ctx, self.id, after, recorded=recorded))

    def _events(self, follower: Follower) -> Iterator[Event]:
        while not follower.is_over:
            yield from self._run(follower.more())

    def astream(self, after: str = "", *, recorded: bool = True) -> AsyncIterator[Event]:
        """Async twin of `stream`."""
        return self._aevents(Follower(self._ctx, self.id, after, recorded=recorded))

    async def _aevents(self, follower: Follower) -> AsyncIterator[Event]:
        while not follower.is_over:
            for item in await self._arun(follower.more()):
                yield item

    @blocking
    def cancel(self, *, undo: bool = True, who: str | None = None) -> Flow[str]:
        """Stop the run and its children for good, undo their effects, and return the status.

        "cancelled" means that there was nothing to undo. "queued" means that a worker, `result()` or the line that
        started the run first settles its effects and undoes them, newest first. "running" means that the process which
        runs it does this at its next step. With `undo=False` the run ends at once and its effects stand; this raises
        RunError while a process runs it. `who` is recorded in `store.ops.actions()`, as in the calls below.
        """
        return self._request("cancel" if undo else "end", who, undo=None if undo else False)

    acancel = awaited(cancel)

    @blocking
    def pause(self, *, who: str | None = None) -> Flow[str]:
        """Stop the run at its next step, until `resume`. Returns the status."""
        return self._request("pause", who)

    apause = awaited(pause)

    @blocking
    def resume(self, *, who: str | None = None) -> Flow[str]:
        """Queue a paused or stuck run again, or have a waiting run check its condition now. Returns the status."""
        return self._request("resume", who)

    aresume = awaited(resume)

    @blocking
    def retry(self, *, who: str | None = None) -> Flow[str]:
        """Queue a failed run again and return the status.

        It continues with the current code at the call that failed, which runs again. Earlier results stand. Raises
        RunError if its effects were undone."""
        from perdure.runs.engine import retrying

        self._status = yield from self._noted(who, "retry", retrying.retry(self._ctx, self.id))
        return self._status

    aretry = awaited(retry)

    @blocking
    def undo(self, *, who: str | None = None) -> Flow[str]:
        """Request that the run's effects be undone, newest first, and return the status.

        A worker or `result()` does it, or the process that runs it at its next step."""
        return self._request("undo", who)

    aundo = awaited(undo)

    @blocking
    def resolve(
        self, step: Step | str | int, *, done: Any = _NO_VALUE, not_done: bool = False, who: str | None = None
    ) -> Flow[None]:
        """Settle an effect in doubt after checking it: it happened (`done=RESULT`), or it did not (`not_done=True`)."""
        if (done is _NO_VALUE) != not_done:
            raise UsageError("resolve(): say done=RESULT or not_done=True, one of them")
        verdict = {"not_done": True} if not_done else {"done": done}
        resolving = flows.resolve(self._ctx, self.id, step, verdict, who or "operator")
        about = {"step": getattr(step, "path", step), "verdict": "not done" if not_done else "done"}
        yield from self._noted(who, "resolve", resolving, **about)

    aresolve = awaited(resolve)

    # --- flows

    def _run(self, flow: Flow[T]) -> T:
        return drive(self._ctx.driver, flow)

    async def _arun(self, flow: Flow[T]) -> T:
        return await adrive(self._ctx.driver, flow)

    def _locate(self) -> Flow[tuple[int, RunRow]]:
        tenant, row = yield from flows.locate(self._ctx, self.id)
        self._status = row.status
        return tenant, row

    def _request(self, wish: str, who: str | None, **details: Any) -> Flow[str]:
        action = "cancel" if wish == "end" else wish
        self._status = yield from self._noted(who, action, flows.request(self._ctx, self.id, wish), **details)
        return self._status

    def _noted(self, who: str | None, action: str, flow: Flow[T], **details: Any) -> Flow[T]:
        return noted(self._ctx, who, action, f"run {self.id}", flow, **details)

    def _result(self, deadline: float | None, hold: Hold) -> Flow[Result]:
        for pause in _pauses():
            tenant, row = yield from self._locate()
            if row.status in FINISHED:
                result: Result = yield from self._outcome(tenant, row)
                return result
            self._check_waiting(row, (yield from flows.tasks_of_people(self._ctx, tenant, row)), deadline)
            job = (yield from self._next_job(tenant, row, hold)) if self._drives else None
            if job is None and not self._ctx.linger_s and row.status != "running":  # a test's clock stands still
                self._check_waiting(row, (yield from flows.tasks_of_people(self._ctx, tenant, row)), 0.0)
            yield from sleep(pause) if job is None else either(job.run, job.arun)
        raise AssertionError("pauses never end")

    def _next_job(self, tenant: int, row: RunRow, hold: Hold) -> Flow[RunExecution | None]:
        """Claim a due run of this run's family, to be executed here. Return None if there is none."""
        from perdure.runs.engine.local import RunExecution

        claimed = yield from flows.next_in_family(self._ctx, tenant, row.root, self._due, hold)
        return None if claimed is None else RunExecution(self._ctx, tenant, *claimed)

    def _drive_family(self, tenant: int, job: RunExecution, hold: Hold) -> Flow[None]:
        """Execute `job` and then the due runs of its family, until this run is finished or none is due."""
        next_job: RunExecution | None = job
        while next_job is not None:
            status = yield from either(next_job.run, next_job.arun)
            if status in FINISHED and next_job.execution.row.id == self.id:
                self._status = status
                return
            _, row = yield from self._locate()
            next_job = None if row.status in FINISHED else (yield from self._next_job(tenant, row, hold))

    def _outcome(self, tenant: int, row: RunRow, *, raw: bool = False) -> Flow[Any]:
        """Return the result of a finished run, or raise its error. With `raw`, decoding needs no classes."""
        text = yield from read(partial(journal.outcome_of, tenant, row))
        if row.status == "done":
            return decode(decompress(text or b"null"), self._ctx.codec, raw=raw)
        raise outcome_error(row.status, self.id, text, self._ctx.codec)

    def _raw_result(self) -> Any:
        """Return the result of a finished run, decoded without its classes, for tools."""
        return self._run(self._outcome(*self._run(self._locate()), raw=True))

    def _check_waiting(self, row: RunRow, tasks: list[PersonTask], deadline: float | None) -> None:
        info = RunInfo.of(row)
        if row.status == "stuck":
            advice = f" (fix the cause, then run the same line again, or `perdure run resume {self.id}`)"
            raise RunStuck(
                f"run {self.id!r} is stuck: {info.waiting_for.shown if info.waiting_for else ''}"
                f"{'' if self._ctx.refuses_effects else advice}"
            )
        if tasks and self._ctx.refuses_effects:  # no other process can reach a sandbox
            how = f"No other process reaches a sandbox: box.store.answer({tasks[0].run!r}, …), then result()"
            raise RunStuck(f"run {self.id!r} {tasks[0].text}. {how}")
        for task in tasks:
            if task not in self._warned:
                fields = event("run.waits", run=task.run, step=task.step, kind=task.kind)
                _log.warning("run %s %s", self.id, self._asked_of(task), extra=fields)
        self._warned = set(tasks)
        if deadline is not None and time.monotonic() >= deadline:
            asked = [self._asked_of(task) + (f" ({task.reason})" if task.reason else "") for task in tasks]
            waits = "" if row.status == "running" else f", waiting for {waits_for(info) or 'a worker'}"
            reason = "; ".join(asked) or f"is {row.status}{waits}"
            raise TimeoutError(f"run {self.id!r} has no result yet: it {reason}")

    def _asked_of(self, task: PersonTask) -> str:
        via = "" if task.run == self.id else f"waits for run {task.run}, which "
        return f"{via}{task.text}. To continue: {task.command}"


def _pauses() -> Iterator[float]:
    yield from _POLL_S
    while True:
        yield _POLL_S[-1]


def run_id_of(ctx: StoreContext, run: str | Run) -> str:
    """Return the id of a run. Raises UsageError for a handle of another store or tenant: ids are not unique there."""
    if not isinstance(run, Run):
        return check_name(run, "run")
    if not ctx.is_same_tenant(run._ctx):
        raise UsageError(f"{run!r} belongs to another store or tenant: use the store that it came from")
    return run.id
