"""The handle of a thread: every operation blocking and async, each a line over the same flow.

A handle is light and does no I/O when it is made. It may be used from any thread and any event loop of the process; it
remembers only where it stands: the checkpoint that it last loaded or saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import NotFound, ThreadDeleted, UnknownType, UsageError
from perdure.log import gc
from perdure.log.append import NOTHING
from perdure.log.reading import read_tips
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, find_thread, merge_metadata
from perdure.storage.program import Flow, Program, Progress, either, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads import flows, saves
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
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.merge import merged
from perdure.threads.models import Change, Checkpoint, Pruned, Report, ThreadInfo
from perdure.threads.retention import ThreadRetention
from perdure.threads.retention import checkpoint_id as _id
from perdure.threads.rollback import rollback
from perdure.threads.save_engine import save, save_now
from perdure.threads.saves import Save, journal_of
from perdure.values.codec import decode, encode

if TYPE_CHECKING:  # not every program keeps its states so
    from perdure.threads.autosave import AutoState
    from perdure.threads.autosave_policies import Policy
    from perdure.threads.line_reads import LineInfo
    from perdure.threads.lines import Line
    from perdure.values.largest_parts import SizedPart

Path = str | Sequence[str | int]
_PAGE = 100


class Thread(ThreadRetention):
    """A named line of work. Get one with `store.thread(name)`."""

    def __init__(self, context: StoreContext, cursor: Cursor) -> None:
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
        expect: Checkpoint | str | Literal[False] | None = None,
    ) -> Checkpoint:
        """Save a state: durable when this returns, and independent of the live object.

        It continues from the newest checkpoint that this handle loaded or saved, or from `parent`. If another writer
        has moved the head since, it becomes a branch (`is_head` is False) and nothing is lost; the handle's first one
        logs a warning. `expect` refuses that with a `Conflict` instead: it names the head, or is False where the thread
        must have no checkpoint yet. No other thread may change the state meanwhile.
        """
        context, cursor = self._context, self._cursor
        if note is None and metadata is None and parent is None and expect is None:
            wanted = Save(context, cursor, text=encode(state, context.codec))
        else:
            wanted = self._save(state, note, metadata, parent, expect)
        journal = saves.journal
        if journal is not None and journal.joins(context):
            return self._saved(*journal.save(wanted))
        done = save_now(wanted)
        assert done.record is not None
        return Checkpoint(cursor.name, done.record, is_head=done.on_head, source=self)

    async def asave(
        self,
        state: Any,
        *,
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent: Checkpoint | str | None = None,
        expect: Checkpoint | str | Literal[False] | None = None,
    ) -> Checkpoint:
        """`save`, awaited."""
        return await self._arun(self._perform(self._save(state, note, metadata, parent, expect)))

    @blocking
    def update(
        self,
        patch: Mapping[str, Any],
        *,
        remove: Iterable[Path] = (),
        note: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Flow[Checkpoint]:
        """Change the newest state: nested mappings are merged, all else replaced; `remove` names paths to take out.

        If another writer saves in between, it starts again from the new head, so no change is lost.
        """
        return self._perform(self._update(patch, remove, note, metadata))

    aupdate = awaited(update)

    @blocking
    def rollback(self, to: Checkpoint | str, *, note: str | None = None) -> Flow[Checkpoint]:
        """A new head that equals an old checkpoint; what came in between stays in the history."""
        return self._saved(*(yield from rollback(self._context, self._cursor, _required(to), check_note(note))))

    arollback = awaited(rollback)

    def autosave(
        self,
        policy: Policy,
        *,
        background: bool = False,
        initial: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> AutoState:
        """`with thread.autosave(perdure.autosave.every(5)) as state:` and `async with`: a state changed like a dict,
        and saved when the policy says so and at the end, also when the body raises.

        It starts from the newest checkpoint, and from `initial` if there is none. With `background` a thread writes,
        and the code waits only while the text is made; what is saved is the state at that call. In `async with` a
        thread always writes.
        """
        from perdure.threads.autosave import AutoState

        return AutoState(self._context, self._cursor, policy, note, initial, background)

    def line(self, namespace: str = "") -> Line:
        """A line of checkpoints whose ids the caller gives: what adapters of other frameworks are built on."""
        from perdure.threads.lines import Line

        return Line(self._context, self._cursor.name, check_namespace(namespace), self._cursor.merge)

    @blocking
    def lines(self) -> Flow[list[LineInfo]]:
        """The lines of this thread by namespace, with the checkpoints that their ids stand for."""
        from perdure.threads.line_reads import lines_of

        tenant, row = yield from flows.locate(self._context, self._cursor)
        return (yield from read(partial(lines_of, tenant, row)))

    alines = awaited(lines)

    # --- read

    @blocking
    def load(self, at: Checkpoint | str | None = None, *, strict: bool = False, raw: bool = False) -> Flow[Checkpoint]:
        """The newest valid checkpoint, or the one asked for, with its state.

        What is damaged is never returned: the newest valid ancestor is, and its `skipped` names what was passed over;
        `strict` raises `Damaged` instead. `raw` gives a readable form that needs none of your classes.
        """
        row, loaded, skipped = yield from flows.load(self._context, self._cursor, _id(at), strict=strict)
        state = decode(loaded.data, self._context.codec, raw=raw)
        return Checkpoint(self.name, loaded.record, is_head=loaded.record.id == row.head, state=state, skipped=skipped)

    aload = awaited(load)

    @blocking
    def get_head(self) -> Flow[Checkpoint | None]:
        """The newest checkpoint, without decoding its state. None: nothing was saved yet."""
        try:
            found = yield from flows.history(self._context, self._cursor, None, 1)
        except ThreadDeleted:
            raise
        except NotFound:
            return None
        return self._checkpoints(*found)[0]

    aget_head = awaited(get_head)

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

    @blocking
    def branches(self) -> Flow[list[Checkpoint]]:
        """The ends of all lines of this thread, newest first: the head, and what became a branch."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        return self._checkpoints(row.head, (yield from read(partial(read_tips, tenant, row.tree, row.thread))))

    abranches = awaited(branches)

    @blocking
    def diff(
        self, before: Checkpoint | str, after: Checkpoint | str | None = None, *, raw: bool = False
    ) -> Flow[list[Change]]:
        """What changed between two checkpoints (default: up to the head), path by path.

        `raw` compares the readable form that needs none of your classes, and so goes into them too.
        """
        _, old, _ = yield from flows.load(self._context, self._cursor, _required(before), strict=True)
        _, new, _ = yield from flows.load(self._context, self._cursor, _id(after), strict=True, look=True)
        if old.data == new.data:
            return []
        codec = self._context.codec
        try:
            return compare(decode(old.data, codec, raw=raw), decode(new.data, codec, raw=raw))
        except UnknownType:  # comparing needs no classes
            return compare(decode(old.data, codec, raw=True), decode(new.data, codec, raw=True))

    adiff = awaited(diff)

    @blocking
    def largest(self, n: int = 10, *, at: Checkpoint | str | None = None) -> Flow[list[SizedPart]]:
        """What makes a state large (default: the newest): paths with the bytes of their text, the largest first. A
        part's size includes what it contains. If one child makes up 90 % of a value, only the child is listed."""
        from perdure.values.largest_parts import largest

        count = check_limit(n) or 0
        _, loaded, _ = yield from flows.load(self._context, self._cursor, _id(at), look=True)
        return largest(loaded.data, count)

    alargest = awaited(largest)

    @blocking
    def info(self) -> Flow[ThreadInfo]:
        """The thread's metadata, head and times."""
        _, row = yield from flows.locate(self._context, self._cursor)
        return ThreadInfo.of(row)

    ainfo = awaited(info)

    # --- arrange

    @blocking
    def fork(
        self, at: Checkpoint | str | None = None, *, name: str, metadata: Mapping[str, Any] | None = None
    ) -> Flow[Thread]:
        """A new thread that continues from a checkpoint (default: the head). Copies nothing."""
        about = check_metadata(metadata) or {}
        number, tree, head = yield from flows.fork(self._context, self._cursor, _id(at), check_name(name), about)
        return Thread(self._context, Cursor(name, thread=number, tree=tree, record=head))

    afork = awaited(fork)

    @blocking
    def annotate(self, metadata: Mapping[str, Any]) -> Flow[ThreadInfo]:
        """Merge into the thread's metadata, by which `store.threads(where=…)` finds it; None removes a key."""
        about = check_metadata(metadata) or {}
        tenant, row = yield from flows.locate(self._context, self._cursor)
        yield from write(partial(_annotate, tenant, row, about))
        _, row = yield from flows.locate(self._context, self._cursor)
        return ThreadInfo.of(row)

    aannotate = awaited(annotate)

    @blocking
    def prune(self, *, keep: int) -> Flow[Pruned]:
        """Remove all but the newest `keep` checkpoints of each line of this thread. What a fork needs stays."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        done = yield from gc.prune(tenant, row.name, row.thread, check_keep(keep))
        return Pruned(*done)

    aprune = awaited(prune)

    @blocking
    def verify(self, *, progress: Progress | None = None) -> Flow[Report]:
        """Check every record of this thread, and those that it shares with other threads: hashes, keyframes, the
        head."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        from perdure.log import verify  # imported late: few programs verify

        return Report.of([(yield from verify.verify_thread(tenant, row, progress))])

    averify = awaited(verify)

    # --- what they share

    def _save(
        self,
        state: Any,
        note: str | None,
        metadata: Mapping[str, Any] | None,
        parent: Checkpoint | str | None,
        expect: Checkpoint | str | Literal[False] | None,
    ) -> Save:
        head = NOTHING if expect is False else _id(expect)
        about = (check_note(note), check_metadata(metadata), _id(parent), head)
        return Save(self._context, self._cursor, *about, encode(state, self._context.codec))

    def _perform(self, wanted: Save) -> Flow[Checkpoint]:
        if (journal := journal_of(self._context)) is None:
            done = yield from save(wanted)
            assert done.record is not None
            return self._saved(done.record, done.on_head)
        return self._saved(*(yield from either(partial(journal.save, wanted), partial(journal.asave, wanted))))

    def _update(
        self,
        patch: Mapping[str, Any],
        remove: Iterable[Path],
        note: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Save:
        codec, paths, about = self._context.codec, check_paths(remove), (check_note(note), check_metadata(metadata))
        kept = decode(encode(patch, codec), codec)  # as it was passed: it may be merged more than once

        def merge(data: bytes) -> bytes:
            return encode(merged(decode(data, codec), kept, paths), codec)

        return Save(self._context, self._cursor, *about, merge=merge, asked=("update", kept, paths))

    def _saved(self, record: Record, is_head: bool) -> Checkpoint:
        return Checkpoint(self._cursor.name, record, is_head=is_head, source=self)

    def _checkpoints(self, head: int | None, records: Iterable[Record]) -> list[Checkpoint]:
        return [self._saved(record, record.id == head) for record in records]


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
        return thread._checkpoints(head, records)


def _annotate(tenant: int, row: ThreadRow, metadata: Mapping[str, Any]) -> Program[None]:
    locked = yield from find_thread(tenant, row.name, row.thread, lock=True)
    yield from merge_metadata(tenant, locked, metadata)


def _required(checkpoint: Checkpoint | str) -> int:
    if (found := _id(checkpoint)) is None:
        raise UsageError("expected a checkpoint or its id, not None")
    return found
