"""Keys of an encrypted store: list and rotate the provider's key that wraps a tenant's data key.

Each tenant's data is encrypted with its own data key, which is stored wrapped with the provider's key. So a rotation
rewrites one row. It does not change the data key: if that was stolen, transfer the tenant to a new store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from perdure.errors import Damaged, KeyMissing, UsageError
from perdure.storage.program import Driver, Flow, Sql, aside, change, fetch, one_row
from perdure.threads.context import StoreContext

if TYPE_CHECKING:
    from perdure.encryption.cache import KeyCache
    from perdure.encryption.keys import Keys

_ROW = Sql("SELECT wrapped_by, wrapped, since FROM tenant_key WHERE tenant = :tenant")
_SET = Sql(
    """UPDATE tenant_key SET wrapped_by = :key, wrapped = :wrapped, since = :since
    WHERE tenant = :tenant AND wrapped_by = :was RETURNING tenant"""
)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The id of the provider's key that wraps a tenant's data key, never the key itself."""

    id: str
    since: datetime
    available: bool
    """Whether this process's provider has the key."""
    current: bool
    """Whether it is the provider's key in use; if not, rotate."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """The id of the key that wraps the tenant's data key now, and of the one before, which the store no longer needs.

    `previous` is None if the key was current already.
    """

    key: str
    previous: str | None


def encrypting(keys: object) -> Callable[[Driver], Driver]:
    """Return a function that makes a driver encrypt with the keys of `open(keys=…)`. Raises UsageError."""
    from perdure.encryption.cache import KeyCache
    from perdure.encryption.driver import EncryptingDriver
    from perdure.encryption.keys import provider_of

    cache = KeyCache(provider_of(keys))
    return lambda driver: EncryptingDriver(driver, cache)


def key_cache(ctx: StoreContext) -> KeyCache:
    """Return the key cache of a store. Raises UsageError if it was opened without keys."""
    cache: KeyCache | None = ctx.driver.capabilities.keys
    if cache is None:
        raise UsageError("the store was opened without keys: open(url, keys=…)")
    return cache


def list_keys(ctx: StoreContext) -> Flow[list[KeyInfo]]:
    """Return the key that wraps the tenant's data key, or an empty list if the tenant has no data key yet."""
    cache = key_cache(ctx)
    tenant = yield from ctx.tenant()
    row = None if tenant is None else one_row((yield from fetch(_ROW, tenant=tenant)))
    if row is None:
        return []
    keys = yield from aside(partial(fresh_keys, cache, ctx.tenant_name))
    key, since = bytes(row[0]), datetime.fromtimestamp(row[2] / 1e6, UTC)
    return [KeyInfo(key.hex(), since, key in keys.by_id, key == keys.current)]


def fresh_keys(cache: KeyCache, name: str) -> Keys:
    """Get a tenant's keys from the provider, not from the cache. Raises KeyMissing, Unavailable."""
    cache.ask(name)
    return cache.keys(name, {name})


def rotate(ctx: StoreContext) -> Flow[Rotated]:
    """Wrap the tenant's data key with the provider's current key. Safe to repeat, and concurrent rotations are safe."""
    cache = key_cache(ctx)
    tenant = yield from ctx.ensure_tenant()
    keys = yield from aside(partial(fresh_keys, cache, ctx.tenant_name))
    while True:
        row = one_row((yield from fetch(_ROW, tenant=tenant)))
        if row is None or bytes(row[0]) == keys.current:
            return Rotated(keys.current.hex(), None)
        was = bytes(row[0])
        wrapped = _wrapped_anew(tenant, ctx.tenant_name, keys, was, bytes(row[1]))
        rewrap = _SET(tenant=tenant, key=keys.current, wrapped=wrapped, was=was, since=ctx.clock_us())
        if (yield from change(rewrap)):  # no row: another rotation was faster
            return Rotated(keys.current.hex(), was.hex())


def _wrapped_anew(tenant: int, name: str, keys: Keys, key: bytes, wrapped: bytes) -> bytes:
    from perdure.encryption.cipher import unwrap_data_key, wrap_data_key

    if key not in keys.by_id:
        raise KeyMissing(
            f"the data key of tenant {name!r} is wrapped with key {key.hex()}, which was not given: keep it among the "
            "keys, as an older one, until the rotation is done",
            tenant=name,
            key=key.hex(),
        )
    data_key = unwrap_data_key(tenant, keys, key, wrapped)
    if data_key is not None:
        return wrap_data_key(tenant, keys, data_key)
    raise Damaged(f"the stored data key of tenant {name!r} is damaged: restore the store from a backup")
