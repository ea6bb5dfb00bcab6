"""The table of snapshots: taking one, listing, releasing. Each function is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import orjson

from perdure.errors import NotFound
from perdure.storage.program import Batch, Dialect, Program, Rows, Sql
from perdure.storage.versions import SHORT_WAITS, installed
from perdure.storage.wrapping import RELEASED

_BATCH_ROWS = 5000  # removed in one transaction
_COLUMNS = "name, epoch, token, taken_at, note, good, keep_until, manifest"
# PostgreSQL: writers that have changed something commit first, and new ones wait.
_LOCK = Sql(sqlite="SELECT 1", postgres="LOCK TABLE epoch IN EXCLUSIVE MODE")
_NEXT = Sql("UPDATE epoch SET held = epoch, epoch = epoch + 1 RETURNING held")
_INSERT = Sql(
    f"""INSERT INTO snapshot ({_COLUMNS})
    VALUES (:name, :epoch, :token, {{now}}, :note, 0, :keep_until, :manifest) RETURNING {_COLUMNS}"""
)
_SELECT = Sql(f"SELECT {_COLUMNS} FROM snapshot ORDER BY epoch DESC")
# A role that works for one tenant may not release a snapshot: the maintenance of others does.
_EXPIRED = Sql(
    sqlite="SELECT token FROM snapshot WHERE keep_until <= :now",
    postgres="SELECT token FROM snapshot WHERE keep_until <= :now AND has_table_privilege('snapshot', 'DELETE')",
)
_DROP = Sql("DELETE FROM snapshot WHERE token = :token")
_HELD = Sql("UPDATE epoch SET held = coalesce((SELECT max(epoch) FROM snapshot), -1)")
_SEEN = "SELECT 1 FROM snapshot s WHERE s.epoch >= p.stamp AND s.epoch < p.died"
_KEPT = Sql("SELECT 1 FROM snapshot WHERE token = :token")
# The oldest transaction that a snapshot waits for: it has changed something, or, before the first snapshot, read it.
_BLOCKER = Sql(
    sqlite="SELECT 0, '', '', 0 WHERE 0",
    postgres="""SELECT coalesce(l.pid, 0), coalesce(a.application_name, ''), coalesce(a.state, ''),
        coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::bigint
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.granted AND l.relation IN (SELECT oid FROM pg_class WHERE relnamespace = current_schema()::regnamespace)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND (to_regclass('epoch') IS NULL OR l.relation = to_regclass('epoch') AND l.mode <> 'AccessShareLock')
    ORDER BY a.xact_start LIMIT 1""",
)
# Which store this is, and its era.
STORE = Sql("SELECT value, coalesce((SELECT value FROM meta WHERE key = 'era'), '0') FROM meta WHERE key = 'store'")


class SnapshotRow(NamedTuple):
    """One row of the table."""

    name: str
    epoch: int
    token: str
    taken_at: int
    note: str | None
    good: int
    keep_until: int | None
    manifest: str  # JSON


def take(
    name: str, token: str, note: str | None, keep_until: int | None, now: Callable[[], int], *, numbered: bool = False
) -> Program[SnapshotRow]:
    """A snapshot of everything that is committed. `numbered`: it gets the first name of name-1, name-2, … that is free.
    On PostgreSQL this may raise Busy: then it is worth another try."""
    _, _, [(epoch,)], [(store, era)] = yield Batch(SHORT_WAITS(), _LOCK(), _NEXT(), STORE())
    if numbered:
        [found] = yield Batch(_SELECT())
        names = {row[0] for row in found}
        name = next(free for number in count(1) if (free := f"{name}-{number}") not in names)
    manifest = orjson.dumps({"stores": {store: [int(era), epoch, token]}}).decode()
    row = {"name": name, "epoch": epoch, "token": token, "note": note, "keep_until": keep_until, "manifest": manifest}
    [[made]] = yield Batch(_INSERT(**row, now=now()))
    return SnapshotRow(*made)


def read_all() -> Program[list[SnapshotRow]]:
    """All that are kept, the newest first."""
    if not (yield from installed()):
        return []
    [rows] = yield Batch(_SELECT(), last=True)
    return [SnapshotRow(*row) for row in rows]


def update(token: str, **columns: str | int) -> Program[None]:
    """Set columns of one. Raises NotFound."""
    yield from check_kept(token)
    names = ", ".join(f"{name} = :{name}" for name in columns)
    yield Batch(Sql(f"UPDATE snapshot SET {names} WHERE token = :token")(token=token, **columns))


def check_kept(*tokens: str) -> Program[None]:
    """Raises NotFound for a snapshot that was released."""
    if not all((yield Batch(*(_KEPT(token=token) for token in tokens)))):
        raise NotFound(RELEASED)


def blocker() -> Program[Rows]:
    """Of the transaction that keeps a snapshot from being taken: process, application, state, seconds."""
    [found] = yield Batch(_BLOCKER(), last=True)
    return found


def drop(tokens: Sequence[str]) -> Program[None]:
    """Release them; what only they could see is removed by `collect`."""
    yield Batch(*(_DROP(token=token) for token in tokens), _HELD())


def expired(now: int) -> Program[list[str]]:
    """The tokens of those whose time is over."""
    if not (yield from installed()):
        return []
    [found] = yield Batch(_EXPIRED(now=now), last=True)
    return [token for (token,) in found]


def collect(tables: Sequence[str], dialect: Dialect) -> Program[bool]:
    """Remove some rows of the past that no snapshot can see. Whether there may be more."""
    row = "rowid" if dialect == "sqlite" else "ctid"
    some = f"SELECT p.{row} FROM {{0}}_past p WHERE NOT EXISTS ({_SEEN}) LIMIT {_BATCH_ROWS}"
    removal = f"DELETE FROM {{0}}_past WHERE {row} IN ({some}) RETURNING 1"
    found = yield Batch(*(Sql(removal.format(table))() for table in tables))
    return any(len(rows) == _BATCH_ROWS for rows in found)


def held_bytes(epoch: int, tables: Mapping[str, Sequence[str]], dialect: Dialect) -> Program[int]:
    """The bytes of the past that this snapshot sees and no other."""
    alone = f"p.stamp <= :epoch AND p.died > :epoch AND NOT EXISTS ({_SEEN} AND s.epoch <> :epoch)"
    total = 0
    for table, names in tables.items():
        size = (
            "pg_column_size(p.*)" if dialect == "postgres" else " + ".join(f"coalesce(length(p.{n}), 0)" for n in names)
        )
        [[(found,)]] = yield Batch(Sql(f"SELECT sum({size}) FROM {table}_past p WHERE {alone}")(epoch=epoch))
        total += int(found or 0)
    return total
