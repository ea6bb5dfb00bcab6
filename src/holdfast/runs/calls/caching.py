"""`cache=`: results of expensive pure steps, kept by what went in, for all runs of a tenant."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import Unstorable, UsageError
from holdfast.runs.functions.inputs import digest, key_of
from holdfast.runs.journal.entries import squeeze, unsqueeze
from holdfast.storage.cells import CACHED, CACHED_INPUT
from holdfast.storage.program import Batch, Program, Rows, Sql, read
from holdfast.values.codec import encode
from holdfast.values.names import module_name

if TYPE_CHECKING:
    from holdfast.runs.functions.specs import StepSpec
    from holdfast.runs.session.acting import Act
    from holdfast.runs.session.session import Session

_LOOK = Sql(
    """SELECT value FROM step_cache WHERE tenant = :tenant AND name = :name AND input = :input
    AND (expires_at IS NULL OR expires_at > {now})""",
    seals={"input": CACHED_INPUT},
    opens={0: CACHED},
)
_KEEP = Sql(
    """INSERT INTO step_cache (tenant, name, input, value, expires_at) VALUES (:tenant, :name, :input, :value,
        CASE WHEN CAST(:ttl AS bigint) = 0 THEN NULL ELSE {now} + CAST(:ttl AS bigint) END)
    ON CONFLICT (tenant, name, input) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at""",
    seals={"input": CACHED_INPUT, "value": CACHED},
)
_SWEEP = Sql("DELETE FROM step_cache WHERE tenant = :tenant AND expires_at <= {now}")


def _name(spec: StepSpec) -> str:
    """What a step's results are kept under: two steps of the same name do not share them."""
    return f"{module_name(spec.fn.__module__)}:{spec.fn.__qualname__}:{spec.name}"


def _input(session: Session, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: bytes) -> bytes:
    if spec.cache_key is None:
        receiver = spec.binder.plan.receiver
        if receiver is not None and key_of(args[0] if args else kwargs.get(receiver)) is None:
            raise UsageError(
                f"{spec.name} is cached, and its result may depend on the object it is called on, which has no key: "
                f"give the class a holdfast_key, or the step cache_key=lambda {receiver}, …: …"
            )
        return wanted
    try:
        return digest(encode(spec.cache_key(*args, **kwargs), session.ctx.codec))
    except Unstorable as error:
        raise Unstorable(f"what cache_key of {spec.name} gives {str(error).removeprefix('state ')}") from error


def look_up(
    session: Session, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: bytes
) -> Act[bytes | None]:
    """The text of a cached result, or None."""
    key = _input(session, spec, args, kwargs, wanted)
    found = yield from read(partial(_read, session.tenant, _name(spec), key, session.ctx.clock_us()))
    return None if found is None else unsqueeze(found)


def _read(tenant: int, name: str, key: bytes, now: int) -> Program[bytes | None]:
    [rows] = yield Batch(_LOOK(tenant=tenant, name=name, input=key, now=now), last=True)
    return rows[0][0] if rows else None


def remember(
    session: Session, spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: bytes, value: bytes
) -> Generator[Batch, list[Rows], None]:
    """Keep a result, in the transaction that records it."""
    key = _input(session, spec, args, kwargs, wanted)
    ttl = int((spec.cache or 0) * 1e6)
    now = session.ctx.clock_us()
    stored = squeeze(unsqueeze(value))
    yield Batch(_KEEP(tenant=session.tenant, name=_name(spec), input=key, value=stored, ttl=ttl, now=now))


def sweep_cache(tenant: int, now: int) -> Program[None]:
    """Remove what has expired."""
    yield Batch(_SWEEP(tenant=tenant, now=now), last=True)
