"""Calls of an effect's `reconcile`, `undo` and `approve`: the names of their parameters choose the values.

`key` is the effect's idempotency key, `result` what it returned, `effect_key` the key that it had; any other name is an
argument of the effect. An unknown name, or a parameter that cannot be passed by name, is refused when the effect is
decorated. The undo may run weeks later: too late to find this mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from perdure.errors import UsageError
from perdure.runs.functions.inputs import annotations_of, is_key, receiver_of, signature_of
from perdure.runs.functions.specs import plain_name

_OF_UNDO = ("result", "effect_key")


def check_callbacks(
    fn: Callable[..., Any],
    reconcile: Callable[..., Any] | None,
    undo: Callable[..., Any] | None,
    ignore: Collection[str],
) -> None:
    """Raise UsageError if `reconcile` or `undo` has a parameter that the effect `fn` cannot fill."""
    if reconcile is None and undo is None:
        return
    names, recorded, is_open = _names(fn, ignore)
    if reconcile is not None:
        _check(fn, "reconcile", reconcile, [*names, *(["key"] if "key" not in names else [])], is_open)
    if undo is None:
        return
    undo = getattr(getattr(undo, "perdure", None), "fn", undo)
    if not plain_name(undo):
        raise UsageError(
            f"undo={undo!r} of effect {_name(fn)} has no name to be recorded and found again by: wrap it in a function"
        )
    if receiver_of(undo, signature_of(undo)) is not None:
        raise UsageError(
            f"undo={_name(undo)} is a method, and an undo has no self to call it on: give a function, which gets "
            "the effect's arguments and result by name"
        )
    _check(fn, "undo", undo, [*recorded, *_OF_UNDO], is_open)


def check_approval(
    fn: Callable[..., Any], when: Callable[..., Any] | None, quoted: Collection[str], ignore: Collection[str]
) -> None:
    """Raise UsageError if `when` has a parameter, or a question quotes one, that the effect `fn` does not record."""
    _, names, is_open = _names(fn, ignore)
    if when is not None:
        if not callable(when):
            raise UsageError(f"when={when!r} of effect {_name(fn)}: a function that returns whether to ask")
        _check(fn, "approve", when, names, is_open)
    unknown = sorted(name for name in quoted if name not in names and not (is_open and name))
    if unknown:
        raise UsageError(
            f"the question of effect {_name(fn)} quotes {{{unknown[0]}}}, which is not an argument of it: it has "
            f"{', '.join(names) or 'none'}; write {{{{ and }}}} for braces"
        )


def _names(fn: Callable[..., Any], ignore: Collection[str]) -> tuple[list[str], list[str], bool]:
    """Return the names of all parameters, those of the recorded ones, and whether there are **kwargs of any name."""
    signature = signature_of(fn)
    annotations, receiver = annotations_of(fn, signature), receiver_of(fn, signature)
    names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    recorded = [name for name in names if name != receiver and name not in ignore and not is_key(annotations.get(name))]
    return names, recorded, len(names) < len(signature.parameters)


def _check(fn: Callable[..., Any], option: str, callback: Callable[..., Any], names: list[str], is_open: bool) -> None:
    signature = signature_of(callback)
    annotations = annotations_of(callback, signature)
    for name, parameter in signature.parameters.items():
        is_known = name in names or is_open or is_key(annotations.get(name)) or parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(
                f"{option}={_name(callback)} of effect {_name(fn)} takes {name!r} by position only, and it is called "
                "by name: take the / out of its parameters, or wrap it in a function"
            )
        if parameter.kind is parameter.VAR_POSITIONAL:
            shown = f"*{name}"
        elif is_known or parameter.default is not parameter.empty:
            continue
        else:
            shown = name
        own = ", or `key: perdure.IdempotencyKey`, a key of its own" if option == "undo" else ""
        raise UsageError(
            f"{option}={_name(callback)} of effect {_name(fn)} asks for {shown!r}, which is not there: it is called by "
            f"name, with any of {', '.join(names)}{own}"
        )


def called_by_name(
    callback: Callable[..., Any], arguments: Mapping[str, Any], extras: Mapping[str, Any], key: str | None = None
) -> dict[str, Any]:
    """Return the keyword arguments for a callback.

    `arguments` are the effect's; `extras` takes precedence over them. `key` fills a parameter of type IdempotencyKey.
    None leaves that parameter to the caller."""
    signature = signature_of(callback)
    annotations = annotations_of(callback, signature)
    values = {**arguments, **extras}
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if is_key(annotations.get(name)):
            if key is not None:
                kwargs[name] = key
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= {other: value for other, value in arguments.items() if other not in signature.parameters}
        elif name in values:
            kwargs[name] = values[name]
    return kwargs


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", fn))
