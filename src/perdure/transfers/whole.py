"""Copy every row of a store into an empty one, table by table, between any two databases.

Numbers stay, so rows are copied as they are: hashes stay valid and encrypted values stay encrypted. The tables and
their keys are read from the source's catalogue. A table or column that the target does not have is refused. The copy is
one transaction of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Damaged, UsageError
from perdure.storage.domains import all_tables
from perdure.storage.program import Batch, Driver, Program, Progress, Row, Rows, Sql, Statement, drive, write
from perdure.transfers.read_ahead import PAGE_ROWS, PATIENCE, Put, ReadAhead, next_page_rows

# Tables that describe their own database: its migrations and snapshots.
_OWN = frozenset({"migration", "epoch", "snapshot", "snapshot_note"})
# Rows that mark a store as a copy are not copied.
_META = "key NOT IN ('backup', 'restored', 'replica')"

# Base tables only: at a snapshot, views of the same names hide them.
TABLES = Sql(
    sqlite=r"""SELECT t.name, c.name, c.pk FROM sqlite_schema t JOIN pragma_table_info(t.name, 'main') c
        WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'
            AND t.name NOT LIKE '%\_past' ESCAPE '\' AND c.name <> 'stamp'
        ORDER BY t.name, c.cid""",
    postgres=r"""SELECT c.relname::text, a.attname::text,
            coalesce(array_position(i.indkey::int[], a.attnum::int), -1) + 1
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
        WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('meta')) AND c.relkind = 'r'
            AND c.relname NOT LIKE '%\_past' AND a.attname <> 'stamp'
        ORDER BY c.relname, a.attnum""",
)
NUMBER = Sql(sqlite="SELECT number FROM counter", postgres="SELECT last_value FROM number")
_SEES_ALL = Sql(sqlite="SELECT 1", postgres="SELECT CAST(may_see_every_tenant() AS int)")
USED = Sql(
    """SELECT 1 WHERE EXISTS (SELECT 1 FROM tenant) OR EXISTS (SELECT 1 FROM thread) OR EXISTS (SELECT 1 FROM run)"""
)


class CopiedTable(NamedTuple):
    """A table to copy, without the columns that snapshots have added."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def where(self) -> str:
        return _META if self.name == "meta" else "1 = 1"

    def counted(self) -> Sql:
        return Sql(f'SELECT count(*) FROM "{self.name}" WHERE {self.where}')

    def insert(self, *, replace: bool = False) -> Sql:
        """Return the statement that inserts a row. With `replace`, it updates a row with the same key."""
        marks, conflict = ", ".join(f":{column}" for column in self.columns), ""
        if replace or self.name == "meta":  # the target has meta rows of its own
            new = ", ".join(f'"{column}" = excluded."{column}"' for column in self.columns if column not in self.key)
            conflict = f" ON CONFLICT ({_names(self.key)}) DO {f'UPDATE SET {new}' if new else 'NOTHING'}"
        text = f'INSERT INTO "{self.name}" ({_names(self.columns)}) {{identity}} VALUES ({marks}){conflict}'
        return Sql(sqlite=text.format(identity=""), postgres=text.format(identity="OVERRIDING SYSTEM VALUE"))


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


class Copied(NamedTuple):
    rows: dict[str, int]  # how many were copied, by table
    last: Any  # the result of `last`


def copy_store(
    source: Driver, target: Driver, progress: Progress | None = None, *, last: Callable[[], Program[Any]] | None = None
) -> Copied:
    """Copy every row from one snapshot of the source in one transaction of the target. Run `last` at its end.

    Raises UsageError if the target is not empty.
    """
    copied: Copied = drive(target, write(partial(_copy, source, progress, last), solo=True))
    return copied


def _copy(source: Driver, progress: Progress | None, last: Callable[[], Program[Any]] | None) -> Program[Copied]:
    [used, columns, _] = yield Batch(USED(tenant=None), TABLES(), PATIENCE())
    if used:
        raise UsageError(
            "the target is not empty: name another file or schema (schema=…, --schema), or drop what is there first"
        )
    done = 0
    with ReadAhead(source, partial(_read, copied_tables(columns))) as pages:
        number, counts = next(pages)
        for table, rows in pages:
            insert = table.insert()
            yield Batch(*(insert(**dict(zip(table.columns, row, strict=True))) for row in rows))
            done += len(rows)
            if progress is not None:
                progress(done, sum(counts.values()))
    yield Batch(set_counters(number))
    return Copied(counts, (yield from last()) if last is not None else None)


def _read(known: Sequence[CopiedTable], put: Put) -> Program[None]:
    """Put the source's counter and the number of rows of each table, then each table with pages of its rows."""
    yield from check_sees_all()
    [numbers, columns] = yield Batch(NUMBER(tenant=None), TABLES())
    if not numbers:
        raise Damaged("the source has lost its counter: `perdure store repair` makes a copy that has one")
    [(number,)] = numbers
    tables = known_tables(columns, known)
    counts = yield Batch(*(table.counted()(tenant=None) for table in tables))
    put((int(number), {table.name: int(rows[0][0]) for table, rows in zip(tables, counts, strict=True)}))
    for table in tables:
        yield from read_pages(table, table.name, table.where, table.key, put, (table,))


def read_pages(
    table: CopiedTable,
    name: str,
    where: str,
    by: tuple[str, ...],
    put: Put,
    label: Row,
    behind: Row = (),
    **params: Any,
) -> Program[None]:
    """Put (*label, rows) for each page of a table, in the order of `by`, after the position `behind`.

    A page has fewer rows if they are large. `name` is that of the table, or of its past table.
    """
    limit = PAGE_ROWS // 10
    while True:
        rows = yield from read_page(table, name, where, by, behind, limit, **params)
        if rows:
            put((*label, [row[len(by) :] for row in rows]))
        if len(rows) < limit:
            return
        behind = rows[-1][: len(by)]
        limit = next_page_rows(limit, rows)


def read_page(
    table: CopiedTable, name: str, where: str, by: tuple[str, ...], behind: Row, limit: int, **params: Any
) -> Program[Rows]:
    """Return up to `limit` rows after the position `behind`. Each has the columns of `by`, then those of the table."""
    marks = {f"key{place}": value for place, value in enumerate(behind)}
    later = f"AND ({_names(by[: len(marks)])}) > ({', '.join(f':{mark}' for mark in marks)})" if marks else ""
    select = Sql(
        f"""SELECT {_names((*by, *table.columns))} FROM "{name}" WHERE {where} {later}
        ORDER BY {_names(by)} LIMIT :limit"""
    )
    [rows] = yield Batch(select(tenant=None, limit=limit, **params, **marks))
    return rows


def set_counters(number: int) -> Statement:
    """Return the statement that sets a copy's counters, so that new numbers differ from those of copied rows."""
    sequences = "".join(
        f", setval(pg_get_serial_sequence('{table.name}', '{column.name}'),"
        f" greatest((SELECT max({column.name}) FROM {table.name}), 1))"
        for table in all_tables().values()
        for column in table.columns
        if column.identity
    )
    return Sql(
        sqlite="UPDATE counter SET number = :number",
        postgres=f"SELECT setval('number', greatest(:number::bigint, 1)){sequences}",
    )(tenant=None, number=number)


def check_sees_all() -> Program[None]:
    [[(sees_all,)]] = yield Batch(_SEES_ALL(tenant=None))
    if not sees_all:
        raise UsageError(
            "a copy of everything is made by a role that sees every tenant: the owner, or one that "
            "`perdure store role operator` made"
        )


def copied_tables(columns: Rows) -> list[CopiedTable]:
    """Return the tables to copy. Tables that others refer to come first."""
    declared = all_tables()
    own = _OWN.union(name for name, table in declared.items() if not table.copied)
    columns_of: dict[str, list[tuple[str, int]]] = {}
    for name, column, place in columns:
        if name not in own:
            columns_of.setdefault(name, []).append((column, place))
    tables = [
        CopiedTable(
            name,
            tuple(column for column, _ in parts),
            tuple(column for column, place in sorted(parts, key=lambda part: part[1]) if place),
        )
        for name, parts in columns_of.items()
    ]
    first = {"tenant", *(table.refers_to for table in declared.values())}
    return sorted(tables, key=lambda table: (table.name not in first, table.name))


def known_tables(columns: Rows, known: Sequence[CopiedTable]) -> list[CopiedTable]:
    """Return the tables of a source to copy. Raises UsageError for a table or column that the target does not have."""
    names = {table.name: set(table.columns) for table in known}
    tables = copied_tables(columns)
    for table in tables:
        if table.name not in names or not names[table.name].issuperset(table.columns):
            raise UsageError(
                f"the source has the table {table.name[:60]!r}, or columns in it, that no store of this version has: "
                "move it elsewhere, or open the source once with this version of Perdure"
            )
    return tables
