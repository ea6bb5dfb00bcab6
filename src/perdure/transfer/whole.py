"""Copying everything into an empty store, between any two databases: every row as it is, table by table.

Numbers stay, so nothing has to be made anew: hashes hold, and what is encrypted stays encrypted. Which tables there
are, and their keys, is read from the source's catalogue. A copy that was killed is dropped and made again by the same
call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import StoreError, UsageError
from perdure.storage.program import Batch, Driver, Program, Progress, Rows, Sql, Statement, drive, read, write
from perdure.transfer.catalogue import WHOLE_STORE, drop_cursor, read_cursor, save_cursor

_PAGE = 500
_PAGE_BYTES = 8 << 20
_UNIT = "store"
# They describe the database they are in: its migrations, counters, roles, size, and transfers into it.
_OWN = frozenset({"migration", "counter", "tenant_role", "size_sample", "transfer"})
_FIRST = ("tenant", "blob")  # others refer to them
# What marks a store as a copy is not copied.
_META = "key NOT IN ('backup', 'restored')"

_TABLES = Sql(
    sqlite="""SELECT t.name, c.name, c.pk FROM sqlite_schema t JOIN pragma_table_info(t.name) c
        WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%' ORDER BY t.name, c.cid""",
    postgres="""SELECT c.relname::text, a.attname::text,
            coalesce(array_position(i.indkey::int[], a.attnum::int), -1) + 1
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
        WHERE c.relnamespace = to_regnamespace(current_schema()) AND c.relkind = 'r' ORDER BY c.relname, a.attnum""",
)
_SOURCE = Sql(
    sqlite="SELECT (SELECT value FROM meta WHERE key = 'store'), number FROM counter",
    postgres="SELECT (SELECT value FROM meta WHERE key = 'store'), (SELECT last_value FROM number)",
)
_SEES_ALL = Sql(sqlite="SELECT 1", postgres="SELECT CAST(may_see_every_tenant() AS int)")
_PATIENCE = Sql(
    sqlite="SELECT 1",
    postgres="""SELECT set_config('idle_in_transaction_session_timeout', '0', true),
        set_config('statement_timeout', '0', true)""",
)
_USED = Sql(
    """SELECT 1 WHERE EXISTS (SELECT 1 FROM tenant) OR EXISTS (SELECT 1 FROM thread) OR EXISTS (SELECT 1 FROM run)"""
)
_COUNTERS = Sql(
    sqlite="UPDATE counter SET number = :number",
    postgres="""SELECT setval('number', greatest(:number::bigint, 1)),
        setval(pg_get_serial_sequence('body', 'id'), greatest((SELECT max(id) FROM body), 1)),
        setval(pg_get_serial_sequence('pack', 'pack'), greatest((SELECT max(pack) FROM pack), 1))""",
)


class _Table(NamedTuple):
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def where(self) -> str:
        return _META if self.name == "meta" else "1 = 1"

    def counted(self) -> Sql:
        return Sql(f'SELECT count(*) FROM "{self.name}" WHERE {self.where}')

    def page(self, *, after: bool) -> Sql:
        """The next rows in the order of the key."""
        key, marks = _names(self.key), ", ".join(f":key{place}" for place in range(len(self.key)))
        behind = f" AND ({key}) > ({marks})" if after else ""
        return Sql(
            f'SELECT {_names(self.columns)} FROM "{self.name}" WHERE {self.where}{behind} ORDER BY {key} LIMIT :limit'
        )

    def insert(self) -> Sql:
        marks = ", ".join(f":{column}" for column in self.columns)
        # The target has meta rows of its own; anything else that is there was written by this transfer.
        conflict = "(key) DO UPDATE SET value = excluded.value" if self.name == "meta" else "DO NOTHING"
        text = (
            f'INSERT INTO "{self.name}" ({_names(self.columns)}) {{identity}} VALUES ({marks}) ON CONFLICT {conflict}'
        )
        return Sql(sqlite=text.format(identity=""), postgres=text.format(identity="OVERRIDING SYSTEM VALUE"))


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


class Copied(NamedTuple):
    """What was copied."""

    rows: dict[str, int]  # by table
    last: Any  # what `last` returned


def copy_store(
    source: Driver, target: Driver, progress: Progress | None = None, *, last: Callable[[], Program[Any]] | None = None
) -> Copied:
    """Copy every row, from one snapshot of the source. `last` runs in the transaction that finishes the copy. Raises
    UsageError for a target that is not empty."""
    copied: Copied = drive(source, read(partial(_copy, target, progress, last)))
    return copied


def _copy(target: Driver, progress: Progress | None, last: Callable[[], Program[Any]] | None) -> Program[Copied]:
    [[(sees_all,)]] = yield Batch(_SEES_ALL(tenant=None))
    if not sees_all:
        raise UsageError(
            "a copy of everything is made by a role that sees every tenant: the owner, or one that "
            "`perdure store role operator` made"
        )
    [[(store, number)], columns, _] = yield Batch(_SOURCE(tenant=None), _TABLES(), _PATIENCE())
    tables = _tables(columns)
    counts = yield Batch(*(table.counted()(tenant=None) for table in tables))
    expected = {table.name: int(rows[0][0]) for table, rows in zip(tables, counts, strict=True)}
    drive(target, write(partial(_begin, tables, str(store)), solo=True))
    done = 0
    for table in tables:
        insert = table.insert()
        behind: dict[str, Any] = {}
        while rows := (yield Batch(table.page(after=bool(behind))(tenant=None, limit=_PAGE, **behind)))[0]:
            for some in _parts(rows):
                made = [insert(**dict(zip(table.columns, row, strict=True))) for row in some]
                drive(target, write(partial(_write, made), solo=True))
                done += len(some)
                if progress is not None:
                    progress(done, sum(expected.values()))
            newest = dict(zip(table.columns, rows[-1], strict=True))
            behind = {f"key{place}": newest[column] for place, column in enumerate(table.key)}
    ended = drive(target, write(partial(_finish, tables, expected, int(number), last), solo=True))
    return Copied(expected, ended)


def _tables(columns: Rows) -> list[_Table]:
    """All tables to copy, those that others refer to first."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name, column, place in columns:
        if name not in _OWN:
            found.setdefault(name, []).append((column, place))
    tables = [
        _Table(
            name,
            tuple(column for column, _ in parts),
            tuple(column for column, place in sorted(parts, key=lambda part: part[1]) if place),
        )
        for name, parts in found.items()
    ]
    return sorted(tables, key=lambda table: (table.name not in _FIRST, table.name))


def _parts(rows: Rows) -> Generator[Rows, None, None]:
    """Pages of bounded size: a transaction must fit into memory."""
    part: Rows = []
    size = 0
    for row in rows:
        part.append(row)
        size += sum(len(value) for value in row if isinstance(value, bytes | str))
        if size > _PAGE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


# --- in the target


def _begin(tables: list[_Table], store: str) -> Program[None]:
    """Mark the target as unfinished. It must be empty, or hold what an earlier call has copied, which is dropped."""
    found = yield from read_cursor(WHOLE_STORE, _UNIT)
    [used] = yield Batch(_USED(tenant=None))
    if found == {"store": store}:
        yield Batch(*(Sql(f'DELETE FROM "{table.name}"')(tenant=None) for table in reversed(tables)))
    elif used or found is not None:
        raise UsageError(
            "the target is not empty: name another file or schema (schema=…, --schema), or drop what is there first"
        )
    yield Batch(save_cursor(WHOLE_STORE, _UNIT, {"store": store}))


def _write(statements: list[Statement]) -> Program[None]:
    yield Batch(*statements, last=True)


def _finish(
    tables: list[_Table],
    expected: dict[str, int],
    number: int,
    last: Callable[[], Program[Any]] | None,
) -> Program[Any]:
    """Compare how many rows there are, and let the copy be used."""
    answers = yield Batch(*(table.counted()(tenant=None) for table in tables))
    for table, rows in zip(tables, answers, strict=True):
        if rows[0][0] != expected[table.name]:
            raise StoreError(
                f"table {table.name} of the copy has {rows[0][0]} rows, the source {expected[table.name]}: another "
                "process writes to the target"
            )
    yield Batch(_COUNTERS(tenant=None, number=number), drop_cursor(WHOLE_STORE, _UNIT))
    return (yield from last()) if last is not None else None
