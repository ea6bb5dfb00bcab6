"""`saver.compact()`: remove what retention says, pack what has come to rest, give the space back.

What a put had no time for is done here: writes that were stored before their checkpoint's text was at hand are
compressed against it, keyframes are compressed again with more effort, cold differences are packed together. Nothing
changes what anybody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from perdure.adapters import LineEngine, Listing, Wanted
from perdure.errors import Damaged
from perdure.langgraph.retention import Retention, expire_all, shorten_one
from perdure.log.branches import count_threads, thread_names
from perdure.log.compacting import reclaim, recompress
from perdure.log.labels import LabelRow
from perdure.log.packing import COLD_US, pack_tenant
from perdure.log.pending import Against, Repacked, has_loose, repacked, store_repacked
from perdure.runs.journal import adapter_tasks
from perdure.storage.program import Flow, Progress, Rows, read, write

_PAGE = 500
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction has removed, and how much smaller it made what stays."""

    threads: int
    checkpoints: int
    saved_bytes: int


def compact(engine: LineEngine, retention: Retention, progress: Progress | None) -> Flow[Compacted]:
    """Retention for all threads, then packing, then the space."""
    tenant = yield from engine.ctx.tenant()
    if tenant is None:
        return Compacted(0, 0, 0)
    expired = yield from expire_all(engine, tenant, retention)
    removed = saved = done = after = 0
    total = yield from read(partial(count_threads, tenant))
    while page := (yield from read(partial(thread_names, tenant, after, _PAGE))):
        for number, name in page:
            removed += yield from shorten_one(engine, tenant, retention, name)
            if (yield from read(partial(has_loose, tenant, number))):
                saved += yield from _repack(engine, tenant, name)
            after, done = number, done + 1
            if progress is not None:
                progress(done, max(done, total))
    removed_tasks = yield from adapter_tasks.sweep(tenant, engine.ctx.clock_us())
    saved += yield from recompress(tenant)
    saved += (yield from pack_tenant(tenant, engine.ctx.clock_us() - COLD_US)).saved_bytes
    if expired or removed or saved or removed_tasks:  # it rewrites the file
        yield from reclaim()
    return Compacted(expired, removed, saved)


def _repack(engine: LineEngine, tenant: int, name: str) -> Flow[int]:
    """Compress a thread's loose writes against their checkpoints' texts. How many bytes that saved."""
    listing = Listing(engine, Wanted(thread=name))
    waiting: list[Repacked] = []
    saved = 0
    while (rows := (yield from listing.rows())) is not None:
        for label, writes in rows:
            waiting += yield from _repacked(listing, tenant, label, writes)
            if len(waiting) >= _BATCH:
                saved += yield from _store(waiting)
                waiting = []
    return saved + (yield from _store(waiting))


def _repacked(listing: Listing, tenant: int, label: LabelRow, writes: Rows) -> Flow[list[Repacked]]:
    if all(row[5] is not None for row in writes):
        return []
    try:
        text = yield from listing.text(label)
        against = Against(label.record, text, 0) if text is not None else None
        return [] if against is None else repacked(tenant, label.thread, label.space, writes, against)
    except Damaged:
        return []  # that is for verify to say


def _store(found: list[Repacked]) -> Flow[int]:
    return (yield from write(partial(store_repacked, found))) if found else 0
