"""Attach values to checkpoints of lines: the writes of tasks, until the next checkpoint includes them.

A value is text here: the caller encodes it and knows its meaning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from perdure.errors import Damaged, NotFound, PerdureError
from perdure.log.labels import find_named
from perdure.log.pending import Against, Stored, Write, is_large, note_asked, put_writes, write_statements
from perdure.log.reading import read_thread_state
from perdure.log.thread_table import find_thread, try_thread
from perdure.storage.events import event
from perdure.storage.program import Append, Batch, Flow, Program, Statement, as_subprogram, read, write
from perdure.threads.context import StoreContext
from perdure.threads.external_rows import refer, refer_later
from perdure.threads.externals import referring
from perdure.threads.thread_cache import CachedThread
from perdure.values.external import keys_of

_log = logging.getLogger("perdure")


class Ending(Protocol):
    """The end of a task, written in the transaction that attaches its values. With an `error` no value is attached."""

    @property
    def statement(self) -> Statement: ...

    @property
    def error(self) -> PerdureError | None: ...

    def finish(self) -> None: ...


def attach(
    ctx: StoreContext, name: str, namespace: str, id_: bytes, writes: Sequence[Write], ending: Ending | None = None
) -> Flow[None]:
    """Attach values to a checkpoint, and end the task that wrote them. Safe to repeat.

    If the thread was deleted meanwhile, drop the values and log a warning.
    """
    if ending is not None and (error := ending.error) is not None:
        yield from write(partial(_one, ending.statement))
        raise error
    values = [value for one in writes for value in one.values]
    yield from referring(ctx, values, partial(_attach, ctx, name, namespace, id_, writes, keys_of(values), ending))


def _attach(
    ctx: StoreContext,
    name: str,
    namespace: str,
    id_: bytes,
    writes: Sequence[Write],
    keys: Sequence[bytes],
    ending: Ending | None,
) -> Flow[None]:
    also = () if ending is None else (ending.statement,)
    tenant = yield from ctx.ensure_tenant()
    thread = ctx.threads.get((tenant, name))
    number = thread.thread if thread is not None else None
    against = None if thread is None else (yield from _against(ctx, tenant, name, thread, namespace, id_, writes))
    at = ctx.clock_us()
    stored = Stored(None)
    if not (yield from is_too_late(ctx, (tenant, name), namespace, id_)):
        if number is not None and not (namespace or also or keys):
            statements = write_statements(tenant, number, id_, writes, against)
            statements += note_asked(tenant, number, id_, writes, at)
            if (yield Append(statements, (1,) * len(statements))):
                return
        try:
            put = partial(put_writes, tenant, name, number, namespace, id_, writes, at=at, beside=also)
            if keys:
                put = partial(_put_referring, put, tenant, name, namespace, id_, keys, at)
            stored = yield from write(partial(put, against=against))
            if stored.moved:
                stored = yield from write(partial(put, against=None))
        except NotFound:
            pass
    if stored.thread is None:
        dropped = event("writes.dropped", thread=name)
        _log.warning("thread %r was deleted: values that came too late were dropped", name, extra=dropped)
    if ending is not None:
        ending.finish()


def _put_referring(
    put: Callable[..., Program[Stored]],
    tenant: int,
    name: str,
    namespace: str,
    id_: bytes,
    keys: Sequence[bytes],
    at: int,
    *,
    against: Against | None,
) -> Program[Stored]:
    """Store writes and that they refer to large values, which stay as long as the record of the writes."""
    stored: Stored = yield from as_subprogram(put(against=against))
    if stored.thread is None or stored.moved:
        return stored
    row = yield from find_thread(tenant, name)
    label = yield from find_named(tenant, row.thread, namespace, id_)
    if label is None:
        yield from refer_later(tenant, row.tree, keys, at)
    else:
        yield from refer(tenant, row.tree, label.record, keys, at)
    return stored


def is_too_late(ctx: StoreContext, name: tuple[int, str], namespace: str, id_: bytes) -> Flow[bool]:
    """Return whether a checkpoint belongs to a deleted thread of this name, and not to one that was created since."""
    if not ctx.threads.is_too_late(name, id_):
        return False

    def program() -> Program[bool]:
        row = yield from try_thread(*name)
        return row is None or (yield from find_named(name[0], row.thread, namespace, id_)) is None

    return (yield from read(program))


def _one(statement: Statement) -> Program[None]:
    yield Batch(statement, last=True)


def _against(
    ctx: StoreContext, tenant: int, name: str, thread: CachedThread, namespace: str, id_: bytes, writes: Sequence[Write]
) -> Flow[Against | None]:
    """Return a record to compress values against, or None: their own checkpoint, if its text is in memory.

    Large values may use any record of the thread, because they often share much text with it.
    """
    tip = thread.tips.get(namespace)
    own = tip is not None and tip.id == id_
    if not own and not is_large(writes):
        return None
    for one in [tip] if own and tip is not None else reversed(thread.newest()):
        base = ctx.cache.get((tenant, thread.tree, one.record))
        if base is not None and base.record.thread == thread.thread:  # its generation is the thread's
            return Against(one.record, base.data, base.generation)
    if not is_large(writes):
        return None
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, name, thread.thread, None))
    except (NotFound, Damaged):
        return None
    return None if loaded is None else Against(loaded.record.id, loaded.data, row.generation)
