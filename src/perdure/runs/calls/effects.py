"""An effect: written down before it runs and after it ran. In between it is in doubt, which is a state with a policy.

    no intent                 it runs; but in doubt too where a promoted replica ends (`_may_be_lost`)
    intent, no completion     in doubt: ask `reconcile`; without it, or if that does not know, `on_doubt` decides
    completion                the recorded result or error; the body never runs again

Not done and retry are acted on only after the intent's deadline: until then the old request may still land.
"""

from __future__ import annotations

import logging
import random
from copy import copy
from functools import partial
from typing import Any

from blake3 import blake3

from perdure.errors import InDoubt, NotApproved, RunStuck, Unstorable, UsageError
from perdure.runs.calls import asks
from perdure.runs.calls.asks import AskSpec
from perdure.runs.calls.bodies import BodyThread, BodyTimeout, acall_body, call_body, run_body
from perdure.runs.calls.failures import describe_error, line_of, mark_recorded, safe_text
from perdure.runs.calls.outcome import Done, NotDone, Unknown, Verdict, check_verdict, is_definite
from perdure.runs.calls.steps import answer, encode_result, wait_for_retry, wait_until
from perdure.runs.calls.timeouts import check_deadline, is_over
from perdure.runs.execution.instrumentation import count_event
from perdure.runs.execution.operation import LINGER_S, Body, Operation, Pause, run_operation
from perdure.runs.execution.scope import Scope, StepCall, Unwind
from perdure.runs.functions.callbacks import called_by_name
from perdure.runs.functions.inputs import DIGEST_BYTES, digest
from perdure.runs.functions.keys import IdempotencyKey
from perdure.runs.functions.specs import StepSpec, plain_name
from perdure.runs.journal.entries import DONE, FAILED, INTENT, WAIT, Entry, completion, compress
from perdure.storage.events import event
from perdure.values.codec import encode
from perdure.values.safe_repr import shown

ATTEMPTS_MAX = 10  # and the retries of the effect: so often an effect whose outcome stays open is tried
_log = logging.getLogger("perdure")


def effect(scope: Scope, spec: StepSpec, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an effect where `usual_path` finds nothing to decide: its intent, its body and its completion."""
    execution, failed = scope.execution, None
    text = spec.binder.text(args, kwargs, execution.ctx.codec)
    scope.count += 1
    call = StepCall(scope, spec, path, args, kwargs, text, blake3(text).digest(DIGEST_BYTES))
    call.key, call.attempt = make_key(call), 0
    execution.journal.append(*intent(call))
    if isinstance(execution.stop, Unwind):  # an operator's request came with the answer: it has not begun
        run_operation(scope, not_begun(call))
        raise execution.stop
    args, kwargs = spec.binder.call_with(args, kwargs, call.key)
    try:
        result = call_body(call, args, kwargs)
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
    """Call an effect: from the journal, or for real, or settle what became of it. `path`: where, if not at the next
    place of its branch."""
    scope.check()
    execution = scope.execution
    text = spec.binder.text(args, kwargs, execution.ctx.codec)
    args_hash = digest(text)
    if path is None:
        path = scope.take_for(spec.name, args_hash)
        yield from check_deadline(scope, path)
    found = execution.recorded(path, spec.name, args_hash)
    if spec.approve and scope.asking is not None:
        asks.pass_questions(scope.asking, execution.index.at(f"{path}~approve"))
    ended = execution.final(found)
    if ended is not None:
        return (yield from answer(execution, ended, by_name=scope.by_name))
    call = StepCall(scope, spec, path, args, kwargs, text, args_hash)
    intents = [recorded.entry for recorded in found if recorded.kind == INTENT]
    if not intents:
        call.key, call.attempt = make_key(call), 0
        if spec.approve:
            yield from _approval(call)
        scope.check()  # it may have waited for long
        if _may_be_lost(call):
            yield from execution.journal.record(intent(call))
            settled, result = yield from _settle(call)
            if settled:
                return result
        return (yield from attempts(call))
    restore_intent(call, intents[-1])
    if found[-1].kind in (FAILED, DONE):  # it failed for certain, and is tried again: an undo, a node
        call.is_unsettled = False
        yield from wait_for_retry(call, int((found[-1].entry.extra or {}).get("due", 0)))
    else:
        settled, result = yield from _settle(call)
        if settled:
            return result
    scope.check()
    return (yield from attempts(call))


def _may_be_lost(call: StepCall) -> bool:
    """Whether it may have run in a world that was lost, and its intent with it: the first effect of its run since the
    store, a replica, was promoted; and the next one, as long as each was found to have happened there."""
    index, cut = call.execution.index, call.execution.row.cut
    if not cut:
        return False
    ends = [completion(index.at(row.entry.path)) for row in index.rows() if row.kind == INTENT and row.seq >= cut]
    return all(end is None or "settled" in (end.extra or {}) for end in ends)


def restore_intent(call: StepCall, last: Entry) -> None:
    """A call whose intent is recorded. Its key is never computed again: it is the one that went out."""
    extra = last.extra or {}
    call.key, call.attempt, call.deadline = IdempotencyKey(extra["key"]), last.attempt, int(extra["deadline"])
    call.is_unsettled = "unsettled" in extra


def make_key(call: StepCall) -> IdempotencyKey:
    """What the receiver can tell a repeated request by: the same for every attempt, another one for every call."""
    execution = call.execution
    if not execution.key_head:  # the same for all of a run
        execution.key_head = _framed(execution.row.incarnation, execution.ctx.tenant_name.encode())
    framed = execution.key_head + _framed(call.path.encode(), call.name.encode(), call.args_hash)
    return IdempotencyKey("pd_" + blake3(framed).hexdigest()[:29])  # 32 characters: some receivers take no more


def _framed(*parts: bytes) -> bytes:
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _check_allowed(call: StepCall) -> None:
    """Raises UsageError in a sandbox."""
    if call.execution.ctx.refuses_effects:
        refused = UsageError(f"effect {call.name} at step {call.path} is not recorded, and a sandbox runs no effects")
        call.execution.stop = call.execution.stop or refused  # the code cannot catch it and continue
        raise refused


def intent(call: StepCall) -> tuple[int, Entry]:
    _check_allowed(call)
    execution, spec = call.execution, call.spec
    call.attempt, call.duration_us = call.attempt + 1, 0
    call.deadline = execution.shared_clock_us() + int(spec.deadline_s * 1e6)
    extra: dict[str, Any] = {"key": str(call.key), "deadline": call.deadline}
    if spec.undo is not None:
        extra["undo"] = plain_name(spec.undo)
    if call.is_unsettled:
        extra["unsettled"] = True
    return INTENT, call.entry(compress(call.text), extra)


Ended = tuple[Exception | None, Any]  # how a body ended: its error, or its result


def attempts(call: StepCall, first: Ended | None = None) -> Operation[Any]:
    """Intent, body, completion; and again as the rules of the effect allow. `first`: the first attempt was made, and
    ended so."""
    drafts = [] if first is not None else [intent(call)]
    while True:
        error, result = (yield from _attempt(call, drafts)) if first is None else first
        first = None
        if error is None:
            return (yield from _succeed(call, result))
        if _is_definite(call, error):
            drafts = yield from _failed(call, error)
            continue
        was_unsettled = call.is_unsettled
        settled, result = yield from _settle_error(call, error)
        if settled:
            return result
        if isinstance(error, BodyTimeout) and error.still is not None:
            # Its request may be under way in this very process: it is not done again before that has ended. How it
            # ended settles this attempt.
            first = yield from _ended_late(error.still)
            call.is_unsettled = call.is_unsettled and was_unsettled
            continue
        call.caller.check()  # another attempt may not be wanted any more
        drafts = [intent(call)]


def _attempt(call: StepCall, drafts: list[tuple[int, Entry]]) -> Operation[Ended]:
    """Write the intent, then call the body."""
    execution, spec, task = call.execution, call.spec, _task(call)
    execution.acting.add(task)
    call.begun = False
    try:
        yield from execution.journal.record(*drafts)
        if isinstance(execution.stop, Unwind):  # an operator's request came with the answer: it has not begun
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
            # A task that was cancelled while its intent was written: the body never began, and that is no doubt.
            if not call.begun and type(broken).__name__ == "CancelledError":
                yield from not_begun(call)
            raise
    finally:
        execution.acting.discard(task)


def _is_definite(call: StepCall, error: Exception) -> bool:
    """Whether it says that the effect did not happen: this attempt, and those before it."""
    named = (*call.spec.definite, *call.caller.definite)
    return not call.is_unsettled and (not call.begun or is_definite(error, named, call.spec.fn, call.outside))


def not_begun(call: StepCall) -> Operation[None]:
    if not call.is_unsettled:  # else its intent stays open, for what was before it
        yield from call.execution.journal.record((FAILED, call.entry(None, {"begun": False})))


def _ended_late(still: BodyThread[Any]) -> Operation[tuple[Exception | None, Any]]:
    """Wait for a body that runs on after its time: its error, or its result."""
    while not still.wait(0):
        yield Pause(0.05)
    try:
        return None, still.result()
    except Exception as error:
        return error, None


def _task(call: StepCall) -> Any:
    """The task that an async effect runs in: it is not broken off because another branch has ended the run."""
    if not (call.spec.is_async and call.execution.is_async):
        return None
    import asyncio

    return asyncio.current_task()


def _failed(call: StepCall, error: Exception) -> Operation[list[tuple[int, Entry]]]:
    """A definite failure: the end, or the entries that the next attempt begins with."""
    execution, spec = call.execution, call.spec
    described = describe_error(error, execution.ctx.codec)
    if not spec.retry.wants(error, call.attempt):
        if call.path.startswith("undo:"):  # must not stand for ever: a resume of the run tries again
            yield from execution.journal.record((FAILED, call.entry(None, {"error": described})))
        else:
            yield from ended(call, None, {"error": described})
            mark_recorded(error)
        raise error
    delay = spec.retry.delay_s(call.attempt, random.random())
    due = execution.shared_clock_us() + int(delay * 1e6)
    failed = (FAILED, call.entry(None, {"error": described, "due": due}))
    if delay <= LINGER_S:
        try:
            yield from wait_until(execution, call.path, due, {"for": "retry", "step": call.path, "name": call.name})
            call.caller.check()  # another attempt may not be wanted any more
        except GeneratorExit:
            raise
        except BaseException:  # the code ends here: that it failed is no doubt
            yield from execution.journal.record(failed)
            raise
        if not is_over(call.caller):
            return [failed, intent(call)]  # the failure and the next intent share one commit
    yield from execution.journal.record(failed)  # a run that parks meanwhile must know that this is no doubt
    yield from wait_for_retry(call, due)
    return [intent(call)]


def _succeed(call: StepCall, result: Any, extra: dict[str, Any] | None = None) -> Operation[Any]:
    try:
        value = encode_result(call, result)
    except Unstorable as error:
        # It was done: that is what matters. The result is lost, and a caller that asks for it gets an error.
        described = describe_error(error, call.execution.ctx.codec)
        yield from ended(call, None, {"error": described, "done": True, **(extra or {})})
        raise
    yield from ended(call, value, extra)
    return result


def ended(call: StepCall, value: bytes | None, extra: dict[str, Any] | None) -> Operation[None]:
    yield from call.execution.journal.record((DONE, call.entry(value, extra)))


# --- doubt


def _settle_error(call: StepCall, error: Exception) -> Operation[tuple[bool, Any]]:
    """`_settle`, after an error out of the body that leaves the outcome unknown."""
    run, kind = call.execution.row.id, type(error).__name__
    found = event("effect.unknown", run=run, step=call.path, function=call.spec.name, error=kind)
    hint = (
        "an earlier attempt may have" if call.is_unsettled else "name it in definite= if it means that nothing happened"
    )
    what = "run %s: %s raised %s: it is unknown whether it happened; %s"
    _log.warning(what, run, call.spec.name, kind, hint, extra=found)
    try:
        return (yield from _settle(call, error))
    except InDoubt as doubt:
        raise doubt from error


def _settle(call: StepCall, error: Exception | None = None) -> Operation[tuple[bool, Any]]:
    """`settle`, of a call that is run again if it may be: not for ever. After so many attempts a person is asked."""
    settled, result = yield from settle(call, error)
    if settled or call.attempt < call.spec.retry.retries + ATTEMPTS_MAX:
        return settled, result
    verdict = yield from _ask_person(call, f"{call.path}#{call.attempt}", only_if_asked=False)
    if isinstance(verdict, Done):
        return True, (yield from _succeed(call, verdict.result, {"settled": "resolved"}))
    call.is_unsettled = False
    return False, None


def settle(call: StepCall, error: Exception | None = None) -> Operation[tuple[bool, Any]]:
    """Find out what became of an effect: (True, its result), or (False, None) if it may be run (again)."""
    _check_allowed(call)
    execution, spec = call.execution, call.spec
    ask_path = f"{call.path}#{call.attempt}"
    verdict = yield from _ask_person(call, ask_path, only_if_asked=True)
    by = "resolved"
    if verdict is None:
        count_event("in_doubt")
        verdict, by = (yield from _reconcile(call)), "reconciled"
        if spec.reconcile is None and error is not None:
            verdict = Unknown(f"it raised {line_of(error)}")
    if isinstance(verdict, NotDone) and (yield from execution.now_us()) < call.deadline:
        # What came late would be doubled: look once more when it can come no more.
        yield from _until_deadline(call)
        if spec.reconcile is not None:
            verdict, by = (yield from _reconcile(call)), "reconciled"
    call.is_unsettled = False  # a verdict is about the key, and so about every attempt; on_doubt="retry" is none
    if isinstance(verdict, Unknown):
        verdict, by = (yield from _by_policy(call, ask_path, verdict)), "resolved"
    if isinstance(verdict, Done):
        return True, (yield from _succeed(call, verdict.result, {"settled": by}))
    return False, None


def _by_policy(call: StepCall, ask_path: str, unknown: Unknown) -> Operation[Verdict]:
    policy = call.spec.on_doubt
    if call.is_last and policy != "ask":  # nothing tells by running again: what may have to be undone, a person must
        policy = "fail" if call.spec.undo is None else "ask"
    if policy == "retry":
        call.is_unsettled = True
        yield from _until_deadline(call)
        return NotDone()
    if policy == "fail":
        doubt = in_doubt(call, unknown.reason)
        yield from ended(call, None, {"error": describe_error(doubt, call.execution.ctx.codec), "doubt": True})
        raise doubt
    verdict = yield from _ask_person(call, ask_path, only_if_asked=False, reason=unknown.reason)
    assert verdict is not None
    if isinstance(verdict, NotDone):
        yield from _until_deadline(call)
    return verdict


def in_doubt(call: StepCall, reason: str = "") -> InDoubt:
    run = call.execution.row.id
    return InDoubt(
        f"it is unknown whether {call.spec.name} at step {call.path} of run {run!r} happened (key {call.key})"
        f'{": " + reason if reason else ""}. on_doubt="fail" leaves that to the code that called it: look at the '
        "receiver for the key",
        run=run,
        step=call.path,
        key=str(call.key),
    )


def _until_deadline(call: StepCall) -> Operation[None]:
    what = {"for": "deadline", "step": call.path, "name": call.spec.name}
    yield from wait_until(call.execution, call.path, call.deadline, what)


def _reconcile(call: StepCall) -> Operation[Verdict]:
    spec = call.spec
    if spec.reconcile is None:
        return Unknown()
    fn = spec.reconcile
    inner = copy(call)
    inner.name, inner.spec = f"reconcile of {spec.name}", StepSpec(fn, spec.name, "step")
    body = acall_body if inner.spec.is_async else call_body
    try:
        kwargs = called_by_name(fn, *_values(call), call.key)
        found = yield Body(partial(body, inner, (), kwargs, None), inner.spec.is_async)
    except Exception as error:
        kind, run = type(error).__name__, call.execution.row.id
        found = event("reconcile.failed", run=run, step=call.path, function=spec.name, error=kind)
        _log.warning("run %s: reconcile of %s failed: %s", run, spec.name, kind, extra=found)
        return Unknown(f"reconcile failed: {line_of(error)}")
    try:
        return check_verdict(found, getattr(fn, "__name__", "reconcile"))
    except (
        UsageError
    ) as error:  # a defect of the code, which says nothing about the effect: user code must not catch it
        stuck = RunStuck(f"step {call.path} of run {call.execution.row.id!r} is in doubt, and {error}")
        call.execution.stop = call.execution.stop or stuck
        raise stuck from error


def _values(call: StepCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the call by name, and the key by its names."""
    binder = call.spec.binder
    if call.text:  # as recorded: a body that has run may have changed them
        arguments = {**binder.named(call.args, call.kwargs), **call.execution.decoded(call.text)}
    else:
        arguments = {**binder.plan.defaults, **call.kwargs}
    named = binder.plan.key
    if named is not None and arguments.get(named) is None:  # not given by the caller: filled in by its name below
        arguments.pop(named, None)
    return arguments, {} if "key" in arguments and named != "key" else {"key": call.key, named or "key": call.key}


def _ask_person(call: StepCall, ask_path: str, *, only_if_asked: bool, reason: str = "") -> Operation[Verdict | None]:
    """A person's verdict. With `only_if_asked`, None if no person was asked yet. `reason`: why that is needed."""
    execution = call.execution
    state = yield from asks.look(execution, ask_path)
    is_asked = state is not None and state.status != "closed"
    if only_if_asked and not is_asked:
        return None
    known = (execution.index.at(call.path)[-1].entry.extra or {}).get("reason", "")
    reason = safe_text(reason) or known
    if only_if_asked and state is not None and state.status == "open" and call.spec.reconcile is not None:
        verdict = yield from _reconcile(call)  # while a person is being waited for, the receiver may know by now
        if not isinstance(verdict, Unknown):
            return verdict
        reason = safe_text(verdict.reason)
    if not is_asked or reason != known:
        question = (
            f"Did {call.spec.name}{_shown(call)} happen? Its outcome is not known. Look at the receiver "
            f"for the key {call.key}."
        )
        terms = AskSpec(step=call.path, key=str(call.key), reason=reason or None)
        entry = call.entry(None, {"doubt": ask_path, **_because(reason)})
        beside = partial(asks.open_ask, execution, ask_path, "doubt", question, terms, None)
        yield from execution.journal.record((WAIT, entry), same_tx=beside)
    what = {"for": "doubt", "step": call.path, "name": call.spec.name, "key": str(call.key), **_because(reason)}
    answered = yield from asks.await_answer(execution, ask_path, what, None)
    return Done(answered.get("done")) if "done" in answered else NotDone()


def _because(reason: str) -> dict[str, str]:
    return {"reason": reason} if reason else {}


def _shown(call: StepCall) -> str:
    arguments = call.spec.binder.bind(call.args, call.kwargs) if call.text else call.kwargs
    inside = ", ".join(f"{name}={shown(value, 40)}" for name, value in arguments.items())
    return f"({inside})"


# --- approval


def _approval(call: StepCall) -> Operation[None]:
    """Ask whether it may run; the answer is recorded beside the effect."""
    spec, path = call.spec, f"{call.path}~approve"
    asked: asks.Question = spec.approve
    if asked.text == asks.MAY_IT_RUN:
        asked = asked._replace(text=f"May {spec.name}{_shown(call)} run?")
    asking = asks.question_at(call.caller, path, asked, name="perdure.approve", kind="approval")
    agreed = yield from call.caller.alone(asking)
    if agreed is not True:
        error = NotApproved(f"{spec.name}{_shown(call)} was not approved; it did not run")
        extra = {"error": describe_error(error, call.execution.ctx.codec), "approved": False}
        call.attempt = call.attempt or 1
        yield from call.execution.journal.record((DONE, call.entry(None, extra)))
        raise error
