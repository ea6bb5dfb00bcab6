"""Indexes of large namespaces kept in the store, so that the first search of a process need not read every item.

A process that had to build the index of a namespace of 10,000 items stores it after its search. The rows are volatile:
an index that is missing, damaged or stale is built from the items again. Nothing is read from here but proposals.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from perdure.errors import PerdureError
from perdure.memory.labels import below
from perdure.memory.rows import SEQUENCE_BITS
from perdure.memory.scopes import KeptScope, Newest, ScopeIndexes, Searcher
from perdure.memory.tables import INDEX_PART
from perdure.storage.events import event, said
from perdure.storage.program import Batch, Flow, Program, Sql, Transaction, aside, fetch

if TYPE_CHECKING:  # needs numpy
    from perdure.memory.segments import IndexSegment

ITEMS_MIN = 10_000  # of a namespace whose index is stored
_CHANGED_SHARE = 4  # it is stored again when a quarter of it is new
_PART_BYTES = 1 << 20
_PAGE = 16
_log = logging.getLogger("perdure")
_LARGE = Sql(
    """SELECT space, last, generation FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below AND items >= :least ORDER BY space"""
)
_NEWEST = Sql(
    """SELECT s.generation, i.at FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.id = :id
    WHERE s.tenant = :tenant AND s.space = :space"""
)
_PARTS = Sql(
    f"""SELECT number, until, generation, at, digest, body FROM memory_index
    WHERE tenant = :tenant AND space = :space AND model = :model AND number >= :number
    ORDER BY number LIMIT {_PAGE}""",
    opens={5: INDEX_PART.at("space", "model", 0)},
    tolerant=True,
)
_ADD = Sql(
    """INSERT INTO memory_index (tenant, space, model, number, until, generation, at, digest, body)
    VALUES (:tenant, :space, :model, :number, :until, :generation, :at, :digest, :body)""",
    seals={"body": INDEX_PART},
)
_KNOWN = Sql("SELECT DISTINCT space, generation FROM memory_index WHERE tenant = :tenant")
_DROP = Sql("DELETE FROM memory_index WHERE tenant = :tenant AND space = :space")
_GENERATIONS = Sql("SELECT space, generation FROM memory_space WHERE tenant = :tenant")


def load(tenant: int, searcher: Searcher, indexes: ScopeIndexes) -> Flow[None]:
    """Cache the index of a scope made of what is stored of its large namespaces."""
    path = indexes.query.path
    large = yield from fetch(_LARGE, tenant=tenant, path=path, below=below(path), least=ITEMS_MIN)
    segments: list[IndexSegment] = []
    spaces: Newest = {}
    for space, last, generation in large:
        try:
            header, data = yield Transaction(partial(_read, tenant, space, indexes.stored_as), volatile=True)
            segment = (yield from aside(partial(_segment, space, indexes.dimension, header, data))) if header else None
        except Exception as error:  # it is damaged, or on a standby of PostgreSQL, which has no volatile tables
            _log.debug("an index of memory cannot be read: %s", said(error), extra=event("memory.index_unreadable"))
            segment = None
        if segment is None or header[0] > last or header[1] != generation:
            continue
        newest = yield from fetch(_NEWEST, tenant=tenant, space=space, id=space << SEQUENCE_BITS | header[0])
        if newest == [(generation, header[2])]:  # the same history: the file is not beside an older copy of the store
            segments.append(segment)
            spaces[space] = searcher.stored[tenant, space] = header[:2]
    if segments:
        from perdure.memory.segments import IndexScope

        indexes.keep(KeptScope(spaces, IndexScope(indexes.dimension, tuple(segments))))


def _read(tenant: int, space: int, model: str) -> Program[tuple[Any, bytearray]]:
    """Return until, generation, time and digest of a stored index with its bytes, or None as the first of these."""
    header, data, number = None, bytearray(), 0
    while page := (yield Batch(_PARTS(tenant=tenant, space=space, model=model, number=number)))[0]:
        for place, *about, body in page:
            if place != number or type(body) is not bytes or (header or tuple(about)) != tuple(about):
                return None, data  # parts are missing, damaged, or those of several indexes
            header, number = tuple(about), number + 1
            data += body
    return header, data


def _segment(space: int, dimension: int, header: tuple[Any, ...], data: bytearray) -> IndexSegment | None:
    from perdure.memory.segments import IndexSegment

    if blake3(data).digest() != header[3]:
        return None
    segment = IndexSegment.loaded(data, space)
    # Without a model, segments have vectors of one number, which are never known.
    return segment if segment is not None and segment.vectors.numbers.shape[1] == max(dimension, 1) else None


def store(tenant: int, searcher: Searcher, indexes: ScopeIndexes) -> Flow[None]:
    """Store the indexes of large namespaces that this process had to build, or of which much is new."""
    kept = indexes.kept(then=False) if searcher.stores_indexes else None
    if kept is None:
        return
    for space, mark in kept.spaces.items():
        until, generation = searcher.stored.get((tenant, space), (0, 0))
        new = mark[0] - (until if generation == mark[1] else 0)
        if new < ITEMS_MIN // _CHANGED_SHARE:
            continue
        segment = yield from aside(partial(kept.scope.of_space, space))
        if len(segment.ids) < ITEMS_MIN or new < len(segment.ids) // _CHANGED_SHARE:
            continue
        searcher.stored[tenant, space] = mark  # if it fails, it is not tried again at once
        try:
            yield from _write(tenant, space, indexes.stored_as, mark, segment)
        except PerdureError as error:  # a role of PostgreSQL that may only read, a full disk
            _log.debug("an index of memory was not stored: %s", said(error), extra=event("memory.index_not_stored"))


def _write(tenant: int, space: int, model: str, mark: tuple[int, int], segment: IndexSegment) -> Flow[None]:
    last, generation = mark
    scope = {"tenant": tenant, "space": space}
    newest = yield from fetch(_NEWEST, **scope, id=space << SEQUENCE_BITS | last)
    if not newest or newest[0][0] != generation:
        return
    facts = {"until": last, "generation": generation, "at": newest[0][1], "model": model}
    buffers = yield from aside(segment.dumped)
    facts["digest"] = yield from aside(partial(_digest, buffers))
    for number, body in enumerate(_bodies(buffers)):
        part = _ADD(**scope, **facts, number=number, body=body)
        yield _changing([_DROP(**scope), part] if number == 0 else [part])
    if (yield from fetch(_NEWEST, **scope, id=space << SEQUENCE_BITS | last)) != newest:
        yield _changing([_DROP(**scope)])  # items were erased meanwhile


def _bodies(buffers: Iterable[Any]) -> Iterator[bytes]:
    for buffer in buffers:
        for start in range(0, len(buffer), _PART_BYTES):
            yield bytes(buffer[start : start + _PART_BYTES])


def _digest(buffers: Iterable[Any]) -> bytes:
    hashed = blake3()
    for buffer in buffers:
        hashed.update(buffer)
    return hashed.digest()


def _changing(statements: Iterable[Any]) -> Transaction:
    def program() -> Program[None]:
        yield Batch(*statements, last=True)

    return Transaction(program, write=True, volatile=True)


def drop(tenant: int, spaces: Iterable[int] | None = None) -> Flow[None]:
    """Drop the stored indexes of namespaces, or, with None, of those that have changed so that they are of no use."""
    known = yield from _known(tenant)
    if known and spaces is None:
        now: dict[int, int] = dict((yield from fetch(_GENERATIONS, tenant=tenant)))
        spaces = [space for space, generation in known if now.get(space) != generation]
    gone = {*(spaces or ())} & {space for space, _ in known}
    if gone:
        yield _changing([_DROP(tenant=tenant, space=space) for space in sorted(gone)])


def _known(tenant: int) -> Flow[list[Any]]:
    """Return the namespaces with stored indexes. Read first: on SQLite a write would make the file."""

    def program() -> Program[list[Any]]:
        [stored] = yield Batch(_KNOWN(tenant=tenant), last=True)
        return stored

    known: list[Any] = yield Transaction(program, volatile=True)
    return known
