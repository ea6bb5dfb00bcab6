"""Before a repair changes anything: whether it can read all that is there.

A wrong key makes sound data look lost. So a repair that lacks a key is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from perdure.errors import KeyMissing, UsageError
from perdure.log.thread_table import try_thread
from perdure.storage.columns import MARK
from perdure.storage.program import Batch, Flow, Program, Sql, read
from perdure.threads.context import Context

_NOTHING = "nothing was changed"
_GIVE = "give its keys (keys=…), or set PERDURE_KEYS to its key file"
_SAMPLE = 20
_KEY = Sql("SELECT wrapped_by FROM tenant_key WHERE tenant = :tenant")
_TENANTS = Sql("SELECT tenant, name FROM tenant ORDER BY tenant")
_USED = Sql(
    """SELECT EXISTS (SELECT 1 FROM thread WHERE tenant = :tenant), EXISTS (SELECT 1 FROM run WHERE tenant = :tenant),
    EXISTS (SELECT 1 FROM body WHERE tenant = :tenant)"""
)
_STRANGE = Sql("SELECT 1 FROM tenant_key s WHERE NOT EXISTS (SELECT 1 FROM tenant t WHERE t.tenant = s.tenant) LIMIT 1")
# What cells begin with that were sealed, whatever the store has kept about keys.
_STARTS = [
    Sql(f"SELECT substr({column}, 1, 16) FROM {table} WHERE tenant = :tenant ORDER BY {key} LIMIT :limit")
    for table, column, key in (("body", "salt", "id"), ("journal", "body", "run, seq"), ("run_value", "value", "run"))
]


class Allowed(NamedTuple):
    """What a repair was told to do without."""

    leave: Sequence[str] = ()  # tenants whose keys are gone


def check_readable(ctx: Context, allowed: Allowed, keys: object) -> Flow[set[str]]:
    """The names of the tenants to be passed over: those that are to be left, those that have neither data nor a key.
    Raises KeyMissing, NotEncrypted, UsageError."""
    found = yield from read(tenants)
    if keys is None and (yield from read(_is_sealed_strange)):
        raise KeyMissing(f"the store is encrypted, and a repair must read it: {_GIVE}; {_NOTHING}")
    names = [name for _, name in found]
    unknown = [name for name in allowed.leave if name not in names]
    if unknown:
        raise UsageError(f"leave={unknown[0]!r}: there is no such tenant; there are {', '.join(map(repr, names))}")
    passed = set(allowed.leave)
    for number, name in found:
        if name not in passed and not (yield from _has_key(number, name, keys)):
            passed.add(name)
    return passed


def tenants() -> Program[list[tuple[int, str]]]:
    """The tenants of a store: numbers and names."""
    [rows] = yield Batch(_TENANTS(tenant=None), last=True)
    return [(number, name) for number, name in rows if type(number) is int and type(name) is str]


# --- keys


def _has_key(tenant: int, name: str, keys: object) -> Flow[bool]:
    """Whether a tenant can be read. False: there is nothing to be read. Raises KeyMissing, NotEncrypted."""
    listed, is_encrypted = yield from read(partial(_keys_of, tenant))
    if keys is None and (listed or is_encrypted):
        says = f"the data of tenant {name!r} is encrypted, and a repair must read it: {_GIVE}"
        raise _refused(says, name, listed)
    if is_encrypted and not listed:
        raise KeyMissing(
            f"the data of tenant {name!r} is encrypted, and its data key (the table `tenant_key`) is gone: restore a "
            f"backup, or bring that table back from one; {_NOTHING}",
            tenant=name,
        )
    if keys is not None:
        try:
            yield from read(partial(try_thread, tenant, ""))  # whatever opens a cell asks for the key
        except KeyMissing as error:
            if listed is None and not (yield from read(partial(_is_used, tenant))):
                return False
            raise _refused(str(error), name, listed) from None
    return True


def _refused(says: str, name: str, key: bytes | None) -> KeyMissing:
    return KeyMissing(
        f"{says}. {_NOTHING.capitalize()}. If the key was forgotten on purpose, leave the tenant as it is: "
        f"repair(…, leave=[{name!r}]) (`--leave {name}`)",
        tenant=name,
        key=(key or b"").hex(),
    )


def _keys_of(tenant: int) -> Program[tuple[bytes | None, bool]]:
    """The key that wraps the data key of a tenant, and whether its values look encrypted."""
    listed, *starts = yield Batch(
        _KEY(tenant=tenant), *(sql(tenant=tenant, limit=_SAMPLE) for sql in _STARTS), last=True
    )
    values = [start for rows in starts for (start,) in rows if type(start) is bytes]
    # One value may look so by damage; a store that is encrypted has no others.
    is_encrypted = 2 * sum(start.startswith(MARK) for start in values) > len(values)
    return (bytes(listed[0][0]) if listed else None), is_encrypted


def _is_used(tenant: int) -> Program[bool]:
    [rows] = yield Batch(_USED(tenant=tenant), last=True)
    return any(rows[0])


def _is_sealed_strange() -> Program[bool]:
    """Whether there are keys of a tenant whose own row is lost."""
    [rows] = yield Batch(_STRANGE(tenant=None), last=True)
    return bool(rows)
