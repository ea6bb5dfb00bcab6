"""The key of an effect: what lets the receiver of a repeated request see that it has done it already."""

from __future__ import annotations

from perdure.values.registry import register


class Key(str):
    """An idempotency key. Perdure fills in a parameter of this type: `def book(flight: str, key: perdure.Key)`.

    It is a plain string to whoever receives it: give it to the service as it is, in the header or field that its API
    has for that. It is chosen before an effect first runs, stored with the intent, and the same at every attempt.
    """

    __slots__ = ()


register(Key, name="perdure.Key", dump=str, load=Key)  # whoever returns or passes on his key stores a text


def current_key() -> Key:
    """The idempotency key of the effect that runs: `perdure.idempotency_key()`. Raises NotInRun elsewhere."""
    from perdure.errors import NotInRun
    from perdure.runs.session.scope import current

    scope = current.get()
    if scope is None or scope.body is None or scope.body.key is None:
        raise NotInRun("perdure.idempotency_key() is called inside the body of an effect: only that has a key")
    return Key(scope.body.key)
