"""The idempotency key as a header of HTTP APIs.

    @perdure.effect
    def charge(order: str, cents: int) -> str:
        reply = client.post("/v1/charges", json={…}, headers=perdure.idempotency_headers(api="stripe"))

The receiver does the work once per key, and answers a repeated request with what it answered before. It does so
only for as long as it remembers the key, which is not forever:

    api            header                       key at most    remembered for (? where its documents do not say)
    ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    adyen          Idempotency-Key              64             ?
    amazon_pay     x-amz-pay-idempotency-key    32             always
    brex           Idempotency-Key              ?              ?
    gocardless     Idempotency-Key              ?              ?
    klarna         Klarna-Idempotency-Key       ?              24 hours
    mangopay       Idempotency-Key              36             24 hours
    mercado_pago   X-Idempotency-Key            ?              ?
    mollie         Idempotency-Key              ?              ?
    paypal         PayPal-Request-Id            108            6 hours (orders), by API
    resend         Idempotency-Key              256            24 hours
    squarespace    Idempotency-Key              64             ?
    stripe         Idempotency-Key              255            24 hours or more
    worldline      X-GCS-Idempotence-Key        40             24 hours

A run that may rest for longer than that in the middle of an effect needs `reconcile=` as well: after it, the key
no longer protects. Square, Plaid and Wise take the key in the body of the request, not in a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perdure.errors import UsageError

__all__ = ["HEADERS", "KEY_LENGTH_MAX", "idempotency_headers"]

_STANDARD: Final = "Idempotency-Key"

#: The header of each API.
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adyen": _STANDARD,
        "amazon_pay": "x-amz-pay-idempotency-key",
        "brex": _STANDARD,
        "gocardless": _STANDARD,
        "klarna": "Klarna-Idempotency-Key",
        "mangopay": _STANDARD,
        "mercado_pago": "X-Idempotency-Key",
        "mollie": _STANDARD,
        "paypal": "PayPal-Request-Id",
        "resend": _STANDARD,
        "squarespace": _STANDARD,
        "stripe": _STANDARD,
        "worldline": "X-GCS-Idempotence-Key",
    }
)

#: How long a key each API takes; 255 for those that do not say.
KEY_LENGTH_MAX: Final[Mapping[str, int]] = MappingProxyType(
    {
        "adyen": 64,
        "amazon_pay": 32,
        "mangopay": 36,
        "paypal": 108,
        "resend": 256,
        "squarespace": 64,
        "stripe": 255,
        "worldline": 40,
    }
)
_LENGTH_MAX: Final = 255

_IN_BODY: Final = {
    "square": 'idempotency_key in the body of the request: json={"idempotency_key": perdure.idempotency_key(), …}',
    "plaid": 'idempotency_key in the body of the request: json={"idempotency_key": perdure.idempotency_key(), …}',
    "wise": "customerTransactionId in the body of the request, which must be a UUID",
}
# RFC 9110: what a header's name is made of.
_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def idempotency_headers(key: str | None = None, *, header: str = _STANDARD, api: str | None = None) -> dict[str, str]:
    """The header that carries the idempotency key, to be sent with the request of an effect.

    Without `key` it is the key of the effect that is running; outside of one, NotInRun. `api` chooses the header
    by the API's name (see HEADERS), `header` gives it. A key that is too long for the API is refused here, because
    there it would be refused, cut, or ignored.
    """
    length_max = _LENGTH_MAX
    if api is not None:
        if header != _STANDARD:
            raise UsageError(f"api={api!r} says which header it is; leave out header={header!r}")
        header = _header_of(api)
        length_max = KEY_LENGTH_MAX.get(_name(api), _LENGTH_MAX)
    if not header or not _TOKEN.issuperset(header):
        raise UsageError(f"{header!r} cannot be the name of a header")
    if key is None:
        from perdure.runs.functions.keys import current_key

        key = current_key()
    _check_key(key, length_max, api or header)
    return {header: str(key)}


def _name(api: str) -> str:
    return api.strip().lower().replace("-", "_").replace(" ", "_")


def _header_of(api: str) -> str:
    name = _name(api)
    if name in HEADERS:
        return HEADERS[name]
    if name in _IN_BODY:
        raise UsageError(f"{api!r} takes the key not in a header but as {_IN_BODY[name]}")
    raise UsageError(
        f"the API {api!r} is not known here; known are {', '.join(HEADERS)}; for another give its header: "
        f'perdure.idempotency_headers(header="X-Request-Id")'
    )


def _check_key(key: object, length_max: int, receiver: str) -> None:
    if not isinstance(key, str):
        raise UsageError(f"an idempotency key is a str, not a {type(key).__qualname__}")
    # Nothing that ends the header, and no blanks at the ends, which a server may cut off.
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise UsageError(f"the idempotency key {key[:80]!r} cannot stand in a header: printable ASCII, not empty")
    if len(key) > length_max:
        raise UsageError(
            f"the idempotency key has {len(key)} characters, and {receiver} takes {length_max}; derive a shorter one "
            f"that is always the same for it, for example hashlib.sha256(key.encode()).hexdigest()[:{length_max}], "
            f"and use that in reconcile too"
        )
