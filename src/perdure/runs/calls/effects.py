"""Running effects: each is recorded before it runs (its intent) and after it ran (its completion).

An effect with a completion never runs again. One with an intent alone is in doubt: `reconcile`, then `on_doubt`
decides. After NotDone, or for a retry, the body runs only after the intent's deadline: until then the old request may
land.
"""

from __future__ import annotations

import random
from typing import Any

from blake3 import blake3

from perdure.errors import Unstorable
from perdure.runs.calls.approvals import approval
from perdure.runs.calls.bodies import BodyThread, BodyTimeout, call_body, measured_call, run_body
from perdure.runs.calls.doubt import check_allowed, ended, settle_again, settle_error
from perdure.runs.calls.failures import describe_end, describe_error, mark_recorded
from perdure.runs.calls.outcome import is_definite
from perdure.runs.calls.steps import answer, encode_result, tried_before, wait_for_retry, wait_until
from perdure.runs.calls.timeouts import check_deadline, is_over
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.matching import after_recorded, in_turn
from perdure.runs.execution.operation import Operation, Pause, run_operation
from perdure.runs.execution.scope import Scope, StepCall, Unwind
from perdure.runs.functions.inputs import DIGEST_BYTES, digest
from perdure.runs.functions.keys import IdempotencyKey
from perdure.runs.functions.specs import StepSpec, plain_name
from perdure.runs.journal.entries import DONE, FAILED, INTENT, Entry, completion, compress
from perdure.runs.journal.kinds import RETRY
from perdure.storage import metrics
from perdure.values.codec import encode


def effect(scope: Scope, spec: StepSpec, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the intent, call the body and record the completion, where `usual_path` finds nothing to decide."""
    execution, failed = scope.execution, None
    text, values = spec.binder.encoded(args, kwargs, execution.ctx.codec)
    if values:
        run_operation(scope, keep(execution, values))
    scope.count += 1
    call = StepCall(scope, spec, path, args, kwargs, text, blake3(text).digest(DIGEST_BYTES))
    call.key, call.attempt = make_key(call), 0
    execution.journal.append(*intent(call))
    if isinstance(execution.stop, Unwind):  # the commit brought an operator's request, and the body has not begun
        run_operation(scope, not_begun(call))
        raise execution.stop
    args, kwargs = spec.binder.call_with(args, kwargs, call.key)
    try:
        result = call_body(call, args, kwargs) if metrics.sink is None else measured_call(call, args, kwargs)
    except Exception as error:
        failed = error
    if failed is not None:
        return run_operation(scope, attempts(call, (failed, None)))
    try:
        value = compress(encode(result, execution.ctx.codec))
    except Unstorable:
        return run_operation(scope, attempts(call, (None, result)))
    execution.journal.append(DONE, call.entry(value))
    return result


def effect_operation(
    scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], path: str | None = None
) -> Operation[Any]:
    """Return the recorded result of an effect, or run it; if it is in doubt, settle it first.

    `path` is the place of the call; None is the next place of its branch.
    """
    scope.check()
    execution = scope.execution
    text, values = spec.binder.encoded(args, kwargs, execution.ctx.codec)
    args_hash = digest(text)
    if path is None:
        path = yield from execution.policy.path(scope, spec, args_hash, is_effect=True)
        yield from check_deadline(scope, path)
    rows = execution.recorded(path, spec.name, args_hash)
    ended = execution.policy.end(rows)
    if ended is not None:
        yield from in_turn(scope, rows)
        return (yield from answer(execution, ended, by_name=scope.by_name))
    yield from after_recorded(scope)
    yield from keep(execution, values)  # the intent refers to them
    call = StepCall(scope, spec, path, args, kwargs, text, args_hash)
    intents = [recorded.entry for recorded in rows if recorded.kind == INTENT]
    if not intents:
        call.key, call.attempt = make_key(call), 0
        if spec.approve:
            yield from approval(call)
        scope.check()  # the branch may have ended while the approval was pending
        if _may_be_lost(call):
            yield from execution.journal.record(intent(call))
            settled, result = yield from settle_again(call)
            if settled:
                return result
        return (yield from attempts(call))
    restore_intent(call, intents[-1])
    call.tried = tried_before([recorded.entry for recorded in rows if recorded.kind == FAILED])
    was_doubt = any(recorded.kind == DONE and (recorded.entry.extra or {}).get("doubt") for recorded in rows)
    # The last attempt failed for certain, so there is no doubt: an undo, a task or a retried run tries again.
    if rows[-1].kind in (FAILED, DONE) and not was_doubt:
        call.is_unsettled = False
        yield from wait_for_retry(call, int((rows[-1].entry.extra or {}).get("due", 0)))
    else:
        settled, result = yield from settle_again(call)
        if settled:
            return result
    scope.check()
    return (yield from attempts(call))


def _may_be_lost(call: StepCall) -> bool:
    """Return whether a call without an intent may have run on the primary before this replica was promoted.

    The intent may not have been replicated. This holds for the run's first effect since the promotion, and for the
    next one as long as each before it was found to have happened.
    """
    index, cut = call.execution.index, call.execution.row.cut
    if not cut:
        return False
    ends = [completion(index.at(row.entry.path)) for row in index.rows() if row.kind == INTENT and row.seq >= cut]
    return all(end is None or "settled" in (end.extra or {}) for end in ends)


def restore_intent(call: StepCall, last: Entry) -> None:
    """Restore a call from its recorded intent. The key is never computed again: it is the one that was sent."""
    extra = last.extra or {}
    call.key, call.attempt, call.deadline = IdempotencyKey(extra["key"]), last.attempt, int(extra["deadline"])
    call.is_unsettled = "unsettled" in extra


def make_key(call: StepCall) -> IdempotencyKey:
    """Return the key by which the receiver detects a repeated request: equal for all attempts, unique to each call.

    In the turn of a member, an effect that was undone when its message was given up gets another one.
    """
    execution, turn = call.execution, call.execution.turn
    if not execution.key_head:  # the same for all keys of a run
        incarnation = execution.row.incarnation if turn is None else turn.lineage
        execution.key_head = _framed(incarnation, execution.ctx.tenant_name.encode())
    framed = execution.key_head + _framed(call.path.encode(), call.name.encode(), call.args_hash)
    key = _key_of(framed)
    while turn is not None and key in turn.undone:
        key = _key_of(key.encode())
    return key


def _key_of(framed: bytes) -> IdempotencyKey:
    return IdempotencyKey("pd_" + blake3(framed).hexdigest()[:29])  # 32 characters: some receivers accept no more


def _framed(*parts: bytes) -> bytes:
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def intent(call: StepCall) -> tuple[int, Entry]:
    check_allowed(call)
    execution, spec = call.execution, call.spec
    call.attempt, call.duration_us = call.attempt + 1, 0
    call.deadline = execution.shared_clock_us() + int(spec.deadline_s * 1e6)
    extra: dict[str, Any] = {"key": str(call.key), "deadline": call.deadline}
    if spec.undo is not None:
        extra["undo"] = plain_name(spec.undo)
    if call.is_unsettled:
        extra["unsettled"] = True
    if execution.turn is not None:
        extra["turn"] = execution.turn.number
    return INTENT, call.entry(compress(call.text), extra)


Ended = tuple[Exception | None, Any]  # the end of a body: its error, or None and its result


def attempts(call: StepCall, first: Ended | None = None) -> Operation[Any]:
    """Record the intent, call the body and record the completion; repeat it as the rules of the effect allow.

    `first` is the end of the first attempt if the caller has made it.
    """
    drafts = [] if first is not None else [intent(call)]
    while True:
        error, result = (yield from _attempt(call, drafts)) if first is None else first
        first = None
        if error is None:
            if (unstorable := (yield from _succeed(call, result))) is None:
                return result
            error, call.has_happened = unstorable, True
        elif _is_definite(call, error):
            drafts = yield from _failed(call, error)
            continue
        was_unsettled = call.is_unsettled
        settled, result = yield from settle_error(call, error)
        if settled:
            return result
        if isinstance(error, BodyTimeout) and error.still is not None:
            # Its request may still be under way in this process, so no new attempt begins before the body has ended.
            # The end of the body settles this attempt.
            first = yield from _ended_late(error.still)
            call.is_unsettled = call.is_unsettled and was_unsettled
            continue
        call.caller.check()  # the branch may have ended meanwhile
        drafts = [intent(call)]


def _attempt(call: StepCall, drafts: list[tuple[int, Entry]]) -> Operation[Ended]:
    """Record the intent, then call the body. Return how it ended."""
    execution, spec, task = call.execution, call.spec, _task(call)
    execution.acting.add(task)
    call.begun = False
    try:
        yield from execution.journal.record(*drafts)
        if isinstance(execution.stop, Unwind):  # the commit brought an operator's request, and the body has not begun
            yield from not_begun(call)
            raise execution.stop
        assert call.key is not None
        args, kwargs = spec.binder.call_with(call.args, call.kwargs, call.key)
        limit = spec.timeout_s if not spec.is_async else (spec.timeout_s or spec.deadline_s)
        try:
            return None, (yield from run_body(call, args, kwargs, limit))
        except Exception as error:
            return error, None
        except BaseException as broken:
            # The task was cancelled while the intent was written: the body never began, so there is no doubt.
            if not call.begun and type(broken).__name__ == "CancelledError":
                yield from not_begun(call)
            raise
    finally:
        execution.acting.discard(task)


def _is_definite(call: StepCall, error: Exception) -> bool:
    """Return whether an error proves that neither this attempt nor an earlier one took effect."""
    named = (*call.spec.definite, *call.execution.policy.definite)
    return not call.is_unsettled and (not call.begun or is_definite(error, named, call.spec.fn, call.outside))


def not_begun(call: StepCall) -> Operation[None]:
    if not call.is_unsettled:  # else an earlier attempt is in doubt, and the intent must stay open
        yield from call.execution.journal.record((FAILED, call.entry(None, {"begun": False})))


def _ended_late(still: BodyThread[Any]) -> Operation[tuple[Exception | None, Any]]:
    """Wait for a body that still runs after its timeout. Return how it ended."""
    while not still.wait(0):
        yield Pause(0.05)
    try:
        return None, still.result()
    except Exception as error:
        return error, None


def _task(call: StepCall) -> Any:
    """Return the asyncio task of an async effect, else None. It is not cancelled when another branch ends the run."""
    if not (call.spec.is_async and call.execution.is_async):
        return None
    import asyncio

    return asyncio.current_task()


def _failed(call: StepCall, error: Exception) -> Operation[list[tuple[int, Entry]]]:
    """Record a definite failure. Return the entries that the next attempt begins with; raise if it was the last one."""
    execution, spec = call.execution, call.spec
    is_last = not spec.retry.wants(error, call.attempt - call.tried)
    described = describe_end(call, error) if is_last else describe_error(error, execution.ctx.codec)
    if is_last:
        if call.path.startswith("undo:"):  # not a final end: a resume of the run tries the undo again
            yield from execution.journal.record((FAILED, call.entry(None, {"error": described})))
        else:
            yield from ended(call, None, {"error": described})
            mark_recorded(error, call.path)
        raise error
    delay = spec.retry.delay_s(call.attempt, random.random())
    due = execution.shared_clock_us() + int(delay * 1e6)
    failed = (FAILED, call.entry(None, {"error": described, "due": due}))
    if delay <= execution.ctx.linger_s:
        try:
            yield from wait_until(execution, call.path, due, RETRY, RETRY.waiting(call.path, name=call.name))
            call.caller.check()  # the branch may have ended meanwhile
        except GeneratorExit:
            raise
        except BaseException:  # no further attempt: record the failure, or the effect would be in doubt
            yield from execution.journal.record(failed)
            raise
        if not is_over(call.caller):
            return [failed, intent(call)]  # the failure and the next intent share one commit
    yield from execution.journal.record(failed)  # recorded before the wait: the run may park, and must not be in doubt
    yield from wait_for_retry(call, due)
    return [intent(call)]


def _succeed(call: StepCall, result: Any) -> Operation[Unstorable | None]:
    """Record the result of the body. The result of an undo is not kept.

    Return the error if the result cannot be stored: then the effect has happened, and its end is not recorded.
    """
    try:
        value = yield from encode_result(call, None if call.path.startswith("undo:") else result)
    except Unstorable as error:
        return error
    yield from ended(call, value, None)
    return None
