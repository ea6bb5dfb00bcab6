"""Loading one checkpoint of a line, by its id or as the newest, with what is attached to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Damaged, NotFound, Undecodable
from perdure.log.envelopes import id_of
from perdure.log.ids import show_id as show_record
from perdure.log.labels import (
    MAIN,
    Found,
    find_label,
    find_space,
    greatest_label,
)
from perdure.log.pending import odd_bases, select_writes, writes_of
from perdure.log.reading import Loaded, read_state
from perdure.log.thread_table import ThreadRow, find_thread, metadata_of
from perdure.storage import metrics
from perdure.storage.program import Batch, Flow, Program, Rows, read
from perdure.threads.context import Context
from perdure.threads.flows import base_of
from perdure.threads.line_engine import Entry, LineEngine
from perdure.threads.thread_cache import Tip


class _At(NamedTuple):
    """What a read has found: the thread, the labelled record, and its state unless the cache has it."""

    thread: int
    tree: int
    metadata: Mapping[str, Any]
    generation: int
    found: Found
    state: Loaded | bytes
    writes: Rows
    bases: dict[int, bytes]


@metrics.operation("load")
def load(engine: LineEngine, name: str, namespace: str, id_: bytes | None) -> Flow[Entry | None]:
    """A checkpoint by its id, or the newest of a namespace, with what is pending on it."""
    ctx = engine.ctx
    tenant = yield from ctx.tenant()
    if tenant is None:
        return None
    try:
        at = yield from read(partial(_find, tenant, name, namespace, id_, ctx))
    except NotFound:
        engine.threads.forget(name)
        return None
    if at is None:
        return None
    thread = engine.threads.note(tenant, name, at.thread, at.tree, at.metadata)
    text = at.state.data if isinstance(at.state, Loaded) else at.state
    if id_ is None:
        thread.note_tip(namespace, Tip(at.found.id, at.found.record))
        if isinstance(at.state, Loaded):
            ctx.cache.put((tenant, at.tree, at.found.record), base_of(at.state, at.generation))
    writes = writes_of(at.writes, {at.found.record: text, **at.bases})
    return Entry(name, namespace, at.found.id, text, writes)


def _find(tenant: int, name: str, namespace: str, id_: bytes | None, ctx: Context) -> Program[_At | None]:
    row = yield from find_thread(tenant, name)
    place = yield from find_space(tenant, row.thread, namespace)
    if place is None:
        return None
    number, newest = place if place[0] != MAIN else (MAIN, row.head)
    state: Loaded | bytes | None = None
    if id_ is not None:
        found = yield from find_label(tenant, row.thread, number, id_)
    else:
        found = yield from greatest_label(tenant, row.thread, number)
        if newest is not None and (found is None or found.record != newest):
            found, state = yield from _newest(tenant, row, number, found, newest)
    if found is None:
        return None
    cached = ctx.cache.get((tenant, row.tree, found.record))
    if state is None:
        state = cached.data if cached is not None else (yield from read_state(tenant, row.tree, found.record))
    if state is None:
        record = show_record(found.record)
        raise Damaged(
            f"thread {name!r}: checkpoint {record} is missing; run `perdure store verify`", checkpoints=(record,)
        )
    [writes] = yield Batch(select_writes(tenant, row.thread, number, found.id))
    bases = yield from odd_bases(tenant, row.tree, writes, [found.record])
    return _At(row.thread, row.tree, metadata_of(row), row.generation, found, state, writes, bases)


def _newest(
    tenant: int, row: ThreadRow, space: int, greatest: Found | None, head: int
) -> Program[tuple[Found | None, Loaded | None]]:
    """The head, where it has not the greatest id: a clock stepped back, or the head was moved by a fork or a rollback.
    Not if it was saved without an id, or its namespace was removed."""
    loaded = yield from read_state(tenant, row.tree, head)
    if loaded is None:
        return greatest, None
    try:
        id_ = id_of(loaded.data)
    except Undecodable:
        return greatest, None
    label = yield from find_label(tenant, row.thread, space, id_)
    if space != MAIN and (label is None or label.record != head):
        return greatest, None
    return Found(space, id_, head), loaded
