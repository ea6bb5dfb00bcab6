"""The part of a store (`ops/store.py`) that runs durable functions and manages their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import UsageError
from perdure.runs.calls import saving
from perdure.runs.calls.asks import AnswerReceipt
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.calls.timeouts import check_seconds
from perdure.runs.engine import flows
from perdure.runs.engine.claims import Hold, holding
from perdure.runs.engine.local import RunExecution
from perdure.runs.engine.models import Question, RunInfo, Step, question_of
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.handle import Run, run_id_of
from perdure.runs.journal import control
from perdure.runs.journal.rows import STATUSES, NewRun
from perdure.storage.program import Flow, either, read
from perdure.storage.twins import awaited, blocking
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import Handle, StoreContext

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.runs.history.replay import Replay

_ALL = 2**62


class RunStore(Handle):
    """Starts, lists and controls the runs of one tenant."""

    def __init__(self, context: StoreContext) -> None:
        saving.install()
        self._context = context
        self._runtime = runtime_of(context)

    @blocking
    def run(
        self,
        /,
        fn: Callable[..., Any],
        *args: Any,
        id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        **kwargs: Any,
    ) -> Flow[Run]:
        """Start or resume a durable function in this process, and return when it is finished or parked.

        If a run with this id exists, it is resumed when it is parked, stopped or stuck. A finished run is returned as
        it is, and a paused one stays paused. For a run that another process executes, the handle's `result()` waits.
        Other arguments under the same id raise RunMismatch.
        """
        spec = durable_spec(fn)
        new = flows.new_run(self._context, spec, args, kwargs, id, queue, priority, here=True)
        return holding(self._runtime.hold(self._context), partial(self._run_here, spec, new))

    arun = awaited(run)

    @blocking
    def start(
        self,
        /,
        fn: Callable[..., Any],
        *args: Any,
        id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay_s: float = 0.0,
        **kwargs: Any,
    ) -> Flow[Run]:
        """Queue a durable function for any worker. A second call with the same id returns the same run."""
        wake_at = self._context.clock_us() + int(check_seconds(delay_s, "start(delay_s=…)") * 1e6) if delay_s else 0
        new = flows.new_run(self._context, durable_spec(fn), args, kwargs, id, queue, priority, wake_at, here=False)
        _, row, _ = yield from flows.begin(self._context, new)
        return self._handle(row.id, row.status)

    astart = awaited(start)

    @blocking
    def get_run(self, id: str) -> Flow[Run]:
        """Return a handle of an existing run. Raises NotFound."""
        _, row = yield from flows.locate(self._context, check_name(id, "run"))
        return self._handle(row.id, row.status)

    aget_run = awaited(get_run)

    @blocking
    def runs(
        self,
        *,
        status: str | None = None,
        function: str | None = None,
        queue: str | None = None,
        limit: int | None = 100,
        tasks: bool = False,
    ) -> Flow[list[RunInfo]]:
        """List runs, the newest first.

        A run that stands for a task of a graph is listed only while it waits for a person, unless `tasks` is True."""
        if status is not None and status not in STATUSES:
            raise UsageError(f"status={status!r}: one of {', '.join(STATUSES)}")
        for what, name in (("function", function), ("queue", queue)):
            if name is not None:
                check_name(name, what)
        most = check_limit(limit)
        tenant = yield from self._context.tenant()
        if tenant is None:
            return []
        wanted = partial(control.listed, tenant, status=status, function=function, queue=queue, tasks=tasks)
        found = yield from read(partial(wanted, before=_ALL, limit=_ALL if most is None else most))
        return [RunInfo.of(row) for row in found]

    aruns = awaited(runs)

    @blocking
    def questions(self, run: str | Run | None = None, *, all: bool = False, limit: int = 1000) -> Flow[list[Question]]:
        """List the questions that runs wait for, oldest first. With `all`, include the answered ones."""
        run_id = None if run is None else run_id_of(self._context, run)
        found = yield from flows.list_asks(self._context, run_id, all, limit)
        return [question_of(row, self._context.codec) for row in found]

    aquestions = awaited(questions)

    @blocking
    def answer(
        self, run: str | Run, value: Any, *, step: Step | str | int | None = None, who: str = "operator"
    ) -> Flow[AnswerReceipt]:
        """Answer the open question of a run. If it has several, `step` says which.

        Raises AnswerRefused with the reason. The run is resumed by a worker, or by a process that waits for its result.
        """
        run_id = run_id_of(self._context, run)
        if step is None:
            open_asks = yield from flows.list_asks(self._context, run_id, False, 1000)
            if len(open_asks) != 1:
                yield from flows.locate(self._context, run_id)
                paths = ", ".join(row[1] for row in open_asks)
                raise UsageError(
                    f"run {run_id!r} has {len(open_asks)} open questions"
                    + (f" (steps {paths}): say which with step=" if open_asks else ": nothing to answer")
                )
            step = str(open_asks[0][1])
        path = yield from flows.path_of(self._context, run_id, step)
        return (yield from flows.answer(self._context, run_id, path, value, who))

    aanswer = awaited(answer)

    @blocking
    def send(self, run: str | Run, value: Any, *, topic: str = "", key: str | None = None) -> Flow[None]:
        """Send a message to a run, which reads it with `perdure.receive`. Messages with the same `key` arrive once."""
        return flows.send(self._context, run_id_of(self._context, run), value, topic, key)

    asend = awaited(send)

    @blocking
    def fork(
        self,
        run: str | Run,
        *,
        at: Step | str | int | None = None,
        id: str | None = None,
        changes: Mapping[Any, Any] | None = None,
        keys: Literal["new", "same"] | None = None,
    ) -> Flow[Run]:
        """Create a run that shares another run's history up to and including a step, and continues from there.

        No history is copied. `at` is a step's path, its number or a Step of `run.steps()`. None keeps everything that
        is recorded, 0 nothing. `changes` replaces results of kept steps: `changes={"3": "other"}`. If effects came
        after that point, choose the fork's idempotency keys: with `keys="new"` receivers see new effects, with
        `keys="same"` receivers that honour keys answer as before. Open calls are not shared: a question is asked again.
        The fork is executed by `result()` or by a worker. It undoes only its own effects. A second call with the same
        id returns the same fork.
        """
        from perdure.runs.history import fork

        request = fork.fork_request(self._context, run_id_of(self._context, run), at, id, changes, keys)
        return self._handle(*(yield from fork.fork(self._context, request)), drives=True)

    afork = awaited(fork)

    @blocking
    def delete_run(self, run: str | Run) -> Flow[None]:
        """Delete a finished run and all its records. Its id can then be used again.

        Raises UsageError if it is not finished, or if a fork or an unfinished parent needs it."""
        from perdure.runs.maintenance import retention

        return retention.delete_run(self._context, run_id_of(self._context, run))

    adelete_run = awaited(delete_run)

    @blocking
    def replay(self, run: str | Run, fn: Callable[..., Any] | None = None) -> Flow[Replay]:
        """Run a run's code and answer every call from its journal. No body runs, and the store does not change.

        The replay ends with the function, or at the first call without a recorded result, such as an unanswered
        question. `fn` replays other code against the journal. Raises NonDeterministic where the code diverges from it.
        """
        from perdure.runs.history.replay import ReplayRunner, spec_for

        tenant, row = yield from flows.locate(self._context, run_id_of(self._context, run))
        runner = ReplayRunner(self._context, tenant, row, spec_for(row, fn))
        return (yield from either(runner.run, runner.arun))

    areplay = awaited(replay)

    # --- flows

    def _handle(self, run_id: str, status: str, *, drives: bool = False) -> Run:
        return Run(self._context, run_id, status, drives=drives)

    def _run_here(self, spec: DurableSpec, new: NewRun, hold: Hold) -> Flow[Run]:
        tenant, handle, job = yield from self._begin(spec, new, hold)
        if job is not None:
            yield from handle._drive_family(tenant, job, hold)
        return handle

    def _begin(self, spec: DurableSpec, new: NewRun, hold: Hold) -> Flow[tuple[int, Run, RunExecution | None]]:
        ctx = self._context
        tenant, row, claim = yield from flows.begin(ctx, new, hold)
        args: bytes | None = new.args
        handle = self._handle(row.id, row.status, drives=True)
        if claim is None:
            flows.check_version(row, spec)
            claimed = yield from flows.try_claim(ctx, tenant, row, hold, again=True)
            if claimed is None:
                # It may wait for a child whose process died: execute a due run of its family here.
                job = (yield from handle._next_job(tenant, row, hold)) if row.status == "waiting" else None
                return tenant, handle, job
            (row, claim), args = claimed, None
        return tenant, handle, RunExecution(ctx, tenant, row, spec, claim, args=args)
