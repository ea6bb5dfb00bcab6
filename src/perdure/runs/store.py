"""The part of a store (`ops/store.py`) that runs durable functions and manages their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from perdure.errors import UsageError
from perdure.runs.calls import saving
from perdure.runs.calls.asks import AnswerReceipt
from perdure.runs.calls.decorators import durable_call
from perdure.runs.calls.timeouts import check_seconds
from perdure.runs.engine import flows, reading, searching, thread_answers
from perdure.runs.engine.claims import Hold, holding
from perdure.runs.engine.local import RunExecution
from perdure.runs.engine.models import Question, Step, question_of, step_name
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.searching import Counts, Dimension, RunConditions
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.handle import Run, run_id_of
from perdure.runs.journal import keyed
from perdure.runs.journal.rows import NewRun
from perdure.runs.run_table import RunInfo, RunRow
from perdure.storage.program import Flow, Program, Progress, either, write
from perdure.storage.twins import awaited, blocking
from perdure.threads.actions import noted
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import Handle, StoreContext
from perdure.threads.externals import referring

if TYPE_CHECKING:  # imported where they are used: most programs need none of them
    from perdure.runs.engine.bulk import Action, BulkResult
    from perdure.runs.history.replay import Replay


class RunStore(Handle):
    """Starts, lists and controls the runs of one tenant."""

    def __init__(self, context: StoreContext) -> None:
        saving.install()
        self._context = context
        self._runtime = runtime_of(context)

    @blocking
    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        tags: Mapping[str, str | int] | None = None,
        **kwargs: Any,
    ) -> Flow[Run]:
        """Start or resume a durable function in this process, and return when it is finished or parked.

        If a run with this id exists, it is resumed when it is parked, stopped or stuck. A finished run is returned as
        it is, and a paused one stays paused. For a run that another process executes, the handle's `result()` waits.
        Other arguments under the same id raise RunMismatch. `runs(tags=…)` finds a run by the tags that it began with.
        """
        spec, args = durable_call(fn, args)
        new = flows.new_run(self._context, spec, args, kwargs, id, queue, priority, tags=tags, here=True)
        return holding(self._runtime.hold(self._context), partial(self._run_here, spec, new))

    arun = awaited(run)

    @blocking
    def start(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        id: str | None = None,
        queue: str = "default",
        priority: int = 0,
        delay_s: float = 0.0,
        tags: Mapping[str, str | int] | None = None,
        key: str | None = None,
        debounce_s: float | None = None,
        singleton: Literal["join", "refuse"] | None = None,
        **kwargs: Any,
    ) -> Flow[Run]:
        """Queue a durable function for any worker. A second call with the same id returns the same run.

        `debounce_s` starts the run when that time has passed without another call: each call with the same function
        and `key` replaces the arguments, and the last one runs. `singleton` allows one open run of the function and
        `key`: while there is one, "join" returns it, and "refuse" raises Conflict.
        """
        wake_at = self._context.clock_us() + int(check_seconds(delay_s, "start(delay_s=…)") * 1e6) if delay_s else 0
        spec, args = durable_call(fn, args)
        new = flows.new_run(self._context, spec, args, kwargs, id, queue, priority, wake_at, tags=tags, here=False)
        if key is None and debounce_s is None and singleton is None:
            _, row, _ = yield from flows.begin(self._context, new)
            return self._handle(row.id, row.status)
        op = _keyed_start(new, key, debounce_s, singleton, has_more=bool(id or delay_s or tags))
        tenant = yield from self._context.ensure_tenant()
        starting = partial(write, partial(op, tenant, now=self._context.clock_us()))
        row = yield from referring(self._context, new.values, starting)
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
        statuses: str | Sequence[str] | None = None,
        function: str | None = None,
        version: str | None = None,
        queue: str | None = None,
        tags: Mapping[str, str | int] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        id_prefix: str | None = None,
        parent: str | Run | None = None,
        tasks: bool = False,
        before: str | None = None,
        limit: int | None = 100,
    ) -> Flow[list[RunInfo]]:
        """List the runs that meet all conditions, the newest first.

        `since` and `until` concern the time when a run was created. `before` is the `cursor` of the last run of a page:
        the next page begins after it, whatever was started since. A run that stands for a task of a graph is listed
        only while it waits for a person, unless `tasks` is True.
        """
        where = RunConditions(
            statuses=statuses, function=function, version=version, queue=queue, tags=tags, since=since, until=until,
            id_prefix=id_prefix, parent=parent, tasks=tasks,
        )  # fmt: skip
        rows = yield from searching.find_runs(self._context, where, before, check_limit(limit))
        return (yield from reading.infos((yield from self._context.tenant()) or 0, rows))

    aruns = awaited(runs)

    @blocking
    def count_runs(
        self, by: Dimension = "status", *, limit: int | None = 1000, **where: Unpack[RunConditions]
    ) -> Flow[Counts]:
        """Count the runs that meet the conditions of `runs`, by "status", "function", "version" or "queue".

        With conditions on these four alone, every run is counted. With others the count stops at `limit` runs, the
        newest ones, and `is_partial` of the result is True. None counts all, however long it takes.
        """
        most = check_limit(limit)
        return searching.count_runs(self._context, where, by, 2**61 if most is None else most)

    acount_runs = awaited(count_runs)

    @blocking
    def questions(self, run: str | Run | None = None, *, all: bool = False, limit: int = 1000) -> Flow[list[Question]]:
        """List the questions that runs and graphs wait for, oldest first. With `all`, include the answered ones.

        `run` selects the questions of one run, or of the graph's thread of that name. An answered question of a graph
        is listed until its graph has continued.
        """
        run_id = None if run is None else run_id_of(self._context, run)
        asks = yield from flows.list_asks(self._context, run_id, all, limit)
        of_runs = [question_of(row, self._context.codec) for row in asks]
        if isinstance(run, Run):
            return of_runs
        of_threads = yield from thread_answers.list_questions(self._context, run_id, all, limit)
        return sorted([*of_runs, *of_threads], key=lambda question: question.asked_at)[:limit]

    aquestions = awaited(questions)

    @blocking
    def answer(
        self, run: str | Run, value: Any, *, step: Step | str | int | None = None, who: str | None = None
    ) -> Flow[AnswerReceipt]:
        """Answer the open question of a run, or of the graph's thread of that name. With several, `step` says which.

        Raises AnswerRefused with the reason. The run is resumed by a worker, or by a process that waits for its result.
        A graph is resumed by a worker that was given it, or when it is invoked again with None. `who` is stored with
        the answer ("operator" if it is None), and recorded in `ops.actions()`.
        """
        ctx, run_id = self._context, run_id_of(self._context, run)
        of_thread = [] if isinstance(run, Run) else (yield from thread_answers.list_questions(ctx, run_id, False, 1000))
        asked = [question.path for question in of_thread]
        is_of_run = isinstance(run, Run) or (yield from flows.exists(ctx, run_id))
        if step is None:
            open_asks = yield from flows.list_asks(ctx, run_id, False, 1000)
            paths = [*(str(row[1]) for row in open_asks), *asked]
            if len(paths) != 1:
                yield from thread_answers.check_asks(ctx, run_id, is_of_run)
                raise UsageError(
                    f"{run_id!r} has {len(paths)} open questions"
                    + (f" (steps {', '.join(paths)}): say which with step=" if paths else ": nothing to answer")
                )
            step = paths[0]
        if step in asked or not is_of_run:
            yield from thread_answers.check_asks(ctx, run_id, is_of_run)
            answering = thread_answers.answer(ctx, run_id, step_name(step), value, who or "operator")
            return (yield from noted(ctx, who, "answer", f"thread {run_id}", answering, step=step_name(step)))
        path = yield from flows.path_of(ctx, run_id, step)
        answering = flows.answer(ctx, run_id, path, value, who or "operator")
        return (yield from noted(ctx, who, "answer", f"run {run_id}", answering, step=path))

    aanswer = awaited(answer)

    @blocking
    def send(
        self, run: str | Run, value: Any, *, topic: str = "", key: str | None = None, who: str | None = None
    ) -> Flow[None]:
        """Send a message to a run, which reads it with `perdure.receive`. Messages with the same `key` arrive once."""
        run_id = run_id_of(self._context, run)
        sending = flows.send(self._context, run_id, value, topic, key)
        return noted(self._context, who, "send", f"run {run_id}", sending, topic=topic or None)

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
        who: str | None = None,
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
        forking = noted(
            self._context, who, "fork", f"run {run_id_of(self._context, run)}", fork.fork(self._context, request), id=id
        )
        return self._handle(*(yield from forking), drives=True)

    afork = awaited(fork)

    @blocking
    def bulk(
        self,
        action: Action,
        *runs: str | Run,
        undo: bool = True,
        progress: Progress | None = None,
        who: str | None = None,
        **where: Unpack[RunConditions],
    ) -> Flow[BulkResult]:
        """Cancel, pause, resume, retry or undo many runs: those named, or those that meet the conditions of `runs`.

        Without `statuses` the conditions select the runs that the action is for: "retry" the failed ones. With
        `undo=False` cancelled runs end at once and their effects stand. Runs are changed in chunks, and a run that
        cannot be changed stops no other. `progress` is called with (done, total).
        """
        from perdure.runs.engine.bulk import bulk

        ids = [run_id_of(self._context, run) for run in runs]
        work = bulk(self._context, action, ids, where, undo, progress)
        return noted(self._context, who, action, "runs", work, **_bulk_details(ids, where))

    abulk = awaited(bulk)

    @blocking
    def retry(self, *runs: str | Run, who: str | None = None, **where: Unpack[RunConditions]) -> Flow[BulkResult]:
        """Queue failed runs again: those named, or those that meet the conditions of `runs`.

        Each continues with the current code at the call that failed. Earlier results and effects stand."""
        from perdure.runs.engine.bulk import bulk

        ids = [run_id_of(self._context, run) for run in runs]
        work = bulk(self._context, "retry", ids, where, True, None)
        return noted(self._context, who, "retry", "runs", work, **_bulk_details(ids, where))

    aretry = awaited(retry)

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
        flows.check_no_member(row, "replayed")
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


def _bulk_details(ids: Sequence[str], where: RunConditions) -> dict[str, Any]:
    """Return what a record says about a bulk operation: at most 100 of the ids."""
    return {"count": len(ids) or None, "runs": ids[:100], "where": {name: str(one) for name, one in where.items()}}


def _keyed_start(
    new: NewRun,
    key: str | None,
    debounce_s: float | None,
    singleton: Literal["join", "refuse"] | None,
    *,
    has_more: bool,
) -> Callable[..., Program[RunRow]]:
    """Return the program that starts a debounced run or a singleton. Raises UsageError."""
    if (debounce_s is None) == (singleton is None):
        raise UsageError("start(key=…): say what the key is for, debounce_s=… or singleton=…, one of them")
    new = new._replace(key=f"{new.function}:{'' if key is None else check_name(key, 'key')}")
    if singleton is not None:
        if singleton not in ("join", "refuse"):
            raise UsageError(f'start(singleton={singleton!r}): "join" or "refuse"')
        return partial(keyed.start_single, new=new, mode=singleton)
    window_us = int(check_seconds(debounce_s, "start(debounce_s=…)") * 1e6)
    if window_us <= 0:
        raise UsageError(f"start(debounce_s={debounce_s!r}): a number of seconds above 0")
    if has_more:
        raise UsageError("start(debounce_s=…): id=, delay_s= and tags= are of one call, and the run may be of another")
    return partial(keyed.start_debounced, new=new, window_us=window_us)
