"""Settling effects whose end is not recorded: by `reconcile`, by the policy `on_doubt`, or by a person.

The verdict is recorded as the end of the effect, or lets it run again. `effects.py` runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from perdure.errors import InDoubt, RunStuck, Unstorable, UsageError
from perdure.runs.calls import asks
from perdure.runs.calls.asked_calls import call_shown, masked_arguments
from perdure.runs.calls.asks import AskSpec
from perdure.runs.calls.bodies import acall_body, call_body
from perdure.runs.calls.failures import describe_error, line_of, mark_recorded, safe_text
from perdure.runs.calls.outcome import Done, NotDone, Unknown, Verdict, check_verdict
from perdure.runs.calls.steps import checked_result, encode_result, wait_until
from perdure.runs.execution.instrumentation import count_event
from perdure.runs.execution.operation import Body, Operation
from perdure.runs.execution.scope import StepCall
from perdure.runs.functions.callbacks import called_by_name
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import DONE, WAIT
from perdure.runs.journal.kinds import DEADLINE, DOUBT
from perdure.storage.events import event
from perdure.values.codec import encode

# The number of attempts beyond `retries` after which a person is asked about an effect whose outcome stays open.
ATTEMPTS_MAX = 10
_log = logging.getLogger("perdure")


def check_allowed(call: StepCall) -> None:
    """Refuse an effect in a sandbox. Raises UsageError."""
    if call.execution.ctx.refuses_effects:
        refused = UsageError(f"effect {call.name} at step {call.path} is not recorded, and a sandbox runs no effects")
        call.execution.halt(refused)  # or the run's code could catch it and continue
        raise refused


def ended(call: StepCall, value: bytes | None, extra: dict[str, Any] | None) -> Operation[None]:
    yield from call.execution.journal.record((DONE, call.entry(value, extra)))


def _settled(call: StepCall, verdict: Done, by: str) -> Operation[Any]:
    """Record the result of a verdict as the end of the effect, and return it."""
    value = yield from encode_result(call, verdict.result)
    yield from ended(call, value, {"settled": by})
    return verdict.result


def settle_error(call: StepCall, error: Exception) -> Operation[tuple[bool, Any]]:
    """Settle an effect after an error that leaves its outcome unknown, or a result that cannot be stored."""
    run, kind = call.execution.row.id, type(error).__name__
    fields = event("effect.unknown", run=run, step=call.path, function=call.spec.name, error=kind)
    message = "run %s: %s raised %s: it is unknown whether it happened; %s"
    if call.has_happened:
        message = "run %s: %s happened, and its result cannot be stored (%s); %s"
        hint = "return plain data from it; `perdure run show` names the type"
    elif call.is_unsettled:
        hint = "an earlier attempt may have"
    else:
        hint = "name it in definite= if it means that nothing happened"
    _log.warning(message, run, call.spec.name, kind, hint, extra=fields)
    try:
        return (yield from settle_again(call, error))
    except InDoubt as doubt:
        raise doubt from error


def settle_again(call: StepCall, error: Exception | None = None) -> Operation[tuple[bool, Any]]:
    """Settle an effect as `settle` does; after `retries` and ATTEMPTS_MAX more attempts, ask a person."""
    settled, result = yield from settle(call, error)
    if settled or call.attempt - call.tried < call.spec.retry.retries + ATTEMPTS_MAX:
        return settled, result
    verdict = yield from _ask_person(call, f"{call.path}#{call.attempt}", only_if_asked=False)
    if isinstance(verdict, Done):
        return True, (yield from _settled(call, verdict, "resolved"))
    call.is_unsettled = call.has_happened = False
    return False, None


def settle(call: StepCall, error: Exception | None = None) -> Operation[tuple[bool, Any]]:
    """Settle an effect: return (True, its result) if it happened, or (False, None) if it may be run (again)."""
    check_allowed(call)
    execution, spec = call.execution, call.spec
    ask_path = f"{call.path}#{call.attempt}"
    last = execution.index.at(call.path)[-1].entry.extra or {}
    call.has_happened = call.has_happened or "happened" in last
    verdict = yield from _ask_person(call, ask_path, only_if_asked=True)
    by = "resolved"
    if verdict is None:
        count_event("in_doubt")
        verdict, by = (yield from _reconcile(call)), "reconciled"
        if spec.reconcile is None and error is not None:
            verdict = Unknown(str(error) if call.has_happened else f"it raised {line_of(error)}")
    if isinstance(verdict, NotDone) and (yield from execution.now_us()) < call.deadline:
        # A request that arrives late would be doubled: ask again when it can no longer arrive.
        yield from _until_deadline(call)
        if spec.reconcile is not None:
            verdict, by = (yield from _reconcile(call)), "reconciled"
    call.is_unsettled = False  # a verdict is about the key, so about every attempt; on_doubt="retry" gives none
    if isinstance(verdict, Unknown):
        verdict, by = (yield from _by_policy(call, ask_path, verdict)), "resolved"
    if isinstance(verdict, Done):
        return True, (yield from _settled(call, verdict, by))
    call.has_happened = False  # a person decided that it did not happen
    return False, None


def _by_policy(call: StepCall, ask_path: str, unknown: Unknown) -> Operation[Verdict]:
    policy = call.spec.on_doubt
    # The run is ending, so no retry can settle it. If the effect has an undo, a person must decide whether to use it.
    if call.is_last and policy != "ask":
        policy = "fail" if call.spec.undo is None else "ask"
    if call.has_happened and policy == "retry":  # the body would again return what cannot be stored
        policy = "ask"
    if policy == "retry":
        call.is_unsettled = True
        yield from _until_deadline(call)
        return NotDone()
    if policy == "fail":
        doubt = in_doubt(call, unknown.reason)
        yield from ended(call, None, {"error": describe_error(doubt, call.execution.ctx.codec), "doubt": True})
        mark_recorded(doubt, call.path)
        raise doubt
    verdict = yield from _ask_person(call, ask_path, only_if_asked=False, reason=unknown.reason)
    assert verdict is not None
    if isinstance(verdict, NotDone):
        yield from _until_deadline(call)
    return verdict


def in_doubt(call: StepCall, reason: str = "") -> InDoubt:
    run = call.execution.row.id
    step = f"{call.spec.name} at step {call.path} of run {run!r}"
    return InDoubt(
        (f"{step} happened, and its result is lost" if call.has_happened else f"it is unknown whether {step} happened")
        + f" (key {call.key})"
        f'{": " + reason if reason else ""}. on_doubt="fail" leaves that to the code that called it: look at the '
        "receiver for the key",
        run=run,
        step=call.path,
        key=str(call.key),
    )


def _until_deadline(call: StepCall) -> Operation[None]:
    waiting = DEADLINE.waiting(call.path, name=call.spec.name)
    yield from wait_until(call.execution, call.path, call.deadline, DEADLINE, waiting)


def _reconcile(call: StepCall) -> Operation[Verdict]:
    spec = call.spec
    if spec.reconcile is None:
        return Unknown()
    fn = spec.reconcile
    try:
        verdict = yield from called_back(call, fn, "reconcile")
    except Exception as error:
        kind, run = type(error).__name__, call.execution.row.id
        fields = event("reconcile.failed", run=run, step=call.path, function=spec.name, error=kind)
        _log.warning("run %s: reconcile of %s failed: %s", run, spec.name, kind, extra=fields)
        return Unknown(f"reconcile failed: {line_of(error)}")
    try:
        return _checked(call, check_verdict(verdict, getattr(fn, "__name__", "reconcile")))
    except UsageError as error:
        # A defect of the reconcile function says nothing about the effect: the run's code must not catch it.
        stuck = RunStuck(f"step {call.path} of run {call.execution.row.id!r} is in doubt, and {error}")
        call.execution.halt(stuck)
        raise stuck from error


def called_back(call: StepCall, fn: Callable[..., Any], option: str) -> Operation[Any]:
    """Call a callback of an effect with the arguments that it names. Journaled calls in it are plain calls."""
    inner = copy(call)
    inner.name, inner.spec = f"{option} of {call.spec.name}", StepSpec(fn, call.spec.name, "step")
    body = acall_body if inner.spec.is_async else call_body
    kwargs = called_by_name(fn, *_values(call), call.key)
    return (yield Body(partial(body, inner, (), kwargs, None), inner.spec.is_async))


def _checked(call: StepCall, verdict: Verdict) -> Verdict:
    """Return Unknown for a verdict of `reconcile` that cannot be acted on."""
    if isinstance(verdict, NotDone) and call.has_happened:
        return Unknown("its body returned, and reconcile says that it did not happen")
    try:
        if isinstance(verdict, Done):
            checked_result(call, verdict.result)
    except Unstorable as error:
        return Unknown(f"it happened, and reconcile returned {error}")
    return verdict


def _values(call: StepCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the call by name, and its key by each name that `reconcile` may use for it."""
    binder = call.spec.binder
    if call.text:  # the recorded arguments: a body that ran may have changed the objects
        arguments = {**binder.named(call.args, call.kwargs), **call.execution.decoded(call.text)}
    else:
        arguments = {**binder.plan.defaults, **call.kwargs}
    named = binder.plan.key
    if named is not None and arguments.get(named) is None:  # the caller passed none: it is filled in below
        arguments.pop(named, None)
    return arguments, {} if "key" in arguments and named != "key" else {"key": call.key, named or "key": call.key}


def _ask_person(call: StepCall, ask_path: str, *, only_if_asked: bool, reason: str = "") -> Operation[Verdict | None]:
    """Return a person's verdict; None with `only_if_asked` if no person was asked yet. The person sees the `reason`."""
    execution = call.execution
    state = yield from asks.look(execution, ask_path)
    is_asked = state is not None and state.status != "closed"
    if only_if_asked and not is_asked:
        return None
    known = (execution.index.at(call.path)[-1].entry.extra or {}).get("reason", "")
    reason = safe_text(reason) or known
    if only_if_asked and state is not None and state.status == "open" and call.spec.reconcile is not None:
        verdict = yield from _reconcile(call)  # the receiver may know the outcome before the person answers
        if not isinstance(verdict, Unknown):
            return verdict
        reason = safe_text(verdict.reason)
    if not is_asked or reason != known:
        asked = f"Did {call.spec.name}{call_shown(call)} happen? Its outcome is not known."
        if call.has_happened:
            asked = (
                f"What did {call.spec.name}{call_shown(call)} return? It happened, and its result could not be stored."
            )
        question = f"{asked} Look at the receiver for the key {call.key}."
        arguments = encode(masked_arguments(call), execution.ctx.codec).decode()
        terms = AskSpec(
            step=call.path, key=str(call.key), reason=reason or None, effect=call.spec.name, arguments=arguments
        )
        extra = {"doubt": ask_path} | ({"reason": reason} if reason else {})
        entry = call.entry(None, {**extra, "happened": True} if call.has_happened else extra)
        opened = partial(asks.open_ask, execution, ask_path, "doubt", question, terms, None)
        yield from execution.journal.commit(opened, (WAIT, entry))
    name, key = call.spec.name, str(call.key)
    shown = f"a verdict on {name} (step {call.path}, key {key}){f': {reason}' if reason else ''}"
    waiting = DOUBT.waiting(call.path, shown, name=name, key=key, reason=reason, has_happened=call.has_happened)
    answered = yield from asks.await_answer(execution, ask_path, DOUBT, waiting, None)
    return Done(answered.get("done")) if "done" in answered else NotDone()
