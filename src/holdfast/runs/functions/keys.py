"""The key of an effect: what lets the receiver of a repeated request see that it has done it already."""

from __future__ import annotations

from holdfast.values.registry import register


class Key(str):
    """An idempotency key. A parameter with this type is filled in by Holdfast: `def book(flight: str, key: hf.Key)`.

    It is a plain string to whoever receives it: give it to the service as it is, in the header or field that its API
    has for that. It is chosen before an effect first runs, stored with the intent, and the same at every attempt.
    """

    __slots__ = ()


register(Key, name="holdfast.Key", dump=str, load=Key)  # whoever returns or passes on his key stores a text


def current_key() -> Key:
    """The idempotency key of the effect whose body is running: `hf.idempotency_key()`. Raises NotInRun elsewhere."""
    from holdfast.errors import NotInRun
    from holdfast.runs.session.scope import current

    scope = current.get()
    if scope is None or scope.body is None or scope.body.key is None:
        raise NotInRun("hf.idempotency_key() is called inside the body of an effect: only that has a key")
    return Key(scope.body.key)
