"""What a tenant stores as tables for SQL: threads, checkpoints, states, runs, steps, memory. As Parquet too.

DuckDB runs the queries on copies in memory. The library's own read path makes these, so that a query sees what `load`
returns, on either database and from an encrypted store. Nothing is written to the store.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import Damaged, ExtraMissing, UsageError
from perdure.transfers.files import file_path, local_path, work_folder
from perdure.values.secrets import masked
from perdure.views.graphs import is_checkpoint, values_of
from perdure.views.readable_values import readable

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.handle import Snapshot
    from perdure.threads.models import Checkpoint

_ROWS_AT_ONCE = 500
_TEXT, _TIME, _WHOLE, _JSON = "VARCHAR", "TIMESTAMP WITH TIME ZONE", "BIGINT", "JSON"
_SAID = ("error", "note", "problem", "source", "text", "waiting_for")  # columns with texts of people and programs
Row = tuple[Any, ...]


@dataclass(frozen=True)
class SqlResult:
    """What a query returned. A JSON column is text, a time an aware datetime in UTC."""

    columns: tuple[str, ...]
    types: tuple[str, ...]  # DuckDB's
    rows: list[Row]


@dataclass(frozen=True)
class _Table:
    columns: dict[str, str]  # the type by name; the tenant's column comes before them
    rows: Callable[[Any], Iterator[Row]]


def sql(store: Store | Snapshot, query: str, *, reveal: bool = False, files: bool = False) -> SqlResult:
    """Run one SELECT of DuckDB's SQL on what this tenant stores, or stored at a snapshot.

    Secrets that are recognised by their name or form are masked, unless `reveal`. The query reaches neither files nor
    the network; with `files` it may read files. Only the tables that it names are copied.
    """
    with _opened(store, query, reveal) as connection:
        _close_doors(connection, files)
        answer = _asked(connection, query)
        rows = _translated(query, answer.fetchall)
        return SqlResult(tuple(answer.columns), tuple(map(str, answer.types)), rows)


def export_parquet(
    store: Store | Snapshot,
    folder: str | os.PathLike[str],
    *,
    query: str | None = None,
    reveal: bool = False,
    files: bool = False,
) -> dict[str, int]:
    """Write each table as a Parquet file into a folder, and return the number of rows by file.

    With `query`, write its result alone: `folder` is then the path of the file. Files of these names are replaced. Only
    their owner can read them.
    """
    if query is None:
        place = local_path(os.fspath(folder))
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        queries = {place / f"{name}.parquet": f"SELECT * FROM {name}" for name in TABLES}
    else:
        queries = {file_path(os.fspath(folder)): query}
    counts: dict[str, int] = {}
    for path, text in queries.items():
        with work_folder(path) as private, _opened(store, text, reveal) as connection:
            draft = private / path.name  # DuckDB itself would replace a file by way of a name that is not allowed
            _close_doors(connection, files, draft)
            answer = _asked(connection, text)
            _translated(text, partial(answer.write_parquet, str(draft), compression="zstd"))
            [count] = connection.execute("SELECT count(*) FROM read_parquet(?)", [str(draft)]).fetchone()
            draft.chmod(0o600)
            os.replace(draft, path)
            counts[path.name] = count
    return counts


def sql_tables() -> dict[str, dict[str, str]]:
    """Return the type of each column by table and name, as `sql` and `export_parquet` have them."""
    return {name: {"tenant": _TEXT, **table.columns} for name, table in TABLES.items()}


# --- DuckDB


def _opened(store: Any, query: str, reveal: bool) -> Any:
    """Return a database in memory that has the tables whose names the query mentions."""
    try:
        import duckdb
        import pytz  # noqa: F401  # DuckDB makes datetimes with it
    except ImportError as error:
        raise ExtraMissing("SQL over a store", "sql") from error
    # Without a folder for temporary files: what an encrypted store has must not lie on a disk in the clear.
    settings: dict[str, Any] = {
        "temp_directory": "",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(":memory:", config=settings)
    try:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET python_enable_replacements = false")  # variables of this process are no tables
        source: Any = getattr(store, "store", store)
        for name, table in TABLES.items():
            if re.search(rf"\b{name}\b", query, re.IGNORECASE):
                _fill(connection, source, name, table, reveal)
        return connection
    except BaseException:
        connection.close()
        raise


def _fill(connection: Any, source: Any, name: str, table: _Table, reveal: bool) -> None:
    columns = {"tenant": _TEXT, **table.columns}
    declared = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
    connection.execute(f"CREATE TABLE {name} ({declared})")
    tenant = source._context.tenant_name
    shape = _json([columns])
    insert = f"INSERT INTO {name} SELECT unnest(from_json(?, ?), recursive := true)"
    rows = table.rows(source)
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        documents = [dict(zip(columns, (tenant, *map(readable, row)), strict=True)) for row in some]
        shown = documents if reveal else [_masked(document, columns) for document in documents]
        connection.execute(insert, [_json(shown), shape])


def _json(value: Any) -> str:
    """Return JSON in valid Unicode: half of a surrogate pair, which DuckDB refuses, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def _masked(document: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Mask the secrets in values and texts of users. Names are left as they are, because joins need them."""
    return {
        name: masked(value) if columns[name] == _JSON or name in _SAID else value for name, value in document.items()
    }


def _close_doors(connection: Any, files: bool, output: Path | None = None) -> None:
    """Forbid files and the network to the statements that follow, except for the file of the result."""
    if output is not None:
        connection.execute("SET allowed_paths = [?]", [str(output)])
    if not files:
        connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _asked(connection: Any, query: str) -> Any:
    """Return the relation of a query. Raise UsageError if it is not one SELECT, or if DuckDB refuses it."""
    import duckdb

    statements = _translated(query, lambda: duckdb.extract_statements(query))
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UsageError("one SELECT is expected: a query reads, and changes nothing")
    return _translated(query, lambda: connection.sql(query))


def _translated(query: str, work: Callable[[], Any]) -> Any:
    import duckdb

    try:
        return work()
    except duckdb.Error as error:
        names = ", ".join(TABLES)
        raise UsageError(f"DuckDB cannot run {query!r}: {error}; the tables are {names}") from None


# --- rows


def _threads(store: Any) -> Iterator[Row]:
    for info in _all_threads(store):
        yield info.name, info.metadata, info.head, info.created_at, info.updated_at, info.forked_at


def _all_threads(store: Any) -> Iterator[Any]:
    """Yield the threads page by page."""
    before: str | None = None
    while page := store.threads(before=before, limit=1000):
        yield from page
        before = page[-1].cursor


def _checkpoints(store: Any) -> Iterator[Row]:
    for thread, line, one in _all_checkpoints(store):
        yield (
            *(thread.name, one.id, one.parent, one.step, one.is_head, line),
            *(one.at, one.kind, one.note, one.metadata, one.size_bytes),
        )


def _states(store: Any) -> Iterator[Row]:
    for thread, _, one in _all_checkpoints(store):
        try:
            state = thread.load(one.id, strict=True, raw=True).state
        except Damaged as error:  # one damaged state must not hide the others
            yield thread.name, one.id, one.step, one.at, None, str(error)
            continue
        yield thread.name, one.id, one.step, one.at, values_of(state) if is_checkpoint(state) else state, None


def _all_checkpoints(store: Any) -> Iterator[tuple[Any, str, Checkpoint]]:
    """Yield every checkpoint once, with its thread and the namespace of its line: the head's history, then others."""
    for info in _all_threads(store):
        if info.head is None:
            continue
        thread = store.thread(info.name)
        lines = {record: line.namespace for line in thread.lines() for record in line.checkpoints.values()}
        seen: set[str] = set()
        ends = sorted(thread.branches(), key=lambda one: not one.is_head)
        for end in ends:
            for one in thread.history(start=end):
                if one.id in seen:
                    break  # from here on the history was seen already
                seen.add(one.id)
                yield thread, lines.get(one.id, ""), one


def _all_runs(store: Any) -> Iterator[Any]:
    before: str | None = None
    while page := store.runs(before=before, limit=1000, tasks=True):
        yield from page
        before = page[-1].cursor


def _runs(store: Any) -> Iterator[Row]:
    for info in _all_runs(store):
        run = store.get_run(info.id)
        outcome = run.outcome(raw=True)
        yield (
            *(info.id, info.function, info.version, info.status, info.queue, info.priority, info.attempts),
            *(info.parent, info.origin, info.tags, info.created_at, info.changed_at),
            info.waiting_for.shown if info.waiting_for else None,
            run.arguments(raw=True),
            *((None, None) if outcome is None else (outcome.result, outcome.error)),
        )


def _steps(store: Any) -> Iterator[Row]:
    for info in _all_runs(store):
        for step in store.get_run(info.id).steps():
            yield (
                *(info.id, step.number, step.path, step.name, step.kind, step.status, step.attempts),
                *(step.started_at, step.ended_at, step.arguments, step.result, step.error),
            )


def _memory(store: Any) -> Iterator[Row]:
    """Yield every version of every item that exists. Items that were deleted or have expired are left out."""
    memory = store.memory(raw=True)
    for space in memory.namespaces():
        below = store.memory(*space.labels, raw=True)
        for item in (one for one in below.list(limit=None) if one.namespace == space.labels):
            for one in below.history(item.key):
                yield (
                    *(one.namespace, one.key, one.version, one.ended_at is None, one.kind, one.pinned),
                    *(one.at, one.ended_at, one.expires_at, one.gone, one.value, one.text, one.source),
                )


def _columns(**kinds: str) -> dict[str, str]:
    return kinds


TABLES = {
    "threads": _Table(
        _columns(
            thread=_TEXT, metadata=_JSON, head=_TEXT, created_at=_TIME, updated_at=_TIME, forked_at=_TEXT
        ),
        _threads,
    ),
    "checkpoints": _Table(
        _columns(
            thread=_TEXT, checkpoint=_TEXT, parent=_TEXT, step=_WHOLE, is_head="BOOLEAN", namespace=_TEXT,
            saved_at=_TIME, kind=_TEXT, note=_TEXT, metadata=_JSON, size_bytes=_WHOLE,
        ),
        _checkpoints,
    ),
    "states": _Table(
        _columns(thread=_TEXT, checkpoint=_TEXT, step=_WHOLE, saved_at=_TIME, state=_JSON, problem=_TEXT), _states
    ),
    "runs": _Table(
        _columns(
            run=_TEXT, function=_TEXT, version=_TEXT, status=_TEXT, queue=_TEXT, priority=_WHOLE, attempts=_WHOLE,
            parent=_TEXT, origin=_TEXT, tags=_JSON, created_at=_TIME, changed_at=_TIME, waiting_for=_TEXT,
            arguments=_JSON, result=_JSON, error=_TEXT,
        ),
        _runs,
    ),
    "steps": _Table(
        _columns(
            run=_TEXT, number=_WHOLE, path=_TEXT, name=_TEXT, kind=_TEXT, status=_TEXT, attempts=_WHOLE,
            started_at=_TIME, ended_at=_TIME, arguments=_JSON, result=_JSON, error=_TEXT,
        ),
        _steps,
    ),
    "memory": _Table(
        _columns(
            namespace="VARCHAR[]", key=_TEXT, version=_WHOLE, is_current="BOOLEAN", kind=_TEXT, pinned="BOOLEAN",
            learned_at=_TIME, ended_at=_TIME, expires_at=_TIME, gone=_TEXT, value=_JSON, text=_TEXT, source=_TEXT,
        ),
        _memory,
    ),
}  # fmt: skip
