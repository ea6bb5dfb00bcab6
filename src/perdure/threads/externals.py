"""Large values (`values/external.py`): where they are, and that none is missing or left for ever.

An object has a name that is never used again, so that no late removal can hit a value that is stored anew. First a row
names the object, then it is written, then the transaction that refers to it writes a use (`external_rows.py`) and
checks that the row is there. So a crash leaves an object without a use, which `collect` removes, and never a use
without its object. Tables of uses declare `holds_values`; collection asks all of them, and their past for snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from perdure.errors import Conflict, Damaged, NotEncrypted, NotFound, Undecodable, UsageError, ValueMissing
from perdure.log.ids import first_id
from perdure.storage.columns import EncryptedColumn
from perdure.storage.domains import all_tables
from perdure.storage.object_folder import Objects
from perdure.storage.program import Batch, Flow, Program, Sql, adrive, aside, change, drive, fetch, read, write
from perdure.storage.store_tables import STORE
from perdure.storage.versions import installed
from perdure.threads.context import StoreContext
from perdure.threads.external_rows import HOUR_US, IS_THERE, Retired
from perdure.values.external import External, content_hash, keys_of, packed, unpacked
from perdure.values.registry import Codec

T = TypeVar("T")
_SECOND_US = 1_000_000  # ids of records may be ahead of the clock by less; those of later writes are far ahead
GRACE_US = HOUR_US  # for a save between its object and its transaction; without it, the save would begin again
_ATTEMPTS = 8  # an attempt fails only because a collection without grace has removed a value
KEPT_US = 30 * 24 * HOUR_US  # how long an object stays that nothing refers to: a backup may refer to it
_PAGE = 200
_BODY = EncryptedColumn("external.body", "bytes", ("hash",))
_CLAIM = Sql(f"UPDATE external SET at = {{now}} WHERE {IS_THERE} RETURNING name")
_ADD = Sql(
    """INSERT INTO external (tenant, name, hash, bytes, at, is_written, gone_at)
    VALUES (:tenant, :name, :hash, :bytes, {now}, 0, NULL) ON CONFLICT DO NOTHING"""
)
_NAME = Sql(f"SELECT name FROM external WHERE {IS_THERE}")
_IS_WRITTEN = Sql(f"SELECT 1 FROM external WHERE {IS_THERE} AND is_written = 1")
_WRITTEN = Sql(
    """UPDATE external SET at = {now}, is_written = 1
    WHERE tenant = :tenant AND name = :name AND gone_at IS NULL RETURNING 1"""
)
_NOW = Sql("SELECT {now}")
_LOCK = Sql("SELECT 1 FROM external WHERE tenant = :tenant AND gone_at IS NULL ORDER BY hash {for_update}")
_IS_HELD = """EXISTS (SELECT 1 FROM {} r WHERE r.tenant = external_use.tenant AND r.tree = external_use.tree
    AND r.id BETWEEN external_use.first AND external_use.last AND r.body IS NOT NULL)"""
_DROP_USES = """DELETE FROM external_use WHERE tenant = :tenant AND NOT {} AND (last < :started OR NOT EXISTS (
    SELECT 1 FROM thread t WHERE t.tenant = external_use.tenant AND t.tree = external_use.tree))"""
_RETIRE = "UPDATE external SET gone_at = {{now}} WHERE tenant = :tenant AND gone_at IS NULL AND at <= :until{}"
_IS_USED = "EXISTS (SELECT 1 FROM {} u WHERE u.tenant = external.tenant AND u.hash = external.hash)"
_LOST = """SELECT DISTINCT u.hash FROM {} u WHERE u.tenant = :tenant AND NOT EXISTS (SELECT 1 FROM external e
    WHERE e.tenant = u.tenant AND e.hash = u.hash AND e.gone_at IS NULL)"""
_GONE = Sql(
    """SELECT name FROM external WHERE tenant = :tenant AND gone_at IS NOT NULL AND gone_at <= {now} - :kept
    ORDER BY name LIMIT :limit"""
)
_FORGET = Sql("DELETE FROM external WHERE tenant = :tenant AND name = :name AND gone_at IS NOT NULL")
_USED = """SELECT hash FROM external WHERE tenant = :tenant AND gone_at IS NULL AND hash > :after AND ({})
    ORDER BY hash LIMIT :limit"""


HAS_VALUES = Sql("SELECT 1 FROM external WHERE tenant = :tenant LIMIT 1")


class Contents:
    """Reads the values of a tenant (`values.external.Reader`), in a copy in memory also those of its origin."""

    def __init__(self, ctx: StoreContext) -> None:
        self._ctx = ctx
        self._origin = None if ctx.values_of is None else Contents(ctx.values_of)

    @property
    def codec(self) -> Codec:
        return self._ctx.codec

    def read(self, external: External[Any]) -> bytes:
        return self.read_key(bytes.fromhex(external.hash))

    def read_key(self, key: bytes) -> bytes:
        """Return the content of a value, checked. Raises ValueMissing, Damaged."""
        try:
            return drive(self._ctx.driver, self.content(key))
        except ValueMissing:
            if self._origin is None:
                raise
            return self._origin.read_key(key)

    async def aread(self, external: External[Any]) -> bytes:
        try:
            return await adrive(self._ctx.driver, self.content(bytes.fromhex(external.hash)))
        except ValueMissing:
            if self._origin is None:
                raise
            return await self._origin.aread(external)

    def is_of(self, ctx: StoreContext) -> bool:
        return self._ctx.is_same_tenant(ctx)

    def content(self, key: bytes) -> Flow[bytes]:
        """Return the content of a value, checked. Raises ValueMissing, Damaged."""
        ctx, objects = self._ctx, objects_of(self._ctx)
        tenant = (yield from ctx.tenant()) or 0
        names = yield from fetch(_NAME, tenant=tenant, hash=key)
        if not names:
            raise ValueMissing(
                f"the value {key.hex()} is not in this store: `perdure store verify` names what is missing"
            )
        try:
            stored = yield from aside(partial(objects.get, names[0][0]))
        except NotFound as error:
            raise ValueMissing(str(error)) from None
        if (cipher := (yield from _cipher(ctx, tenant, writes=False))) is not None:
            stored = cipher.decrypt(_BODY, stored, (key,))
        try:
            content = yield from aside(partial(unpacked, stored))
        except Undecodable:
            content = b""
        if content_hash(content) != key:
            raise Damaged(f"the value {key.hex()} was changed in {objects}: restore the object {names[0][0]} there")
        return content


def objects_of(ctx: StoreContext) -> Objects:
    if ctx.objects is None:
        raise UsageError(
            "there is a perdure.External, and the store was opened without a place for such values: "
            'perdure.open(…, objects="s3://bucket/folder" or a folder)'
        )
    return ctx.objects


def _cipher(ctx: StoreContext, tenant: int, *, writes: bool) -> Flow[Any]:
    """Return the cipher of a tenant; None if the store is not encrypted. Raises KeyMissing."""
    keys = ctx.driver.capabilities.keys
    if keys is None:
        return None
    from perdure.encryption.cache import KeysWanted  # late: most stores have no keys
    from perdure.encryption.driver import load

    asked: set[str] = set()

    def loading() -> Program[Any]:
        try:
            return (yield from load(keys, tenant, asked, write=writes))
        except KeysWanted as wanted:  # the driver asks the provider, and begins again
            asked.add(wanted.name)
            raise

    return (yield from (write(loading) if writes else read(loading)))


# --- saving


def keep(ctx: StoreContext, keys: Iterable[bytes], values: Sequence[External[Any]] = ()) -> Flow[None]:
    """Write the objects of values that a text is about to refer to, unless they are there. Raises ValueMissing.

    `values` are those that may be new. The others of `keys` are referred to by an older text.
    """
    tenant, new = (yield from ctx.ensure_tenant()), {value.hash: value for value in values}
    if values:
        objects_of(ctx)
    for key in sorted(set(keys)):
        if (yield from fetch(_IS_WRITTEN, tenant=tenant, hash=key)):
            continue
        content = None
        if (value := new.get(key.hex())) is not None:
            content = value.content(ctx.codec)
            if content is None and isinstance(value._reader, Contents) and not value._reader.is_of(ctx):
                content = yield from aside(partial(value._reader.read, value))
        if content is None and ctx.values_of is not None:
            content = yield from aside(partial(Contents(ctx.values_of).read_key, key))
        if content is None:
            raise ValueMissing(f"the value {key.hex()} is not in this store any more: nothing was saved")
        yield from _store(ctx, tenant, key, content)


def _store(ctx: StoreContext, tenant: int, key: bytes, content: bytes) -> Flow[None]:
    name = yield from write(partial(_claim, ctx, tenant, key, len(content)))
    body = yield from aside(partial(packed, content))
    if (cipher := (yield from _cipher(ctx, tenant, writes=True))) is not None:
        body = cipher.encrypt(_BODY, body, (key,))
    yield from aside(partial(objects_of(ctx).put, name, body))
    if not (yield from change(_WRITTEN(tenant=tenant, name=name, now=ctx.clock_us()))):
        # A collection without grace has removed it before it was written, and does not look again.
        yield from aside(partial(objects_of(ctx).delete, name))


def _claim(ctx: StoreContext, tenant: int, key: bytes, size: int) -> Program[str]:
    now = ctx.clock_us()
    [rows] = yield Batch(_CLAIM(tenant=tenant, hash=key, now=now))
    while not rows:  # another writer may have stored it since, and a collection removed that
        [[(store, era)]] = yield Batch(STORE())
        name = f"{store}/{era}/{tenant}/{ctx.entropy(16).hex()}"
        _, rows = yield Batch(
            _ADD(tenant=tenant, name=name, hash=key, bytes=size, now=now), _CLAIM(tenant=tenant, hash=key, now=now)
        )
    return str(rows[0][0])


def referring(
    ctx: StoreContext,
    values: Sequence[External[Any]],
    flow: Callable[[], Generator[Any, Any, T]],
    keys: Iterable[bytes] = (),
) -> Flow[T]:
    """Store values, then run a flow whose transaction refers to them. Repeat both if a value was removed in between."""
    if not values and not keys:
        return (yield from flow())
    every = [*keys_of(values), *keys]
    for _ in range(_ATTEMPTS):
        yield from keep(ctx, every, values)
        try:
            return (yield from flow())
        except Retired:
            pass
    raise Conflict("large values are removed as fast as they are stored: nothing was saved; save again later")


# --- removing


def collect(ctx: StoreContext, tenant: int, *, grace_us: int = GRACE_US, kept_us: int = KEPT_US) -> Flow[int]:
    """Remove the objects that nothing refers to, in the store or in a snapshot. Return how many.

    An object of an earlier era, before a restore from a backup, stays: the store that was backed up may need it.
    """
    now = ctx.clock_us()
    yield from write(partial(_retire, tenant, now, grace_us))
    removed = 0
    if ctx.objects is None:
        return removed
    [[(store, era)]] = yield from _one(STORE)
    while names := (yield from fetch(_GONE, tenant=tenant, now=now, kept=kept_us, limit=_PAGE)):
        for (name,) in names:
            if name.startswith(f"{store}/{era}/"):
                yield from aside(partial(ctx.objects.delete, name))
            yield from change(_FORGET(tenant=tenant, name=name))
        removed += len(names)
    return removed


def _one(sql: Sql) -> Flow[list[Any]]:
    return [(yield from fetch(sql))]


def _retire(tenant: int, now: int, grace: int) -> Program[None]:
    """Drop the uses by records that are gone, then retire the values without uses.

    On PostgreSQL the lock waits for transactions that refer to a value, and the next statement sees what they wrote. It
    does not lock a value that is stored later: so what was stored or referred to since the lock was asked for stays.
    """
    is_versioned = yield from installed()
    held = [_IS_HELD.format(table) for table in ("record", *(["record_past"] if is_versioned else []))]
    [[(began,)], _] = yield Batch(_NOW(now=now), _LOCK(tenant=tenant))
    yield Batch(Sql(_DROP_USES.format(f"({' OR '.join(held)})"))(tenant=tenant, started=first_id(now + _SECOND_US)))
    unused = "".join(f" AND NOT {_IS_USED.format(table)}" for table in _uses(is_versioned))
    yield Batch(Sql(_RETIRE.format(unused))(tenant=tenant, now=now, until=began - grace))


def _uses(is_versioned: bool) -> list[str]:
    """Return the tables of uses, with those that snapshots see if there were any."""
    tables = [table for table in all_tables().values() if table.holds_values]
    past = [f"{table.name}_past" for table in tables if is_versioned and table.versioned]
    return [*(table.name for table in tables), *past]


def has_values(tenant: int) -> Flow[bool]:
    """Return whether a tenant has large values, or had some whose objects are still there."""
    return bool((yield from fetch(HAS_VALUES, tenant=tenant)))


# --- checking and copying


def verify(ctx: StoreContext, tenant: int) -> Flow[list[str]]:
    """Read every value that something refers to. Return what is wrong, as sentences.

    If the store was opened without `objects=`, or is a copy in memory, that is nothing."""
    if ctx.objects is None or ctx.values_of is not None:
        return []
    wrong: list[str] = []
    tables = _uses((yield from read(installed)))
    for table in tables:
        for (key,) in (yield from fetch(Sql(_LOST.format(table)), tenant=tenant)):
            wrong.append(f"the value {bytes(key).hex()} is not in this store, and something refers to it")
    after, used = b"", Sql(_USED.format(" OR ".join(map(_IS_USED.format, tables))))
    while rows := (yield from fetch(used, tenant=tenant, after=after, limit=_PAGE)):
        for (key,) in rows:
            try:
                yield from Contents(ctx).content(bytes(key))
            except (Damaged, NotEncrypted) as error:
                wrong.append(str(error))
        after = rows[-1][0]
    return wrong


def copy_values(source: StoreContext, target: StoreContext, keys: Sequence[bytes]) -> None:
    """Copy values to another store, before the threads that refer to them."""
    if target.values_of is not None:  # it reads them where they are
        return
    if source.objects is target.objects and target is (source.values_of or source):
        return
    reader, tenant = Contents(source), drive(target.driver, target.ensure_tenant())
    for key in keys:
        # One that is there may be unused: claimed, a collection leaves it until the copies of the threads refer to it.
        drive(target.driver, change(_CLAIM(tenant=tenant, hash=key, now=target.clock_us())))
        value = External.of_content(key, reader.read_key(key))
        drive(target.driver, keep(target, [key], [value]))
