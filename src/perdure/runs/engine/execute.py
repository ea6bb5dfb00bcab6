"""Execution of a claimed run: read its journal, call its function, record how it ended.

If the execution was stopped (parked, cancelled, taken over), that decides the run's status, whatever exceptions the
function caught. Only an error of the user's own code fails a run. If `undo_on` names the error, the run's effects are
undone; after any other error they stand. Everything else leaves the run resumable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from blake3 import blake3

from perdure.errors import (
    Busy,
    Damaged,
    DiskFull,
    JournalDamaged,
    KeyMissing,
    LeaseLost,
    NonDeterministic,
    NotFound,
    NotInRun,
    OutcomeUnknown,
    RunError,
    RunStuck,
    RunUndone,
    StoreError,
    Unavailable,
    UsageError,
    ValueProblem,
)
from perdure.runs.calls import saga
from perdure.runs.calls.evidence import environment, records_every_run
from perdure.runs.calls.failures import describe_error, line_of, recorded
from perdure.runs.engine import turns
from perdure.runs.engine.flows import cancel_children
from perdure.runs.engine.parking import give_back, reached
from perdure.runs.engine.retrying import failed_calls
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution, ReplayEnd
from perdure.runs.execution.instrumentation import measured_run
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.operation import Body, Operation, Parked
from perdure.runs.execution.scope import Unwind, current
from perdure.runs.execution.unwinds import Cancelled, ContinueAsNew, Expired, Interrupted, Paused, Undo
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import DurableSpec, find_durable
from perdure.runs.journal import rows, standing
from perdure.runs.journal.blobs import blob_hash, blob_statements
from perdure.runs.journal.entries import compress, decompress
from perdure.runs.journal.journal import read_with_sum
from perdure.runs.journal.rounds import start_over
from perdure.runs.journal.values import OF_VALUE, use
from perdure.runs.run_table import Waiting, all_of
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.storage.program import Statement, read
from perdure.values.codec import encode
from perdure.values.external import encode_noting, keys_of

_log = logging.getLogger("perdure")
# Errors that are not the run's own failure. They leave it stuck: resumable, and not undone.
_STUCK = (NonDeterministic, Damaged, JournalDamaged, RunStuck, ValueProblem, StoreError, ImportError)
# Temporary errors: the run is queued again, due after `_LATER_US`.
PASSING = (Unavailable, Busy, OutcomeUnknown, DiskFull)
_LATER_US = 5_000_000
# Wrong calls of Perdure's API leave the run stuck too, even if a step recorded the error: a person corrects the code.
_WRONG_CALLS = (UsageError, NotInRun)


def execute_run(execution: Execution, spec: DurableSpec, args_text: bytes | None = None) -> Operation[str]:
    """Execute a claimed run as far as possible. Return its status, or "lost" if this process no longer owns it."""
    operation = _execute_run(execution, spec, args_text)
    return operation if (sink := metrics.sink) is None else measured_run(sink, execution, operation)


def _execute_run(execution: Execution, spec: DurableSpec, args_text: bytes | None) -> Operation[str]:
    is_member = execution.row.turn is not None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    try:
        if is_member:
            has_mail = yield from turns.begin(execution)
        else:
            arguments = yield from prepare(execution, args_text)
            args, kwargs = spec.binder.restore(arguments)
            execution.receiver = arguments.get(spec.binder.plan.receiver or "")
    except _STUCK as error:
        return (yield from _stuck(execution, error))
    execution.apply_request(execution.row.request)
    end = saga.ending(execution)
    if is_member and execution.stop is None:
        if not has_mail:
            return (yield from give_back(execution, "waiting", rows.NEVER, Waiting("message", "a message")))
        if end is not None:
            return (yield from _guarded(execution, turns.give_up(execution, spec, end.get("error"))))
        if execution.row.crashes >= turns.options_of(spec).attempts:
            return (yield from _guarded(execution, turns.give_up(execution, spec, None)))
        try:
            args = turns.decode_turn(execution)
        except ValueProblem as error:  # another attempt would not read it either
            described = describe_error(error, execution.ctx.codec)
            return (yield from _guarded(execution, turns.give_up(execution, spec, described)))
    elif end is not None or isinstance(execution.stop, Undo):
        status = "undone" if end is None else str(end["as"])
        reason = None if end is None else end.get("error")
        return (yield from _guarded(execution, _undo_and_finish(execution, status, reason)))
    if spec.timeout_s is not None and not execution.replay:
        execution.deadline_us = execution.row.created_at + int(spec.timeout_s * 1e6)
        execution.check_time()
    result: Any = None
    failure: BaseException | None = None
    if execution.stop is None:
        try:
            result = yield Body(partial(_main, execution, spec, args, kwargs), is_async=spec.is_async)
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = _not_ending(execution, error)
    if (opened := execution.resources) is not None:  # before another process may open its own
        yield Body(opened.aclose if spec.is_async else opened.close, is_async=spec.is_async)
    stop = execution.stop or execution.root.stop
    return (yield from _guarded(execution, _conclude(execution, spec, result, failure, stop)))


def _not_ending(execution: Execution, error: BaseException) -> BaseException:
    """Return the error of a run's code; in a worker, RunStuck in place of one that would end the process.

    If such a run was released instead, it would end the next worker too.
    """
    if not execution.in_worker or isinstance(error, Exception | Unwind):
        return error
    from asyncio import CancelledError

    if isinstance(error, CancelledError):
        return error
    kind = type(error).__name__
    return RunStuck(
        f"its code raised {kind}, which would have ended the process; a run ends by returning or by an error"
    )


def prepare(execution: Execution, args_text: bytes | None) -> Operation[dict[str, Any]]:
    """Read the journal into the index, and return the arguments. Raises JournalDamaged."""
    row = execution.row
    if row.fence > 1 or row.entries or row.origin is not None or execution.replay:
        execution.index.load(*(yield from read(partial(read_with_sum, execution.tenant, row))))
    else:
        execution.index.load((), rows.JournalSum(0, 0, row.seq))
    if args_text is None:
        args_text = yield from read(partial(rows.value_of, execution.tenant, row.run, "args"))
    if args_text is None:
        raise JournalDamaged(f"the arguments of run {row.id!r} are gone; restore it from a backup")
    if type(args_text) is not bytes:  # a worker's claim returns unreadable arguments instead of raising
        raise JournalDamaged(
            f"the arguments of run {row.id!r} were changed or belong to another run; nothing was run. Restore it "
            "from a backup"
        )
    text = decompress(args_text)
    if row.input and row.since == 0 and digest(text) != row.input:  # continue_as_new changes the arguments
        raise JournalDamaged(
            f"the arguments of run {row.id!r} are not those that it was started with; nothing was run. Restore it from "
            "a backup"
        )
    arguments = execution.decoded(text)
    if not isinstance(arguments, dict):
        raise JournalDamaged(f"the arguments of run {row.id!r} are not what this Perdure writes")
    return arguments


def _main(execution: Execution, spec: DurableSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the durable function in the run's scope; an async one as a task of the supervisor."""
    if spec.is_async:
        return execution.supervisor.main(partial(spec.fn, *args, **kwargs))
    token = current.set(execution.root)
    failure: BaseException | None = None
    try:
        return spec.fn(*args, **kwargs)
    except StopIteration as error:  # as Python does for coroutines
        failure = RuntimeError(f"{spec.name} raised StopIteration")
        raise failure from error
    except BaseException as error:
        failure = error
        raise
    finally:
        current.reset(token)
        if execution.orphans:
            from perdure.runs.parallel.threads import join_orphans

            join_orphans(execution, failure)


def _guarded(execution: Execution, operation: Operation[str]) -> Operation[str]:
    """Drive an operation that ends a run. It may itself park, lose the lease or get stuck."""
    try:
        return (yield from operation)
    except Parked:
        return (yield from _park(execution))
    except Unwind as stop:
        if isinstance(stop, Paused | Cancelled | Undo | Interrupted | Expired):
            return (yield from _guarded(execution, _conclude(execution, None, None, None, stop)))
        raise
    except LeaseLost:
        return "lost"
    except GeneratorExit:
        raise
    except Exception as error:
        return (yield from _stuck(execution, error))
    except BaseException:  # the process is being interrupted: its next owner resumes at once
        yield from give_back(execution, "queued", 0, Waiting("worker", "a worker"))
        raise


def _conclude(
    execution: Execution,
    spec: DurableSpec | None,
    result: Any,
    failure: BaseException | None,
    stop: BaseException | None,
) -> Operation[str]:
    if isinstance(stop, LeaseLost):
        return "lost"
    if isinstance(stop, Parked):
        return (yield from _park(execution))
    if isinstance(stop, Paused):
        return (yield from give_back(execution, "paused", rows.NEVER, Waiting("resume", "perdure run resume")))
    if isinstance(stop, Interrupted):  # its next owner resumes at once
        if failure is not None and not isinstance(failure, Exception | Unwind):
            raise failure  # such as Ctrl-C: the caller must see it
        return (yield from give_back(execution, "queued", 0, Waiting("worker", "a worker")))
    if isinstance(stop, Cancelled):
        execution.stop = execution.root.stop = None
        yield from cancel_children(execution.ctx, execution.tenant, execution.row, execution.journal.write_fenced)
        return (yield from _undo_and_finish(execution, "cancelled", None))
    if isinstance(stop, ContinueAsNew):
        assert spec is not None
        return (yield from _start_over(execution, spec, stop))
    if isinstance(stop, Undo) and execution.turn is not None:
        undone = describe_error(RunUndone(stop.reason or "perdure.undo()"), execution.ctx.codec)
        return (yield from turns.give_up(execution, spec, undone))
    if isinstance(stop, Undo):
        execution.stop = execution.root.stop = None
        reason = {"type": "perdure:RunUndone", "text": stop.reason}
        return (yield from _undo_and_finish(execution, "undone", reason))
    if isinstance(stop, Expired):  # whatever the code caught, and whatever it had recorded
        execution.stop, execution.deadline_us = None, None
        yield from cancel_children(execution.ctx, execution.tenant, execution.row, execution.journal.write_fenced)
        return (yield from _end_with_error(execution, spec, TimeoutError(str(stop))))
    if isinstance(stop, ReplayEnd):
        raise stop
    for error in (stop, failure):
        if error is not None and _is_mistake(error):
            if execution.turn is not None and isinstance(error, (*_WRONG_CALLS, ValueProblem)):
                return (yield from turns.fail(execution, spec, error))  # a message must not stop its receiver
            if recorded(error):
                error = RunStuck(
                    f"{line_of(error)}. A step recorded this: correct it, and fork the run before that step"
                )
            return (yield from _stuck(execution, error))
    if isinstance(stop, Exception):  # such as InDoubt in a tool of a framework, which may have caught it
        failure, execution.stop = stop, None
    if (names := execution.never_awaited()) and failure is None:
        missing = RunStuck(f"{', '.join(names)} was called and never awaited, so that it did not run: write `await`")
        return (yield from _stuck(execution, missing))
    if failure is None or isinstance(failure, Exception):
        early = execution.ended_early(
            execution.root, f"the function {'returned' if failure is None else f'raised {line_of(failure)}'}"
        )
        if early is not None:
            return (yield from _stuck(execution, early))
    if isinstance(failure, Exception):
        ending = turns.fail if execution.turn is not None else _end_with_error
        return (yield from ending(execution, spec, failure))
    if failure is not None:
        raise failure
    if execution.turn is not None:
        try:
            return (yield from turns.end(execution, result))
        except (ValueProblem, NotFound, UsageError) as error:  # of the state, the answer or a receiver
            return (yield from turns.fail(execution, spec, error))
    return (yield from _done(execution, result))


def _end_with_error(execution: Execution, spec: DurableSpec | None, failure: Exception) -> Operation[str]:
    """Fail a run. Undo its effects if `undo_on` names the error."""
    execution.root.stop = None
    described = describe_error(failure, execution.ctx.codec)
    if spec is not None and _is_declared(failure, spec.undo_on):
        return (yield from _undo_and_finish(execution, "failed", described))
    return (yield from _fail(execution, failure, described))


def _is_declared(error: BaseException, classes: tuple[type[BaseException], ...]) -> bool:
    """Return whether `undo_on` names an error; for a group, whether it names every member."""
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, classes):
        return all(_is_declared(member, classes) for member in error.exceptions)
    return isinstance(error, classes)


def _fail(execution: Execution, failure: Exception, described: dict[str, Any]) -> Operation[str]:
    """End a run with an error that `undo_on` does not name. Its effects stand; `retry` and `undo` remain possible."""
    described["calls"] = failed_calls(execution, failure)
    if saga.has_something_to_undo(execution):
        described["stands"] = True
    return (yield from _finish_described(execution, "failed", described))


def _is_mistake(error: BaseException) -> bool:
    """Return whether an error leaves its run stuck instead of failed; for a group, whether one member does."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_mistake, error.exceptions))
    return isinstance(error, _WRONG_CALLS) or (isinstance(error, _STUCK) and not recorded(error))


def _done(execution: Execution, result: Any) -> Operation[str]:
    try:
        text, values = encode_noting(result, execution.ctx.codec)
    except ValueProblem as error:
        return (yield from _stuck(execution, error))
    if saga.open_calls(execution):  # effects that were cancelled or abandoned: a run with a doubt is not done
        yield from saga.settle_open(execution)
    if execution.state is not None:
        yield from execution.state.finish()
    yield from keep(execution, values)
    about = {"tenant": execution.tenant, "run": execution.row.run}
    also = [use(**about, kind=OF_VALUE, key=key) for key in keys_of(values)]
    if records_every_run():
        described: dict[str, Any] = {}
        also += _record_environment(execution, described)
        also.append(rows.ADD_VALUE(**about, kind=rows.ENVIRONMENT, value=described["environment"]))
    return (yield from _finish(execution, "done", compress(text), also))


def _undo_and_finish(execution: Execution, status: str, error: dict[str, Any] | None) -> Operation[str]:
    execution.stop, execution.undoing = None, True
    yield from saga.compensate(execution, status, error)
    described = dict(error or {})
    if saga.ending(execution) is not None:
        described["undone"] = saga.undone_count(execution)
    if lasting := standing.lasting(execution.index.calls()):
        described["lasting"] = lasting
    return (yield from _finish_described(execution, status, described))


def _finish_described(execution: Execution, status: str, described: dict[str, Any]) -> Operation[str]:
    """End a run that did not succeed. If it failed, store the environment too."""
    also = _record_environment(execution, described) if status == "failed" else []
    outcome = compress(encode(described, execution.ctx.codec))
    return (yield from _finish(execution, status, outcome, also))


def _record_environment(execution: Execution, described: dict[str, Any]) -> list[Statement]:
    """Add the environment's hash to a described error. Return the statements that store the environment."""
    spec = find_durable(execution.row.function)
    body = environment(None if spec is None else spec.fn)
    described["environment"] = blob_hash(body)
    return blob_statements(execution.tenant, execution.row.run, body)


def _finish(execution: Execution, status: str, outcome: bytes | None, also: Sequence[Statement] = ()) -> Operation[str]:
    """End the run, and write `also` in the same transaction. Return its status, or "lost"."""
    name = execution.row.function
    lines = yield from execution.journal.closing_lines()
    if hooks.hook is not None:
        hooks.fault_point("finish", "", name, 1, "before")
    op = partial(
        rows.finish,
        lines=lines,
        total=execution.index.total(),
        status=status,
        outcome=outcome if outcome is not None else b"{}",
        waiting=None,
        stands=status in ("done", "failed") and not execution.undoing,
        key=execution.row.key,
        also=also,
        now=execution.ctx.clock_us(),
    )
    ended: str | None = yield from execution.journal.commit_with_retry(op, partial(reached, execution, status))
    if hooks.hook is not None:
        hooks.fault_point("finish", "", name, 1, "after")
    return "lost" if ended is None else ended


def _park(execution: Execution) -> Operation[str]:
    waits = [wait for wait in execution.waits if not wait.path.startswith(tuple(execution.lost_prefixes))]
    wake_at = min((wait.wake_at for wait in waits if wait.wake_at is not None), default=rows.NEVER)
    if execution.deadline_us is not None and not execution.undoing:
        wake_at = min(wake_at, execution.deadline_us)
    what = [wait.what for wait in waits]
    return (yield from give_back(execution, "waiting", wake_at, all_of(what)))


def _stuck(execution: Execution, error: BaseException) -> Operation[str]:
    """Leave the run stuck, for a person to look at. Nothing is undone, and it can be resumed.

    After a temporary error the run is queued again instead.
    """
    if execution.replay:
        raise error
    run, kind = execution.row.id, type(error).__name__
    # The log does not get the error's text, which may quote a value or user code.
    says = "its result" if execution.ctx.refuses_effects else "`perdure run show`"
    _log.warning("run %s is stuck (%s); %s says why", run, kind, says, extra=event("run.stuck", run=run, error=kind))
    if (sink := metrics.sink) is not None and isinstance(error, JournalDamaged):
        sink.record(metrics.CORRUPTIONS, 1, "journal")
    execution.stop = None
    described = describe_error(error, execution.ctx.codec)
    what = Waiting("help", f"{kind}: {described['text']}", text=described["text"], name=kind)
    try:
        if isinstance(error, PASSING):
            later = execution.shared_clock_us() + _LATER_US
            return (yield from give_back(execution, "queued", later, Waiting("worker", "a worker")))
        also = []
        if not isinstance(error, KeyMissing):  # without the key nothing can be encrypted
            also = _record_environment(execution, described)
            outcome = compress(encode(described, execution.ctx.codec))
            also.append(rows.ADD_VALUE(tenant=execution.tenant, run=execution.row.run, kind="outcome", value=outcome))
        return (yield from give_back(execution, "stuck", rows.NEVER, what, also))
    except (StoreError, RunError):
        return "lost"  # the store itself failed: the lease runs out, and another process resumes the run


def _start_over(execution: Execution, spec: DurableSpec, new: ContinueAsNew) -> Operation[str]:
    execution.stop = execution.root.stop = None
    yield from saga.settle_open(execution)  # the journal is about to be dropped, and its effects in doubt with it
    args = new.args_given if spec.binder.plan.receiver is None else (execution.receiver, *new.args_given)
    text, values = spec.binder.encoded(args, new.kwargs_given, execution.ctx.codec)
    yield from keep(execution, values)
    # Derived from the last incarnation: if the run is rewound and starts over again, its keys may stay the same.
    incarnation = blake3(execution.row.incarnation + b"continue_as_new").digest(16)
    # A `since` above 0 says that the run started over, so it is at least 1 even if the journal was empty.
    since = max(1, execution.index.last)
    op = partial(
        start_over,
        since=since,
        args=compress(text),
        keys=keys_of(values),
        incarnation=incarnation,
        now=execution.ctx.clock_us(),
    )
    is_done = yield from execution.journal.commit_with_retry(op, partial(_is_begun_anew, execution, incarnation))
    return "queued" if is_done else "lost"


def _is_begun_anew(execution: Execution, incarnation: bytes) -> Operation[bool | None]:
    """Return True if a COMMIT whose answer was lost has restarted the run, else None."""
    row = yield from read(partial(rows.numbered, execution.tenant, execution.row.run))
    return True if row is not None and row.incarnation == incarnation else None
