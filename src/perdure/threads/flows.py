"""What a thread can do, as flows: transactions with decoding, comparing and encoding between them.

Each public operation is one flow here, driven blocking or async by the handles in `thread.py`. A flow never does I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson

from perdure.errors import Conflict, Damaged, NotFound, OutcomeUnknown, StoreError, UsageError
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
from perdure.log.ids import ID_MAX, parse_id, show_id
from perdure.log.labels import copy_labels, list_labels
from perdure.log.reading import (
    Loaded,
    read_line,
    read_live,
    read_newest,
    read_state,
    read_thread_state,
)
from perdure.log.records import SALT_BYTES, Record
from perdure.log.thread_table import (
    ThreadRow,
    create_thread,
    find_thread,
    metadata_of,
    no_thread,
    try_thread,
)
from perdure.storage import metrics
from perdure.storage.base import ConstraintFailed
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, read, write
from perdure.threads.context import Context, Cursor
from perdure.threads.instrumentation import record_size, warn_skipped, warn_unknown
from perdure.threads.size_warning import warn_if_large
from perdure.values.dictionary import Dictionary

_log = logging.getLogger("perdure")
ATTEMPTS = 64  # another writer succeeds each time one of these fails
_FALLBACK_PAGE = 64


def tenant_of(ctx: Context, cursor: Cursor) -> Flow[int]:
    """The tenant's number, for an operation that only makes sense on a thread that exists."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        cursor.found_nothing = True
        raise NotFound(
            f"thread {cursor.name!r} has no checkpoint: nothing was ever saved in {ctx.driver!r} "
            f"for tenant {ctx.tenant_name!r}; check the path, or save() first"
        )
    return tenant


def locate(ctx: Context, cursor: Cursor) -> Flow[tuple[int, ThreadRow]]:
    """The tenant's number and the thread's row. Raises NotFound, ThreadDeleted."""
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


# --- saving


@metrics.operation("save")
def save(
    ctx: Context,
    cursor: Cursor,
    text: bytes,
    *,
    kind: str = "state",
    note: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    parent: int | None = None,
    expect: int | None = None,
    base: int | None = None,
) -> Flow[tuple[Record, bool]]:
    """Append a state. Returns its record, and whether it became the head.

    `base` names what the difference is made against, where that is not the parent.
    """
    if len(text) > ctx.warn_bytes:
        warn_if_large(ctx, cursor.name, text)
    tenant = yield from ctx.ensure_tenant()
    follows = yield from _follows(cursor, tenant, parent or expect or cursor.record)
    anchor = base or follows
    stored = orjson.dumps(metadata).decode() if metadata else None
    salt = ctx.entropy(SALT_BYTES)
    draft: Draft | None = None
    after = max(follows or 0, anchor or 0)
    for _ in range(ATTEMPTS):
        if draft is None:
            found = yield from _base(ctx, cursor, tenant, anchor)
            branching = found is not None and (parent is not None or found.record.thread != cursor.thread)
            draft = prepare(text, found, salt, kind=kind, note=note, metadata=stored, branching=branching)
        at = ctx.clock_us()
        record = ctx.new_record_id(at, after)
        cursor.own.append(record)
        try:
            done = yield from _append(cursor, draft, place_of(cursor, tenant, parent, expect), record, at, follows)
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise  # damage, or a defect of ours: saving again would not help, and would hide it
            cursor.disown(record)
            continue  # the id is taken: one chance in a million
        if done.record is not None:
            advance_cursor(ctx, cursor, tenant, draft, done, done.record, asked=parent is not None)
            return done.record, done.on_head
        cursor.disown(record)
        if done.after:  # its parent is newer than its id, or the id is taken
            after = done.after
        else:  # the base was moved by a prune
            ctx.cache.drop((tenant, done.tree, anchor or 0))
            draft = None
    raise Conflict(f"thread {cursor.name!r} is being rearranged without pause: nothing was written; save again")


def _follows(cursor: Cursor, tenant: int, stands_on: int | None) -> Flow[int | None]:
    """What a save follows: the checkpoint that the handle last loaded or saved; if there is none, the head."""
    if cursor.thread is not None and stands_on is not None:
        return stands_on
    row = yield from read(partial(try_thread, tenant, cursor.name, cursor.thread))
    if row is None:
        return stands_on
    cursor.resolve(row.thread, row.tree)
    return row.head if stands_on is None and not cursor.found_nothing else stands_on


def place_of(cursor: Cursor, tenant: int, parent: int | None, expect: int | None) -> Place:
    return Place(
        tenant,
        cursor.name,
        cursor.thread,
        cursor.merge,
        parent,
        expect,
        cursor.record,
        cursor.own,
        cursor.lost_head,
        cursor.found_nothing,
    )


def advance_cursor(
    ctx: Context, cursor: Cursor, tenant: int, draft: Draft, done: Appended, record: Record, *, asked: bool
) -> None:
    """Move the cursor to a new record, and cache what the next save builds on. `asked`: the caller gave the parent."""
    if (sink := metrics.sink) is not None:
        record_size(ctx, draft, sink)
    cursor.resolve(done.thread, done.tree)
    cursor.merge = None
    if stored_as_drafted(draft, record):
        before = draft.base.record.id if draft.base is not None else None
        ctx.cache.put(
            (tenant, done.tree, record.id),
            base_after(draft, record, done.generation),
            instead_of=(tenant, done.tree, before) if before is not None and before == cursor.record else None,
        )
    if not done.on_head:  # from here on the handle follows its branch: the head is no longer its own
        cursor.own.clear()
        cursor.own.append(record.id)
        if not asked and not cursor.on_branch:
            _log.warning(
                "thread %r: another writer has saved since this handle loaded it, so that its saves are a branch from "
                "here on (is_head is False): load() takes the handle back to the head, and expect= refuses such a "
                "save; see docs/how-to/threads.md",
                cursor.name,
                extra=event("thread.branched", thread=cursor.name),
            )
        cursor.on_branch = True
    cursor.record, cursor.found_nothing = record.id, False


def _base(ctx: Context, cursor: Cursor, tenant: int, anchor: int | None) -> Flow[Base | None]:
    """What to make the difference against, from the cache or the store. None: nothing that can be read."""
    if anchor is None or cursor.thread is None:
        return None
    if (cached := ctx.cache.get((tenant, cursor.tree, anchor))) is not None:
        return cached
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, anchor))
    except Damaged:
        return None  # the new record will carry its full text
    if loaded is None:
        return None
    return base_of(loaded, row.generation)


def base_of(loaded: Loaded, generation: int) -> Base:
    """What a save can build on, from a state that was loaded."""
    key = loaded.key_data
    return Base(loaded.record, loaded.data, loaded.digests, Dictionary(key), len(key), generation)


def _append(cursor: Cursor, draft: Draft, place: Place, record: int, at: int, follows: int | None) -> Flow[Appended]:
    """The short path where it applies, else the careful one."""
    base = draft.base
    quick: Callable[[], Program[bool]] | None = None
    sealed: Record | None = None
    expected = place.expect in (None, follows) and not cursor.merge  # what the short path does not look at
    if expected and base is not None and base.record.id == follows and cursor.thread is not None:
        sealed = seal(draft, cursor.thread, cursor.tree, record, at, base.record)
        quick = partial(append_to_head, draft, base, place.tenant, sealed)
    done = yield from commit(record, quick, partial(append, draft, place, record, at))
    if done is not None:
        return done
    assert sealed is not None
    assert base is not None
    return Appended(sealed, sealed.thread, sealed.tree, base.generation, on_head=True)


def commit(
    record: int,
    quick: Callable[[], Program[bool]] | None,
    careful: Callable[[], Program[Appended]],
    unknown: OutcomeUnknown | None = None,
) -> Flow[Appended | None]:
    """Write a record: by the quick program, else by the careful one, which first looks for a record whose COMMIT was
    not acknowledged (`unknown`). None: the quick program wrote it."""
    if quick is not None:
        try:
            if (yield from write(quick)):
                return None
        except OutcomeUnknown as error:
            unknown = error
    for _ in range(2):
        if unknown is not None:
            warn_unknown(show_id(record))
        try:
            # It looks for the record before it writes.
            return (yield from write(careful))
        except OutcomeUnknown as error:
            unknown = error
        except StoreError as error:
            if unknown is None:
                raise
            # This error's "nothing was written" is true of the search, not of the commit before it.
            raise OutcomeUnknown(f"{unknown} Looking for checkpoint {show_id(record)} failed: {error}") from unknown
    assert unknown is not None
    raise unknown


def update(
    ctx: Context,
    cursor: Cursor,
    merge: Callable[[Any], bytes],
    note: str | None,
    metadata: Mapping[str, Any] | None,
) -> Flow[tuple[Record, bool]]:
    """Change the newest state: load, merge, save if the head has not moved since, else start again."""
    for _ in range(ATTEMPTS):
        row, loaded, _ = yield from load(ctx, cursor)
        try:
            return (
                yield from save(
                    ctx,
                    cursor,
                    merge(loaded.data),
                    kind="update",
                    note=note,
                    metadata=metadata,
                    expect=row.head,  # not what was loaded: an ancestor stands in for a damaged head
                )
            )
        except Conflict:
            continue
    raise Conflict(f"thread {cursor.name!r} is saved to without pause: nothing was written; update it again")


def fork(
    ctx: Context, cursor: Cursor, at: int | None, name: str, metadata: Mapping[str, Any]
) -> Flow[tuple[int, int, int]]:
    """A new thread that shares this one's records up to a checkpoint. Its number, its tree, its head."""
    tenant, _ = yield from locate(ctx, cursor)
    made = yield from write(
        partial(_fork, tenant, cursor.name, cursor.thread, at, name, dict(metadata), ctx.clock_us())
    )
    ctx.threads.forget((tenant, name))  # a deleted thread of the same name
    return made


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
    if record is None:
        raise NotFound(f"thread {source!r} has no checkpoint {show_id(target or 0)}")
    made = yield from create_thread(
        tenant,
        name,
        {**metadata_of(row), **metadata},
        now,
        tree=row.tree,
        origin=record.id,
        head_hash=record.hash,
        generation=row.generation,
    )
    if made is None:
        raise UsageError(f"a thread named {name!r} exists already: choose another name for the fork")
    # What subgraphs have saved since the head belongs to the step that follows it.
    upto = ID_MAX if record.id == row.head else record.id
    yield Batch(*copy_labels(tenant, row.thread, made.thread, upto))
    return made.thread, made.tree, record.id


def newest_id(tenant: int, name: str) -> Program[bytes | None]:
    """The greatest id of a thread: what comes for a lower one after it was deleted comes too late."""
    row = yield from try_thread(tenant, name)
    labels = (yield from list_labels(tenant, thread=row.thread, limit=1)) if row is not None else []
    return labels[0].id if labels else None


# --- reading


def gone(cursor: Cursor, record: int) -> NotFound:
    return NotFound(f"thread {cursor.name!r} has no checkpoint {show_id(record)} (pruned, or of another thread)")


@metrics.operation("load")
def load(
    ctx: Context, cursor: Cursor, at: int | None = None, *, strict: bool = False, look: bool = False
) -> Flow[tuple[ThreadRow, Loaded, tuple[str, ...]]]:
    """A checked state: the head's, or another checkpoint's. If it is damaged, that of the newest valid ancestor,
    with the ids that had to be skipped; `strict` raises instead. `look`: the handle stays where it stands."""
    tenant = yield from tenant_of(ctx, cursor)
    skipped: tuple[str, ...] = ()
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, cursor.name, cursor.thread, at))
        if loaded is None:
            raise gone(cursor, at or 0)
    except NotFound:
        # Another handle may make the thread meanwhile; this one's first save must not pass for its successor.
        cursor.found_nothing = cursor.thread is None
        raise
    except Damaged as damage:
        if strict:
            raise
        tenant, row = yield from locate(ctx, cursor)
        loaded, skipped = yield from _fall_back(cursor, tenant, row, at, damage)
        # What is in memory may be fine, but nothing must be built on what cannot be read back.
        for damaged in (row.head or 0, *map(parse_id, skipped)):
            ctx.cache.drop((tenant, row.tree, damaged))
    cursor.resolve(row.thread, row.tree)
    if at is None and not look:
        # Also when an ancestor had to stand in: the next save follows the head, damaged or not.
        cursor.record, cursor.lost_head, cursor.found_nothing, cursor.on_branch = row.head, None, False, False
        if skipped and not (yield from read(partial(read_live, tenant, row.tree, row.head or 0))):
            # There is no row to follow: the next save follows what stands in, and becomes the head.
            cursor.record, cursor.lost_head = loaded.record.id, row.head
        key = (tenant, row.tree, loaded.record.id)
        cached = ctx.cache.get(key)
        # What is there already has digests and a stream to continue: keep it if the record is still stored that way.
        if cached is None or (cached.generation, cached.record.key) != (row.generation, loaded.record.key):
            ctx.cache.put(key, base_of(loaded, row.generation))
    return row, loaded, skipped


def _fall_back(
    cursor: Cursor, tenant: int, row: ThreadRow, at: int | None, damage: Damaged
) -> Flow[tuple[Loaded, tuple[str, ...]]]:
    """The newest checkpoint before a damaged one that can be read: along its parents, or, where these pointers are
    damaged too, among all that the thread wrote, and before its fork."""
    first = row.head if at is None else at
    newest = ID_MAX if at is None else at
    # A damaged page is an error of the database, which does not know what was being read.
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
    """A page of records from `start` on, along the parents or among the thread's own; and where the next starts."""
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


def history(
    ctx: Context, cursor: Cursor, start: int | None, limit: int, *, first_page: bool = True
) -> Flow[tuple[int | None, list[Record]]]:
    """A page of the line that ends in a record (default: the head), newest first; and the head.

    A later page may be empty: the line may end there, or have been pruned up to there."""
    tenant, row = yield from locate(ctx, cursor)
    first = row.head if start is None else start
    if first is None:
        return row.head, []
    records = yield from read(partial(read_line, tenant, row.tree, first, limit))
    if start is not None and first_page and (not records or records[0].id != start):
        raise gone(cursor, start)
    if not records and start is None:  # not "nothing was saved": the thread knows its head
        head = show_id(first)
        raise Damaged(f"the head of thread {cursor.name!r} ({head}) is missing", checkpoints=(head,))
    return row.head, records
