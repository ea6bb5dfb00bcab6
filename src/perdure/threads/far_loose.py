"""Objects that nothing names any more, and removing them: when their time is over, or at once if something was erased.

Which they are is in `far_loose`; how they get on that list, `ops/far/objects.py` says.
"""

from __future__ import annotations

from functools import partial

from perdure.errors import StoreError, UsageError
from perdure.storage.far import Remove
from perdure.storage.objects import Objects
from perdure.storage.program import Batch, Flow, Program, Sql, Transaction, read, write
from perdure.threads.context import Context

PUTTING_US = 86_400_000_000  # a move that takes longer is given up
_MARGIN_US = 3_600_000_000  # the clocks of the database and of this machine may differ
LIST_PAGE = 500
PUTTING, LET_GO, REMOVING = 0, 1, 2

_HOME = Sql("SELECT key, value FROM meta WHERE key IN ('store', 'backup', :key)")
_SET_HOME = Sql("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO NOTHING")
_DUE = Sql(
    """UPDATE far_loose SET state = 2 WHERE tenant = :tenant AND name IN (SELECT name FROM far_loose
        WHERE tenant = :tenant AND (state = 2 OR (state = 1 AND at < :let_go) OR (state = 0 AND at < :putting))
        ORDER BY name LIMIT :limit {skip_locked}) RETURNING name"""
)
_FORGET = Sql("DELETE FROM far_loose WHERE tenant = :tenant AND name = :name AND state = 2")
_AT_ONCE = Sql("UPDATE far_loose SET at = 0 WHERE tenant = :tenant AND state = 1 AND at >= :since")
# What was let go just now: `_AT_ONCE` has marked it.
_FOREIGN = Sql(
    """SELECT count(*) FROM far_loose WHERE tenant = :tenant AND state > 0 AND at = 0
    AND (:home = '' OR substr(name, 1, length(:home)) <> :home)""",
    postgres="""SELECT count(*) FROM far_loose WHERE tenant = :tenant AND state > 0 AND at = 0
    AND (:home::text = '' OR substr(name, 1, length(:home::text)) <> :home::text)""",
)
_LOOSE = Sql("SELECT state, count(*) FROM far_loose WHERE tenant = :tenant GROUP BY state")


def objects_of(ctx: Context) -> Objects | None:
    """The object store of a store, if it has one."""
    found: Objects | None = getattr(ctx.driver, "objects", None)
    return found


def place_of(ctx: Context) -> str:
    """Where it is, without secrets."""
    return str(ctx.driver.place.shown)  # type: ignore[attr-defined]


def needed(ctx: Context) -> Objects:
    """The object store of a store. Raises UsageError if it has none."""
    found = objects_of(ctx)
    if found is None:
        raise UsageError("the store was opened without an object store: open(url, objects=…), or --objects URL")
    return found


def home_of(tenant: int, fresh: str, *, make: bool) -> Program[tuple[str, bool]]:
    """The folder of what this store has put there; whether it may remove from it."""
    key = f"objects {tenant}"
    [rows] = yield Batch(_HOME(tenant=tenant, key=key))
    found: dict[str, str] = dict(rows)
    if make and key not in found:
        yield Batch(_SET_HOME(tenant=tenant, key=key, value=fresh))
        [rows] = yield Batch(_HOME(tenant=tenant, key=key))
        found = dict(rows)
    # A backup that is used as a store without being restored is a copy of one that may be in use.
    return f"{found.get('store', '')}/{tenant}/{found.get(key, '')}/", key in found and "backup" not in found


def collect(ctx: Context, tenant: int, *, now_us: int | None = None) -> Flow[int]:
    """Remove the objects that nothing names and whose time is over. How many."""
    objects = needed(ctx)
    now = ctx.clock_us() if now_us is None else now_us
    home, is_ours = yield from read(partial(home_of, tenant, "", make=False))
    if not is_ours:
        return 0
    let_go, putting = now - int(objects.keep_s * 1e6), now - PUTTING_US
    removed = 0
    while names := (yield from write(partial(_due, tenant, let_go, putting))):
        # What was put there by the store that this one was restored from is not ours to remove.
        own = [name for name in names if name.startswith(home)]
        if own:
            yield Transaction(Remove(own))
        yield from write(partial(_forget, tenant, names))
        removed += len(own)
        if len(names) < LIST_PAGE:
            break
    return removed


def _due(tenant: int, let_go: int, putting: int) -> Program[list[str]]:
    [rows] = yield Batch(_DUE(tenant=tenant, let_go=let_go, putting=putting, limit=LIST_PAGE), last=True)
    return [name for (name,) in rows]


def _forget(tenant: int, names: list[str]) -> Program[None]:
    yield Batch(*(_FORGET(tenant=tenant, name=name) for name in names), last=True)


def remove_now(ctx: Context, tenant: int, since_us: int) -> Flow[list[str]]:
    """Erasing: remove what was let go since then at once. What may still hold it, as sentences."""
    loose = yield from write(partial(_hurry, tenant, since_us - _MARGIN_US))
    told: list[str] = []
    if objects_of(ctx) is None:
        waiting = loose.get(LET_GO, 0) + loose.get(REMOVING, 0)
        if waiting:
            told.append(
                f"{waiting} objects in the object store: this store was opened without it. Run `perdure compact` with "
                "--objects URL"
            )
        return told
    if not loose:
        return told
    place = place_of(ctx)
    foreign = yield from read(partial(_count_foreign, tenant))
    if foreign:
        told.append(
            f"{foreign} objects at {place} that another store has put there, which this one is a copy of: erase it "
            "there too, or remove that store's folder"
        )
    try:
        yield from collect(ctx, tenant)
    except StoreError as error:
        told.append(f"objects at {place}, until `perdure compact` can remove them ({error})")
    left = yield from read(partial(count_loose, tenant))
    if left.get(PUTTING):
        told.append(
            f"up to {left[PUTTING]} objects at {place}, of moves that are under way or were killed: "
            "`perdure compact` removes them after a day"
        )
    told.append(f"older versions and soft-deleted objects at {place}, if its bucket keeps those, and copies of it")
    return told


def _count_foreign(tenant: int) -> Program[int]:
    """How many objects that nothing here names are not this store's to remove."""
    home, is_ours = yield from home_of(tenant, "", make=False)
    [[(count,)]] = yield Batch(_FOREIGN(tenant=tenant, home=home if is_ours else ""), last=True)
    return int(count)


def _hurry(tenant: int, since: int) -> Program[dict[int, int]]:
    _, rows = yield Batch(_AT_ONCE(tenant=tenant, since=since), _LOOSE(tenant=tenant))
    return {int(state): int(count) for state, count in rows}


def count_loose(tenant: int) -> Program[dict[int, int]]:
    """How many objects no row names, by their state."""
    [rows] = yield Batch(_LOOSE(tenant=tenant), last=True)
    return {int(state): int(count) for state, count in rows}
