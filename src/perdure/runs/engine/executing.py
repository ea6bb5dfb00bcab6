"""The life of a claimed run in this process: read its journal, call its function, write down how it ended.

Whatever the function does with exceptions, what counts is why the session stopped: parked, cancelled, taken over.
Only an error of the user's own code fails a run and undoes its effects; everything else leaves it resumable.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import orjson

from perdure.errors import (
    Damaged,
    JournalDamaged,
    LeaseLost,
    NonDeterministic,
    NotInRun,
    RunError,
    RunStuck,
    StoreError,
    UsageError,
    ValueProblem,
)
from perdure.runs.calls import saga
from perdure.runs.calls.failures import describe_error, line_of, recorded
from perdure.runs.engine.flows import cancel_children
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal import rows
from perdure.runs.journal.entries import squeeze, unsqueeze
from perdure.runs.journal.journal import read_with_sum
from perdure.runs.session import points
from perdure.runs.session.acting import Act, Body, Parked
from perdure.runs.session.requests import Cancelled, ContinueAsNew, Interrupted, Paused, RollBack
from perdure.runs.session.scope import Unwind, current
from perdure.runs.session.session import ReplayEnd, Session
from perdure.runs.session.telling import measured_life
from perdure.storage import meters
from perdure.storage.events import event
from perdure.storage.program import read
from perdure.values.codec import encode

_log = logging.getLogger("perdure")
# What leaves a run stuck, resumable and not undone: it is not the run's own failure.
_STUCK = (NonDeterministic, Damaged, JournalDamaged, RunStuck, ValueProblem, StoreError, ImportError)
# Nor is a call of ours that cannot be right, also in a step that recorded it: a person corrects the code.
_WRONG_CALLS = (UsageError, NotInRun)


def life(session: Session, spec: DurableSpec, args_text: bytes | None = None, keep_us: int | None = None) -> Act[str]:
    """Go on with a claimed run as far as it goes. Gives its status then; "lost" if it is another's now."""
    act = _life(session, spec, args_text, keep_us)
    return act if (sink := meters.sink) is None else measured_life(sink, session, act)


def _life(session: Session, spec: DurableSpec, args_text: bytes | None, keep_us: int | None) -> Act[str]:
    try:
        arguments = yield from prepare(session, args_text)
        args, kwargs = spec.binder.restore(arguments)
    except _STUCK as error:
        return (yield from _stuck(session, error))
    session.heed(session.row.request)
    end = saga.ending(session)
    if end is not None or isinstance(session.stop, RollBack):
        status = "rolled_back" if end is None else str(end["as"])
        reason = None if end is None else end.get("error")
        return (yield from _guarded(session, _undo_and_finish(session, status, reason, keep_us)))
    result: Any = None
    failure: BaseException | None = None
    if session.stop is None:
        try:
            result = yield Body(partial(_main, session, spec, args, kwargs), is_async=spec.is_async)
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
    stop = session.stop or session.root.stop
    return (yield from _guarded(session, _conclude(session, spec, result, failure, stop, keep_us)))


def prepare(session: Session, args_text: bytes | None) -> Act[dict[str, Any]]:
    """Read the journal, once, and the arguments."""
    row = session.row
    if row.fence > 1 or row.origin is not None or session.replay:
        session.index.load(*(yield from read(partial(read_with_sum, session.tenant, row))))
    else:
        session.index.load((), rows.JournalSum(0, 0, row.seq))
    if args_text is None:
        args_text = yield from read(partial(rows.value_of, session.tenant, row.run, "args"))
    if args_text is None:
        raise JournalDamaged(f"the arguments of run {row.id!r} are gone; restore it from a backup")
    if type(args_text) is not bytes:  # the worker's claim passes on what it cannot read
        raise JournalDamaged(
            f"the arguments of run {row.id!r} were changed or belong to another run; nothing was run. Restore it "
            "from a backup"
        )
    text = unsqueeze(args_text)
    if row.input and row.since == row.origin_since == 0 and digest(text) != row.input:  # others after continue_as_new
        raise JournalDamaged(
            f"the arguments of run {row.id!r} are not those that it was started with; nothing was run. Restore it from "
            "a backup"
        )
    found = session.decoded(text)
    if not isinstance(found, dict):
        raise JournalDamaged(f"the arguments of run {row.id!r} are not what this Perdure writes")
    return found


def _main(session: Session, spec: DurableSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the durable function: in the run's scope, or as a task that a supervisor watches."""
    if spec.is_async:
        return session.supervisor.main(partial(spec.fn, *args, **kwargs))
    token = current.set(session.root)
    failure: BaseException | None = None
    try:
        return spec.fn(*args, **kwargs)
    except BaseException as error:
        failure = error
        raise
    finally:
        current.reset(token)
        if session.strays:
            from perdure.runs.parallel.threads import join_strays

            join_strays(session, failure)


def _guarded(session: Session, act: Act[str]) -> Act[str]:
    """The end of a run may itself park, lose the lease, or get stuck."""
    try:
        return (yield from act)
    except Parked:
        return (yield from _park(session))
    except Unwind as stop:
        if isinstance(stop, Paused | Cancelled | Interrupted):
            return (yield from _conclude(session, None, None, None, stop, None))
        raise
    except LeaseLost:
        return "lost"
    except GeneratorExit:
        raise
    except Exception as error:
        return (yield from _stuck(session, error))
    except BaseException:  # the process is being interrupted: whoever runs it next goes on at once
        yield from _give_back(session, "queued", 0, {"for": "a worker"})
        raise


def _conclude(
    session: Session,
    spec: DurableSpec | None,
    result: Any,
    failure: BaseException | None,
    stop: BaseException | None,
    keep_us: int | None,
) -> Act[str]:
    if isinstance(stop, LeaseLost):
        return "lost"
    if isinstance(stop, Parked):
        return (yield from _park(session))
    if isinstance(stop, Paused):
        return (yield from _give_back(session, "paused", rows.NEVER, {"for": "resume"}))
    if isinstance(stop, Interrupted):  # whoever runs it next goes on at once
        if failure is not None and not isinstance(failure, Exception | Unwind):
            raise failure  # Ctrl-C, which goes on to whoever called
        return (yield from _give_back(session, "queued", 0, {"for": "a worker"}))
    if isinstance(stop, Cancelled):
        yield from cancel_children(session.ctx, session.tenant, session.row, session.log.write_fenced)
        return (yield from _finish(session, "cancelled", None, keep_us))
    if isinstance(stop, ContinueAsNew):
        assert spec is not None
        return (yield from _start_over(session, spec, stop))
    if isinstance(stop, RollBack):
        session.stop = session.root.stop = None
        reason = {"type": "perdure:RolledBack", "text": stop.reason}
        return (yield from _undo_and_finish(session, "rolled_back", reason, keep_us))
    if isinstance(stop, ReplayEnd):
        raise stop
    for error in (stop, failure):
        if error is not None and _is_mistake(error):
            if recorded(error):
                error = RunStuck(
                    f"{line_of(error)}. A step recorded this: correct it, and fork the run before that step"
                )
            return (yield from _stuck(session, error))
    if (names := session.never_awaited()) and failure is None:
        missing = RunStuck(f"{', '.join(names)} was called and never awaited, so that it did not run: write `await`")
        return (yield from _stuck(session, missing))
    if failure is None or isinstance(failure, Exception):
        early = session.ended_early(
            session.root, f"the function {'returned' if failure is None else f'raised {line_of(failure)}'}"
        )
        if early is not None:
            return (yield from _stuck(session, early))
    if isinstance(failure, Exception):
        session.root.stop = None
        described = describe_error(failure, session.ctx.codec)
        return (yield from _undo_and_finish(session, "failed", described, keep_us))
    if failure is not None:
        raise failure
    return (yield from _done(session, result, keep_us))


def _is_mistake(error: BaseException) -> bool:
    """Whether an error leaves its run stuck instead of failing it; of a group, whether one of its members does."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_mistake, error.exceptions))
    return isinstance(error, _WRONG_CALLS) or (isinstance(error, _STUCK) and not recorded(error))


def _done(session: Session, result: Any, keep_us: int | None) -> Act[str]:
    try:
        text = encode(result, session.ctx.codec)
    except ValueProblem as error:
        return (yield from _stuck(session, error))
    if saga.open_calls(session):  # cancelled or given up in between: a run is not done while something is in doubt
        yield from saga.settle_open(session)
    if session.state is not None:
        yield from session.state.finish()
    return (yield from _finish(session, "done", squeeze(text), keep_us))


def _undo_and_finish(session: Session, status: str, error: dict[str, Any] | None, keep_us: int | None) -> Act[str]:
    session.stop, session.undoing = None, True
    yield from saga.compensate(session, status, error)
    described = dict(error or {})
    undone = saga.undone_count(session)
    if undone:
        described["undone"] = undone
    return (yield from _finish(session, status, squeeze(encode(described, session.ctx.codec)), keep_us))


def _finish(session: Session, status: str, outcome: bytes | None, keep_us: int | None) -> Act[str]:
    name = session.row.function
    lines = yield from session.log.closing_lines()
    if points.hook is not None:
        points.reach("finish", "", name, 1, "before")
    op = partial(
        rows.finish,
        lines=lines,
        total=session.index.total(),
        status=status,
        outcome=outcome if outcome is not None else b"{}",
        waiting=None,
        keep=keep_us,
        now=session.ctx.clock_us(),
    )
    ended = yield from session.log.commit_with_retry(op, partial(_has_status, session, status))
    if points.hook is not None:
        points.reach("finish", "", name, 1, "after")
    if ended is None:
        return "lost"
    return ended if isinstance(ended, str) else status


def _has_status(session: Session, status: str) -> Act[bool]:
    row = yield from read(partial(rows.numbered, session.tenant, session.row.run))
    return row is not None and row.status == status and row.fence == session.hold.fence


def _park(session: Session) -> Act[str]:
    waits = [wait for wait in session.waits if not wait.path.startswith(tuple(session.beaten))]
    wake_at = min((wait.wake_at for wait in waits if wait.wake_at is not None), default=rows.NEVER)
    what = [wait.what for wait in waits]
    return (
        yield from _give_back(session, "waiting", wake_at, what[0] if len(what) == 1 else {"for": "all", "of": what})
    )


def _give_back(session: Session, status: str, wake_at: int, what: dict[str, Any]) -> Act[str]:
    yield from session.log.flush()
    if points.hook is not None:
        points.reach("park", "", session.row.function, 1, "before")
    text = orjson.dumps(what, default=str).decode()
    heeded = "pause" if status == "paused" else "rollback" if session.undoing else ""
    op = partial(
        rows.park,
        total=session.index.total(),
        status=status,
        wake_at=wake_at,
        waiting=text,
        now=session.ctx.clock_us(),
        heeded=heeded,
    )
    parked = yield from session.log.commit_with_retry(op, partial(_has_status, session, status))
    if points.hook is not None:
        points.reach("park", "", session.row.function, 1, "after")
    return status if parked is not None else "lost"


def _stuck(session: Session, error: BaseException) -> Act[str]:
    """Keep the run as it is, for a person to look at: nothing is undone, and it can be resumed."""
    if session.replay:
        raise error
    run, kind = session.row.id, type(error).__name__
    # Not the error's text: it may quote a value, or what user code said.
    _log.warning(
        "run %s is stuck (%s); `perdure run` says why", run, kind, extra=event("run.stuck", run=run, error=kind)
    )
    if (sink := meters.sink) is not None and isinstance(error, JournalDamaged):
        sink.record(meters.CORRUPTIONS, 1, "journal")
    session.stop = None
    session.stuck_by = error
    described = {"for": "help", "error": describe_error(error, session.ctx.codec)["text"], "type": type(error).__name__}
    try:
        return (yield from _give_back(session, "stuck", rows.NEVER, described))
    except (StoreError, RunError):
        return "lost"  # the store is what failed: the lease runs out, and whoever comes next goes on


def _start_over(session: Session, spec: DurableSpec, new: ContinueAsNew) -> Act[str]:
    session.stop = session.root.stop = None
    yield from saga.settle_open(session)  # with the journal, what is in doubt would be forgotten
    bound = spec.binder.bind(new.args_given, new.kwargs_given)
    text = spec.binder.text(bound, session.ctx.codec)
    incarnation = session.ctx.entropy(16)
    # By `since` is known that it began anew: never 0, also if nothing was recorded before.
    since = max(1, session.index.last)
    op = partial(rows.start_over, since=since, args=squeeze(text), incarnation=incarnation, now=session.ctx.clock_us())
    is_done = yield from session.log.commit_with_retry(op, partial(_is_begun_anew, session, incarnation))
    return "queued" if is_done else "lost"


def _is_begun_anew(session: Session, incarnation: bytes) -> Act[bool]:
    row = yield from read(partial(rows.numbered, session.tenant, session.row.run))
    return row is not None and row.incarnation == incarnation
