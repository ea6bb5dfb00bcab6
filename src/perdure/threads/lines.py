"""Lines of checkpoints whose ids the caller gives: the port that adapters of other frameworks are built on.

`store.thread(name).line(namespace)` is one line of a thread. Namespace "" is the thread's own line: what is saved there
moves the thread's head. Other namespaces are lines of their own, stored as differences in the same tree.

What a line promises:

- `save` is durable when it returns, and is all there or not at all. Saving an id again replaces what the id stands for.
- A checkpoint follows the one that `parent` names; without it, it starts a line. With `exclusive`, a save whose parent
  is not the newest checkpoint of the line raises `Conflict` and writes nothing.
- `load` returns a state that was checked against its hash, with its attachments; None if there is no such id.
- `attach` adds a value to a checkpoint, also before that is saved. The first value of a key stays, unless `replace`.
  Attachments are deleted with their checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import Conflict, Damaged, NotFound
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
from perdure.log.ids import show_id
from perdure.log.label_ids import pack_id, unpack_id
from perdure.log.labels import (
    MAIN,
    Found,
    LabelRow,
    Mark,
    find_label,
    find_space,
    greatest_label,
    list_labels,
)
from perdure.log.pending import Write, odd_bases, put_writes, select_writes, writes_of
from perdure.log.reading import Loaded, read_state
from perdure.log.records import SALT_BYTES
from perdure.log.thread_table import ThreadRow, find_thread, try_thread
from perdure.storage import meters
from perdure.storage.base import ConstraintFailed
from perdure.storage.program import Batch, Flow, Program, adrive, drive, read, write
from perdure.threads.context import Context, Cursor
from perdure.threads.flows import ATTEMPTS, base_of, commit
from perdure.values.codec import decode, encode

_PAGE = 50
_KIND = "line"


class LineCheckpoint(NamedTuple):
    """A checkpoint of a line: the id that its caller gave it, its state, and what was attached to it by key."""

    id: str
    state: Any
    attachments: Mapping[str, Any]


class _Stored(NamedTuple):
    id: bytes
    text: bytes
    writes: list[Write]


class Line:
    """One line of checkpoints of a thread, by ids that the caller gives. Get one with `thread.line(namespace)`."""

    def __init__(self, context: Context, cursor: Cursor, namespace: str) -> None:
        self._context, self._cursor, self.namespace = context, cursor, namespace
        self._tip: tuple[bytes, int] | None = None  # the id and the record that were last saved or loaded as newest

    def __repr__(self) -> str:
        return f"<Line {self.namespace!r} of thread {self._cursor.name!r}>"

    def save(
        self, state: Any, *, id: str, parent: str | None = None, note: str | None = None, exclusive: bool = False
    ) -> bool:
        """Save a state under an id. Returns whether it is the newest checkpoint of the line now."""
        return drive(self._context.driver, self._save(state, id, parent, note, exclusive))

    async def asave(
        self, state: Any, *, id: str, parent: str | None = None, note: str | None = None, exclusive: bool = False
    ) -> bool:
        """`save`, awaited."""
        return await adrive(self._context.driver, self._save(state, id, parent, note, exclusive))

    def load(self, id: str | None = None) -> LineCheckpoint | None:
        """A checkpoint by its id, or the newest. None: there is none."""
        return drive(self._context.driver, self._load(id))

    async def aload(self, id: str | None = None) -> LineCheckpoint | None:
        """`load`, awaited."""
        return await adrive(self._context.driver, self._load(id))

    def history(self, *, before: str | None = None, limit: int | None = None) -> Iterator[LineCheckpoint]:
        """Checkpoints by id, the greatest first: those below `before`. Read in pages."""
        pages = _LinePages(self, before, limit)
        while pages.left:
            yield from drive(self._context.driver, pages.read())

    async def ahistory(self, *, before: str | None = None, limit: int | None = None) -> AsyncIterator[LineCheckpoint]:
        """`history`, as an async iterator."""
        pages = _LinePages(self, before, limit)
        while pages.left:
            for checkpoint in await adrive(self._context.driver, pages.read()):
                yield checkpoint

    def attach(self, id: str, key: str, value: Any, *, replace: bool = False) -> None:
        """Add a value to a checkpoint, which may be saved later. The first value of a key stays, unless `replace`."""
        drive(self._context.driver, self._attach(id, key, value, replace))

    async def aattach(self, id: str, key: str, value: Any, *, replace: bool = False) -> None:
        """`attach`, awaited."""
        await adrive(self._context.driver, self._attach(id, key, value, replace))

    # --- saving

    @meters.operation("save")
    def _save(self, state: Any, id: str, parent: str | None, note: str | None, exclusive: bool) -> Flow[bool]:
        ctx, cursor = self._context, self._cursor
        text = encode(state, ctx.codec)
        tenant = yield from ctx.ensure_tenant()
        mark = Mark(self.namespace, pack_id(id), pack_id(parent) if parent is not None else None, None, exclusive)
        salt, after = ctx.entropy(SALT_BYTES), 0
        draft: Draft | None = None
        follows: int | None = None
        for _ in range(ATTEMPTS):
            if draft is None:
                base, follows = yield from self._base(tenant, mark.parent)
                branching = base is not None and base.record.id != follows
                draft = prepare(text, base, salt, kind=_KIND, note=note, metadata=None, branching=branching)
                after = max(after, base.record.id if base is not None else 0, follows or 0)
            at = ctx.clock_us()
            record = ctx.new_record_id(at, after)
            try:
                done = yield from self._commit(draft, tenant, mark, record, at, follows)
            except ConstraintFailed as error:
                if error.kind != "unique":
                    raise
                continue  # the id is taken: one chance in a million
            if done.record is not None:
                self._advance(tenant, draft, done, mark)
                return done.on_head
            if not done.after:  # garbage collection has moved the base
                if draft.base is not None:
                    ctx.cache.drop((tenant, done.tree, draft.base.record.id))
                cursor.resolve(done.thread, done.tree)
                self._tip = draft = None
            after = max(after, done.after)
        raise Conflict(f"thread {cursor.name!r} is being rearranged without pause: nothing was written; save again")

    def _commit(
        self, draft: Draft, tenant: int, mark: Mark, record: int, at: int, follows: int | None
    ) -> Flow[Appended]:
        base, cursor = draft.base, self._cursor
        careful = partial(append, draft, Place(tenant, cursor.name, cursor.thread, cursor.merge), record, at, mark)
        if cursor.merge or self.namespace or base is None or base.record.id != follows or cursor.thread is None:
            done = yield from commit(record, None, careful)
            assert done is not None
            return done
        sealed = seal(draft, cursor.thread, cursor.tree, record, at, base.record)
        done = yield from commit(record, partial(append_to_head, draft, base, tenant, sealed, mark), careful)
        return done or Appended(sealed, sealed.thread, sealed.tree, base.generation, on_head=True)

    def _advance(self, tenant: int, draft: Draft, done: Appended, mark: Mark) -> None:
        """Remember what the next save builds on."""
        assert done.record is not None
        self._cursor.resolve(done.thread, done.tree)
        self._cursor.merge = None
        if done.on_head:
            self._tip = mark.id, done.record.id
        if stored_as_drafted(draft, done.record):
            base = draft.base
            before = base.record.id if base is not None and base.record.id == done.record.parent else None
            self._context.cache.put(
                (tenant, done.tree, done.record.id),
                base_after(draft, done.record, done.generation),
                instead_of=(tenant, done.tree, before) if before is not None else None,
            )

    def _base(self, tenant: int, parent: bytes | None) -> Flow[tuple[Base | None, int | None]]:
        """What to make the difference against, and the parent's record. Without a parent the thread's newest state
        will do: a nested line begins with much of what its caller has."""
        ctx, cursor, tip = self._context, self._cursor, self._tip
        if (
            tip is not None
            and tip[0] == parent
            and (cached := ctx.cache.get((tenant, cursor.tree, tip[1]))) is not None
        ):
            return cached, tip[1]
        try:
            row, follows, loaded = yield from read(partial(self._read_base, tenant, parent))
        except Damaged:
            return None, None  # the new record carries its full text
        if row is not None:
            cursor.resolve(row.thread, row.tree)
        return (base_of(loaded, row.generation) if row is not None and loaded is not None else None), follows

    def _read_base(
        self, tenant: int, parent: bytes | None
    ) -> Program[tuple[ThreadRow | None, int | None, Loaded | None]]:
        row = yield from try_thread(tenant, self._cursor.name, self._cursor.thread)
        if row is None:
            return None, None, None
        found = (yield from _find(tenant, row, self.namespace, parent)) if parent is not None else None
        wanted = found.record if found is not None else row.head
        loaded = (yield from read_state(tenant, row.tree, wanted)) if wanted is not None else None
        return row, found.record if found is not None else None, loaded

    def _attach(self, id: str, key: str, value: Any, replace: bool) -> Flow[None]:
        ctx, cursor = self._context, self._cursor
        one = Write(pack_id(key), -1 if replace else 0, "", "", encode(value, ctx.codec))
        tenant = yield from ctx.ensure_tenant()
        put = partial(put_writes, tenant, cursor.name, cursor.thread, self.namespace, pack_id(id), [one], None)
        yield from write(partial(put, at=ctx.clock_us()))

    # --- reading

    @meters.operation("load")
    def _load(self, id: str | None) -> Flow[LineCheckpoint | None]:
        tenant = yield from self._context.tenant()
        if tenant is None:
            return None
        try:
            stored = yield from read(partial(self._read, tenant, pack_id(id) if id is not None else None))
        except NotFound:
            return None
        return None if stored is None else self._decoded(stored)

    def _read(self, tenant: int, id_: bytes | None) -> Program[_Stored | None]:
        row = yield from find_thread(tenant, self._cursor.name, self._cursor.thread)
        found = yield from _find(tenant, row, self.namespace, id_)
        return None if found is None else (yield from self._read_found(tenant, row, found))

    def _read_page(self, tenant: int, before: bytes | None, limit: int) -> Program[list[_Stored]]:
        row = yield from find_thread(tenant, self._cursor.name, self._cursor.thread)
        space = yield from find_space(tenant, row.thread, self.namespace)
        if space is None:
            return []
        found: list[LabelRow] = yield from list_labels(
            tenant, thread=row.thread, space=space[0], before=before, limit=limit
        )
        page: list[_Stored] = []
        for label in found:
            stored = yield from self._read_found(tenant, row, Found(label.space, label.id, label.record))
            page.append(stored)
        return page

    def _read_found(self, tenant: int, row: ThreadRow, found: Found) -> Program[_Stored]:
        cached = self._context.cache.get((tenant, row.tree, found.record))
        text = cached.data if cached is not None else None
        if text is None:
            loaded = yield from read_state(tenant, row.tree, found.record)
            if loaded is None:
                record = show_id(found.record)
                message = f"thread {row.name!r}: checkpoint {record} is missing; run `perdure store verify`"
                raise Damaged(message, checkpoints=(record,))
            text = loaded.data
        [rows] = yield Batch(select_writes(tenant, row.thread, found.space, found.id))
        bases = yield from odd_bases(tenant, row.tree, rows, [found.record])
        return _Stored(found.id, text, writes_of(rows, {found.record: text, **bases}))

    def _decoded(self, stored: _Stored) -> LineCheckpoint:
        codec = self._context.codec
        # In order of keys; what replaces (index -1) comes before the first value (index 0), and wins.
        attachments: dict[str, Any] = {}
        for one in stored.writes:
            attachments.setdefault(unpack_id(one.task), decode(one.text, codec))
        return LineCheckpoint(unpack_id(stored.id), decode(stored.text, codec), attachments)


def _find(tenant: int, row: ThreadRow, namespace: str, id_: bytes | None) -> Program[Found | None]:
    """The label of an id, or of the newest checkpoint of a namespace."""
    space = yield from find_space(tenant, row.thread, namespace)
    if space is None:
        return None
    if id_ is not None:
        return (yield from find_label(tenant, row.thread, space[0], id_))
    head = row.head if space[0] == MAIN else space[1]
    found = yield from greatest_label(tenant, row.thread, space[0])
    if found is None or head is None or found.record == head:
        return found
    labels = yield from list_labels(tenant, thread=row.thread, space=space[0], limit=_PAGE)
    # A clock that stepped back gave the newest a smaller id. A head without a label was not saved by this line.
    return next((Found(label.space, label.id, label.record) for label in labels if label.record == head), found)


class _LinePages:
    """How far the history of a line was read."""

    def __init__(self, line: Line, before: str | None, limit: int | None) -> None:
        self._line, self._before = line, pack_id(before) if before is not None else None
        self.left = 2**62 if limit is None else limit

    def read(self) -> Flow[list[LineCheckpoint]]:
        tenant = yield from self._line._context.tenant()
        size = min(_PAGE, self.left)
        stored: list[_Stored] = []
        if tenant is not None:
            try:
                stored = yield from read(partial(self._line._read_page, tenant, self._before, size))
            except NotFound:
                pass
        self.left = self.left - len(stored) if len(stored) == size else 0
        if stored:
            self._before = stored[-1].id
        return [self._line._decoded(one) for one in stored]
