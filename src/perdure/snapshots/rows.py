"""The table of snapshots: taking one, listing, releasing. Each function is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import orjson

from perdure.errors import Damaged, NotFound
from perdure.log.retention import read_policy
from perdure.storage.domains import Table
from perdure.storage.program import Batch, Dialect, Program, Sql
from perdure.storage.store_tables import STORE
from perdure.storage.versions import SHORT_WAITS, installed
from perdure.storage.wrapping import RELEASED

_BATCH_ROWS = 5000  # removed in one transaction
_COLUMNS = "name, epoch, token, taken_at, good, keep_until, manifest"
# PostgreSQL: writers that have changed something commit first, and new ones wait.
_LOCK = Sql(sqlite="SELECT 1", postgres="LOCK TABLE epoch IN EXCLUSIVE MODE")
_NEXT = Sql("UPDATE epoch SET held = epoch, epoch = epoch + 1 RETURNING held")
_INSERT = Sql(
    f"""INSERT INTO snapshot ({_COLUMNS})
    VALUES (:name, :epoch, :token, {{now}}, 0, :keep_until, :manifest) RETURNING {_COLUMNS}"""
)
# Roles that are held to one tenant read no notes: the database shows them none.
_SELECT = Sql(
    f"""SELECT {_COLUMNS}, (SELECT note FROM snapshot_note n WHERE n.token = snapshot.token)
    FROM snapshot ORDER BY epoch DESC"""
)
_ANNOTATE = Sql(
    """INSERT INTO snapshot_note (token, note) VALUES (:token, :note)
    ON CONFLICT (token) DO UPDATE SET note = excluded.note"""
)
# A role that works for one tenant may not release a snapshot: the maintenance of others does.
_IS_OVER = "keep_until <= :now OR (keep_until IS NULL AND good = 0 AND taken_at <= :before)"
_EXPIRED = Sql(
    sqlite=f"SELECT token FROM snapshot WHERE {_IS_OVER}",
    postgres=f"SELECT token FROM snapshot WHERE ({_IS_OVER}) AND has_table_privilege('snapshot', 'DELETE')",
)
_EPOCH = Sql("SELECT epoch, held FROM epoch")
_DROP = Sql("DELETE FROM snapshot WHERE token = :token")
_DROP_NOTE = Sql("DELETE FROM snapshot_note WHERE token = :token")
_HELD = Sql("UPDATE epoch SET held = coalesce((SELECT max(epoch) FROM snapshot), -1)")
_SEEN = "SELECT 1 FROM snapshot s WHERE s.epoch >= p.stamp AND s.epoch < p.died"
_OLDER = "SELECT 1 FROM snapshot s WHERE s.epoch < p.stamp"
_KEPT = Sql("SELECT 1 FROM snapshot WHERE token = :token")
# The oldest transaction that a snapshot waits for: it has changed something, or, before the first snapshot, read it.
BLOCKER = Sql(
    sqlite="SELECT 0, '', '', 0 WHERE 0",
    postgres="""SELECT coalesce(l.pid, 0), coalesce(a.application_name, p.gid, ''),
        coalesce(a.state, CASE WHEN p.gid IS NULL THEN '' ELSE 'prepared: `perdure store settle` ends it' END),
        coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)), 0)::bigint
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
        LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL AND p.transaction IN (
            SELECT x.transactionid FROM pg_locks x WHERE x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction)
    WHERE l.granted AND l.relation IN (SELECT oid FROM pg_class WHERE relnamespace = current_schema()::regnamespace)
        AND l.pid IS DISTINCT FROM pg_backend_pid()
        AND (to_regclass('epoch') IS NULL OR l.relation = to_regclass('epoch') AND l.mode <> 'AccessShareLock')
    ORDER BY a.xact_start LIMIT 1""",
)


class SnapshotRow(NamedTuple):
    name: str
    epoch: int
    token: str
    taken_at: int
    good: int
    keep_until: int | None
    manifest: str  # JSON
    note: str | None

    def check(self) -> None:
        """Raise Damaged if the epoch is not the one that the snapshot was taken at: another state would be shown."""
        if not str(self.token).startswith(f"{self.epoch}-"):  # SQLite lets a column hold anything
            raise Damaged(
                f"snapshot {self.name!r} is damaged: it is not known which state it is of. Release it, or restore the "
                "store from a backup"
            )


def take(
    name: str,
    token: str,
    note: str | None,
    keep_until: int | None,
    now: Callable[[], int],
    *,
    numbered: bool = False,
    restores: str | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> Program[SnapshotRow]:
    """Take a snapshot of everything that is committed.

    `made_by` describes the process that takes it. `numbered`: use the first of name-1, name-2, … that is free.
    `restores` names the restore whose undo it is. On PostgreSQL this may raise Busy; the caller tries again.
    """
    _, _, [(epoch,)], stores = yield Batch(SHORT_WAITS(), _LOCK(), _NEXT(), STORE())
    if not stores or not isinstance(stores[0][0], str):
        raise Damaged("the store's id is damaged: `perdure store repair` makes a copy with another one")
    [(store, era)] = stores
    if numbered:
        [existing] = yield Batch(_SELECT())
        names = {row[0] for row in existing}
        name = next(free for number in count(1) if (free := f"{name}-{number}") not in names)
    token = f"{epoch}-{token}"  # the epoch can be checked by it
    about: dict[str, Any] = {"stores": {store: [int(era), epoch, token]}}
    about |= ({"restores": restores} if restores else {}) | ({"made_by": dict(made_by)} if made_by else {})
    manifest = orjson.dumps(about).decode()
    row = {"name": name, "epoch": epoch, "token": token, "keep_until": keep_until, "manifest": manifest}
    [[inserted]] = yield Batch(_INSERT(**row, now=now()))
    if note is not None:
        yield Batch(_ANNOTATE(token=token, note=note))
    return SnapshotRow(*(*inserted, note))


def read_all() -> Program[list[SnapshotRow]]:
    """Return all snapshots that are kept, the newest first."""
    if not (yield from installed()):
        return []
    [kept] = yield Batch(_SELECT(), last=True)
    rows = [SnapshotRow(*row) for row in kept]
    for row in rows:
        if (type(row.epoch), type(row.token), type(row.taken_at)) != (int, str, int):  # SQLite lets them be anything
            raise Damaged(
                f"the row of snapshot {row.name!r} is damaged: `perdure store repair` makes a copy without it"
            )
    return rows


def update(token: str, **columns: str | int | None) -> Program[None]:
    """Set columns of a snapshot. Raises NotFound."""
    yield from check_kept(token)
    names = ", ".join(f"{name} = :{name}" for name in columns)
    yield Batch(Sql(f"UPDATE snapshot SET {names} WHERE token = :token")(token=token, **columns))


def finish_undo(undo: SnapshotRow, note: str) -> Program[None]:
    """Record that the restore that an undo was taken for has ended. Raises NotFound."""
    about = {key: value for key, value in orjson.loads(undo.manifest).items() if key != "restores"}
    yield from update(undo.token, manifest=orjson.dumps(about).decode())
    yield Batch(_ANNOTATE(token=undo.token, note=note))


def check_kept(*tokens: str) -> Program[None]:
    """Raise NotFound if a snapshot was released."""
    if not all((yield Batch(*(_KEPT(token=token) for token in tokens)))):
        raise NotFound(RELEASED)


def problems(tenant: int, tables: Sequence[Table]) -> Program[list[str]]:
    """Return what is wrong with the snapshots and with the versions of a tenant's rows, as sentences.

    It finds epochs that were changed, and rows of which a snapshot would show two versions.
    """
    if not (yield from installed()):
        return []
    [snapshots, [(epoch, held)]] = yield Batch(_SELECT(), _EPOCH())
    wrong: list[str] = []
    for row in (SnapshotRow(*each) for each in snapshots):
        try:
            row.check()
        except Damaged as error:
            wrong.append(str(error))
    newest = max((row[1] for row in snapshots), default=-1)
    if held != newest or epoch <= newest:
        wrong.append(f"the epoch of the store is damaged: {epoch}, and {newest} of its newest snapshot")
    for table in tables:
        key = " AND ".join(f"{{0}}.{column} = {{1}}.{column}" for column in ("tenant", *table.key))
        for text in (
            f"SELECT 1 FROM {table.name} l WHERE l.tenant = :tenant AND (l.stamp < 0 OR l.stamp > :epoch) LIMIT 1",
            f"""SELECT 1 FROM {table.name}_past p WHERE p.tenant = :tenant
                AND (p.stamp < 0 OR p.stamp > p.died OR p.died > :epoch) LIMIT 1""",
            f"""SELECT 1 FROM {table.name}_past p JOIN {table.name} l ON {key.format("p", "l")}
                WHERE p.tenant = :tenant AND p.died > l.stamp LIMIT 1""",
            f"""SELECT 1 FROM {table.name}_past p JOIN {table.name}_past q ON {key.format("p", "q")}
                WHERE p.tenant = :tenant AND p.died > q.stamp AND q.died > p.stamp
                    AND (p.stamp, p.died) <> (q.stamp, q.died) LIMIT 1""",
        ):
            [bad] = yield Batch(Sql(text)(tenant=tenant, epoch=epoch))
            if bad:
                wrong.append(f"versions of rows of table {table.name} are damaged: snapshots may show another state")
                break
    return wrong


def drop(tokens: Sequence[str]) -> Program[None]:
    """Release snapshots. `collect` removes the rows that only they could see."""
    yield Batch(*(drop(token=token) for token in tokens for drop in (_DROP, _DROP_NOTE)), _HELD())


def expired(tenant: int, now: int) -> Program[list[str]]:
    """Return the tokens of snapshots whose `keep_until` is past, or that are older than retention says."""
    if not (yield from installed()):
        return []
    age = (yield from read_policy(tenant)).get("snapshots")
    [rows] = yield Batch(_EXPIRED(now=now, before=-1 if age is None else now - age), last=True)
    return [token for (token,) in rows]


def collect(tables: Sequence[Table], dialect: Dialect) -> Program[bool]:
    """Remove some rows of the past that no snapshot needs. Return whether there may be more."""
    row = "rowid" if dialect == "sqlite" else "ctid"
    removals = []
    for table in tables:
        needed = f"EXISTS ({_SEEN}) OR ({table.remembered.format(row='p')}) AND EXISTS ({_OLDER})"
        some = f"SELECT p.{row} FROM {table.name}_past p WHERE NOT ({needed}) LIMIT {_BATCH_ROWS}"
        removals.append(Sql(f"DELETE FROM {table.name}_past WHERE {row} IN ({some}) RETURNING 1"))
    removed = yield Batch(*(removal() for removal in removals))
    return any(len(rows) == _BATCH_ROWS for rows in removed)


def held_bytes(epoch: int, tables: Mapping[str, Sequence[str]], dialect: Dialect) -> Program[int]:
    """Return the bytes of the past that only this snapshot sees."""
    alone = f"p.stamp <= :epoch AND p.died > :epoch AND NOT EXISTS ({_SEEN} AND s.epoch <> :epoch)"
    total = 0
    for table, names in tables.items():
        size = (
            "pg_column_size(p.*)" if dialect == "postgres" else " + ".join(f"coalesce(length(p.{n}), 0)" for n in names)
        )
        [[(size_of_table,)]] = yield Batch(Sql(f"SELECT sum({size}) FROM {table}_past p WHERE {alone}")(epoch=epoch))
        total += int(size_of_table or 0)
    return total
