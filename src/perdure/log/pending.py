"""Pending writes: the outputs of tasks, attached to a labelled record until the next record includes them.

Of regular writes the first one stays. Special ones (index below 0: an error, an interrupt, an answer) are replaced.
Writes may arrive before their record. A value that occurs in the record's own text is stored as a reference, and a
large value is compressed against that text.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from perdure.errors import Damaged, Undecodable
from perdure.log.label_ids import pack_id, unpack_id
from perdure.log.labels import MAIN, LabelRow, ensure_space
from perdure.log.reading import read_state
from perdure.log.tables import WRITE_VALUE
from perdure.log.thread_table import (
    THREAD_COLUMNS,
    THREAD_ENCRYPTED,
    ThreadRow,
    create_thread,
    find_thread,
    thread_row,
    try_thread,
)
from perdure.storage.program import Batch, Program, Rows, Sql, Statement
from perdure.values.compress import compress_against, decompress_bounded, zstd
from perdure.values.dictionary import compress_alone, decompress_alone
from perdure.values.external import External
from perdure.values.limits import SIZE_MAX

QUESTIONS = "__interrupt__"  # the key of the questions that a task stops for (`task_questions.py`)
LARGE_BYTES = 4096  # values of at least this size are compressed against the text of their record
_PLAIN, _ALONE, _AGAINST, _COPY = range(4)  # the first byte of a stored value: its encoding
_COPY_WITHIN_BYTES = 16 * 1024  # search only the end of a record's text, which holds the newest input
_NUMBER_BYTES = 5
_PACK_MIN_BYTES = 48

_COLUMNS = "tenant, thread, space, id, task, idx, key, path, base, value"
# FOR KEY SHARE keeps the thread's row until COMMIT. So a deletion waits, and then sees the write.
_INSERT = f"""INSERT INTO write ({_COLUMNS})
    SELECT tenant, thread, {{space}}, {{id}}, {{task}}, {{idx}}, {{key}}, {{path}}, {{base}}, {{value}}
    FROM thread WHERE tenant = :tenant AND thread = :thread AND generation = coalesce({{generation}}, generation)
        AND ({{head}} IS NULL OR head = {{head}})
    {{for_key_share}}
    ON CONFLICT (tenant, thread, space, id, task, idx)"""
_CASTS = {
    "space": "bigint",
    "id": "bytea",
    "task": "bytea",
    "idx": "bigint",
    "key": "text",
    "path": "text",
    "base": "bigint",
    "value": "bytea",
    "generation": "bigint",
    "head": "bigint",
}
_REPLACE = "DO UPDATE SET key = excluded.key, path = excluded.path, base = excluded.base, value = excluded.value"


def _insert(conflict: str) -> Sql:
    postgres = sqlite = _INSERT
    for name, kind in _CASTS.items():
        postgres = postgres.replace(f"{{{name}}}", f":{name}::{kind}")
        sqlite = sqlite.replace(f"{{{name}}}", f":{name}")
    return Sql(sqlite=f"{sqlite} {conflict}", postgres=f"{postgres} {conflict}", seals={"value": WRITE_VALUE})


_KEEP_FIRST = _insert("DO NOTHING")
_TAKE_LAST = _insert(_REPLACE)
_ASKED = Sql("UPDATE thread SET asked_at = :at, asked_id = :id WHERE tenant = :tenant AND thread = :thread")
_GENERATION = Sql("SELECT generation FROM thread WHERE tenant = :tenant AND thread = :thread")
_THIS = "tenant = :tenant AND thread = :thread AND space = :space"
_OPENS = {6: WRITE_VALUE.at("space", 0, 1, 2, 3, 4, 5)}
_OF = Sql(
    f"SELECT id, task, idx, key, path, base, value FROM write WHERE {_THIS} AND id = :id",
    opens=_OPENS,
    tolerant=True,
)
_BETWEEN = Sql(
    f"SELECT id, task, idx, key, path, base, value FROM write WHERE {_THIS} AND id BETWEEN :low AND :high",
    opens=_OPENS,
    tolerant=True,
)
# Selects a thread with the pending writes of its newest record: a row for each write, or one row without a write. No
# row: the record is no longer the newest, or has lost its parent.
_WIDTH = len(THREAD_COLUMNS)
_TIP_COLUMNS = ", ".join(f"t.{column}" for column in THREAD_COLUMNS)
_TIP = Sql(
    f"""SELECT {_TIP_COLUMNS}, w.id, w.task, w.idx, w.key, w.path, w.base, w.value FROM thread t
    LEFT JOIN write w ON w.tenant = t.tenant AND w.thread = t.thread AND w.space = :space AND w.id = :id
    WHERE t.tenant = :tenant AND t.name = :name AND t.thread = :thread AND t.head = :record
    AND EXISTS (SELECT 1 FROM label WHERE {_THIS} AND id = :id AND record = :record)
    AND NOT EXISTS (SELECT 1 FROM label WHERE {_THIS} AND id > :id)
    AND (CAST(:parent AS bigint) IS NULL OR EXISTS (
        SELECT 1 FROM record WHERE tenant = :tenant AND tree = t.tree AND id = :parent AND body IS NOT NULL))""",
    opens={**THREAD_ENCRYPTED, _WIDTH + 6: WRITE_VALUE.at("space", *range(_WIDTH, _WIDTH + 6))},
    tolerant=True,
)


class Write(NamedTuple):
    """One pending write, with its value as text. `values`: the large values that the text refers to."""

    task: str
    idx: int
    key: str
    path: str
    text: bytes
    values: Sequence[External[Any]] = ()


class Against(NamedTuple):
    """A record whose text is in memory, to compress writes against, and a generation in which it surely existed.

    `is_new`: the same transaction appends it, so the writes apply only if it is the head."""

    record: int
    text: bytes
    generation: int
    is_new: bool = False


class Stored(NamedTuple):
    """The result of `put_writes`. `thread` is None if the thread was deleted.

    `moved`: records were removed meanwhile, perhaps the one that the writes were compressed against. Then the caller
    must store them again, with `against=None`."""

    thread: int | None
    moved: bool = False


def is_large(writes: Sequence[Write]) -> bool:
    """Return whether a write is large enough to be compressed against its record's text."""
    return any(len(write.text) >= LARGE_BYTES for write in writes)


def put_writes(
    tenant: int,
    name: str,
    number: int | None,
    space: str,
    id_: bytes,
    writes: Sequence[Write],
    against: Against | None,
    at: int,
    beside: Sequence[Statement] = (),
) -> Program[Stored]:
    """Store writes and run the statements `beside` them, in one transaction. Safe to repeat."""
    if number is not None and space == "":
        statements = write_statements(tenant, number, id_, writes, against)
        statements += note_asked(tenant, number, id_, writes, at)
        *_, there = yield Batch(*statements, *beside, _GENERATION(tenant=tenant, thread=number), last=True)
        return Stored(number if there else None, _has_moved(there, against))
    thread = yield from try_thread(tenant, name, number, lock=True)
    if thread is None:  # the writes came before the first record: the thread has no head yet
        thread = yield from create_thread(tenant, name, {}, at)
    if thread is None:
        thread = yield from find_thread(tenant, name, lock=True)
    if _has_moved([(thread.generation,)], against):
        return Stored(thread.thread, moved=True)
    place, _ = yield from ensure_space(tenant, thread.thread, space)
    statements = write_statements(tenant, thread.thread, id_, writes, against, place)
    asked = note_asked(tenant, thread.thread, id_, writes, at) if place == MAIN else ()
    yield Batch(*statements, *asked, *beside, last=True)
    return Stored(thread.thread)


def note_asked(tenant: int, thread: int, id_: bytes, writes: Iterable[Write], at: int) -> list[Statement]:
    """Return the statement that marks a thread as asking if one of the writes is a question."""
    is_asking = any(write.key == QUESTIONS for write in writes)
    return [_ASKED(tenant=tenant, thread=thread, at=at, id=id_)] if is_asking else []


def _has_moved(rows: Rows, against: Against | None) -> bool:
    return bool(rows) and against is not None and rows[0][0] != against.generation


def write_statements(
    tenant: int, thread: int, id_: bytes, writes: Iterable[Write], against: Against | None, space: int = MAIN
) -> list[Statement]:
    """Return the statements that store writes on a record of a line, by default of the thread's own.

    Each changes one row, or none if the write was stored before, the thread is gone, or its generation has changed."""
    statements: list[Statement] = []
    for write in writes:
        base, value = _pack(write, against)
        statements.append(
            (_TAKE_LAST if write.idx < 0 else _KEEP_FIRST)(
                tenant=tenant,
                thread=thread,
                space=space,
                id=id_,
                task=pack_id(write.task),
                idx=write.idx,
                key=write.key,
                path=write.path,
                base=base,
                value=value,
                generation=None if base is None or against is None else against.generation,
                head=against.record if against is not None and against.is_new else None,
            )
        )
    return statements


def select_writes(tenant: int, thread: int, space: int, id_: bytes) -> Statement:
    """Return the statement that selects the pending writes of one record, for `writes_of`."""
    return _OF(tenant=tenant, thread=thread, space=space, id=id_)


def select_writes_between(tenant: int, thread: int, space: int, low: bytes, high: bytes) -> Statement:
    """Return the statement that selects the pending writes of all records between two ids."""
    return _BETWEEN(tenant=tenant, thread=thread, space=space, low=low, high=high)


def read_tip(tenant: int, name: str, tip: LabelRow, parent: int | None) -> Program[tuple[ThreadRow, Rows] | None]:
    """Return a thread and the rows of pending writes of its newest record, for `writes_of`.

    Return None if `tip` is no longer the newest, or if its parent was removed."""
    key = {"thread": tip.thread, "space": tip.space, "id": tip.id, "record": tip.record}
    [rows] = yield Batch(_TIP(tenant=tenant, name=name, parent=parent, **key), last=True)
    if not rows:
        return None
    return thread_row(rows[0][:_WIDTH]), [row[_WIDTH:] for row in rows if row[_WIDTH] is not None]


def odd_bases(
    tenant: int, tree: int, rows: Rows, own: Collection[int]
) -> Generator[Batch, list[Rows], dict[int, bytes]]:
    """Read the texts that writes were compressed against, except those of `own`, which the caller has.

    There are others only if an id was put again."""
    texts: dict[int, bytes] = {}
    for base in {row[5] for row in rows if type(row[5]) is int} - set(own):
        loaded = yield from read_state(tenant, tree, base)
        if loaded is not None:
            texts[base] = loaded.data
    return texts


def writes_of(rows: Rows, texts: Mapping[int, bytes]) -> list[Write]:
    """Return the writes of one record, in the order in which a run applies them. Raise Damaged if one cannot be read.

    `texts`: by record, the texts that they were compressed against."""
    for row in rows:
        if tuple(map(type, row)) not in _SHAPES:
            raise Damaged("the row of a pending write is damaged; run `perdure store verify`")
    return [
        Write(unpack_id(task), idx, key, path, _unpack(key, base, value, texts))
        for _, task, idx, key, path, base, value in sorted(rows, key=_order)
    ]


_SHAPES = {(bytes, bytes, int, str, str, base, bytes) for base in (int, type(None))}


def _order(row: tuple[Any, ...]) -> tuple[str, bytes, int]:
    _, task, idx, _, path, _, _ = row
    return path, task, idx


def _pack(write: Write, against: Against | None) -> tuple[int | None, bytes]:
    """Encode a value. Return the record that it was compressed against, or None, and the stored bytes."""
    text, kind, base = write.text, _PLAIN, None
    stored = text
    if len(text) >= _PACK_MIN_BYTES:
        at = against.text.find(text, max(0, len(against.text) - _COPY_WITHIN_BYTES)) if against is not None else -1
        if against is not None and at >= 0:
            numbers = (at, len(text))
            kind, base = _COPY, against.record
            stored = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers)
        elif against is None or len(text) < LARGE_BYTES or len(against.text) < _PACK_MIN_BYTES:
            kind, stored = _ALONE, compress_alone(text)
        else:
            kind, base, stored = _AGAINST, against.record, compress_against(text, against.text)
        if len(stored) >= len(text):
            kind, base, stored = _PLAIN, None, text
    return base, bytes((kind,)) + stored


def _unpack(key: str, base: int | None, value: bytes, texts: Mapping[int, bytes]) -> bytes:
    kind, stored = value[0] if value else -1, value[1:]
    try:
        if kind == _PLAIN:
            text = stored
        elif kind == _ALONE:
            text = decompress_alone(stored)
        elif kind == _AGAINST and base is not None and base in texts:
            prefix = zstd.ZstdDict(texts[base], is_raw=True)
            text = decompress_bounded(stored, SIZE_MAX, prefix=prefix)
        elif kind == _COPY and base is not None and base in texts:
            at, size = (int.from_bytes(part, "little") for part in (stored[:_NUMBER_BYTES], stored[_NUMBER_BYTES:]))
            text = texts[base][at : at + size]
            if len(text) != size:
                raise Undecodable("it reaches beyond what it was stored against")
        else:
            raise Undecodable("what it was stored against is gone")
    except Undecodable as error:
        raise Damaged(f"a pending write of key {key!r} is damaged: {error}") from error
    return text
