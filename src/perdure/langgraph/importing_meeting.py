"""Threads that are in the store already: what of them is there, and whether the rest may be added.

An import that is run again finds its own work, and adds what is missing. But a thread may have gone on in the store
since, or be another one of the same name. If the source has something new for such a thread, then the two have parted:
adding it would change what the thread's newest checkpoint is under a running application. It is left as it is, and
that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from perdure.langgraph.importing_checks import Checking
from perdure.langgraph.importing_sources import Source
from perdure.langgraph.saver import PerdureSaver
from perdure.log.branches import try_thread
from perdure.log.label_ids import pack_id
from perdure.log.labels import find_space
from perdure.storage.program import Batch, Flow, Program, Sql, drive, read

PAGE = 500

_THIS = "tenant = :tenant AND thread = :thread AND space = :space AND id BETWEEN :low AND :high"
_LABELS = Sql(f"SELECT id FROM label WHERE {_THIS}")
_WRITES = Sql(f"SELECT id, task, idx FROM write WHERE {_THIS}")
_COUNT = Sql("SELECT count(*) FROM label WHERE tenant = :tenant AND thread = :thread")


class Present(NamedTuple):
    """What the store has of a page of ids: which checkpoints, and the keys of their writes."""

    ids: set[bytes]
    writes: dict[bytes, set[tuple[bytes, int]]]


class Met(NamedTuple):
    """What is in the store of a thread: how many of the source's checkpoints, and whether the source has more.
    `refused`: why nothing may be added."""

    checkpoints: int
    has_more: bool
    refused: str | None = None


def pages(source: Source, thread: str, space: str, *, backwards: bool = False) -> Iterator[list[str]]:
    """The ids of a namespace, some at a time."""
    after: str | None = None
    while ids := source.ids(thread, space, after, PAGE, backwards=backwards):
        yield ids
        after = ids[-1]


class Meeting:
    """Compares threads of the source with those of the store, by their ids."""

    def __init__(self, source: Source, saver: PerdureSaver, checking: Checking) -> None:
        self._source = source
        self._context = saver.store._context
        self._checking = checking

    def look(self, thread: str) -> Met | None:
        """What the store has of a thread. None: nothing."""
        held = drive(self._context.driver, self._count(thread))
        if not held:
            return None
        found = 0
        has_more = went_on = False
        for space in self._source.spaces(thread):
            newest: str | None = None
            for ids in pages(self._source, thread, space):
                present = self.present(thread, space, ids)
                here = [id_ for id_ in ids if pack_id(id_) in present.ids]
                found += len(here)
                has_more |= len(here) < len(ids)
                if here:
                    newest = here[-1]
                    theirs = packed(self._source, thread, space, here)
                    for id_ in map(pack_id, here):
                        keys, there = theirs.get(id_, set()), present.writes.get(id_, set())
                        has_more |= bool(keys - there)
                        went_on |= bool(there - keys)
            if newest is not None:
                content, changed = self._newest(thread, space, newest)
                if content is not None:
                    return Met(found, True, f"{content}, so the store has something else under the same id")
                has_more |= changed
        if not found:
            return Met(0, True, "the store has another thread of that name")
        went_on |= held > found
        if has_more and went_on:
            return Met(found, True, "it has gone on in the store since, and so it has in the source")
        return Met(found, has_more)

    def _newest(self, thread: str, space: str, id_: str) -> tuple[str | None, bool]:
        """Whether the newest common checkpoint of a namespace differs, and how; and whether it lacks writes."""
        for stored in self._source.checkpoints(thread, space, [id_]):
            content = self._checking.content(thread, space, stored)
            return content, bool(self._checking.lacking(thread, space, stored))
        return None, False

    def present(self, thread: str, space: str, ids: Sequence[str]) -> Present:
        """What the store has of these checkpoints."""
        low, high = min(map(pack_id, ids)), max(map(pack_id, ids))
        return drive(self._context.driver, self._present(thread, space, low, high))

    def _present(self, thread: str, space: str, low: bytes, high: bytes) -> Flow[Present]:
        tenant = yield from self._context.tenant()
        if tenant is None:
            return Present(set(), {})
        return (yield from read(partial(_look, tenant, thread, space, low, high)))

    def _count(self, thread: str) -> Flow[int]:
        tenant = yield from self._context.tenant()
        if tenant is None:
            return 0
        return (yield from read(partial(_held, tenant, thread)))


def packed(source: Source, thread: str, space: str, ids: Sequence[str]) -> dict[bytes, set[tuple[bytes, int]]]:
    """The keys of the writes that the source has on these checkpoints, as the store has them."""
    keys = source.write_keys(thread, space, ids)
    return {pack_id(id_): {(pack_id(task), idx) for task, idx in of_id} for id_, of_id in keys.items()}


def _held(tenant: int, thread: str) -> Program[int]:
    row = yield from try_thread(tenant, thread)
    if row is None:
        return 0
    [[(count,)]] = yield Batch(_COUNT(tenant=tenant, thread=row.thread), last=True)
    # A thread that was saved without LangGraph has no labels, but a head.
    return int(count) or int(row.head is not None)


def _look(tenant: int, thread: str, space: str, low: bytes, high: bytes) -> Program[Present]:
    row = yield from try_thread(tenant, thread)
    place = (yield from find_space(tenant, row.thread, space)) if row is not None else None
    if row is None or place is None:
        return Present(set(), {})
    key = {"tenant": tenant, "thread": row.thread, "space": place[0], "low": low, "high": high}
    labels, writes = yield Batch(_LABELS(**key), _WRITES(**key), last=True)
    keys: dict[bytes, set[tuple[bytes, int]]] = {}
    for id_, task, idx in writes:
        keys.setdefault(id_, set()).add((task, idx))
    return Present({id_ for (id_,) in labels}, keys)
