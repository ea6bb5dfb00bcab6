"""Reading the tables of PostgresSaver and AsyncPostgresSaver.

The values of a thread's channels are in a table of their own, once for each version. A value that did not change
between two checkpoints is fetched and handed out once, and as many values at a time as fit into a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from perdure.errors import OpenError
from perdure.langgraph.importing_sources import Stored, StoredWrite, WriteKey, check_columns, each_once, not_stock

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
except ImportError as missing:  # pragma: no cover - the extra is installed wherever the tests run
    raise OpenError('PostgreSQL needs its driver: pip install "psycopg[binary]>=3.2"') from missing

from perdure.storage.postgres_errors import Target, not_opened, translated
from perdure.storage.postgres_open import parsed

_TIMEOUT_S = 60.0
_CHUNK_BYTES = 4 * 1024 * 1024
_CHUNK_ROWS = 64
_SENDS = "__pregel_tasks"
_SENDS_APART = 4  # before this version, what a step sends was kept on its parent only
_KEY = {"thread_id", "checkpoint_ns", "checkpoint_id"}
_CHECKPOINTS = _KEY | {"parent_checkpoint_id", "checkpoint", "metadata"}
_BLOBS = {"thread_id", "checkpoint_ns", "channel", "version", "type", "blob"}
_WRITES = _KEY | {"task_id", "idx", "channel", "type", "blob"}
_OF = "WHERE thread_id = %s AND checkpoint_ns = %s"

Pair = tuple[str, str]  # channel, version


class PostgresSource:
    """The stock tables of one database, in the schema that the URL's search path leads to."""

    def __init__(self, url: str) -> None:
        self._target: Target = parsed(url, schema="public", timeout_s=_TIMEOUT_S, durability="full")
        options = f"-c default_transaction_read_only=on -c statement_timeout={int(_TIMEOUT_S * 1000)}"
        given = conninfo_to_dict(self._target.conninfo)
        own = conninfo_to_dict(url).get("options") or ""
        given["options"] = f"{own} {options}".strip()
        try:
            self._connection = psycopg.connect(make_conninfo("", **given), autocommit=True)
        except psycopg.Error as error:
            raise not_opened(error, self._target) from error
        try:
            self._has_path = self._check()
        except BaseException:
            self._connection.close()
            raise
        self._held: dict[Pair, tuple[Any, Any]] = {}  # values of the checkpoint at hand
        self._held_of: tuple[str, str] = ("", "")

    def _check(self) -> bool:
        what = str(self._target)
        checkpoints = self._columns("checkpoints")
        if checkpoints and "checkpoint_id" not in checkpoints and "checkpoint" in checkpoints:
            raise not_stock(what, "its tables are those of ShallowPostgresSaver, which keeps no history")
        check_columns(what, "checkpoints", checkpoints, _CHECKPOINTS)
        check_columns(what, "checkpoint_blobs", self._columns("checkpoint_blobs"), _BLOBS)
        writes = self._columns("checkpoint_writes")
        check_columns(what, "checkpoint_writes", writes, _WRITES)
        return "task_path" in writes

    def _columns(self, table: str) -> set[str]:
        rows = self._rows(
            "SELECT attname FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND relkind IN ('r', 'p')",
            table,
        )
        return {name for (name,) in rows}

    def _rows(self, text: str, *params: Any) -> list[tuple[Any, ...]]:
        try:
            # Binary: bytes come as they are, not as twice as many hex digits.
            with self._connection.cursor(binary=True) as cursor:
                return cursor.execute(text.encode(), params).fetchall()
        except psycopg.Error as error:
            raise translated(error, self._target, _TIMEOUT_S) from error

    def threads(self) -> Iterator[str]:
        return each_once(self._rows, "%s", "thread_id")

    def spaces(self, thread: str) -> Iterator[str]:
        return each_once(self._rows, "%s", "checkpoint_ns", "thread_id = %s AND", thread)

    def ids(self, thread: str, space: str, after: str | None, limit: int, *, backwards: bool = False) -> list[str]:
        where = "" if after is None else f"AND checkpoint_id {'<' if backwards else '>'} %s"
        rows = self._rows(
            f"SELECT checkpoint_id FROM checkpoints {_OF} {where} "
            f"ORDER BY checkpoint_id {'DESC' if backwards else ''} LIMIT %s",
            *(thread, space, *(() if after is None else (after,)), limit),
        )
        return [id_ for (id_,) in rows]

    def checkpoints(self, thread: str, space: str, ids: Sequence[str]) -> Iterator[Stored]:
        if self._held_of != (thread, space):
            self._held, self._held_of = {}, (thread, space)
        for start in range(0, len(ids), _CHUNK_ROWS):
            chunk = list(ids[start : start + _CHUNK_ROWS])
            rows = self._rows(
                f"SELECT checkpoint_id, parent_checkpoint_id, checkpoint, metadata FROM checkpoints {_OF} "
                "AND checkpoint_id = ANY(%s)",
                *(thread, space, chunk),
            )
            found = {row[0]: row for row in rows}
            yield from self._with_values(thread, space, [found[id_] for id_ in chunk if id_ in found])

    def _with_values(self, thread: str, space: str, rows: list[tuple[Any, ...]]) -> Iterator[Stored]:
        """Checkpoints with their values and writes, some at a time: as many as `_CHUNK_BYTES` hold, one at least."""
        sizes = self._sizes(thread, space, {pair for row in rows for pair in _pairs(row[2])})
        at = 0
        while at < len(rows):
            wanted: dict[Pair, None] = {}
            size, end = 0, at
            while end < len(rows):
                more = [pair for pair in _pairs(rows[end][2]) if pair in sizes and pair not in self._held]
                size += sum(sizes[pair] for pair in more if pair not in wanted)
                if end > at and size > _CHUNK_BYTES:
                    break
                wanted |= dict.fromkeys(more)
                end += 1
            part = rows[at:end]
            values = self._held | self._blobs(thread, space, list(wanted))
            writes = self._writes(thread, space, [row[0] for row in part])
            sends = self._sends(thread, space, part)
            for id_, parent, checkpoint, metadata in part:
                self._held = {pair: values[pair] for pair in _pairs(checkpoint) if pair in values}
                apart = {channel: value for (channel, _), value in self._held.items()}
                yield Stored(
                    id_, parent or None, None, checkpoint, metadata, writes.get(id_, []), apart, sends.get(id_)
                )
            at = end

    def _sizes(self, thread: str, space: str, pairs: set[Pair]) -> dict[Pair, int]:
        rows = self._rows(
            "SELECT b.channel, b.version, coalesce(octet_length(b.blob), 0) FROM unnest(%s::text[], %s::text[]) "
            f"AS p (channel, version) JOIN checkpoint_blobs b USING (channel, version) {_OF}",
            *([channel for channel, _ in pairs], [version for _, version in pairs], thread, space),
        )
        return {(channel, version): size for channel, version, size in rows}

    def _blobs(self, thread: str, space: str, pairs: list[Pair]) -> dict[Pair, tuple[Any, Any]]:
        if not pairs:
            return {}
        rows = self._rows(
            "SELECT b.channel, b.version, b.type, b.blob FROM unnest(%s::text[], %s::text[]) "
            f"AS p (channel, version) JOIN checkpoint_blobs b USING (channel, version) {_OF}",
            *([channel for channel, _ in pairs], [version for _, version in pairs], thread, space),
        )
        return {(channel, version): (kind, data) for channel, version, kind, data in rows}

    def _writes(self, thread: str, space: str, ids: list[str]) -> dict[str, list[StoredWrite]]:
        path = "task_path" if self._has_path else "''"
        rows = self._rows(
            f"SELECT checkpoint_id, task_id, {path}, idx, channel, type, blob FROM checkpoint_writes {_OF} "
            "AND checkpoint_id = ANY(%s)",
            *(thread, space, ids),
        )
        found: dict[str, list[StoredWrite]] = {}
        for id_, *write in rows:
            found.setdefault(id_, []).append(StoredWrite(*write))
        return found

    def _sends(self, thread: str, space: str, rows: list[tuple[Any, ...]]) -> dict[str, list[tuple[Any, Any]]]:
        """What the stock saver adds to a checkpoint of an old version: what its parent's tasks have sent."""
        parents = {row[0]: row[1] for row in rows if row[1] and _version(row[2]) < _SENDS_APART}
        if not parents:
            return {}
        order = "task_path, task_id, idx" if self._has_path else "task_id, idx"
        found: dict[str, list[tuple[Any, Any]]] = {}
        for parent, kind, data in self._rows(
            f"SELECT checkpoint_id, type, blob FROM checkpoint_writes {_OF} AND checkpoint_id = ANY(%s) "
            f"AND channel = '{_SENDS}' ORDER BY {order}",
            *(thread, space, list(parents.values())),
        ):
            found.setdefault(parent, []).append((kind, data))
        return {id_: found[parent] for id_, parent in parents.items() if parent in found}

    def write_keys(self, thread: str, space: str, ids: Sequence[str]) -> dict[str, set[WriteKey]]:
        found: dict[str, set[WriteKey]] = {}
        for id_, task, idx in self._rows(
            f"SELECT checkpoint_id, task_id, idx FROM checkpoint_writes {_OF} AND checkpoint_id = ANY(%s)",
            *(thread, space, list(ids)),
        ):
            found.setdefault(id_, set()).add((task, idx))
        return found

    def count(self, threads: Sequence[str] | None) -> int:
        if threads is None:
            return int(self._rows("SELECT count(*) FROM checkpoints")[0][0])
        return int(self._rows("SELECT count(*) FROM checkpoints WHERE thread_id = ANY(%s)", list(threads))[0][0])

    def size_bytes(self) -> int:
        tables = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
        rows = self._rows(
            "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(%s::text[]) AS name", list(tables)
        )
        return int(rows[0][0] or 0)

    def is_file(self, path: str) -> bool:
        return False

    def close(self) -> None:
        self._connection.close()


def _pairs(checkpoint: Any) -> list[Pair]:
    """The channels of a checkpoint with their versions, as the table of values has them."""
    versions = checkpoint.get("channel_versions") if type(checkpoint) is dict else None
    if type(versions) is not dict:
        return []
    return [(channel, str(version)) for channel, version in versions.items()]


def _version(checkpoint: Any) -> int:
    found = checkpoint.get("v") if type(checkpoint) is dict else None
    return found if type(found) is int else _SENDS_APART
