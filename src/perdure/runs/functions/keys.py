"""`IdempotencyKey`: what lets the receiver of an effect's repeated request see that it has done it already."""

from __future__ import annotations

from perdure.values.registry import register


class IdempotencyKey(str):
    """An idempotency key, for `def book(flight: str, key: perdure.IdempotencyKey)`: Perdure fills in the parameter.

    It is a plain string to its receiver: give it to the service as it is, in the header or field that its API
    has for that. It is chosen before an effect first runs, stored with the intent, and the same at every attempt.
    """

    __slots__ = ()


# A key that is returned or passed on is stored as a text.
register(IdempotencyKey, name="perdure.IdempotencyKey", dump=str, load=IdempotencyKey)


def idempotency_key() -> IdempotencyKey:
    """The idempotency key of the effect that runs: `perdure.idempotency_key()`. Raises NotInRun elsewhere."""
    from perdure.errors import NotInRun
    from perdure.runs.execution.scope import current

    scope = current.get()
    if scope is None or scope.body is None or scope.body.key is None:
        raise NotInRun("perdure.idempotency_key() is called inside the body of an effect: only that has a key")
    return IdempotencyKey(scope.body.key)
