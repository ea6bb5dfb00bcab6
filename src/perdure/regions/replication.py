"""Replicating a store to another region: the target holds the source as it was at a snapshot, row by row.

    1  snapshot    T of the source; the one that the target holds, S, is kept until the target holds T
    2  transfer    rows of S that have changed are removed, rows of T that S does not have are written: by index,
                   whatever the store's size. Numbers, hashes and encrypted columns stay as they are; no key is needed
    3  record      which snapshot that is (epoch, token), in the same transaction of the target
    4  release     the snapshots of the source that the target no longer needs

The target is at all times the source at one instant. Killed before 3 has committed, it holds S, and the next round
releases T; killed after, it holds T, and the next round releases S. Triggers refuse every other write to the target
until `promote` (`promotion.py`).

A snapshot is known by its token, which is random. A source that does not have the one that the target holds has lost it
(a failover to a standby that was behind), and with it commits that the target may have: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from typing import Any

import orjson

from perdure.errors import Conflict, OutcomeUnknown, PerdureError, UsageError
from perdure.log.erase import SECURE, scrub
from perdure.ops.store import Store
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Batch, Driver, Program, Row, Rows, Sql, Statement, drive, fetch, write
from perdure.storage.store_tables import STORE
from perdure.storage.versions import forget
from perdure.transfers.read_ahead import PAGE_ROWS, PATIENCE, Put, ReadAhead
from perdure.transfers.whole import (
    NUMBER,
    TABLES,
    USED,
    CopiedTable,
    check_sees_all,
    copied_tables,
    known_tables,
    read_page,
    read_pages,
    set_counters,
)

STATE = Sql("SELECT value FROM meta WHERE key = 'replica'")  # of the target: which snapshot of which store it holds
_SET = Sql("INSERT INTO meta (key, value) VALUES ('replica', :value)")
_UNSET = Sql("DELETE FROM meta WHERE key = 'replica' RETURNING value")
# What was erased. The last column: nothing of that tenant is being erased.
_ERASED = Sql(
    """SELECT e.tenant, e.thread, e.record, CASE WHEN m.key IS NULL THEN 1 ELSE 0 END
    FROM erased e LEFT JOIN meta m ON m.key = 'scrub ' || CAST(e.tenant AS text)"""
)
_TOKENS = Sql("SELECT token FROM snapshot")
_REFUSED = "this store is a replica: it takes no writes until `perdure store promote`"
# SECURITY DEFINER: no role that is held to a tenant sees that key of `meta`.
_FUNCTION = Sql(
    sqlite="SELECT 1",
    postgres=f"""DO $do$ BEGIN EXECUTE format($f$CREATE OR REPLACE FUNCTION refuse_write() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$ BEGIN
        IF EXISTS (SELECT 1 FROM %I.meta WHERE key = 'replica') THEN
            RAISE EXCEPTION '{_REFUSED}' USING ERRCODE = '25006';
        END IF;
        RETURN NULL;
    END $body$$f$, current_schema()); REVOKE ALL ON FUNCTION refuse_write() FROM PUBLIC; END $do$""",
)
# For SQLite, and for PostgreSQL.
_REFUSE = (
    f"""CREATE TRIGGER replica_{{0}}_{{1}} BEFORE {{1}} ON {{0}} WHEN EXISTS (SELECT 1 FROM meta WHERE key = 'replica')
        BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
    "CREATE TRIGGER replica BEFORE INSERT OR UPDATE OR DELETE ON {0} EXECUTE FUNCTION refuse_write()",
)


@dataclass(frozen=True, slots=True)
class Replicated:
    """What a round brought to the target."""

    taken_at: datetime  # the target holds everything that was committed in the source before
    written: int  # rows


@dataclass(frozen=True, slots=True)
class _Round:
    """The two snapshots of the source that a round leads from and to."""

    since: int  # epoch; -1: the target is empty
    until: int
    tokens: frozenset[str]  # of both
    erased: frozenset[Row]  # what the target knows of


def replicate(source: Store, target: Store) -> Replicated:
    """Bring a target to the state of the source: one round. The target is an empty store, or a replica of the source.

    Raises Conflict if the source does not have the snapshot that the target holds.
    """
    ctx = source._context
    here, there = ctx.driver.capabilities.base, target._context.driver.capabilities.base
    [(store, era)] = drive(here, fetch(STORE))
    before = drive(there, write(partial(_prepare_target, store, ctx.entropy(4).hex()), solo=True))
    held = orjson.loads(before)
    prefix = f"replica-{held['id']}-"
    snap = source.snapshot(f"{prefix}{ctx.clock_us()}", note="perdure store replicate")
    taken = snap._row
    plan = _Round(
        since=held.get("epoch", -1),
        until=taken.epoch,
        tokens=frozenset({taken.token, held.get("token", taken.token)}),
        erased=frozenset(drive(there, fetch(_ERASED))),
    )
    now = {"epoch": taken.epoch, "token": taken.token, "at": taken.taken_at, "source": [store, era]}
    after = orjson.dumps(held | now).decode()
    try:
        for name in versioned_tables() if plan.since < 0 else ():
            drive(here, write(partial(_prepare_source, name), solo=True))
        written, erased = drive(there, write(partial(_apply, here, before, after, plan), solo=True))
    except PerdureError as error:
        if not isinstance(error, OutcomeUnknown):  # else the target may hold it
            with suppress(PerdureError):
                snap.release()
        raise
    for old in source.snapshots():
        if old.name.startswith(prefix) and old._row.epoch < taken.epoch:
            old.release()
    if erased:
        drive(there, scrub(there.dialect, full=False))
    return Replicated(snap.taken_at, written)


# --- reading the source


def _prepare_source(table: str) -> Program[None]:
    """Make the indexes by which the changed rows of a table are found."""
    by = ", ".join(("tenant", *versioned_tables()[table].key))
    yield Batch(
        Sql(f"CREATE INDEX IF NOT EXISTS {table}_changes ON {table} (stamp, {by})")(),
        Sql(f"CREATE INDEX IF NOT EXISTS {table}_past_changes ON {table}_past (died, {by})")(),
    )


class _Keys:
    """Pages of keys by which the target asks the source for rows, while a round is read and written."""

    def __init__(self) -> None:
        self._pages: SimpleQueue[Rows] = SimpleQueue()
        self._is_closed = False

    def ask(self, rows: Rows) -> None:
        """Ask for a page of keys. An empty one ends a table."""
        self._pages.put(rows)

    def close(self) -> None:
        """End the questions."""
        self._is_closed = True
        self._pages.put([])

    def next(self) -> Rows:
        rows = self._pages.get()
        if self._is_closed and not rows:
            self._pages.put(rows)
        return rows


def _read(plan: _Round, known: Sequence[CopiedTable], asked: _Keys, put: Put) -> Program[None]:
    """Put the source's counter and the tenants of which something was erased, then the changes of the target.

    A change is (what, table, rows). Where the source may lack rows that the target has, put ("ask", keys, condition),
    and then, for each page of keys that the target asks about, those that are here.
    """
    yield from check_sees_all()
    [[(number,)], tokens, erased, columns] = yield Batch(NUMBER(tenant=None), _TOKENS(), _ERASED(), TABLES())
    if lost := plan.tokens - {token for (token,) in tokens}:
        raise Conflict(
            f"the source does not have the snapshot that the target holds (token {', '.join(lost)}): the source is "
            "another store, the snapshot was released, or a failover of the source has lost it. Then the target may "
            "hold commits that the source has lost: promote the target, or replicate to an empty one"
        )
    tenants = {row[0] for row in erased if plan.since >= 0 and (row not in plan.erased or not row[3])}
    put((number, tenants))
    versioned, tables = [], known_tables(columns, known)
    for table in reversed(tables):  # a row is removed before the one that it refers to
        owned = versioned_tables().get(table.name)
        keys = CopiedTable(table.name, (), table.key if owned is None else ("tenant", *owned.key))
        # Erasing has removed what would show which rows of a tenant are gone.
        for where in [table.where] if owned is None else [f"tenant = {tenant:d}" for tenant in sorted(tenants)]:
            put(("ask", keys, where))
            while rows := asked.next():
                put((yield from _there(keys, rows, None if owned is None else plan.until)))
    for table in tables:
        if owned := versioned_tables().get(table.name):
            versioned.append(table._replace(key=("tenant", *owned.key)))
        else:
            yield from read_pages(table, table.name, table.where, table.key, put, ("compare", table))
    for table in reversed(versioned) if plan.since >= 0 else ():  # a row is removed before the one that it refers to
        keys = table._replace(columns=table.key)
        yield from _changes(put, "remove", keys, plan, f"{table.name}_past", "died", "1 = 1")
    for table in versioned:
        yield from _changes(put, "write", table, plan, table.name, "stamp", "1 = 1")
        yield from _changes(put, "write", table, plan, f"{table.name}_past", "stamp", "died > :until")


def _changes(put: Put, verb: str, table: CopiedTable, plan: _Round, name: str, epoch: str, where: str) -> Program[None]:
    """Put rows whose column `epoch` is in this round."""
    where, by, label = f"{where} AND {epoch} <= :until", (epoch, *table.key), (verb, table)
    return read_pages(table, name, where, by, put, label, behind=(plan.since,), until=plan.until)


# --- writing the target


def _prepare_target(source: str, tag: str) -> Program[str]:
    """Return what the target holds. Make an empty store a replica: its tables refuse writes."""
    [state, used, [(store, _)]] = yield Batch(STATE(tenant=None), USED(tenant=None), STORE(tenant=None))
    if state:
        return str(state[0][0])
    if used:
        raise UsageError("the target is not empty, and is no replica: name another file, database or schema")
    if store == source:
        raise UsageError("the source and the target are the same store")
    text = orjson.dumps({"id": tag}).decode()
    yield Batch(_FUNCTION(), *triggers(*_REFUSE), _SET(tenant=None, value=text))
    return text


def triggers(sqlite: str, postgres: str) -> list[Statement]:
    """Make, or drop, the triggers that refuse writes while meta says that this is a replica."""
    return [
        Sql(
            sqlite=tuple(sqlite.format(name, kind) for kind in ("INSERT", "UPDATE", "DELETE")),
            postgres=postgres.format(name),
        )()
        for name in ("tenant", *versioned_tables())
    ]


def _apply(source: Driver, before: str, after: str, plan: _Round) -> Program[tuple[int, bool]]:
    """Write one round. Return how many rows were written, and whether something was erased."""
    [was, columns, _] = yield Batch(_UNSET(tenant=None), TABLES(), PATIENCE())
    if was != [(before,)]:
        raise Conflict("another process has replicated to this target meanwhile, or it was promoted")
    known = copied_tables(columns)
    primary = {table.name: table.key for table in known}  # a table's may differ between databases
    written = 0
    asked = _Keys()
    with ReadAhead(source, partial(_read, plan, known, asked)) as pages, closing(asked):
        number, tenants = next(pages)
        if tenants:
            yield Batch(SECURE(tenant=None))
        for verb, table, rows in pages:
            if verb == "ask":
                yield from _remove_missing(table, rows, asked, pages)
                continue
            if verb == "remove":
                yield Batch(*(_by_key("DELETE FROM", table)(**_values(table.key, key)) for key in rows))
                continue
            new = rows if verb == "write" else (yield from _changed(table, rows))
            insert = table._replace(key=primary[table.name]).insert(replace=True)
            yield Batch(*(insert(**_values(table.columns, row)) for row in new))
            written += len(new)
    for tenant in tenants:  # what snapshots of the replica keep of it
        yield from forget(*((name, "tenant = :tenant") for name in versioned_tables()), tenant=tenant)
    yield Batch(set_counters(number), _SET(tenant=None, value=after))
    return written, bool(tenants)


def _by_key(command: str, table: CopiedTable, where: str = "1 = 1") -> Sql:
    """Return a statement about the row that has a key."""
    matching = " AND ".join(f'"{column}" = :{column}' for column in table.key)
    return Sql(f'{command} "{table.name}" WHERE {matching} AND {where}')


def _values(columns: Sequence[str], row: Row) -> dict[str, Any]:
    return {"tenant": None} | dict(zip(columns, row, strict=True))


def _changed(table: CopiedTable, rows: Rows) -> Program[Rows]:
    """Return the rows that the target lacks, or has with other values."""
    places = [table.columns.index(column) for column in table.key]
    select = _by_key(f"SELECT {', '.join(table.columns)} FROM", table)
    answers = yield Batch(*(select(**_values(table.key, tuple(row[place] for place in places))) for row in rows))
    return [row for row, current in zip(rows, answers, strict=True) if current != [row]]


def _remove_missing(keys: CopiedTable, where: str, asked: _Keys, pages: Iterator[Any]) -> Program[None]:
    """Remove rows that the source does not have. The target reads its keys page by page, and asks the source for them:
    databases differ in how they order text."""
    rows: Rows = [()]
    while rows := (yield from read_page(keys, keys.name, where, keys.key, rows[-1], PAGE_ROWS)):
        asked.ask(rows)
        gone = [row for row, is_there in zip(rows, next(pages), strict=True) if not is_there]
        yield Batch(*(_by_key("DELETE FROM", keys)(**_values(keys.key, row)) for row in gone))
    asked.ask([])


def _there(keys: CopiedTable, rows: Rows, until: int | None) -> Program[list[bool]]:
    """Return for each key whether the source has a row: now, or at a snapshot."""
    selects = [_by_key("SELECT 1 FROM", keys)]
    if until is not None:
        past = keys._replace(name=f"{keys.name}_past")
        seen = f"stamp <= {until:d}"
        selects = [_by_key("SELECT 1 FROM", keys, seen), _by_key("SELECT 1 FROM", past, f"{seen} AND died > {until:d}")]
    answers = yield Batch(*(select(**_values(keys.key, row)) for row in rows for select in selects))
    each = len(selects)
    return [any(answers[place : place + each]) for place in range(0, len(answers), each)]
