"""Approvals: whether an effect asks a person before it runs, what it asks, and what follows from the answer.

The question is recorded before the run waits, and the intent before the body runs. So `when=` is called only if neither
is recorded: a replay never decides differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from perdure.errors import NotApproved, UsageError
from perdure.runs.calls.asked_calls import call_shown, fields_of, interpolated, masked_arguments
from perdure.runs.calls.asks import CheckedQuestion, question
from perdure.runs.calls.doubt import called_back
from perdure.runs.calls.failures import describe_error
from perdure.runs.execution.operation import Operation
from perdure.runs.execution.scope import StepCall
from perdure.runs.functions.callbacks import check_approval
from perdure.runs.journal.entries import DONE
from perdure.values.codec import encode
from perdure.values.safe_repr import shown

_MAY_IT_RUN = "May it run?"  # stands for a text that names the effect and its arguments


def approval_of(fn: Callable[..., Any], approve: Any, ignore: Collection[str]) -> CheckedQuestion | None:
    """Return the question that `approve=` of an effect asks; None if it asks none. Raises UsageError.

    `approve` is True, a text, a function that decides whether to ask, or a dict: the options of `perdure.ask`, and
    such a function as `when`.
    """
    if approve is None or approve is False:  # not what is merely empty, such as an unset variable: it must not run
        return None
    options: dict[str, Any]
    if isinstance(approve, dict):
        options = dict(approve)
    elif callable(approve):
        options = {"when": approve}
    else:
        options = {} if approve is True else {"question": approve}
    when, text = options.pop("when", None), options.pop("question", _MAY_IT_RUN)
    try:
        asked = question(text, options=[True, False], **options)
        quoted = fields_of(text)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"approve={approve!r}: True, a question, a function that decides, or options of perdure.ask as a dict, "
            f"whose answer is True or False ({error})"
        ) from error
    check_approval(fn, when, quoted, ignore)
    return asked._replace(when=when)


def approval(call: StepCall) -> Operation[None]:
    """Ask whether the effect may run, and record the answer. Raises NotApproved."""
    spec, path = call.spec, f"{call.path}~approve"
    asked: CheckedQuestion = spec.approve
    if asked.when is not None and not call.execution.index.at(path) and not (yield from _must_ask(call, asked.when)):
        return
    text = None if asked.text == _MAY_IT_RUN else interpolated(asked.text, call)
    arguments = encode(masked_arguments(call), call.execution.ctx.codec).decode()
    terms = msgspec.structs.replace(asked.terms, effect=spec.name, arguments=arguments)
    asked = asked._replace(text=text or f"May {spec.name}{call_shown(call)} run?", terms=terms)
    agreed = yield from call.execution.policy.approval(call.caller, path, asked)
    if agreed is not True:
        text = f"{spec.name}{call_shown(call)} was not approved; it did not run"
        yield from _end(call, NotApproved(text))
        raise call.execution.policy.declined(text)


def _must_ask(call: StepCall, when: Callable[..., Any]) -> Operation[bool]:
    """Call the function that decides whether to ask. Its error ends the effect, which does not run."""
    if call.execution.replay:
        raise call.execution.end_of_replay(call.path, call.name)
    try:
        decided = yield from called_back(call, when, "approve")
    except Exception as error:
        yield from _end(call, error)
        raise
    if isinstance(decided, bool):
        return decided
    raise UsageError(f"approve= of effect {call.name} returned {shown(decided)}: True to ask a person, or False")


def _end(call: StepCall, error: Exception) -> Operation[None]:
    extra = {"error": describe_error(error, call.execution.ctx.codec), "approved": False}
    call.attempt = call.attempt or 1
    yield from call.execution.journal.record((DONE, call.entry(None, extra)))
