"""What is done to lines of checkpoints under ids of the caller, as flows: save, attach, load, copy and delete.

Transactions with comparing between them, driven blocking or async. States are texts here: what they mean, and how they
are encoded, is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from perdure.errors import Conflict, Damaged, NotFound, ThreadDeleted, UsageError
from perdure.log import gc
from perdure.log.append import (
    Appended,
    Draft,
    Place,
    append,
    append_to_head,
    base_after,
    prepare,
    seal,
    stored_as_drafted,
)
from perdure.log.cache import Base
from perdure.log.ids import ID_MAX
from perdure.log.labels import (
    LABELLED_KIND,
    Found,
    Mark,
    copy_labels,
    find_label,
    find_space,
    list_labels,
)
from perdure.log.pending import Against, Stored, Write, is_large, put_writes
from perdure.log.reading import Loaded, read_state, read_thread_state
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import create_thread, metadata_of, try_thread
from perdure.log.turns import Held
from perdure.storage import metrics
from perdure.storage.base import ConstraintFailed
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Statement, read, write
from perdure.threads.context import Context
from perdure.threads.flows import base_of, commit
from perdure.threads.instrumentation import record_size
from perdure.threads.line_engine import Encoded, LineEngine
from perdure.threads.size_warning import warn_if_large
from perdure.threads.thread_cache import CachedThread, Tip

_ATTEMPTS = 64
_log = logging.getLogger("perdure")


# --- saving


def parent_text(engine: LineEngine, name: str, namespace: str, parent: bytes) -> tuple[int, Encoded] | None:
    """The record and the text of a checkpoint that is about to be followed, if they are at hand: what did not change is
    taken from it."""
    thread, tenant = engine.threads.get(name), engine.ctx.known_tenant
    tip = thread.tips.get(namespace) if thread is not None else None
    if thread is None or tenant is None or tip is None or tip.id != parent or not tip.parts:
        return None
    base = engine.ctx.cache.get((tenant, thread.tree, tip.record))
    return None if base is None else (tip.record, Encoded(base.data, tip.parts))


@metrics.operation("save")
def save(
    engine: LineEngine,
    name: str,
    encoded: Encoded,
    mark: Mark,
    note: str | None,
    tags: Mapping[str, Any],
    kind: str = LABELLED_KIND,
) -> Flow[None]:
    """Save a checkpoint's text under its id, after its parent's. Raises ParentChanged."""
    if len(encoded.text) > engine.ctx.warn_bytes:
        warn_if_large(engine.ctx, name, encoded.text)
    try:
        yield from _save(engine, name, encoded, mark, note, tags, kind)
    except ThreadDeleted:
        if mark.parent is not None:
            raise ThreadDeleted(f"thread {name!r} was deleted meanwhile: this checkpoint was not stored") from None
        engine.threads.forget(name)  # it has no parent: the thread starts anew
        yield from _save(engine, name, encoded, mark, note, tags, kind)


def _save(
    engine: LineEngine,
    name: str,
    encoded: Encoded,
    mark: Mark,
    note: str | None,
    tags: Mapping[str, Any],
    kind: str,
) -> Flow[None]:
    ctx = engine.ctx
    tenant = yield from ctx.ensure_tenant()
    thread = yield from _cached_thread(engine, tenant, name)
    if mark.parent is not None:
        late = thread is None or (yield from _is_too_late(engine, tenant, name, mark.space, mark.parent))
        if late:
            raise ThreadDeleted(f"thread {name!r} does not exist any more: this checkpoint cannot follow its parent")
    salt = ctx.entropy(SALT_BYTES)
    mark = mark._replace(turn=engine.turns.of())
    parent = None
    draft: Draft | None = None
    after = 0
    merge: Mapping[str, Any] | None = dict(tags) if tags and not _has(thread, tags) else None
    for _ in range(_ATTEMPTS):
        if draft is None:
            base, parent = yield from _base(engine, tenant, name, thread, mark)
            draft = prepare(
                encoded.text,
                base,
                salt,
                kind=kind,
                note=note,
                metadata=None,
                branching=base is not None and base.record.id != parent,
            )
            after = max(after, base.record.id if base is not None else 0, parent or 0)
        at = ctx.clock_us()
        record = ctx.new_record_id(at, after)
        try:
            done = yield from _commit(draft, tenant, name, thread, mark, merge, record, at, parent)
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise
            continue  # the id is taken: one chance in a million
        except Held as held:
            if held.owner == mark.turn.gone or not engine.turns.is_dead(held.owner):
                raise engine.turns.refuse(name) from None
            mark = mark._replace(turn=engine.turns.of(held.owner))
            continue
        if done.record is not None:
            _settle(engine, tenant, name, thread, draft, done, mark, merge, encoded)
            return
        if done.after:
            after = done.after
        else:  # the base was moved by a prune
            if draft.base is not None:
                ctx.cache.drop((tenant, done.tree, draft.base.record.id))
            thread = engine.threads.note(tenant, name, done.thread, done.tree, thread.metadata if thread else {})
            thread.tips.clear()
            draft = None
    raise Conflict(f"thread {name!r} is being rearranged without pause: nothing was written; save it again")


def _has(thread: CachedThread | None, tags: Mapping[str, Any]) -> bool:
    return thread is not None and tags.items() <= thread.metadata.items()


def _cached_thread(engine: LineEngine, tenant: int, name: str) -> Flow[CachedThread | None]:
    """What is known of a thread, from memory or the store. None: there is none of that name."""
    if (thread := engine.threads.get(name)) is not None:
        return thread
    row = yield from read(partial(try_thread, tenant, name))
    return None if row is None else engine.threads.note(tenant, name, row.thread, row.tree, metadata_of(row))


def _base(
    engine: LineEngine, tenant: int, name: str, thread: CachedThread | None, mark: Mark
) -> Flow[tuple[Base | None, int | None]]:
    """What to make the difference against, and the parent's record. Where there is no parent, the thread's newest
    state will do: a subgraph begins with much of what its caller has."""
    if thread is None:
        return None, None
    tip = thread.tips.get(mark.space)
    if mark.parent is not None and tip is not None and tip.id == mark.parent:
        record: int | None = tip.record
        if (cached := engine.ctx.cache.get((tenant, thread.tree, tip.record))) is not None:
            return cached, record
    try:
        generation, record, loaded = yield from read(
            partial(_read_base, tenant, name, thread, mark, _cached(engine.ctx, tenant, thread.tree))
        )
    except Damaged:
        return None, None  # the new record will carry its full text, and the careful path finds the parent
    if isinstance(loaded, Loaded):
        return base_of(loaded, generation), record
    return loaded, record


def _cached(ctx: Context, tenant: int, tree: int) -> Callable[[int], Base | None]:
    return lambda record: ctx.cache.get((tenant, tree, record))


def _read_base(
    tenant: int, name: str, thread: CachedThread, mark: Mark, cached: Callable[[int], Base | None]
) -> Program[tuple[int, int | None, Loaded | Base | None]]:
    row = yield from try_thread(tenant, name, thread.thread)
    assert row is not None  # a number that is gone raises
    parent: Found | None = None
    if mark.parent is not None and (space := (yield from find_space(tenant, row.thread, mark.space))) is not None:
        parent = yield from find_label(tenant, row.thread, space[0], mark.parent)
    wanted = parent.record if parent is not None else row.head
    if wanted is None:
        return row.generation, None, None
    follows = parent.record if parent is not None else None
    known = cached(wanted)
    if known is not None and known.generation == row.generation:
        return row.generation, follows, known
    return row.generation, follows, (yield from read_state(tenant, row.tree, wanted))


def _commit(
    draft: Draft,
    tenant: int,
    name: str,
    thread: CachedThread | None,
    mark: Mark,
    merge: Mapping[str, Any] | None,
    record: int,
    at: int,
    parent: int | None,
) -> Flow[Appended]:
    base = draft.base
    place = Place(tenant, name, thread.thread if thread is not None else None, merge)
    quick: Callable[[], Program[bool]] | None = None
    if merge is None and mark.space == "" and thread is not None and base is not None and base.record.id == parent:
        sealed = seal(draft, thread.thread, thread.tree, record, at, base.record)
        quick = partial(append_to_head, draft, base, tenant, sealed, mark)
    done = yield from commit(record, quick, partial(append, draft, place, record, at, mark))
    if done is not None:
        return done
    assert base is not None
    return Appended(sealed, sealed.thread, sealed.tree, base.generation, on_head=True)


def _settle(
    engine: LineEngine,
    tenant: int,
    name: str,
    thread: CachedThread | None,
    draft: Draft,
    done: Appended,
    mark: Mark,
    merge: Mapping[str, Any] | None,
    encoded: Encoded,
) -> None:
    """Remember what the next save will build on."""
    if (sink := metrics.sink) is not None:
        record_size(engine.ctx, draft, sink)
    assert done.record is not None
    known = {} if thread is None else thread.metadata
    thread = engine.threads.note(tenant, name, done.thread, done.tree, {**known, **(merge or {})})
    if done.on_head:
        thread.note_tip(mark.space, Tip(mark.id, done.record.id, encoded.parts))
    base = draft.base
    if stored_as_drafted(draft, done.record):
        replaced = base.record.id if base is not None and base.record.id == done.record.parent else None
        engine.ctx.cache.put(
            (tenant, done.tree, done.record.id),
            base_after(draft, done.record, done.generation),
            instead_of=(tenant, done.tree, replaced) if replaced is not None else None,
        )


def attach(
    engine: LineEngine, name: str, namespace: str, id_: bytes, writes: Sequence[Write], also: Sequence[Statement] = ()
) -> Flow[None]:
    """Attach what a task has written, with statements of the caller in the same transaction (safe to repeat). Writes
    to a thread that was deleted meanwhile are dropped."""
    ctx = engine.ctx
    tenant = yield from ctx.ensure_tenant()
    thread = engine.threads.get(name)
    number = thread.thread if thread is not None else None
    against = yield from _against(ctx, tenant, name, thread, namespace, id_, writes)
    at = ctx.clock_us()
    stored = Stored(None)
    if not (yield from _is_too_late(engine, tenant, name, namespace, id_)):
        try:
            put = partial(put_writes, tenant, name, number, namespace, id_, writes, at=at, beside=also)
            stored = yield from write(partial(put, against=against))
            if stored.moved:
                stored = yield from write(partial(put, against=None))
        except NotFound:
            pass
    if stored.thread is None:
        found = event("writes.dropped", thread=name)
        _log.warning("thread %r was deleted: late writes of a task were dropped", name, extra=found)


def _is_too_late(engine: LineEngine, tenant: int, name: str, namespace: str, id_: bytes) -> Flow[bool]:
    """Whether a checkpoint belongs to a thread of this name that was deleted, and not to one that was begun since."""
    if not engine.threads.is_too_late(name, id_):
        return False

    def program() -> Program[bool]:
        row = yield from try_thread(tenant, name)
        place = (yield from find_space(tenant, row.thread, namespace)) if row is not None else None
        if row is None or place is None:
            return True
        return (yield from find_label(tenant, row.thread, place[0], id_)) is None

    return (yield from read(program))


def _against(
    ctx: Context,
    tenant: int,
    name: str,
    thread: CachedThread | None,
    namespace: str,
    id_: bytes,
    writes: Sequence[Write],
) -> Flow[Against | None]:
    """A record to compress writes against: their own, if its text is at hand. For large ones any of the thread will do,
    because much of them stands there too."""
    if thread is None:
        return None
    tip = thread.tips.get(namespace)
    own = tip is not None and tip.id == id_
    if not own and not is_large(writes):
        return None
    for one in [tip] if own and tip is not None else reversed(thread.newest()):
        if (base := ctx.cache.get((tenant, thread.tree, one.record))) is not None:
            return Against(one.record, base.data, base.generation)
    if not is_large(writes):
        return None
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, name, thread.thread, None))
    except (NotFound, Damaged):
        return None
    return None if loaded is None else Against(loaded.record.id, loaded.data, row.generation)


# --- threads


def delete(engine: LineEngine, name: str) -> Flow[None]:
    """Delete a thread with its checkpoints and attachments. Late writes to it are refused: its number and its newest id
    are remembered."""
    tenant = yield from engine.ctx.tenant()
    if tenant is None:
        return
    newest = yield from read(partial(_newest_id, tenant, name))
    try:
        yield from gc.delete(tenant, name, None)
    except NotFound:
        return
    if newest is not None:
        engine.threads.mark_deleted(name, newest)


def prune(engine: LineEngine, name: str, keep: int) -> Flow[None]:
    """Keep the newest checkpoints of each line of a thread."""
    tenant = yield from engine.ctx.tenant()
    if tenant is not None:
        try:
            yield from gc.prune(tenant, name, None, keep)
        except NotFound:
            return


def delete_runs(engine: LineEngine, runs: Collection[bytes]) -> Flow[None]:
    """Delete the checkpoints that runs have saved, in all threads, except those that a later one is rebuilt from."""
    tenant = yield from engine.ctx.tenant()
    if tenant is not None and runs:
        yield from gc.delete_runs(tenant, runs)


def _newest_id(tenant: int, name: str) -> Program[bytes | None]:
    row = yield from try_thread(tenant, name)
    labels = (yield from list_labels(tenant, thread=row.thread, limit=1)) if row is not None else []
    return labels[0].id if labels else None


def copy(engine: LineEngine, source: str, target: str) -> Flow[None]:
    """A thread of another name with the same checkpoints, ids and writes. Shares the records: states are not copied."""
    tenant = yield from engine.ctx.tenant()
    if tenant is None:
        raise _no_source(source)
    yield from write(partial(_copy, tenant, source, target, engine.ctx.clock_us()))
    engine.threads.forget(target)


def _copy(tenant: int, source: str, target: str, at: int) -> Program[None]:
    row = yield from try_thread(tenant, source, lock=True)
    if row is None:
        raise _no_source(source)
    made = yield from create_thread(
        tenant,
        target,
        metadata_of(row),
        at,
        tree=row.tree,
        origin=row.head,
        head_hash=row.head_hash,
        generation=row.generation,
    )
    if made is None:
        raise UsageError(f"a thread named {target!r} exists already: delete it first, or copy to another name")
    yield Batch(*copy_labels(tenant, row.thread, made.thread, ID_MAX))


def _no_source(source: str) -> NotFound:
    return NotFound(f"there is no thread {source!r} to copy")
