"""Replicating a store to another region: the target holds the source as it was at a snapshot, row by row.

    1  snapshot    of the source. The one that the target holds is kept until the target holds a newer one
    2  transfer    rows that S sees and T does not are removed, rows that T sees and S does not are written: by index,
                   whatever the store's size. Numbers, hashes and encrypted columns stay as they are; no key is needed
    3  record      which snapshot that is (store, era, epoch, token), in the same transaction of the target
    4  release     the snapshots of the source that the target no longer needs

The target is at all times the source at one instant. Killed anywhere, the next round continues: before 3 has committed
the target holds S, and T is an orphan that is released; after it, S is. Triggers refuse every other write to the
target until `promote` makes it a store of its own, in a new era, in which no process of the old one fits.

A snapshot is known by its token, which is random. If the source does not have the one that the target holds, it lost
it (a failover to a standby that was behind), and with it commits that the target may have: that is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import orjson

from perdure.errors import Conflict, UsageError
from perdure.log.erase import SECURE, scrub
from perdure.runs.journal.rows import FINISHED
from perdure.snapshots.store import SnapshotStore
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Dialect, Driver, Program, Rows, Sql, drive, read, write
from perdure.storage.versions import install
from perdure.threads.models import moment
from perdure.transfers.fencing import fence_old_processes
from perdure.transfers.read_ahead import PATIENCE, Put, ReadAhead
from perdure.transfers.whole import COUNTERS, NUMBER, TABLES, USED, Table, all_tables, check_sees_all

_PAGE = 200
_STATE = Sql("SELECT value FROM meta WHERE key = 'replica'")  # of the target: which snapshot of which store it holds
_SET = Sql("INSERT INTO meta (key, value) VALUES ('replica', :value)")
_UNSET = Sql("DELETE FROM meta WHERE key = 'replica' RETURNING value")
_STORE = Sql("SELECT value, coalesce((SELECT value FROM meta WHERE key = 'era'), '0') FROM meta WHERE key = 'store'")
_ERASED = Sql("SELECT tenant, thread, record FROM erased")
_TOKENS = Sql("SELECT token FROM snapshot")
# The run's own row does not count the entries of a run that is running.
_CUT = Sql(
    f"""UPDATE run SET cut = 1 + coalesce(
        (SELECT max(seq) FROM journal j WHERE j.tenant = run.tenant AND j.run = run.run), 0)
    WHERE status NOT IN {FINISHED!r}"""
)
_REFUSED = "this store is a replica: it takes no writes until `perdure store promote`"
_REFUSE = f"""CREATE FUNCTION refuse_write() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    DECLARE
        is_replica boolean;
    BEGIN
        EXECUTE format('SELECT EXISTS (SELECT 1 FROM %I.meta WHERE key = ''replica'')', TG_TABLE_SCHEMA)
            INTO is_replica;
        IF is_replica THEN
            RAISE EXCEPTION '{_REFUSED}' USING ERRCODE = '25006';
        END IF;
        RETURN NULL;
    END $$"""


@dataclass(frozen=True, slots=True)
class Replicated:
    """What a round brought to the target."""

    taken_at: datetime  # the target holds everything that was committed in the source before
    written: int  # rows
    removed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Promoted:
    """The store that a target has become."""

    taken_at: datetime  # what was committed in the source later is not in it
    era: int
    requeued: int  # runs that had been running: a worker resumes them


@dataclass(frozen=True, slots=True)
class _Round:
    """From which snapshot of the source to which one, and what was erased before the later one was taken."""

    since: int  # epoch; -1: the target is empty
    until: int
    tokens: frozenset[str]
    erased: frozenset[tuple[Any, ...]]
    tenants: tuple[int, ...]  # in which something was erased since the last round


def replicate(source: SnapshotStore, target: SnapshotStore) -> Replicated:
    """Bring the target, an empty store or a replica of the source, to the state of the source: one round. Raises
    Conflict if the source does not have the snapshot that the target holds."""
    start = time.monotonic()
    ctx = source._context
    here, there = ctx.driver.capabilities.base, target._context.driver.capabilities.base
    text = drive(there, write(partial(_prepare_target, ctx.entropy(4).hex(), there.dialect), solo=True))
    state = orjson.loads(text)
    if "token" in state:
        _check_held(source, state, drive(here, read(_identity)))
    else:
        drive(here, write(partial(_prepare_source, here.dialect), solo=True))
    erased, known = (frozenset(drive(driver, read(_erased))) for driver in (here, there))
    prefix = f"replica-{state['id']}-"
    snap = source.snapshot(f"{prefix}{ctx.clock_us()}", note="perdure store replicate")
    [(store, (era, epoch, token))] = snap.manifest["stores"].items()
    tokens = frozenset({token, state.get("token", token)})
    tenants = tuple({row[0] for row in erased - known})
    plan = _Round(state.get("epoch", -1), epoch, tokens, erased, tenants)
    held = {"store": store, "era": era, "epoch": epoch, "token": token, "at": snap._row.taken_at}
    after = orjson.dumps({"id": state["id"], **held}).decode()
    written, removed = drive(there, write(partial(_apply, here, text, after, plan), solo=True))
    for old in source.snapshots():
        if old.name.startswith(prefix) and old.name != snap.name:
            old.release()
    if tenants:
        drive(there, scrub(there.dialect, full=False))
    return Replicated(snap.taken_at, written, removed, time.monotonic() - start)


def promote(target: SnapshotStore) -> Promoted:
    """Make a replica a store of its own, in a new era: no process that used the source can write to it."""
    ctx = target._context
    driver = ctx.driver.capabilities.base
    at, era, requeued = drive(driver, write(partial(_promote, ctx.clock_us(), driver.dialect), solo=True))
    return Promoted(moment(at), era, requeued)


def _check_held(source: SnapshotStore, state: dict[str, Any], identity: tuple[str, int]) -> None:
    """Raise if the source does not have the snapshot that the target holds."""
    if identity != (state["store"], state["era"]):
        raise Conflict(
            f"the target is a replica of store {state['store']} in era {state['era']}, but the source is store "
            f"{identity[0]} in era {identity[1]}: replicate to an empty target"
        )
    if not any(snap._row.token == state["token"] for snap in source.snapshots()):
        raise Conflict(
            f"the source does not have the snapshot that the target holds, of {moment(state['at']):%Y-%m-%d %H:%M:%S} "
            f"UTC with token {state['token']}: it was released, or a failover of the source has lost it. Then the "
            "target may hold commits that the source has lost: promote the target, or replicate to an empty one"
        )


# --- reading the source


def _identity() -> Program[tuple[str, int]]:
    [[(store, era)]] = yield Batch(_STORE(tenant=None), last=True)
    return store, int(era)


def _erased() -> Program[Rows]:
    [rows] = yield Batch(_ERASED(tenant=None), last=True)
    return rows


def _prepare_source(dialect: Dialect) -> Program[None]:
    """Make the indexes by which changed rows are found."""
    yield from install(list(owned_tables()), dialect)
    for name, table in owned_tables().items():
        by = ", ".join(("tenant", *table.key))
        yield Batch(
            Sql(f"CREATE INDEX IF NOT EXISTS {name}_changes ON {name} (stamp, {by})")(),
            Sql(f"CREATE INDEX IF NOT EXISTS {name}_past_changes ON {name}_past (died, {by})")(),
        )


def _read(plan: _Round, put: Put) -> Program[None]:
    """Put what is to be done in the target, in order: (what, table, rows)."""
    yield from check_sees_all()
    [[(number,)], tokens, columns] = yield Batch(NUMBER(tenant=None), _TOKENS(), TABLES())
    if not plan.tokens <= {token for (token,) in tokens}:
        raise Conflict("a snapshot of this round was released; does another process replicate to this target?")
    put(("number", None, number))
    versioned = []
    for table in all_tables(columns):
        if owned := owned_tables().get(table.name):
            versioned.append(table._replace(key=("tenant", *owned.key)))
        else:
            rows = yield from _rows(table.columns, table, table.where)
            put(("whole", table, [row for row in rows if table.name != "erased" or row[:3] in plan.erased]))
    for table in reversed(versioned):  # a row goes before what it refers to
        for owner in plan.tenants:
            [rows] = yield Batch(_keys(table)(tenant=None, owner=owner, until=plan.until))
            put(("only", table, (owner, rows)))
        if plan.since >= 0:
            yield from _put_pages(put, "remove", table, plan, *_removed(table))
    for table in versioned:
        yield from _put_pages(put, "write", table, plan, *_changed(table, table.name, "1 = 1"))
        yield from _put_pages(put, "write", table, plan, *_changed(table, f"{table.name}_past", "died > :until"))


def _rows(columns: Sequence[str], table: Table, where: str, owner: int = 0) -> Program[Rows]:
    [rows] = yield Batch(Sql(f"SELECT {', '.join(columns)} FROM {table.name} WHERE {where}")(tenant=None, owner=owner))
    return rows


def _put_pages(put: Put, what: str, table: Table, plan: _Round, order: str, columns: str, rest: str) -> Program[None]:
    """Put the rows of a query, whose first column is an epoch of this round, page by page."""
    by = (order, *table.key)
    marks = ", ".join(f":key{place}" for place in range(len(by)))
    behind: dict[str, Any] = {}
    while True:
        where = f"({', '.join(by)}) > ({marks})" if behind else f"{order} > :since"
        text = f"SELECT {', '.join(by)}, {columns} {rest} AND {order} <= :until AND {where} ORDER BY {', '.join(by)}"
        page = Sql(f"{text} LIMIT {_PAGE}")(tenant=None, since=plan.since, until=plan.until, **behind)
        [rows] = yield Batch(page)
        if rows:
            put((what, table, [row[len(by) :] for row in rows]))
        if len(rows) < _PAGE:
            return
        behind = {f"key{place}": value for place, value in enumerate(rows[-1][: len(by)])}


def _changed(table: Table, source: str, alive: str) -> tuple[str, str, str]:
    """Rows that the later snapshot sees and the earlier one does not."""
    return "stamp", ", ".join(table.columns), f"FROM {source} WHERE {alive}"


def _removed(table: Table) -> tuple[str, str, str]:
    """Keys of rows that the earlier snapshot sees, and the later one under no other version."""
    same = " AND ".join(f"n.{column} = p.{column}" for column in table.key)
    rest = f"""FROM {table.name}_past p WHERE stamp <= :since
        AND NOT EXISTS (SELECT 1 FROM {table.name} n WHERE {same} AND n.stamp <= :until)
        AND NOT EXISTS (SELECT 1 FROM {table.name}_past n WHERE {same} AND n.stamp <= :until AND n.died > :until)"""
    return "died", ", ".join(table.key), rest


def _keys(table: Table) -> Sql:
    """All keys of a tenant that the later snapshot sees."""
    keys, seen = ", ".join(table.key), "tenant = :owner AND stamp <= :until"
    return Sql(
        f"""SELECT {keys} FROM {table.name} WHERE {seen}
        UNION ALL SELECT {keys} FROM {table.name}_past WHERE {seen} AND died > :until"""
    )


# --- writing the target


def _prepare_target(tag: str, dialect: Dialect) -> Program[str]:
    """What the target holds. An empty store becomes a replica: its tables refuse writes."""
    [state, used, columns] = yield Batch(_STATE(tenant=None), USED(tenant=None), TABLES())
    if state:
        return str(state[0][0])
    if used:
        raise UsageError("the target is not empty, and is no replica: name another file, database or schema")
    text = orjson.dumps({"id": tag}).decode()
    yield Batch(*_refusals(columns, dialect, make=True), _SET(tenant=None, value=text))
    return text


def _refusals(columns: Rows, dialect: Dialect, *, make: bool) -> list[Any]:
    """Statements that make, or drop, the triggers that refuse writes while meta says that this is a replica."""
    tables = [table.name for table in all_tables(columns) if table.name == "tenant" or table.name in owned_tables()]
    if dialect == "postgres":
        function = _REFUSE if make else "DROP FUNCTION refuse_write CASCADE"
        on = "CREATE TRIGGER replica BEFORE INSERT OR UPDATE OR DELETE ON {0} EXECUTE FUNCTION refuse_write()"
        return [Sql(function)(), *(Sql(on.format(name))() for name in tables if make)]
    made = f"""WHEN EXISTS (SELECT 1 FROM meta WHERE key = 'replica') BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"""
    kinds = [(name, kind, f"replica_{name}_{kind}") for name in tables for kind in ("INSERT", "UPDATE", "DELETE")]
    return [
        Sql(f"CREATE TRIGGER {each} BEFORE {kind} ON {name} {made}" if make else f"DROP TRIGGER {each}")()
        for name, kind, each in kinds
    ]


def _apply(source: Driver, before: str, after: str, plan: _Round) -> Program[tuple[int, int]]:
    """One round: how many rows were written, and removed."""
    [was, columns, *_] = yield Batch(
        _UNSET(tenant=None), TABLES(), PATIENCE(), *([SECURE(tenant=None)] if plan.tenants else ())
    )
    primary = {table.name: table.key for table in all_tables(columns)}  # a table's may differ between databases
    if was != [(before,)]:
        raise Conflict("another process has replicated to this target meanwhile, or it was promoted")
    written = removed = number = 0
    with ReadAhead(source, partial(_read, plan)) as pages:
        for what, table, found in pages:
            if what == "number":
                number = found
                continue
            gone, new = yield from _to_do(what, table, found)
            this = " AND ".join(f"{column} = :{column}" for column in table.key)
            removal = Sql(f"DELETE FROM {table.name} WHERE {this}")
            insert = table._replace(key=primary[table.name]).insert(replace=True)
            yield Batch(
                *(removal(**dict(zip(table.key, key, strict=True))) for key in gone),
                *(insert(**dict(zip(table.columns, row, strict=True))) for row in new),
            )
            written, removed = written + len(new), removed + len(gone)
    yield Batch(COUNTERS(tenant=None, number=number), _SET(tenant=None, value=after))
    return written, removed


def _to_do(what: str, table: Table, found: Any) -> Program[tuple[Rows, Rows]]:
    """The keys to remove and the rows to write."""
    if what in ("remove", "write"):
        return (found, []) if what == "remove" else ([], found)
    if what == "only":
        owner, keys = found
        known = yield from _rows(table.key, table, "tenant = :owner", owner)
        return [key for key in known if key not in set(keys)], []
    known = yield from _rows(table.columns, table, table.where)
    places = [table.columns.index(column) for column in table.key]
    old, new = ({tuple(row[place] for place in places): row for row in rows} for rows in (known, found))
    return [key for key in old if key not in new], [row for key, row in new.items() if old.get(key) != row]


def _promote(now: int, dialect: Dialect) -> Program[tuple[int, int, int]]:
    """When the source was as this store is, the new era, and how many runs were queued again."""
    [state, columns] = yield Batch(_STATE(tenant=None), TABLES())
    held = orjson.loads(state[0][0]) if state else {}
    if not held:
        raise UsageError("this store is no replica: it takes writes already")
    if "token" not in held:
        raise UsageError("this replica holds nothing yet: its first `perdure store replicate` was not finished")
    requeued = yield from fence_old_processes("", now)
    yield Batch(_CUT(tenant=None), *_refusals(columns, dialect, make=False))
    _, era = yield from _identity()
    return int(held["at"]), era, requeued
