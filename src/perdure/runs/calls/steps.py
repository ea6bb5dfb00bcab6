"""A plain step: one commit, made when its body has ended. Run again only if that was never recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from perdure.errors import RunStuck, Unstorable, UsageError
from perdure.runs.calls import bodies
from perdure.runs.calls.failures import Unresolved, describe_error, error_text, mark_recorded, rebuild, rebuilt
from perdure.runs.calls.timeouts import check_again, check_deadline
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.instrumentation import measured_body
from perdure.runs.execution.operation import LINGER_S, Body, Operation, Pause, Wait
from perdure.runs.execution.scope import BodyScope, Scope, current
from perdure.runs.execution.unwinds import Abandoned
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import DONE, FAILED, Entry, Recorded
from perdure.storage import metrics


def step_operation(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation[Any]:
    """Call a step: from the journal if its end is recorded, else for real."""
    scope.check()
    execution = scope.execution
    text = spec.binder.text(args, kwargs, execution.ctx.codec)
    args_hash = digest(text)
    path = scope.take_for(spec.name, args_hash)
    if scope.deadlines:
        yield from check_deadline(scope, path)
    found, attempt = execution.recorded(path, spec.name, args_hash), 1
    if found:
        ended = execution.final(found)
        if ended is not None:
            return (yield from answer(execution, ended, by_name=scope.by_name))
        attempt += sum(recorded.kind == FAILED for recorded in found)
    if execution.journal.has_pending:
        yield from execution.journal.flush()
    if found:
        yield from _rest_of_backoff(execution, path, found)
        yield from check_again(scope, path)
    return (yield from attempts(scope, spec, args, kwargs, path, args_hash, attempt))


def attempts(
    scope: Scope,
    spec: StepSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    args_hash: bytes,
    attempt: int = 1,
    failed: tuple[BodyScope, Exception] | None = None,
) -> Operation[Any]:
    """The body, and again as the rules of the step allow. `failed`: the first attempt was made, and ended so."""
    execution = scope.execution
    while True:
        if failed is None:
            frame = BodyScope(scope, path, spec.name)
            try:
                result = yield from run_body(spec, frame, args, kwargs, attempt)
            except Exception as error:
                failed = (frame, error)
            else:
                return (yield from completed(scope, spec, path, args_hash, attempt, result, frame.duration_us))
        (frame, raised), failed = failed, None
        if not spec.retry.wants(raised, attempt):
            extra = {"error": describe_error(raised, execution.ctx.codec)}
            entry = _entry(execution, path, spec, args_hash, attempt, None, extra, frame.duration_us)
            yield from execution.journal.record((DONE, entry))
            mark_recorded(raised)
            try:
                raise raised
            finally:
                del raised  # or its traceback keeps itself alive
        yield from _try_again(execution, path, spec, args_hash, attempt, raised, frame)
        attempt += 1
        scope.check()  # another attempt may not be wanted any more
        yield from check_again(scope, path)


def completed(
    scope: Scope, spec: StepSpec, path: str, args_hash: bytes, attempt: int, result: Any, duration_us: int
) -> Operation[Any]:
    """Write down what the body of a step returned."""
    execution = scope.execution
    try:
        value = encode_result(execution, spec.name, path, result)
    except Unstorable as error:
        execution.stop = execution.stop or error  # no failure of the step: its code cannot catch it and continue
        raise
    entry = _entry(execution, path, spec, args_hash, attempt, value, None, duration_us)
    yield from execution.journal.record((DONE, entry))
    return result


def encode_result(execution: Execution, name: str, path: str, result: Any) -> bytes:
    """The text of a result. Unstorable names the step."""
    try:
        return execution.encoded(result)
    except Unstorable as error:
        where = f"the result of {name} at step {path}"
        inside = error.path.removeprefix("state")
        raise Unstorable(f"{where}{inside}: {error}", path=f"{name}(){inside}") from error


def _entry(
    execution: Execution,
    path: str,
    spec: StepSpec,
    args_hash: bytes,
    attempt: int,
    value: bytes | None,
    extra: Any,
    duration_us: int = 0,
) -> Entry:
    return Entry(path, spec.name, execution.ctx.clock_us(), args_hash, attempt, value, extra, duration_us)


def answer(execution: Execution, ended: Entry, *, by_name: bool = False) -> Operation[Any]:
    """The recorded end of a call: its result, or its error again. `by_name`: only the name and text of the error are
    looked at, so that its class need not be found."""
    extra = ended.extra or {}
    if "error" in extra:
        error = rebuilt(extra["error"], execution.ctx.codec) if by_name else _error_of(execution, ended, extra["error"])
        if not extra.get("done"):  # an effect that was done, but its result could not be kept: a person must look
            mark_recorded(error)
        raise error
    return (yield from execution.value(ended))


def _error_of(execution: Execution, ended: Entry, described: dict[str, Any]) -> Exception:
    """The error that a call ended with. Where its class cannot be found the run is stuck, whatever its code catches: an
    `except` that does not match would undo it, or take another way than the first time."""
    try:
        return rebuild(described, execution.ctx.codec)
    except Unresolved as why:
        stuck = RunStuck(
            f"step {ended.path} ({ended.name}) of run {execution.row.id!r} failed with {error_text(described)}, and "
            f"that error cannot be raised again here: {why}. Nothing was undone; then `perdure run resume "
            f"{execution.row.id}`"
        )
        execution.stop = execution.stop or stuck
        raise stuck from why


def run_body(
    spec: StepSpec,
    frame: BodyScope,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attempt: int,
    timeout_s: float | None = None,
) -> Operation[Any]:
    """Call the user's function once, in a scope that says so."""
    operation = _run_body(spec, frame, args, kwargs, attempt, timeout_s)
    return operation if (sink := metrics.sink) is None else measured_body(sink, frame, spec.kind, operation)


def _run_body(
    spec: StepSpec,
    frame: BodyScope,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attempt: int,
    timeout_s: float | None,
) -> Operation[Any]:
    if frame.execution.replay:
        raise frame.execution.end_of_replay(frame.path, frame.name)
    limit = timeout_s if timeout_s is not None else spec.timeout_s
    if hooks.hook is not None:
        hooks.fault_point("body", frame.path, spec.name, attempt, "before")
    state = frame.execution.state
    before = None if state is None else state.before_body(frame.caller)
    begun = perf_counter_ns()
    try:
        if spec.is_async:
            result = yield Body(partial(_acall, frame, spec, args, kwargs, limit), is_async=True)
        else:
            result = yield Body(partial(_call, frame, spec, args, kwargs, limit))
    except Exception:
        if hooks.hook is not None:
            hooks.fault_point("body", frame.path, spec.name, attempt, "after")
        raise
    finally:
        frame.duration_us = (perf_counter_ns() - begun) // 1000
        if state is not None:
            state.after_body(frame.caller, before)
    if hooks.hook is not None:
        hooks.fault_point("body", frame.path, spec.name, attempt, "after")
    return result


def _call(inner: BodyScope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None) -> Any:
    token = current.set(inner)
    inner.begun, inner.outside = True, sys.exception()
    try:
        if limit is None:
            return spec.body(*args, **kwargs)
        return bodies.call(spec.body, args, kwargs, timeout_s=limit, name=spec.name)
    except bodies.BodyTimeout as error:
        if spec.kind == "step":  # its thread has no part in the run any more; that of an effect is waited for
            inner.stop = Abandoned(str(error))
        raise
    finally:
        current.reset(token)


async def _acall(
    inner: BodyScope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None
) -> Any:
    token = current.set(inner)
    inner.begun, inner.outside = True, sys.exception()
    try:
        if limit is None:
            return await spec.body(*args, **kwargs)
        return await bodies.acall(spec.body, args, kwargs, timeout_s=limit, name=spec.name)
    finally:
        current.reset(token)


def _try_again(
    execution: Execution, path: str, spec: StepSpec, args_hash: bytes, attempt: int, error: Exception, frame: BodyScope
) -> Operation[None]:
    """Write down that an attempt failed and when the next one is due, and wait for it."""
    if (sink := metrics.sink) is not None:
        sink.record(metrics.STEP_RETRIES, 1)
    delay = spec.retry.delay_s(attempt, random.random())
    due = execution.shared_clock_us() + int(delay * 1e6)
    extra = {"error": describe_error(error, execution.ctx.codec), "due": due}
    yield from execution.journal.record(
        (FAILED, _entry(execution, path, spec, args_hash, attempt, None, extra, frame.duration_us))
    )
    yield from wait_until(execution, path, due, {"for": "retry", "step": path, "name": spec.name})


def _rest_of_backoff(execution: Execution, path: str, found: Sequence[Recorded]) -> Operation[None]:
    failed = [recorded.entry for recorded in found if recorded.kind == FAILED]
    if failed and failed[-1].extra is not None:
        yield from wait_until(execution, path, int(failed[-1].extra.get("due", 0)), {"for": "retry", "step": path})


def wait_until(execution: Execution, path: str, due_us: int, what: dict[str, Any]) -> Operation[None]:
    """Let time pass: here if it is short, else the run parks."""
    # By the same estimate as the due time: the server's own clock is ahead of it and would end the wait too early.
    while (left := (due_us - execution.shared_clock_us()) / 1e6) > 0:
        wait = Wait(path, what, due_us)
        yield wait if left > LINGER_S else Pause(left, instead_of=wait)


def refuse_nested(spec: StepSpec, scope: Scope) -> None:
    assert scope.body is not None
    raise UsageError(
        f"effect {spec.name!r} was called inside step {scope.body.name!r}: a step may be run again, and the effect "
        "with it. Call the effect in the durable function, or make the step an effect"
    )
