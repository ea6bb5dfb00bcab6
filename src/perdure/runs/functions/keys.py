"""`IdempotencyKey`: by this key the receiver of an effect recognises a request that it has already carried out."""

from __future__ import annotations

from perdure.values.registry import register


class IdempotencyKey(str):
    """An idempotency key, for `def book(flight: str, key: perdure.IdempotencyKey)`: Perdure fills in the parameter.

    It is a string. Pass it to the service unchanged, in the header or field that its API has for idempotency keys. It
    is chosen before the effect first runs, is stored with the intent, and stays the same for every attempt.
    """

    __slots__ = ()


# A key that code returns or passes on is stored as text.
register(IdempotencyKey, name="perdure.IdempotencyKey", dump=str, load=IdempotencyKey)


def idempotency_key() -> IdempotencyKey:
    """Return the idempotency key of the effect whose body is running. Raises NotInRun elsewhere."""
    from perdure.errors import NotInRun
    from perdure.runs.execution.scope import current

    scope = current.get()
    if scope is None or scope.body is None or scope.body.key is None:
        raise NotInRun("perdure.idempotency_key() is called inside the body of an effect: only that has a key")
    return IdempotencyKey(scope.body.key)
