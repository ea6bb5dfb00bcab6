"""The handle of a thread: every operation blocking and async, each a line over the same flow.

A handle is light and does no I/O when it is made. It may be used from any thread and any event loop of the process; it
remembers only where it stands: the checkpoint that it last loaded or saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import UnknownType, UsageError
from perdure.log import gc
from perdure.log.records import Record
from perdure.storage.program import Flow, Progress, read
from perdure.threads import flows
from perdure.threads.checks import (
    check_keep,
    check_limit,
    check_metadata,
    check_name,
    check_namespace,
    check_note,
    check_paths,
)
from perdure.threads.compare import compare
from perdure.threads.context import Context, Cursor
from perdure.threads.merging import merged
from perdure.threads.models import Change, Checkpoint, Pruned, Report, ThreadInfo
from perdure.threads.retention import Keeping
from perdure.threads.retention import checkpoint_id as _id
from perdure.threads.rollback import rollback
from perdure.threads.straight_save import straight_save
from perdure.threads.transactional_save import Save, journal_of
from perdure.values.codec import decode, encode

if TYPE_CHECKING:  # not every program keeps its states so
    from perdure.threads.autosave import Autosave
    from perdure.threads.autosave_policies import Policy
    from perdure.threads.line_reads import LineInfo
    from perdure.threads.lines import Line
    from perdure.values.sizing import Part

T = TypeVar("T")
Path = str | Sequence[str | int]
_PAGE = 100


class Thread(Keeping):
    """A named line of work. Get one with `store.thread(name)`."""

    def __init__(self, context: Context, cursor: Cursor) -> None:
        self._context = context
        self._cursor = cursor

    @property
    def name(self) -> str:
        return self._cursor.name

    def __repr__(self) -> str:
        return f"<Thread {self.name!r} of tenant {self._context.tenant_name!r}>"

    # --- save

    def save(
        self,
        state: Any,
        *,
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent: Checkpoint | str | None = None,
        expect: Checkpoint | str | None = None,
    ) -> Checkpoint:
        """Save a state: durable when this returns, and independent of the live object.

        It continues from the newest checkpoint that this handle loaded or saved, or from `parent`. If another writer
        has moved the head since, it becomes a branch (`is_head` is False) and nothing is lost; the handle's first one
        logs a warning. `expect` refuses that with a `Conflict` instead. No other thread may change the state meanwhile.
        """
        if (journal := journal_of(self._context)) is not None:
            record, on_head = journal.save(self._journaled(state, note, metadata, parent, expect))
            return self._checkpoint(record, is_head=on_head)
        text = encode(state, self._context.codec)
        if metadata is None and parent is None and expect is None:
            done = straight_save(self._context, self._cursor, text, note and check_note(note))
            if done is not None:
                return self._checkpoint(done[0], is_head=done[1])
        return self._run(self._save(text, note, metadata, parent, expect))

    async def asave(
        self,
        state: Any,
        *,
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent: Checkpoint | str | None = None,
        expect: Checkpoint | str | None = None,
    ) -> Checkpoint:
        """`save`, awaited."""
        if (journal := journal_of(self._context)) is not None:
            record, on_head = await journal.asave(self._journaled(state, note, metadata, parent, expect))
            return self._checkpoint(record, is_head=on_head)
        text = encode(state, self._context.codec)
        return await self._arun(self._save(text, note, metadata, parent, expect))

    def update(
        self,
        patch: Mapping[str, Any],
        *,
        remove: Iterable[Path] = (),
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Change the newest state: nested mappings are merged, all else replaced; `remove` names paths to take out.

        If another writer saves in between, it starts again from the new head, so no change is lost.
        """
        if (journal := journal_of(self._context)) is not None:
            record, on_head = journal.save(self._journaled_update(patch, remove, note, metadata))
            return self._checkpoint(record, is_head=on_head)
        return self._run(self._update(patch, remove, note, metadata))

    async def aupdate(
        self,
        patch: Mapping[str, Any],
        *,
        remove: Iterable[Path] = (),
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """`update`, awaited."""
        if (journal := journal_of(self._context)) is not None:
            record, on_head = await journal.asave(self._journaled_update(patch, remove, note, metadata))
            return self._checkpoint(record, is_head=on_head)
        return await self._arun(self._update(patch, remove, note, metadata))

    def rollback(self, to: Checkpoint | str, *, note: str | None = None) -> Checkpoint:
        """A new head that equals an old checkpoint; what came in between stays in the history."""
        return self._run(self._rollback(to, note))

    async def arollback(self, to: Checkpoint | str, *, note: str | None = None) -> Checkpoint:
        """`rollback`, awaited."""
        return await self._arun(self._rollback(to, note))

    def autosave(
        self,
        policy: Policy,
        *,
        background: bool = False,
        initial: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> Autosave:
        """`with thread.autosave(perdure.autosave.every(5)) as state:` and `async with`: a state changed like a dict,
        and saved when the policy says so and at the end, also when the body raises.

        It starts from the newest checkpoint, and from `initial` if there is none. With `background` a thread writes,
        and the code waits only while the text is made; what is saved is the state at that call. In `async with` a
        thread always writes.
        """
        from perdure.threads.autosave import Autosave, AutoState

        return Autosave(AutoState(self._context, self._cursor, policy, note), initial, background)

    def line(self, namespace: str = "") -> Line:
        """A line of checkpoints whose ids the caller gives: what adapters of other frameworks are built on."""
        from perdure.threads.lines import Line

        return Line(self._context, self._cursor, check_namespace(namespace))

    def lines(self) -> list[LineInfo]:
        """The lines of this thread by namespace, with the checkpoints that their ids stand for."""
        return self._run(self._lines())

    async def alines(self) -> list[LineInfo]:
        """`lines`, awaited."""
        return await self._arun(self._lines())

    # --- read

    def load(self, at: Checkpoint | str | None = None, *, strict: bool = False, raw: bool = False) -> Checkpoint:
        """The newest valid checkpoint, or the one asked for, with its state.

        What is damaged is never returned: the newest valid ancestor is, and its `skipped` names what was passed over;
        `strict` raises `Damaged` instead. `raw` gives a readable form that needs none of your classes.
        """
        return self._run(self._load(at, strict, raw))

    async def aload(self, at: Checkpoint | str | None = None, *, strict: bool = False, raw: bool = False) -> Checkpoint:
        """`load`, awaited."""
        return await self._arun(self._load(at, strict, raw))

    def head(self) -> Checkpoint | None:
        """The newest checkpoint, without decoding its state. None: nothing was saved yet."""
        return self._run(self._head())

    async def ahead(self) -> Checkpoint | None:
        """`head`, awaited."""
        return await self._arun(self._head())

    def history(self, *, limit: int | None = None, start: Checkpoint | str | None = None) -> Iterator[Checkpoint]:
        """The checkpoints that led here, newest first. States are decoded when asked for. Read in pages: nothing is
        held open while you work on one."""
        pages = _Pages(self, limit, start)
        while pages.wanted:
            yield from self._run(pages.flow())

    async def ahistory(
        self, *, limit: int | None = None, start: Checkpoint | str | None = None
    ) -> AsyncIterator[Checkpoint]:
        """`history`, as an async iterator."""
        pages = _Pages(self, limit, start)
        while pages.wanted:
            for checkpoint in await self._arun(pages.flow()):
                yield checkpoint

    def branches(self) -> list[Checkpoint]:
        """The ends of all lines of this thread, newest first: the head, and what became a branch."""
        return self._run(self._branches())

    async def abranches(self) -> list[Checkpoint]:
        """`branches`, awaited."""
        return await self._arun(self._branches())

    def diff(
        self, before: Checkpoint | str, after: Checkpoint | str | None = None, *, raw: bool = False
    ) -> list[Change]:
        """What changed between two checkpoints (default: up to the head), path by path.

        `raw` compares the readable form that needs none of your classes, and so goes into them too.
        """
        return self._run(self._diff(before, after, raw))

    async def adiff(
        self, before: Checkpoint | str, after: Checkpoint | str | None = None, *, raw: bool = False
    ) -> list[Change]:
        """`diff`, awaited."""
        return await self._arun(self._diff(before, after, raw))

    def largest(self, n: int = 10, *, at: Checkpoint | str | None = None) -> list[Part]:
        """What makes a state large (default: the newest): paths with the bytes of their text, the largest first. A
        part's size includes what it contains. If one child makes up 90 % of a value, only the child is listed."""
        return self._run(self._largest(n, at))

    async def alargest(self, n: int = 10, *, at: Checkpoint | str | None = None) -> list[Part]:
        """`largest`, awaited."""
        return await self._arun(self._largest(n, at))

    def info(self) -> ThreadInfo:
        """The thread's metadata, head and times."""
        return self._run(self._info())

    async def ainfo(self) -> ThreadInfo:
        """`info`, awaited."""
        return await self._arun(self._info())

    # --- arrange

    def fork(
        self, at: Checkpoint | str | None = None, *, name: str, metadata: Mapping[str, Any] | None = None
    ) -> Thread:
        """A new thread that continues from a checkpoint (default: the head). Copies nothing."""
        return self._run(self._fork(at, name, metadata))

    async def afork(
        self, at: Checkpoint | str | None = None, *, name: str, metadata: Mapping[str, Any] | None = None
    ) -> Thread:
        """`fork`, awaited."""
        return await self._arun(self._fork(at, name, metadata))

    def annotate(self, metadata: Mapping[str, Any]) -> ThreadInfo:
        """Merge into the thread's metadata, by which `store.threads(where=…)` finds it; None removes a key."""
        return self._run(self._annotate(metadata))

    async def aannotate(self, metadata: Mapping[str, Any]) -> ThreadInfo:
        """`annotate`, awaited."""
        return await self._arun(self._annotate(metadata))

    def prune(self, *, keep: int, progress: Progress | None = None) -> Pruned:
        """Remove all but the newest `keep` checkpoints of this thread's line. What a fork needs stays.

        `progress` is called with (done, of how many).
        """
        return self._run(self._prune(keep, progress))

    async def aprune(self, *, keep: int, progress: Progress | None = None) -> Pruned:
        """`prune`, awaited."""
        return await self._arun(self._prune(keep, progress))

    def verify(self, *, progress: Progress | None = None) -> Report:
        """Check every record of this thread's tree: hashes, keyframes, the head."""
        return self._run(self._verify(progress))

    async def averify(self, *, progress: Progress | None = None) -> Report:
        """`verify`, awaited."""
        return await self._arun(self._verify(progress))

    # --- the same, as flows

    def _save(
        self,
        text: bytes,
        note: str | None,
        metadata: Mapping[str, Any] | None,
        parent: Checkpoint | str | None,
        expect: Checkpoint | str | None,
    ) -> Flow[Checkpoint]:
        record, on_head = yield from flows.save(
            self._context,
            self._cursor,
            text,
            note=check_note(note),
            metadata=check_metadata(metadata),
            parent=_id(parent),
            expect=_id(expect),
        )
        return self._checkpoint(record, is_head=on_head)

    def _journaled(
        self,
        state: Any,
        note: str | None,
        metadata: Mapping[str, Any] | None,
        parent: Checkpoint | str | None,
        expect: Checkpoint | str | None,
    ) -> Save:
        """A save inside a durable run, which writes it down."""
        text, about = encode(state, self._context.codec), check_metadata(metadata)
        at = (_id(parent), _id(expect))
        wanted = encode([check_note(note), about, *at], self._context.codec) + text
        return Save(self._context, self._cursor, wanted, text, note=note, metadata=about, parent=at[0], expect=at[1])

    def _journaled_update(
        self,
        patch: Mapping[str, Any],
        remove: Iterable[Path],
        note: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Save:
        codec, paths, about = self._context.codec, check_paths(remove), check_metadata(metadata)
        wanted = encode(["update", check_note(note), about, patch, paths], codec)
        kept = decode(wanted, codec)[3]  # as it was passed: it may be merged more than once

        def merge(data: Any) -> bytes:
            return encode(merged(decode(data, codec), kept, paths), codec)

        return Save(self._context, self._cursor, wanted, merge=merge, note=note, metadata=about)

    def _update(
        self,
        patch: Mapping[str, Any],
        remove: Iterable[Path],
        note: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Flow[Checkpoint]:
        codec = self._context.codec
        paths = check_paths(remove)
        record, on_head = yield from flows.update(
            self._context,
            self._cursor,
            lambda data: encode(merged(decode(data, codec), patch, paths), codec),
            check_note(note),
            check_metadata(metadata),
        )
        return self._checkpoint(record, is_head=on_head)

    def _rollback(self, to: Checkpoint | str, note: str | None) -> Flow[Checkpoint]:
        record, on_head = yield from rollback(self._context, self._cursor, _required(to), check_note(note))
        return self._checkpoint(record, is_head=on_head)

    def _load(self, at: Checkpoint | str | None, strict: bool, raw: bool) -> Flow[Checkpoint]:
        row, loaded, skipped = yield from flows.load(self._context, self._cursor, _id(at), strict=strict)
        return Checkpoint(
            self.name,
            loaded.record,
            is_head=loaded.record.id == row.head,
            state=decode(loaded.data, self._context.codec, raw=raw),
            skipped=skipped,
        )

    def _head(self) -> Flow[Checkpoint | None]:
        if (yield from self._context.tenant()) is None:
            self._cursor.found_nothing = self._cursor.thread is None
            return None
        head, records = yield from flows.newest(self._context, self._cursor)
        return self._checkpoint(records[0], is_head=records[0].id == head) if records else None

    def _branches(self) -> Flow[list[Checkpoint]]:
        head, records = yield from flows.tips(self._context, self._cursor)
        return [self._checkpoint(record, is_head=record.id == head) for record in records]

    def _diff(self, before: Checkpoint | str, after: Checkpoint | str | None, raw: bool) -> Flow[list[Change]]:
        _, old, _ = yield from flows.load(self._context, self._cursor, _required(before), strict=True)
        _, new, _ = yield from flows.load(self._context, self._cursor, _id(after), strict=True, look=True)
        if old.data == new.data:
            return []
        codec = self._context.codec
        try:
            return compare(decode(old.data, codec, raw=raw), decode(new.data, codec, raw=raw))
        except UnknownType:  # comparing needs no classes
            return compare(decode(old.data, codec, raw=True), decode(new.data, codec, raw=True))

    def _largest(self, n: int, at: Checkpoint | str | None) -> Flow[list[Part]]:
        from perdure.values.sizing import largest

        count = check_limit(n) or 0
        _, loaded, _ = yield from flows.load(self._context, self._cursor, _id(at), look=True)
        return largest(loaded.data, count)

    def _lines(self) -> Flow[list[LineInfo]]:
        from perdure.threads.line_reads import lines_of

        tenant, row = yield from flows.locate(self._context, self._cursor)
        return (yield from read(partial(lines_of, tenant, row)))

    def _info(self) -> Flow[ThreadInfo]:
        _, row = yield from flows.locate(self._context, self._cursor)
        return ThreadInfo.of(row)

    def _fork(self, at: Checkpoint | str | None, name: str, metadata: Mapping[str, Any] | None) -> Flow[Thread]:
        number, tree, head = yield from flows.fork(
            self._context, self._cursor, _id(at), check_name(name), check_metadata(metadata) or {}
        )
        return Thread(self._context, Cursor(name, thread=number, tree=tree, record=head))

    def _annotate(self, metadata: Mapping[str, Any]) -> Flow[ThreadInfo]:
        yield from flows.annotate(self._context, self._cursor, check_metadata(metadata) or {})
        return (yield from self._info())

    def _prune(self, keep: int, progress: Progress | None) -> Flow[Pruned]:
        tenant, row = yield from flows.locate(self._context, self._cursor)
        done = yield from gc.prune(tenant, row.name, row.thread, check_keep(keep), progress)
        return Pruned(*done)

    def _verify(self, progress: Progress | None) -> Flow[Report]:
        tenant, row = yield from flows.locate(self._context, self._cursor)
        from perdure.log import verify  # imported late: few programs verify

        return Report.of([(yield from verify.verify_tree(tenant, row.tree, progress))])

    def _checkpoint(self, record: Record, *, is_head: bool) -> Checkpoint:
        return Checkpoint(self._cursor.name, record, is_head=is_head, fetch=self._fetch_state)

    def _fetch_state(self, at: str) -> Any:
        return self.load(at, strict=True).state


class _Pages:
    """How far a history was read: what blocking and async iteration share."""

    def __init__(self, thread: Thread, limit: int | None, start: Checkpoint | str | None) -> None:
        self._thread = thread
        self._left = check_limit(limit)
        self._next = _id(start)
        self._first_page = True
        self.wanted = self._left is None or self._left > 0

    def flow(self) -> Flow[list[Checkpoint]]:
        thread = self._thread
        size = _PAGE if self._left is None else min(_PAGE, self._left)
        head, records = yield from flows.history(
            thread._context, thread._cursor, self._next, size, first_page=self._first_page
        )
        self._first_page = False
        parent = records[-1].parent if records else None
        # Parents are older; a damaged pointer that says otherwise must not lead in circles.
        self._next = parent if parent is not None and parent < records[-1].id else None
        if self._left is not None:
            self._left -= len(records)
        self.wanted = len(records) == size and self._next is not None and self._left != 0
        return [thread._checkpoint(record, is_head=record.id == head) for record in records]


def _required(checkpoint: Checkpoint | str) -> int:
    if (found := _id(checkpoint)) is None:
        raise UsageError("a checkpoint or its id is wanted here, not NoneType")
    return found
