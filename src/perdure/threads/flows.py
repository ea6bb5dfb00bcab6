"""Flows that find, load, list and fork threads. A flow does no I/O itself: `thread.py` drives it, blocking or async."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from perdure.errors import Damaged, NotFound, UsageError
from perdure.log.ancestors import find_ancestor, sample_line
from perdure.log.cache import FOREIGN, Base
from perdure.log.gc_plan import has_record
from perdure.log.ids import ID_MAX, parse_id, show_id
from perdure.log.labels import copy_labels, list_labels
from perdure.log.reading import Loaded, read_line, read_live, read_newest, read_state, read_thread_state
from perdure.log.records import Record
from perdure.log.task_questions import note_questions
from perdure.log.thread_table import ThreadRow, create_thread, find_thread, metadata_of, no_thread, try_thread
from perdure.storage import metrics
from perdure.storage.program import Batch, Flow, Program, read, write
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.instrumentation import warn_skipped
from perdure.values.dictionary import Dictionary

_FALLBACK_PAGE = 64


def tenant_of(ctx: StoreContext, cursor: Cursor) -> Flow[int]:
    """Return the tenant's number, for an operation that needs an existing thread. Raises NotFound."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        cursor.found_nothing = True
        raise NotFound(
            f"thread {cursor.name!r} has no checkpoint: nothing was ever saved in {ctx.driver!r} "
            f"for tenant {ctx.tenant_name!r}; check the path, or save() first"
        )
    return tenant


def locate(ctx: StoreContext, cursor: Cursor) -> Flow[tuple[int, ThreadRow]]:
    """Return the tenant's number and the thread's row. Raises NotFound, ThreadDeleted."""
    tenant = yield from tenant_of(ctx, cursor)
    try:
        row = yield from read(partial(find_thread, tenant, cursor.name, cursor.thread))
        if row.head is None:
            raise no_thread(cursor.name)
    except NotFound:
        cursor.found_nothing = cursor.thread is None
        raise
    cursor.resolve(row.thread, row.tree)
    return tenant, row


def base_of(loaded: Loaded, row: ThreadRow) -> Base:
    """Return a state that was loaded through a thread as the base of a next save."""
    key, record = loaded.key_data, loaded.record
    generation = row.generation if record.thread == row.thread else FOREIGN
    return Base(record, loaded.data, loaded.digests, Dictionary(key), len(key), loaded.key_thread, generation)


def fork(
    ctx: StoreContext, cursor: Cursor, at: int | None, name: str, metadata: Mapping[str, Any]
) -> Flow[tuple[int, int, int]]:
    """Create a thread that shares this one's records up to a checkpoint. Return its number, its tree and its head."""
    tenant, _ = yield from locate(ctx, cursor)
    forked = yield from write(
        partial(_fork, tenant, cursor.name, cursor.thread, at, name, dict(metadata), ctx.clock_us())
    )
    ctx.threads.forget((tenant, name))  # the cache may have a deleted thread of this name
    return forked


def _fork(
    tenant: int,
    source: str,
    number: int | None,
    at: int | None,
    name: str,
    metadata: dict[str, Any],
    now: int,
) -> Program[tuple[int, int, int]]:
    row = yield from find_thread(tenant, source, number, lock=True)
    target = row.head if at is None else at
    record = (yield from read_live(tenant, row.tree, target)) if target is not None else None
    if record is None or not (yield from has_record(tenant, row, record)):
        raise NotFound(f"thread {source!r} has no checkpoint {show_id(target or 0)} (pruned, or of another thread)")
    created = yield from create_thread(
        tenant,
        name,
        {**metadata_of(row), **metadata},
        now,
        tree=row.tree,
        origin=record.id,
        head_hash=record.hash,
        source=row.thread,
    )
    if created is None:
        raise UsageError(f"a thread named {name!r} exists already: choose another name for the fork")
    # A fork at the head also takes the newer labels: subgraphs saved them for the step that follows the head.
    upto = ID_MAX if record.id == row.head else record.id
    yield Batch(*copy_labels(tenant, row.thread, created.thread, upto), note_questions(tenant, created.thread, now))
    return created.thread, created.tree, record.id


def newest_id(tenant: int, name: str) -> Program[bytes | None]:
    """Return the greatest label id of a thread, or None. After its deletion, writes up to this id come too late."""
    row = yield from try_thread(tenant, name)
    labels = (yield from list_labels(tenant, thread=row.thread, limit=1)) if row is not None else []
    return labels[0].id if labels else None


# --- reading


def gone(cursor: Cursor, record: int) -> NotFound:
    return NotFound(f"thread {cursor.name!r} has no checkpoint {show_id(record)} (pruned, or of another thread)")


@metrics.operation("load")
def load(
    ctx: StoreContext, cursor: Cursor, at: int | None = None, *, strict: bool = False, look: bool = False
) -> Flow[tuple[ThreadRow, Loaded, tuple[str, ...]]]:
    """Load and check the state of the head, or of another checkpoint.

    If it is damaged, return its newest valid ancestor and the ids that were skipped; `strict` raises instead. `look`
    leaves the cursor unchanged.
    """
    tenant = yield from tenant_of(ctx, cursor)
    skipped: tuple[str, ...] = ()
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, at))
        if loaded is None:
            raise gone(cursor, at or 0)
    except NotFound:
        # If another handle creates the thread meanwhile, this one's first save must not count as following it.
        cursor.found_nothing = cursor.thread is None
        raise
    except Damaged as damage:
        if strict:
            raise
        tenant, row = yield from locate(ctx, cursor)
        loaded, skipped = yield from _fall_back(cursor, tenant, row, at, damage)
        # The cached text may be intact, but no save may build on a record that cannot be read back.
        for damaged in (row.head or 0, *map(parse_id, skipped)):
            ctx.cache.drop((tenant, row.tree, damaged))
    cursor.resolve(row.thread, row.tree)
    if at is None and not look:
        # The next save follows the head even if that is damaged and an ancestor is returned.
        cursor.record, cursor.lost_head, cursor.found_nothing, cursor.on_branch = row.head, None, False, False
        if skipped and not (yield from read(partial(read_live, tenant, row.tree, row.head or 0))):
            # The head's row is missing: the next save follows the ancestor, and becomes the head.
            cursor.record, cursor.lost_head = loaded.record.id, row.head
        key = (tenant, row.tree, loaded.record.id)
        cached = ctx.cache.get(key)
        # A cached base has digests and a compressor to continue: keep it if the record is still stored that way.
        base = base_of(loaded, row)
        if (
            cached is None
            or cached.record.key != loaded.record.key
            or base.generation not in (FOREIGN, cached.generation)
        ):
            ctx.cache.put(key, base)
    return row, loaded, skipped


def _fall_back(
    cursor: Cursor, tenant: int, row: ThreadRow, at: int | None, damage: Damaged
) -> Flow[tuple[Loaded, tuple[str, ...]]]:
    """Return the newest readable checkpoint before a damaged one, and the ids that were skipped.

    Search along the parents; if those pointers are damaged too, among all records of the thread, then before its fork.
    """
    first = row.head if at is None else at
    newest = ID_MAX if at is None else at
    # If a database page is damaged, the error names no checkpoint.
    skipped = dict.fromkeys(damage.checkpoints or (show_id(first or 0),))
    tried: set[int] = set()
    for begin, along in ((first, True), (newest, False), (row.origin, True)):
        start = begin
        while start is not None:
            candidates, start = yield from _older(tenant, row, start, along)
            for candidate in candidates:
                if candidate in tried or candidate > newest:
                    continue
                tried.add(candidate)
                try:
                    loaded = yield from read(partial(read_state, tenant, row.tree, candidate))
                except Damaged as error:
                    skipped.update(dict.fromkeys(error.checkpoints or (show_id(candidate),)))
                    continue
                if loaded is not None:
                    warn_skipped(cursor.name, skipped, show_id(candidate))
                    return loaded, tuple(skipped)
    raise Damaged(
        f"thread {cursor.name!r}: none of its {len(tried)} checkpoints is valid; run `perdure store verify`",
        checkpoints=tuple(skipped),
    ) from damage


def _older(tenant: int, row: ThreadRow, start: int, along: bool) -> Flow[tuple[list[int], int | None]]:
    """Return a page of ids from `start` on, along the parents or among the thread's own, and the next page's start."""
    if along:
        records = yield from read(partial(read_line, tenant, row.tree, start, _FALLBACK_PAGE))
        ids = [record.id for record in records]
        following = records[-1].parent if records else None
    else:
        ids = yield from read(partial(read_newest, tenant, row.tree, row.thread, start, _FALLBACK_PAGE))
        following = ids[-1] - 1 if ids else None
    if len(ids) < _FALLBACK_PAGE or following is None or following >= ids[-1]:  # pointers may lead in circles
        return ids, None
    return ids, following


def at_step(ctx: StoreContext, cursor: Cursor, step: int) -> Flow[tuple[int | None, Record]]:
    """Return the head, and the record at a step of the line that ends in the head. Raises NotFound."""
    tenant, row = yield from locate(ctx, cursor)
    assert row.head is not None
    record = yield from read(partial(find_ancestor, tenant, row.tree, row.head, step))
    if record is None or record.body is None:
        newest = yield from read(partial(read_live, tenant, row.tree, row.head))
        if newest is None:
            raise _head_missing(cursor, row.head)
        why = "it was pruned or erased" if step < newest.step else f"the head is step {newest.step}"
        raise NotFound(f"thread {cursor.name!r} has no checkpoint at step {step} of its head's history: {why}")
    return row.head, record


def sizes(ctx: StoreContext, cursor: Cursor, points: int) -> Flow[tuple[int | None, list[Record]]]:
    """Return the head, and at most `points` records of the line that ends in it, oldest first."""
    tenant, row = yield from locate(ctx, cursor)
    assert row.head is not None
    newest = yield from read(partial(read_live, tenant, row.tree, row.head))
    if newest is None:
        raise _head_missing(cursor, row.head)
    return row.head, (yield from read(partial(sample_line, tenant, row.tree, newest, points)))


def _head_missing(cursor: Cursor, record: int) -> Damaged:
    head = show_id(record)
    return Damaged(f"the head of thread {cursor.name!r} ({head}) is missing", checkpoints=(head,))


def history(
    ctx: StoreContext, cursor: Cursor, start: int | None, limit: int, *, first_page: bool = True
) -> Flow[tuple[int | None, list[Record]]]:
    """Return the head, and a page of the line that ends in a record (default: the head), newest first.

    A later page may be empty, because the line ends or was pruned there.
    """
    tenant, row = yield from locate(ctx, cursor)
    first = row.head if start is None else start
    if first is None:
        return row.head, []
    records = yield from read(partial(read_line, tenant, row.tree, first, limit))
    if start is not None and first_page and (not records or records[0].id != start):
        raise gone(cursor, start)
    if not records and start is None:  # the thread names a head, so this is damage and not an empty thread
        raise _head_missing(cursor, first)
    return row.head, records
