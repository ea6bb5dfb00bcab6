"""How long things stay, as it is stored: a policy of a tenant, and a thread's own, which goes before it field by field.

A policy is JSON with two fields: `ttl_us`, how long a thread stays that is not written to, and `keep_last`, how many of
its newest checkpoints. null is for good; a field that a thread's policy does not have is as the tenant's says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson

from perdure.errors import Damaged
from perdure.log.thread_table import find_thread
from perdure.storage.program import Batch, Program, Sql

Fields = dict[str, int | None]
FIELDS = ("ttl_us", "keep_last")
_GET = Sql("SELECT value FROM meta WHERE key = :key")
_SET = Sql("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = :value")
_DROP = Sql("DELETE FROM meta WHERE key = :key")
_GET_OWN = Sql("SELECT retention FROM thread WHERE tenant = :tenant AND thread = :thread")
_SET_OWN = Sql("UPDATE thread SET retention = :retention WHERE tenant = :tenant AND thread = :thread")


class Policy(NamedTuple):
    """What holds for a thread. None: for good."""

    ttl_us: int | None = None
    keep_last: int | None = None


def _key(tenant: int) -> str:
    return f"retention {tenant}"


def fields_of(text: str | None) -> Fields:
    """The fields of a stored policy. Raises Damaged."""
    if text is None:
        return {}
    try:
        found = orjson.loads(text)
        fields = {name: found[name] for name in FIELDS if name in found}
    except (ValueError, TypeError) as error:
        raise Damaged(f"a retention policy cannot be read ({error}); set it again") from error
    if not all(value is None or (type(value) is int and value > 0) for value in fields.values()):
        raise Damaged("a retention policy holds something else than counts; set it again")
    return fields


def policy(tenants: Mapping[str, int | None], own: Mapping[str, int | None]) -> Policy:
    """What holds for a thread: its own fields before the tenant's."""
    return Policy(**{name: own.get(name, tenants.get(name)) for name in FIELDS})


def read_policy(tenant: int) -> Program[Fields]:
    """The policy of a tenant."""
    [rows] = yield Batch(_GET(tenant=tenant, key=_key(tenant)), last=True)
    return fields_of(rows[0][0] if rows else None)


def write_policy(tenant: int, fields: Fields) -> Program[None]:
    """Set the policy of a tenant."""
    this = {"tenant": tenant, "key": _key(tenant)}
    text = orjson.dumps(fields).decode()
    yield Batch(_SET(**this, value=text) if any(fields.values()) else _DROP(**this), last=True)


def read_own(tenant: int, thread: int) -> Program[tuple[Fields, Fields]]:
    """The policy of a tenant, and a thread's own."""
    tenants, own = yield Batch(_GET(tenant=tenant, key=_key(tenant)), _GET_OWN(tenant=tenant, thread=thread), last=True)
    return fields_of(tenants[0][0] if tenants else None), fields_of(own[0][0] if own else None)


def write_own(tenant: int, name: str, thread: int, fields: Fields) -> Program[None]:
    """Set a thread's own policy."""
    row = yield from find_thread(tenant, name, thread, lock=True)
    text = orjson.dumps(fields).decode() if fields else None
    yield Batch(_SET_OWN(tenant=tenant, thread=row.thread, retention=text), last=True)
