"""A call as people see it in questions: its arguments, and texts that quote them. Secrets are masked in all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from string import Formatter
from typing import Any

from perdure.errors import UsageError
from perdure.runs.calls.failures import TEXT_MAX, safe_text
from perdure.runs.execution.scope import StepCall
from perdure.values.codec import decode, encode
from perdure.values.safe_repr import shown
from perdure.values.secrets import is_secret, masked, redacted

_ARGUMENT_MAX_BYTES = 16_384  # a longer argument is shown shortened
_SHORTENED = 200
# More than is shown: what is masked becomes shorter.
_ARGUMENT_HEAD, _TEXT_HEAD = 4 * _SHORTENED, 2 * TEXT_MAX
_UNBOUNDED = re.compile(r"[{}]|\d{4}")
_PRIVATE = re.compile(r"[.\[]_")


def masked_arguments(call: StepCall) -> dict[str, Any]:
    """Return the arguments of a call as plain data, by name."""
    codec = call.execution.ctx.codec
    text = call.text or encode(call.kwargs, codec)
    arguments: dict[str, Any] = decode(text, codec, raw=True)
    long = set()
    if len(text) > _ARGUMENT_MAX_BYTES:
        long = {name for name, value in arguments.items() if len(encode(value, codec)) > _ARGUMENT_MAX_BYTES}
    short = {name: _head(value, _ARGUMENT_HEAD) if name in long else value for name, value in arguments.items()}
    shortened = {name for name in long if not is_secret(name, arguments[name])}
    return {name: shown(value, _SHORTENED) if name in shortened else value for name, value in masked(short).items()}


def _head(value: Any, most: int) -> Any:
    """Return the beginning of a text, and of each text and collection in plain data.

    Masking takes long, and no more than that is shown.
    """
    if isinstance(value, str | bytes):
        return value[:most]
    if isinstance(value, Mapping):
        return {_head(key, most): _head(one, most) for key, one in islice(value.items(), most)}
    if isinstance(value, list | tuple | set | frozenset):
        return [_head(one, most) for one in islice(value, most)]
    return value


def call_shown(call: StepCall) -> str:
    """Return the arguments of a call in one line: "(cents=900, to='ACME')"."""
    arguments = call.spec.binder.bind(call.args, call.kwargs) if call.text else call.kwargs
    inside = [
        f"{name}=***" if is_secret(name, value) else redacted(f"{name}={shown(value, 40)}")
        for name, value in arguments.items()
    ]
    return f"({', '.join(inside)})"


def interpolated(text: str, call: StepCall) -> str | None:
    """Return the text with the arguments of a call in place of `{name}`; None if one of them has no such form."""
    binder = call.spec.binder
    try:
        filled = _Masking().vformat(text, (), {**binder.plan.defaults, **binder.bind(call.args, call.kwargs)})
    except Exception:  # whatever the format of a user's value raises
        return None
    return safe_text(redacted(filled[:_TEXT_HEAD]))


def fields_of(text: str) -> set[str]:
    """Return the names of the arguments that a text quotes. Raises ValueError if its braces do not match.

    Raises UsageError for a width of more than three digits, and for one that an argument decides: it decides how much
    memory the question takes. The same for private attributes, which lead from any value to the whole program.
    """
    names = set()
    for _, field, form, _ in Formatter().parse(text):
        if field is not None:
            if _UNBOUNDED.search(form or ""):
                raise UsageError(f"the question quotes {{{field}:{form}}}: write a width of at most three digits")
            if _PRIVATE.search(field):
                raise UsageError(f"the question quotes {{{field}}}: names that begin with _ are private")
            names.add(re.split(r"[.\[]", field)[0])
    return names


class _Hidden(str):
    __slots__ = ()

    def __format__(self, _spec: str) -> str:
        return "***"


class _Masking(Formatter):
    """Fills in fields. A field is masked if its name, or that of an attribute or item in it, marks a secret."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        is_hidden = any(is_secret(name, value) for name in re.findall(r"\w+", field_name))
        return (_Hidden() if is_hidden else masked(_head(value, _TEXT_HEAD))), first
