"""The handle of a thread. Each operation has a blocking and an async form, and both drive the same flow.

Creating a handle does no I/O. A handle may be used from any thread and any event loop of the process. Its only state is
its cursor: the checkpoint that it last loaded or saved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import NotFound, ThreadDeleted, UnknownType, UsageError
from perdure.log import gc
from perdure.log.append import NOTHING
from perdure.log.ids import show_id
from perdure.log.reading import read_tips
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, find_thread, merge_metadata
from perdure.storage.program import Flow, Program, Progress, either, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads import flows, saves
from perdure.threads.actions import noted
from perdure.threads.checks import (
    check_keep,
    check_limit,
    check_metadata,
    check_name,
    check_namespace,
    check_note,
    check_paths,
    check_points,
    check_step,
)
from perdure.threads.compare import compare
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.merge import edited, merged
from perdure.threads.models import Change, Checkpoint, Pruned, Report, ThreadInfo
from perdure.threads.retention import ThreadRetention
from perdure.threads.retention import checkpoint_id as _id
from perdure.threads.rollback import rollback
from perdure.threads.save_engine import save, save_now
from perdure.threads.saves import Save, journal_of
from perdure.values.codec import decode, encode
from perdure.values.external import encode_noting

if TYPE_CHECKING:  # imported on first use: most programs need none of these
    from perdure.threads.autosave import AutoState
    from perdure.threads.autosave_policies import Policy
    from perdure.threads.failures import AutosaveInfo
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
        """Save a state. It is durable when this returns, and later changes to the object do not affect it.

        The checkpoint follows `parent`, by default the one that this handle last loaded or saved. If another writer has
        moved the head since, the checkpoint becomes a branch: `is_head` is False and nothing is lost. The first branch
        of a handle logs a warning. `expect` raises `Conflict` instead of branching: pass the checkpoint that must be
        the head, or False if the thread must have no checkpoint yet. No other thread may change the state meanwhile.
        """
        context, cursor = self._context, self._cursor
        if note is None and metadata is None and parent is None and expect is None and context.objects is None:
            request = Save(context, cursor, text=encode(state, context.codec))
        else:
            request = self._save(state, note, metadata, parent, expect)
        journal = saves.journal
        if journal is not None and journal.joins(context):
            return self._saved(*journal.save(request))
        done = save_now(request)
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
        """Merge a patch into the newest state, and save the result.

        Nested mappings are merged, other values replaced, and the paths in `remove` deleted. If another writer saves in
        between, the update is repeated on the new head, so no change is lost.
        """
        return self._perform(self._update(patch, remove, note, metadata))

    aupdate = awaited(update)

    @blocking
    def edit(
        self,
        path: Path,
        value: Any,
        *,
        note: str | None = None,
        expect: Checkpoint | str | None = None,
        who: str | None = None,
    ) -> Flow[Checkpoint]:
        """Replace one value of the newest state, and save the result. It needs none of your classes.

        `path` is a key, or a list of keys and positions: `["plan", "steps", 3]`. It leads through dicts and lists. If
        another writer saves in between, the edit is repeated on the new head; with `expect`, the checkpoint that must
        be the head, it raises `Conflict` instead. `who` is recorded in `store.ops.actions()`.
        """
        codec, [place] = self._context.codec, check_paths([path])
        text, values = encode_noting(value, codec)
        merge, asked = partial(_edited, place, text), ("edit", place, decode(text, codec))
        about = (check_note(note), None, None, _id(expect))
        saving = self._perform(Save(self._context, self._cursor, *about, merge=merge, asked=asked, values=values))
        return noted(self._context, who, "edit", f"thread {self.name}", saving, path=place)

    aedit = awaited(edit)

    @blocking
    def rollback(self, to: Checkpoint | str, *, note: str | None = None, who: str | None = None) -> Flow[Checkpoint]:
        """Save the state of an old checkpoint as the new head. The checkpoints in between stay in the history.

        `who` is recorded in `store.ops.actions()`, as in `fork`."""
        target = _required(to)
        going = rollback(self._context, self._cursor, target, check_note(note))
        return self._saved(
            *(yield from noted(self._context, who, "rollback", f"thread {self.name}", going, to=show_id(target)))
        )

    arollback = awaited(rollback)

    def autosave(
        self,
        policy: Policy,
        *,
        background: bool = False,
        initial: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> AutoState:
        """Return a state that is changed like a dict and saved by a policy, as a context manager.

        Use it as `with thread.autosave(perdure.autosave.every(5)) as state:` or with `async with`. The state is also
        saved at the end, even if the body raises. It starts from the newest checkpoint, or from `initial` if there is
        none. With `background` a thread writes: the caller waits only while the state is encoded, and what is saved is
        the state at that call. `async with` always writes in a thread.
        """
        from perdure.threads.autosave import AutoState

        return AutoState(self._context, self._cursor, policy, note, initial, background)

    @blocking
    def get_autosave(self) -> Flow[AutosaveInfo | None]:
        """Return what adaptive autosave has measured on this thread, or None if it was never used. Raises NotFound."""
        from perdure.threads.failures import read_info

        tenant, row = yield from flows.locate(self._context, self._cursor)
        return (yield from read_info(tenant, row.thread))

    aget_autosave = awaited(get_autosave)

    def line(self, namespace: str = "") -> Line:
        """Return a line: checkpoints under ids that the caller chooses. Adapters of other frameworks build on it."""
        from perdure.threads.lines import Line

        return Line(self._context, self._cursor.name, check_namespace(namespace), self._cursor.merge)

    @blocking
    def lines(self, *, of: Checkpoint | str | None = None) -> Flow[list[LineInfo]]:
        """Return the lines of this thread by namespace. Each maps the caller's ids to checkpoints.

        With `of`, it is enough that the ids of that checkpoint are among them: a long history is not read.
        """
        from perdure.threads.line_reads import lines_of

        tenant, row = yield from flows.locate(self._context, self._cursor)
        return (yield from read(partial(lines_of, tenant, row, _id(of))))

    alines = awaited(lines)

    # --- read

    @blocking
    def load(self, at: Checkpoint | str | None = None, *, strict: bool = False, raw: bool = False) -> Flow[Checkpoint]:
        """Load a checkpoint with its state: the newest, or the one that `at` names.

        A damaged checkpoint is never returned. Its newest valid ancestor is returned instead, whose `skipped` lists the
        damaged ids; `strict` raises `Damaged` instead. `raw` decodes to a readable form that needs none of your
        classes.
        """
        row, loaded, skipped = yield from flows.load(self._context, self._cursor, _id(at), strict=strict)
        state = decode(loaded.data, self._context.codec, raw=raw)
        return Checkpoint(self.name, loaded.record, is_head=loaded.record.id == row.head, state=state, skipped=skipped)

    aload = awaited(load)

    @blocking
    def get_head(self) -> Flow[Checkpoint | None]:
        """Return the newest checkpoint without decoding its state, or None if nothing was saved yet."""
        try:
            page = yield from flows.history(self._context, self._cursor, None, 1)
        except ThreadDeleted:
            raise
        except NotFound:
            return None
        return self._checkpoints(*page)[0]

    aget_head = awaited(get_head)

    def history(self, *, limit: int | None = None, start: Checkpoint | str | None = None) -> Iterator[Checkpoint]:
        """Iterate over the head (or `start`) and its ancestors, newest first.

        A state is loaded when its `state` is read. Checkpoints are read in pages: no transaction is open while your
        code runs.
        """
        pages = _Pages(self, limit, start)
        while pages.has_more:
            yield from self._run(pages.flow())

    async def ahistory(
        self, *, limit: int | None = None, start: Checkpoint | str | None = None
    ) -> AsyncIterator[Checkpoint]:
        """`history`, as an async iterator."""
        pages = _Pages(self, limit, start)
        while pages.has_more:
            for checkpoint in await self._arun(pages.flow()):
                yield checkpoint

    @blocking
    def at_step(self, step: int) -> Flow[Checkpoint]:
        """Return the checkpoint of the head's history whose `step` is this number: 0 is the first ever saved.

        A step keeps its number when older checkpoints are pruned. Raises NotFound if that one was removed, or if the
        head's step is smaller. It takes about the same time anywhere in a long history. The state is loaded when its
        `state` is read.
        """
        return self._saved_at(*(yield from flows.at_step(self._context, self._cursor, check_step(step))))

    aat_step = awaited(at_step)

    @blocking
    def sizes(self, *, points: int = 200) -> Flow[list[Checkpoint]]:
        """Return at most `points` checkpoints of the head's history, oldest first and about evenly apart.

        For a picture of how a thread grew: `size_bytes`, `at`, `step` and `note` of each are there, and no state is
        read. The head and the oldest checkpoint that is left are among them. Of a history of more than 10,000 every
        128th is looked at.
        """
        return self._checkpoints(*(yield from flows.sizes(self._context, self._cursor, check_points(points))))

    asizes = awaited(sizes)

    @blocking
    def branches(self) -> Flow[list[Checkpoint]]:
        """Return the last checkpoint of every line of this thread, newest first: the head and each branch's end."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        return self._checkpoints(row.head, (yield from read(partial(read_tips, tenant, row.tree, row.thread))))

    abranches = awaited(branches)

    @blocking
    def diff(
        self, before: Checkpoint | str, after: Checkpoint | str | None = None, *, raw: bool = False
    ) -> Flow[list[Change]]:
        """Return the changes from one checkpoint to another (default: the head), path by path.

        `raw` compares the readable form, which needs none of your classes. It also compares the fields of your objects.
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
        """Return the largest parts of a state (default: the newest) with the bytes of their JSON text, largest first.

        The size of a part includes its children. If one child makes up 90 % of a value, only the child is listed.
        """
        from perdure.values.largest_parts import largest

        count = check_limit(n) or 0
        _, loaded, _ = yield from flows.load(self._context, self._cursor, _id(at), look=True)
        return largest(loaded.data, count)

    alargest = awaited(largest)

    @blocking
    def info(self) -> Flow[ThreadInfo]:
        """Return the thread's metadata, head and times."""
        _, row = yield from flows.locate(self._context, self._cursor)
        return ThreadInfo.of(row)

    ainfo = awaited(info)

    # --- arrange

    @blocking
    def fork(
        self,
        at: Checkpoint | str | None = None,
        *,
        name: str,
        metadata: Mapping[str, Any] | None = None,
        who: str | None = None,
    ) -> Flow[Thread]:
        """Create a thread that continues from a checkpoint (default: the head). No checkpoint is copied."""
        about = check_metadata(metadata) or {}
        forking = flows.fork(self._context, self._cursor, _id(at), check_name(name), about)
        number, tree, head = yield from noted(self._context, who, "fork", f"thread {self.name}", forking, name=name)
        return Thread(self._context, Cursor(name, thread=number, tree=tree, record=head))

    afork = awaited(fork)

    @blocking
    def annotate(self, metadata: Mapping[str, Any]) -> Flow[ThreadInfo]:
        """Merge keys into the thread's metadata, which `store.threads(where=…)` searches. None removes a key."""
        about = check_metadata(metadata) or {}
        tenant, row = yield from flows.locate(self._context, self._cursor)
        yield from write(partial(_annotate, tenant, row, about))
        _, row = yield from flows.locate(self._context, self._cursor)
        return ThreadInfo.of(row)

    aannotate = awaited(annotate)

    @blocking
    def prune(self, *, keep: int) -> Flow[Pruned]:
        """Remove all but the newest `keep` checkpoints of each line of this thread. Those that a fork needs stay."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        done = yield from gc.prune(tenant, row.name, row.thread, check_keep(keep))
        return Pruned(*done)

    aprune = awaited(prune)

    @blocking
    def verify(self, *, progress: Progress | None = None) -> Flow[Report]:
        """Check the hashes, keyframes and head of this thread, including the records it shares with other threads."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        from perdure.log import verify  # imported late: few programs verify

        return Report.of([(yield from verify.verify_thread(tenant, row, progress))])

    averify = awaited(verify)

    # --- shared by the blocking and the async form

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
        text, values = encode_noting(state, self._context.codec)
        return Save(self._context, self._cursor, *about, text, values=values)

    def _perform(self, request: Save) -> Flow[Checkpoint]:
        if (journal := journal_of(self._context)) is None:
            done = yield from save(request)
            assert done.record is not None
            return self._saved(done.record, done.on_head)
        return self._saved(*(yield from either(partial(journal.save, request), partial(journal.asave, request))))

    def _update(
        self,
        patch: Mapping[str, Any],
        remove: Iterable[Path],
        note: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Save:
        codec, paths, about = self._context.codec, check_paths(remove), (check_note(note), check_metadata(metadata))
        text, values = encode_noting(patch, codec)
        kept = decode(text, codec)  # a copy: a retry merges it again, and the caller may change it

        def merge(data: bytes) -> bytes:
            return encode(merged(decode(data, codec), kept, paths), codec)

        return Save(self._context, self._cursor, *about, merge=merge, asked=("update", kept, paths), values=values)

    def _saved(self, record: Record, is_head: bool) -> Checkpoint:
        return Checkpoint(self._cursor.name, record, is_head=is_head, source=self)

    def _saved_at(self, head: int | None, record: Record) -> Checkpoint:
        return self._saved(record, record.id == head)

    def _checkpoints(self, head: int | None, records: Iterable[Record]) -> list[Checkpoint]:
        return [self._saved_at(head, record) for record in records]


class _Pages:
    """The position of a history's iteration, blocking or async."""

    def __init__(self, thread: Thread, limit: int | None, start: Checkpoint | str | None) -> None:
        self._thread = thread
        self._left = check_limit(limit)
        self._next = _id(start)
        self._first_page = True
        self.has_more = self._left is None or self._left > 0

    def flow(self) -> Flow[list[Checkpoint]]:
        thread = self._thread
        size = _PAGE if self._left is None else min(_PAGE, self._left)
        head, records = yield from flows.history(
            thread._context, thread._cursor, self._next, size, first_page=self._first_page
        )
        self._first_page = False
        parent = records[-1].parent if records else None
        # A parent is older than its child. Stop at a damaged pointer to a newer one: it could lead in circles.
        self._next = parent if parent is not None and parent < records[-1].id else None
        if self._left is not None:
            self._left -= len(records)
        self.has_more = len(records) == size and self._next is not None and self._left != 0
        return thread._checkpoints(head, records)


def _annotate(tenant: int, row: ThreadRow, metadata: Mapping[str, Any]) -> Program[None]:
    locked = yield from find_thread(tenant, row.name, row.thread, lock=True)
    yield from merge_metadata(tenant, locked, metadata)


def _edited(path: tuple[Any, ...], value: bytes, text: bytes) -> bytes:
    return edited(text, path, value)


def _required(checkpoint: Checkpoint | str) -> int:
    if (number := _id(checkpoint)) is None:
        raise UsageError("expected a checkpoint or its id, not None")
    return number
