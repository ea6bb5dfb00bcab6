"""Running steps: one commit when the body has ended. The body runs again only if its end was never recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from typing import Any

from blake3 import blake3

from perdure.errors import RunStuck, Unstorable
from perdure.runs.calls.bodies import call_body, measured_call, run_body
from perdure.runs.calls.failures import (
    Unresolved,
    describe_end,
    describe_error,
    error_text,
    mark_recorded,
    rebuild,
    rebuilt,
)
from perdure.runs.calls.timeouts import check_again, check_deadline
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.matching import after_recorded, in_turn
from perdure.runs.execution.operation import Operation, Pause, Wait, run_operation
from perdure.runs.execution.scope import Scope, StepCall, refused_in
from perdure.runs.functions.inputs import DIGEST_BYTES, digest
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import DONE, FAILED, Entry, compress
from perdure.runs.journal.kinds import RETRY, CallKind
from perdure.runs.run_table import Waiting
from perdure.storage import metrics
from perdure.values.codec import encode
from perdure.values.external import External, encode_noting


def step(scope: Scope, spec: StepSpec, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the body of a step and commit its end, where `usual_path` finds nothing to decide."""
    execution, failed = scope.execution, None
    text, _ = spec.binder.encoded(args, kwargs, execution.ctx.codec)  # only its digest is stored
    scope.count += 1
    call = StepCall(
        scope, spec, path, args, kwargs, text, blake3(text).digest(DIGEST_BYTES)
    )  # `digest` inlined, for speed
    try:
        result = call_body(call, args, kwargs) if metrics.sink is None else measured_call(call, args, kwargs)
    except Exception as error:
        failed = error
    if failed is not None:
        return run_operation(scope, attempts(call, failed))
    try:
        value = compress(encode(result, execution.ctx.codec))
    except Unstorable:
        return run_operation(scope, completed(call, result))
    execution.journal.append(DONE, call.entry(value))
    return result


def step_operation(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation[Any]:
    """Return the recorded result of a step or raise its recorded error; run it if no end is recorded."""
    scope.check()
    execution = scope.execution
    text, _ = spec.binder.encoded(args, kwargs, execution.ctx.codec)
    args_hash = digest(text)
    path = yield from execution.policy.path(scope, spec, args_hash, is_effect=False)
    call = StepCall(scope, spec, path, args, kwargs, text, args_hash)
    yield from check_deadline(scope, call.path)
    rows = execution.recorded(call.path, spec.name, args_hash)
    ended = execution.policy.end(rows)
    if ended is not None:
        yield from in_turn(scope, rows)
        return (yield from answer(execution, ended, by_name=scope.by_name))
    yield from after_recorded(scope)
    yield from execution.journal.flush()
    failed = [recorded.entry for recorded in rows if recorded.kind == FAILED]
    if failed:
        call.attempt, call.tried = call.attempt + len(failed), tried_before(failed)
        yield from wait_for_retry(call, int((failed[-1].extra or {}).get("due", 0)))
    return (yield from attempts(call))


def attempts(call: StepCall, raised: Exception | None = None) -> Operation[Any]:
    """Call the body, and repeat it as the rules of the step allow. `raised` is the error of an attempt already made."""
    execution, spec = call.execution, call.spec
    while True:
        if raised is None:
            try:
                result = yield from run_body(call, call.args, call.kwargs, spec.timeout_s)
            except Exception as error:
                raised = error
            else:
                return (yield from completed(call, result))
        is_last = not spec.retry.wants(raised, call.attempt - call.tried)
        described = describe_end(call, raised) if is_last else describe_error(raised, execution.ctx.codec)
        extra: dict[str, Any] = {"error": described}
        if is_last:
            yield from execution.journal.record((DONE, call.entry(None, extra)))
            mark_recorded(raised, call.path)
            try:
                raise raised
            finally:
                raised = None  # breaks the cycle with its traceback
        raised = None
        if (sink := metrics.sink) is not None:
            sink.record(metrics.STEP_RETRIES, 1)
        delay = spec.retry.delay_s(call.attempt, random.random())
        extra["due"] = due = execution.shared_clock_us() + int(delay * 1e6)
        yield from execution.journal.record((FAILED, call.entry(None, extra)))
        yield from wait_for_retry(call, due)
        call = copy(call)  # a body that still runs after its timeout keeps its own call
        call.stop, call.attempt = None, call.attempt + 1


def tried_before(failed: list[Entry]) -> int:
    """Return how many attempts do not count, because an operator has retried the run since."""
    return max((entry.attempt for entry in failed if "retried" in (entry.extra or {})), default=0)


def wait_for_retry(call: StepCall, due_us: int) -> Operation[None]:
    """Wait until the next attempt is due. Raises the error that has ended the branch meanwhile."""
    yield from wait_until(call.execution, call.path, due_us, RETRY, RETRY.waiting(call.path, name=call.name))
    call.caller.check()
    yield from check_again(call.caller, call.path)


def completed(call: StepCall, result: Any) -> Operation[Any]:
    """Record the result of a step's body and return it. Raises Unstorable, which also halts the run."""
    execution = call.execution
    try:
        value = yield from encode_result(call, result)
    except Unstorable as error:
        execution.halt(error)  # the step itself succeeded: the run's code must not catch this and continue
        raise
    yield from execution.journal.record((DONE, call.entry(value)))
    return result


def encode_result(call: StepCall, result: Any) -> Operation[bytes]:
    """Encode the result of a call, and store its large values. Raises Unstorable, which names the step."""
    text, values = checked_result(call, result)
    yield from keep(call.execution, values)
    return compress(text)


def checked_result(call: StepCall, result: Any) -> tuple[bytes, Sequence[External[Any]]]:
    """Return the text of a call's result, and its large values. Raises Unstorable, which names the step."""
    try:
        return encode_noting(result, call.execution.ctx.codec)
    except Unstorable as error:
        inside = error.path.removeprefix("state")
        where = f"the result of {call.name} at step {call.path}{inside}"
        raise Unstorable(f"{where}: {error}", path=f"{call.name}(){inside}") from error


def answer(execution: Execution, ended: Entry, *, by_name: bool = False) -> Operation[Any]:
    """Return the recorded result of a call, or raise its recorded error.

    With `by_name`, the caller reads only the name and the text of the error, so its class need not exist here.
    """
    extra = ended.extra or {}
    if "error" in extra:
        error = rebuilt(extra["error"], execution.ctx.codec) if by_name else _error_of(execution, ended, extra["error"])
        mark_recorded(error, ended.path)
        raise error
    return (yield from execution.value(ended))


def _error_of(execution: Execution, ended: Entry, described: dict[str, Any]) -> Exception:
    """Return the recorded error of a call. Raises RunStuck, and halts the run, if its class cannot be found.

    An `except` would not match a substitute: the run would be undone, or take another path than the first time.
    """
    try:
        return rebuild(described, execution.ctx.codec)
    except Unresolved as why:
        stuck = RunStuck(
            f"step {ended.path} ({ended.name}) of run {execution.row.id!r} failed with {error_text(described)}, and "
            f"that error cannot be raised again here: {why}. Nothing was undone; then `perdure run resume "
            f"{execution.row.id}`"
        )
        execution.halt(stuck)
        raise stuck from why


def wait_until(execution: Execution, path: str, due_us: int, kind: CallKind, waiting: Waiting) -> Operation[None]:
    """Wait until a time: in this process if it is near, else the run parks."""
    # The due time comes from the same estimate. The server's own clock is ahead of it and would end the wait too early.
    while (left := (due_us - execution.shared_clock_us()) / 1e6) > 0:
        wait = Wait(path, waiting, due_us, kind)
        yield wait if left > execution.ctx.linger_s else Pause(left, instead_of=wait)


def refuse_nested(spec: StepSpec, scope: Scope) -> None:
    assert scope.body is not None
    raise refused_in(
        scope.body,
        f"effect {spec.name!r} was called inside step {scope.body.name!r}: a step may be run again, and the effect "
        "with it. Call the effect in the durable function, or make the step an effect",
    )
