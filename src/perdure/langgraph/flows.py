"""What a saver does, as flows: put a checkpoint, put writes, get one, copy and delete threads.

Transactions with encoding and comparing between them, driven blocking or async by `saver.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Conflict, Damaged, LeaseLost, NotFound, ThreadDeleted, Undecodable, UsageError
from perdure.langgraph.checkpoints import Encoded
from perdure.langgraph.known import Known, Seen, Tip
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
from perdure.log.books import id_of
from perdure.log.branches import ThreadRow, create_thread, find_thread, metadata_of, try_thread
from perdure.log.cache import Base
from perdure.log.ids import ID_MAX
from perdure.log.ids import show_id as show_record
from perdure.log.labels import (
    LABELLED_KIND,
    MAIN,
    Found,
    Mark,
    copy_labels,
    find_label,
    find_space,
    greatest_label,
    list_labels,
)
from perdure.log.pending import Against, Stored, Write, is_large, odd_bases, put_writes, select_writes, writes_of
from perdure.log.reading import Loaded, read_state, read_thread_state
from perdure.log.records import SALT_BYTES
from perdure.log.sweeping import delete as delete_records
from perdure.log.turns import Held
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.journal import graph_tasks
from perdure.runs.session.session import LEASE_US
from perdure.storage import meters
from perdure.storage.base import ConstraintFailed
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Rows, Statement, read, write
from perdure.threads.context import Context
from perdure.threads.flows import base_of, commit
from perdure.threads.instrumentation import record_size
from perdure.threads.size_warning import warn_if_large

_ATTEMPTS = 64
_log = logging.getLogger("perdure")


@dataclass(slots=True)
class Keeper:
    """A saver's side of a store: the engine's context, and what the saver remembers."""

    ctx: Context
    known: Known = field(default_factory=Known)
    puts: int = 0  # of all threads: now and then expired ones are looked for

    def __post_init__(self) -> None:
        if (vault := getattr(self.ctx.driver, "vault", None)) is not None:
            vault.listen(self.known)


class Entry(NamedTuple):
    """A checkpoint as it is stored: where it is, its text, and what is pending on it."""

    thread: str
    space: str
    id: bytes
    text: bytes
    writes: Sequence[Write]


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


# --- putting


def parent_text(keeper: Keeper, name: str, space: str, parent: bytes) -> tuple[int, Encoded] | None:
    """The record and the text of a checkpoint that is about to be followed, if they are at hand: what did not change is
    taken from it."""
    seen, tenant = keeper.known.get(name), keeper.ctx.known_tenant
    tip = seen.tips.get(space) if seen is not None else None
    if seen is None or tenant is None or tip is None or tip.id != parent or not tip.spans:
        return None
    base = keeper.ctx.cache.get((tenant, seen.tree, tip.record))
    return None if base is None else (tip.record, Encoded(base.data, tip.spans))


@meters.operation("save")
def put(
    keeper: Keeper, name: str, encoded: Encoded, mark: Mark, note: str | None, tags: Mapping[str, Any]
) -> Flow[None]:
    """Store a checkpoint's text under its id, after its parent's. Raises ParentChanged."""
    if len(encoded.text) > keeper.ctx.warn_bytes:
        warn_if_large(keeper.ctx, name, encoded.text)
    try:
        yield from _put(keeper, name, encoded, mark, note, tags)
    except ThreadDeleted:
        if mark.parent is not None:
            raise ThreadDeleted(
                f"thread {name!r} was deleted while this run was going on: its checkpoint was not stored"
            ) from None
        keeper.known.forget(name)  # it has no parent: the thread starts anew
        yield from _put(keeper, name, encoded, mark, note, tags)


def _put(
    keeper: Keeper, name: str, encoded: Encoded, mark: Mark, note: str | None, tags: Mapping[str, Any]
) -> Flow[None]:
    ctx = keeper.ctx
    tenant = yield from ctx.ensure_tenant()
    seen = yield from _seen(keeper, tenant, name)
    if mark.parent is not None and not mark.orphan:
        late = seen is None or (yield from _is_too_late(keeper, tenant, name, mark.space, mark.parent))
        if late:
            raise ThreadDeleted(f"there is no thread {name!r} any more that this goes on with")
    salt = ctx.entropy(SALT_BYTES)
    us = runtime_of(ctx).owner
    mark = mark._replace(turn=graph_tasks.turn_of(us.known))
    parent = None
    draft: Draft | None = None
    after = 0
    merge: Mapping[str, Any] | None = dict(tags) if tags and not _has(seen, tags) else None
    for _ in range(_ATTEMPTS):
        if draft is None:
            base, parent = yield from _base(keeper, tenant, name, seen, mark)
            draft = prepare(
                encoded.text,
                base,
                salt,
                kind=LABELLED_KIND,
                note=note,
                metadata=None,
                branching=base is not None and base.record.id != parent,
            )
            after = max(after, base.record.id if base is not None else 0, parent or 0)
        at = ctx.clock_us()
        record = ctx.new_record_id(at, after)
        try:
            done = yield from _commit(draft, tenant, name, seen, mark, merge, record, at, parent)
        except ConstraintFailed as error:
            if error.kind != "unique":
                raise
            continue  # the id is taken: one chance in a million
        except Held as held:
            if held.owner == mark.turn.gone or not us.is_dead(held.owner):
                raise is_run_elsewhere(name) from None
            mark = mark._replace(turn=graph_tasks.turn_of(us.known, held.owner))
            continue
        if done.record is not None:
            _settle(keeper, tenant, name, seen, draft, done, mark, merge, encoded)
            return
        if done.after:
            after = done.after
        else:  # the base was moved by a prune
            if draft.base is not None:
                ctx.cache.drop((tenant, done.tree, draft.base.record.id))
            seen = keeper.known.note(tenant, name, done.thread, done.tree, seen.metadata if seen else {})
            seen.tips.clear()
            draft = None
    raise Conflict(f"thread {name!r} is being rearranged without pause: nothing was written; put it again")


def is_run_elsewhere(name: str) -> LeaseLost:
    """What a run is told that comes while another one, mostly of another process, calls a step or an effect."""
    return LeaseLost(
        f"thread {name!r} is being run by another process, or another thread of this one, which is at a step or an "
        "effect: nothing was done; run the graph again when that has ended. If it hangs, the thread is free "
        f"{LEASE_US // 1_000_000} seconds after its last step, or when its effect's time is over"
    )


def _has(seen: Seen | None, tags: Mapping[str, Any]) -> bool:
    return seen is not None and tags.items() <= seen.metadata.items()


def _seen(keeper: Keeper, tenant: int, name: str) -> Flow[Seen | None]:
    """What is known of a thread, from memory or the store. None: there is none of that name."""
    if (seen := keeper.known.get(name)) is not None:
        return seen
    row = yield from read(partial(try_thread, tenant, name))
    return None if row is None else keeper.known.note(tenant, name, row.thread, row.tree, metadata_of(row))


def _base(
    keeper: Keeper, tenant: int, name: str, seen: Seen | None, mark: Mark
) -> Flow[tuple[Base | None, int | None]]:
    """What to make the difference against, and the parent's record. Where there is no parent, the thread's newest
    state will do: a subgraph begins with much of what its caller has."""
    if seen is None:
        return None, None
    tip = seen.tips.get(mark.space)
    if mark.parent is not None and tip is not None and tip.id == mark.parent:
        record: int | None = tip.record
        if (cached := keeper.ctx.cache.get((tenant, seen.tree, tip.record))) is not None:
            return cached, record
    try:
        generation, record, loaded = yield from read(
            partial(_read_base, tenant, name, seen, mark, _cached(keeper.ctx, tenant, seen.tree))
        )
    except Damaged:
        return None, None  # the new record will carry its full text, and the careful path finds the parent
    if isinstance(loaded, Loaded):
        return base_of(loaded, generation), record
    return loaded, record


def _cached(ctx: Context, tenant: int, tree: int) -> Callable[[int], Base | None]:
    return lambda record: ctx.cache.get((tenant, tree, record))


def _read_base(
    tenant: int, name: str, seen: Seen, mark: Mark, cached: Callable[[int], Base | None]
) -> Program[tuple[int, int | None, Loaded | Base | None]]:
    row = yield from try_thread(tenant, name, seen.thread)
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
    seen: Seen | None,
    mark: Mark,
    merge: Mapping[str, Any] | None,
    record: int,
    at: int,
    parent: int | None,
) -> Flow[Appended]:
    base = draft.base
    place = Place(tenant, name, seen.thread if seen is not None else None, merge)
    quick: Callable[[], Program[bool]] | None = None
    if merge is None and mark.space == "" and seen is not None and base is not None and base.record.id == parent:
        sealed = seal(draft, seen.thread, seen.tree, record, at, base.record)
        quick = partial(append_to_head, draft, base, tenant, sealed, mark)
    done = yield from commit(record, quick, partial(append, draft, place, record, at, mark))
    if done is not None:
        return done
    assert base is not None
    return Appended(sealed, sealed.thread, sealed.tree, base.generation, on_head=True)


def _settle(
    keeper: Keeper,
    tenant: int,
    name: str,
    seen: Seen | None,
    draft: Draft,
    done: Appended,
    mark: Mark,
    merge: Mapping[str, Any] | None,
    encoded: Encoded,
) -> None:
    """Remember what the next put will build on."""
    if (sink := meters.sink) is not None:
        record_size(keeper.ctx, draft, sink)
    assert done.record is not None
    known = {} if seen is None else seen.metadata
    seen = keeper.known.note(tenant, name, done.thread, done.tree, {**known, **(merge or {})})
    seen.puts += 1
    if done.on_head:
        seen.note_tip(mark.space, Tip(mark.id, done.record.id, encoded.spans))
    base = draft.base
    if stored_as_drafted(draft, done.record):
        replaced = base.record.id if base is not None and base.record.id == done.record.parent else None
        keeper.ctx.cache.put(
            (tenant, done.tree, done.record.id),
            base_after(draft, done.record, done.generation),
            instead_of=(tenant, done.tree, replaced) if replaced is not None else None,
        )


def put_pending(
    keeper: Keeper, name: str, space: str, id_: bytes, writes: Sequence[Write], beside: Sequence[Statement] = ()
) -> Flow[None]:
    """Store what a task has written, and what goes with it (`beside`, safe to repeat). Writes to a thread that was
    deleted meanwhile are dropped."""
    ctx = keeper.ctx
    tenant = yield from ctx.ensure_tenant()
    seen = keeper.known.get(name)
    number = seen.thread if seen is not None else None
    against = yield from _against(ctx, tenant, name, seen, space, id_, writes)
    at = ctx.clock_us()
    stored = Stored(None)
    if not (yield from _is_too_late(keeper, tenant, name, space, id_)):
        try:
            put = partial(put_writes, tenant, name, number, space, id_, writes, at=at, beside=beside)
            stored = yield from write(partial(put, against=against))
            if stored.moved:
                stored = yield from write(partial(put, against=None))
        except NotFound:
            pass
    if stored.thread is None:
        found = event("writes.dropped", thread=name)
        _log.warning("thread %r was deleted: late writes of a task were dropped", name, extra=found)


def _is_too_late(keeper: Keeper, tenant: int, name: str, space: str, id_: bytes) -> Flow[bool]:
    """Whether a checkpoint belongs to a thread of this name that was deleted, and not to one that was begun since."""
    if not keeper.known.is_too_late(name, id_):
        return False

    def program() -> Program[bool]:
        row = yield from try_thread(tenant, name)
        place = (yield from find_space(tenant, row.thread, space)) if row is not None else None
        if row is None or place is None:
            return True
        return (yield from find_label(tenant, row.thread, place[0], id_)) is None

    return (yield from read(program))


def _against(
    ctx: Context, tenant: int, name: str, seen: Seen | None, space: str, id_: bytes, writes: Sequence[Write]
) -> Flow[Against | None]:
    """A record to compress writes against: their own, if its text is at hand. For large ones any of the thread will do,
    because much of them stands there too."""
    if seen is None:
        return None
    tip = seen.tips.get(space)
    own = tip is not None and tip.id == id_
    if not own and not is_large(writes):
        return None
    for one in [tip] if own and tip is not None else reversed(seen.newest()):
        if (base := ctx.cache.get((tenant, seen.tree, one.record))) is not None:
            return Against(one.record, base.data, base.generation)
    if not is_large(writes):
        return None
    try:
        row, loaded = yield from read(partial(read_thread_state, tenant, name, seen.thread, None))
    except (NotFound, Damaged):
        return None
    return None if loaded is None else Against(loaded.record.id, loaded.data, row.generation)


# --- getting


@meters.operation("load")
def get(keeper: Keeper, name: str, space: str, id_: bytes | None) -> Flow[Entry | None]:
    """A checkpoint by its id, or the newest of a namespace, with what is pending on it."""
    ctx = keeper.ctx
    tenant = yield from ctx.tenant()
    if tenant is None:
        return None
    try:
        at = yield from read(partial(_find, tenant, name, space, id_, ctx))
    except NotFound:
        keeper.known.forget(name)
        return None
    if at is None:
        return None
    seen = keeper.known.note(tenant, name, at.thread, at.tree, at.metadata)
    text = at.state.data if isinstance(at.state, Loaded) else at.state
    if id_ is None:
        seen.note_tip(space, Tip(at.found.id, at.found.record))
        if isinstance(at.state, Loaded):
            ctx.cache.put((tenant, at.tree, at.found.record), base_of(at.state, at.generation))
    writes = writes_of(at.writes, {at.found.record: text, **at.bases})
    return Entry(name, space, at.found.id, text, writes)


def _find(tenant: int, name: str, space: str, id_: bytes | None, ctx: Context) -> Program[_At | None]:
    row = yield from find_thread(tenant, name)
    place = yield from find_space(tenant, row.thread, space)
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
        raise Damaged(f"thread {name!r}: checkpoint {record} is missing; run `perdure verify`", checkpoints=(record,))
    [writes] = yield Batch(select_writes(tenant, row.thread, number, found.id))
    bases = yield from odd_bases(tenant, row.tree, writes, [found.record])
    return _At(row.thread, row.tree, metadata_of(row), row.generation, found, state, writes, bases)


def _newest(
    tenant: int, row: ThreadRow, space: int, greatest: Found | None, head: int
) -> Program[tuple[Found | None, Loaded | None]]:
    """The head, where it is not what has the greatest id: a clock stepped back, or somebody has changed the state, or
    made a fork, without LangGraph. Not if it is no checkpoint of LangGraph's, or of a namespace that was removed."""
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


# --- threads


def delete(keeper: Keeper, name: str, *, idle_since: int | None = None) -> Flow[None]:
    """Delete a thread with all its checkpoints and writes; if `idle_since` is given, only if nobody has written to it
    from then on. Late writes to it are refused: its number and its newest id are remembered."""
    tenant = yield from keeper.ctx.tenant()
    if tenant is None:
        return
    newest = yield from read(partial(_newest_id, tenant, name))
    number = yield from graph_tasks.number_of(tenant, name)
    try:
        yield from delete_records(tenant, name, None, idle_since=idle_since)
    except NotFound:
        return
    yield from graph_tasks.drop_of_thread(tenant, number)
    if newest is not None and idle_since is None:
        keeper.known.bury(name, newest)


def _newest_id(tenant: int, name: str) -> Program[bytes | None]:
    row = yield from try_thread(tenant, name)
    labels = (yield from list_labels(tenant, thread=row.thread, limit=1)) if row is not None else []
    return labels[0].id if labels else None


def copy(keeper: Keeper, source: str, target: str) -> Flow[None]:
    """A thread of another name with the same checkpoints, ids and writes. Shares the records: states are not copied."""
    tenant = yield from keeper.ctx.tenant()
    if tenant is None:
        raise _no_source(source)
    yield from write(partial(_copy, tenant, source, target, keeper.ctx.clock_us()))
    keeper.known.forget(target)


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
