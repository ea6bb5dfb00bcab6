"""The usual way of a step and of an effect: a first call in a blocking run, with nothing else to decide.

Then a call is its body and one commit (an effect: two), and needs no operation: plain functions down to the driver's
`append`. Whatever else there is, or comes up (a recorded call, a retry, doubt, a deadline, an operator's request), is
left to `steps.py` and `effects.py`. What is written is the same.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from blake3 import blake3

from perdure.errors import Unstorable
from perdure.runs.calls import effects, steps
from perdure.runs.calls.effects import EffectCall, Ended, intent, make_key, not_begun
from perdure.runs.execution import hooks
from perdure.runs.execution.operation import Operation, run_operation
from perdure.runs.execution.scope import BodyScope, Scope, Unwind, current
from perdure.runs.functions.inputs import DIGEST_BYTES
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import DONE, Entry, compress
from perdure.storage import metrics
from perdure.values.codec import encode


def is_usual(scope: Scope, spec: StepSpec) -> bool:
    """Whether a call can go this way, as far as that is known before its body runs."""
    return (
        spec.is_plain
        and type(scope) is Scope
        and not scope.deadlines
        and scope.parent is None
        and scope.stop is None
        and scope.execution.journal.is_plain
        and metrics.sink is None
        and not scope.execution.index.at(f"{scope.prefix}{scope.count + 1}")
    )


def step(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step."""
    execution, binder = scope.execution, spec.binder
    text = binder.text(args, kwargs, execution.ctx.codec)
    args_hash = blake3(text).digest(DIGEST_BYTES)  # inline: `digest` is a call more
    scope.count = number = scope.count + 1
    path = f"{scope.prefix}{number}"
    frame, error, result = _call(spec, BodyScope(scope, path, spec.name), args, kwargs)
    if error is not None:
        return run_operation(scope, steps.attempts(scope, spec, args, kwargs, path, args_hash, failed=(frame, error)))
    try:
        value = compress(encode(result, execution.ctx.codec))
    except Unstorable:
        return run_operation(scope, steps.completed(scope, spec, path, args_hash, 1, result, frame.duration_us))
    entry = Entry(path, spec.name, execution.ctx.clock_us(), args_hash, 1, value, None, frame.duration_us)
    if execution.journal.is_plain:
        execution.journal.append(DONE, entry)
    else:
        run_operation(scope, execution.journal.record((DONE, entry)))
    return result


def effect(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an effect."""
    execution, binder = scope.execution, spec.binder
    text = binder.text(args, kwargs, execution.ctx.codec)
    args_hash = blake3(text).digest(DIGEST_BYTES)  # inline: `digest` is a call more
    scope.count = number = scope.count + 1
    path = f"{scope.prefix}{number}"
    call = EffectCall(scope, spec, path, args, kwargs, text, args_hash, make_key(execution, path, spec.name, args_hash))
    execution.journal.append(*intent(call))
    if isinstance(execution.stop, Unwind):
        run_operation(scope, _stopped(call, execution.stop))
    args, kwargs = binder.call_with(args, kwargs, call.key)
    ended = _call(spec, BodyScope(scope, path, spec.name, key=call.key, is_effect=True), args, kwargs)
    frame, error, result = ended
    if error is None and execution.journal.is_plain:
        try:
            value = compress(encode(result, execution.ctx.codec))
        except Unstorable:
            return run_operation(scope, effects.attempts(call, ended))
        call.duration_us = frame.duration_us
        execution.journal.append(DONE, call.entry(value))
        return result
    return run_operation(scope, effects.attempts(call, ended))


def _call(spec: StepSpec, frame: BodyScope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    """Call the body, in a scope that says so."""
    if hooks.hook is not None:
        hooks.fault_point("body", frame.path, frame.name, 1, "before")
    frame.begun, frame.outside = True, sys.exception()
    token = current.set(frame)
    begun = perf_counter_ns()
    try:
        return frame, None, spec.body(*args, **kwargs)
    except Exception as error:
        return frame, error, None
    finally:
        frame.duration_us = (perf_counter_ns() - begun) // 1000
        current.reset(token)
        if hooks.hook is not None:
            hooks.fault_point("body", frame.path, frame.name, 1, "after")


def _stopped(call: EffectCall, stop: Unwind) -> Operation[None]:
    """An operator's request came with the intent: the body has not begun."""
    yield from not_begun(call)
    raise stop
