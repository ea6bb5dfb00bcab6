"""The usual way of a step and of an effect: a first call in a blocking run, with nothing else to decide.

Then a call is its body and one commit (an effect: two), and needs no operation: plain functions down to the driver's
`append`. Whatever else there is, or comes up (a recorded call, a retry, doubt, a deadline, an operator's request), is
left to `steps.py` and `effects.py`. What is written is the same.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from perdure.errors import Unstorable
from perdure.runs.calls import effects, steps
from perdure.runs.calls.effects import Call, Ended, intent, make_key, not_begun
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import StepSpec
from perdure.runs.journal.entries import DONE, Entry, squeeze
from perdure.runs.session import points
from perdure.runs.session.acting import Act, perform
from perdure.runs.session.scope import BodyFrame, Scope, Unwind, current
from perdure.storage import meters
from perdure.values.codec import encode


def is_usual(scope: Scope, spec: StepSpec) -> bool:
    """Whether a call can go this way, as far as that is known before its body runs."""
    return (
        spec.is_plain
        and type(scope) is Scope
        and not scope.deadlines
        and scope.parent is None
        and scope.stop is None
        and scope.session.log.is_plain
        and meters.sink is None
        and not scope.session.index.at(f"{scope.prefix}{scope.count + 1}")
    )


def step(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a step."""
    session, binder = scope.session, spec.binder
    text = binder.text(binder.bind(args, kwargs), session.ctx.codec)
    wanted = digest(text)
    scope.count = number = scope.count + 1
    path = f"{scope.prefix}{number}"
    frame, error, result = _call(scope, spec, BodyFrame(scope, path, spec.name), args, kwargs)
    if error is not None:
        return perform(scope, steps.attempts(scope, spec, args, kwargs, path, text, wanted, failed=(frame, error)))
    try:
        value = squeeze(encode(result, session.ctx.codec))
    except Unstorable:
        return perform(scope, steps.completed(scope, spec, path, wanted, 1, result, frame.took))
    entry = Entry(path, spec.name, session.ctx.clock_us(), wanted, 1, value, None, frame.took)
    if session.log.is_plain:
        session.log.append(DONE, entry)
    else:
        perform(scope, session.log.record((DONE, entry)))
    return result


def effect(scope: Scope, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an effect."""
    session, binder = scope.session, spec.binder
    text = binder.text(binder.bind(args, kwargs), session.ctx.codec)
    wanted = digest(text)
    scope.count = number = scope.count + 1
    path = f"{scope.prefix}{number}"
    call = Call(scope, spec, path, args, kwargs, text, wanted, make_key(session, path, spec.name, wanted))
    session.log.append(*intent(call))
    if isinstance(session.stop, Unwind):
        perform(scope, _stopped(call, session.stop))
    args, kwargs = binder.call_with(args, kwargs, call.key)
    ended = _call(scope, spec, BodyFrame(scope, path, spec.name, key=call.key, is_effect=True), args, kwargs)
    frame, error, result = ended
    if error is None and session.log.is_plain:
        try:
            value = squeeze(encode(result, session.ctx.codec))
        except Unstorable:
            return perform(scope, effects.attempts(call, ended))
        call.took = frame.took
        session.log.append(DONE, call.entry(value))
        return result
    return perform(scope, effects.attempts(call, ended))


def _call(scope: Scope, spec: StepSpec, frame: BodyFrame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    """Call the body, in a scope that says so."""
    if points.hook is not None:
        points.reach("body", frame.path, frame.name, 1, "before")
    frame.begun, frame.outside = True, sys.exception()
    token = current.set(Scope(scope.session, scope.prefix, is_async=scope.is_async, body=frame))
    begun = perf_counter_ns()
    try:
        return frame, None, spec.fn(*args, **kwargs)
    except Exception as error:
        return frame, error, None
    finally:
        frame.took = (perf_counter_ns() - begun) // 1000
        current.reset(token)
        if points.hook is not None:
            points.reach("body", frame.path, frame.name, 1, "after")


def _stopped(call: Call, stop: Unwind) -> Act[None]:
    """An operator's request came with the intent: the body has not begun."""
    yield from not_begun(call)
    raise stop
