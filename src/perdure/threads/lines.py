"""Lines: checkpoints under ids that the caller chooses. Adapters of other frameworks are built on them.

`store.thread(name).line(namespace)` is one line of a thread. Namespace "" is the thread's own line: a save there moves
the thread's head. Other namespaces are lines of their own, stored as differences in the same tree.

Guarantees of a line:

- `save` is atomic, and durable when it returns. Saving an id again replaces the checkpoint of that id.
- A checkpoint follows the one that `parent` names. Without `parent` it starts a line. With `exclusive`, a save whose
  parent is not the newest checkpoint of the line raises `Conflict` and writes nothing.
- `load` returns a state that was checked against its hash, with its attachments, or None if there is no such id.
- `attach` adds a value to a checkpoint, even before that is saved. The first value of a key stays, unless `replace`.
  Attachments are deleted with their checkpoint.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypedDict, Unpack

from perdure.log.label_ids import pack_id
from perdure.log.labels import LABELLED_KIND, Label
from perdure.log.pending import Write
from perdure.storage.events import event
from perdure.storage.program import Flow, adrive, drive
from perdure.storage.twins import awaited, blocking
from perdure.threads import line_reads, line_saves
from perdure.threads.attachments import Ending, attach
from perdure.threads.checks import check_limit, check_note, check_text
from perdure.threads.context import Handle, StoreContext
from perdure.threads.line_reads import LineCheckpoint, LineFilters, Listing, Texts
from perdure.threads.line_saves import Encoded, LineSave, run_key, turn_of
from perdure.threads.save_engine import PreparedSave, save, save_now
from perdure.values.external import encode_noting, keys_of
from perdure.values.registry import Codec

_KIND = "line"
_log = logging.getLogger("perdure")


@cache
def warn_in_memory() -> None:
    """Log that a framework's checkpoints end with this process, once per process. Do nothing in pytest."""
    if "pytest" not in sys.modules:
        _log.warning(
            "checkpoints are kept in memory and end with this process; except in tests, name a file or PostgreSQL: "
            'PerdureSaver("agent.db"), PerdureSaver("postgresql://app@host/agents")',
            extra=event("store.in_memory"),
        )


class SaveOptions(TypedDict, total=False):
    """The options that `Line.save` and `Line.prepare` share."""

    parent: str | None  # the checkpoint that it follows; None starts a line
    note: str | None
    exclusive: bool  # raise Conflict unless the parent is the newest checkpoint,
    allowed: Collection[str]  # or is one of these ("" stands for no parent),
    forks: bool  # or the save may fork
    run: str | None  # the run that saves the checkpoint: `delete_runs` deletes by it


class Line(Handle):
    """One line of a thread: checkpoints under the caller's ids. Get one with `thread.line(namespace)`."""

    def __init__(
        self, context: StoreContext, thread: str, namespace: str, tags: Mapping[str, Any] | None = None
    ) -> None:
        self._context, self.thread, self.namespace = context, thread, namespace
        self._tags = tags or {}  # metadata for the thread
        self._texts: Texts | None = None

    def __repr__(self) -> str:
        return f"<Line {self.namespace!r} of thread {self.thread!r}>"

    def save(
        self,
        state: Any,
        *,
        id: str,
        writes: Sequence[Write] = (),
        before: PreparedSave | None = None,
        **options: Unpack[SaveOptions],
    ) -> None:
        """Save a state under an id. An `Encoded` state is saved as it is; its text is an envelope that holds its ids.

        `writes` are attached to the parent. `before` is the parent if it was only prepared. Both are written in the
        same commit or an earlier one.
        """
        save_now(self._request(state, id, writes, before, **options))

    async def asave(
        self,
        state: Any,
        *,
        id: str,
        writes: Sequence[Write] = (),
        before: PreparedSave | None = None,
        **options: Unpack[SaveOptions],
    ) -> None:
        """`save`, awaited."""
        await self._arun(save(self._request(state, id, writes, before, **options)))

    def prepare(self, state: Any, *, id: str, **options: Unpack[SaveOptions]) -> PreparedSave | None:
        """Prepare a save without writing it. Pass the result to the next save (`before`), or to `store`.

        Return None if the checkpoint does not simply follow the newest one; then call `save`.
        """
        return line_saves.prepare_held(self._request(state, id, **options))

    @blocking
    def store(self, held: PreparedSave) -> Flow[None]:
        """Write a prepared save, unless it is written already."""
        return held.store()

    astore = awaited(store)

    def _request(
        self,
        state: Any,
        id: str,
        writes: Sequence[Write] = (),
        before: PreparedSave | None = None,
        parent: str | None = None,
        note: str | None = None,
        exclusive: bool = False,
        allowed: Collection[str] = (),
        forks: bool = False,
        run: str | None = None,
    ) -> LineSave:
        is_encoded = isinstance(state, Encoded)
        encoded = state if is_encoded else _encoded(state, self._context.codec)
        label = Label(
            self.namespace,
            pack_id(id),
            None if parent is None else pack_id(parent),
            None if run is None else run_key(run),
            exclusive,
            [pack_id(one) if one else b"" for one in allowed],
            forks,
            turn_of(self._context),
            encoded.record,
        )
        kind, note = LABELLED_KIND if is_encoded else _KIND, check_note(note)
        return LineSave(self._context, self.thread, encoded, label, kind, note, self._tags, _checked(writes), before)

    @blocking
    def load(self, id: str | None = None) -> Flow[LineCheckpoint | None]:
        """Load a checkpoint by its id, or the newest. Return None if there is none."""
        packed, texts = (pack_id(id), self._texts) if id is not None else (None, None)
        if packed is not None and texts is None and self._context.known_tenant is not None:
            self._texts = Texts(self._context, self._context.known_tenant)  # reads ahead if more loads by id follow
        return line_reads.load(self._context, self.thread, self.namespace, packed, texts)

    aload = awaited(load)

    def history(self, *, before: str | None = None, limit: int | None = None) -> Iterator[LineCheckpoint]:
        """Iterate over the checkpoints with ids below `before`, the greatest id first. They are read in pages."""
        return islice(history(self._context, self._filters(before)), check_limit(limit))

    async def ahistory(self, *, before: str | None = None, limit: int | None = None) -> AsyncIterator[LineCheckpoint]:
        """`history`, as an async iterator."""
        left = check_limit(limit)
        if left == 0:
            return
        async for checkpoint in ahistory(self._context, self._filters(before)):
            yield checkpoint
            left = None if left is None else left - 1
            if left == 0:
                return

    @blocking
    def attach(self, id: str, key: str, value: Any, *, replace: bool = False) -> Flow[None]:
        """Attach a value to a checkpoint, even before its save. The first value of a key stays, unless `replace`."""
        text, values = encode_noting(value, self._context.codec)
        return self._attach(id, [Write(key, -1 if replace else 0, key, "", text, values)])

    aattach = awaited(attach)

    @blocking
    def attach_all(self, id: str, writes: Sequence[Write], ending: Ending | None = None) -> Flow[None]:
        """Attach encoded values in one commit. `ending` ends the task that wrote them in the same commit."""
        return self._attach(id, writes, ending)

    aattach_all = awaited(attach_all)

    def encoded(self, id: str) -> Encoded | None:
        """Return the text of the newest checkpoint if it has this id and is in memory, else None.

        A caller can copy the parts that did not change from it instead of encoding them.
        """
        return line_saves.parent_text(self._context, self.thread, self.namespace, pack_id(id))

    def _attach(self, id: str, writes: Sequence[Write], ending: Ending | None = None) -> Flow[None]:
        return attach(self._context, self.thread, self.namespace, pack_id(id), _checked(writes), ending)

    def _filters(self, before: str | None) -> LineFilters:
        packed = None if before is None else pack_id(before)
        return LineFilters(self.thread, self.namespace, before=packed)


def _encoded(state: Any, codec: Codec) -> Encoded:
    text, values = encode_noting(state, codec)
    return Encoded(text, keys=tuple(keys_of(values)), values=values)


def _checked(writes: Sequence[Write]) -> Sequence[Write]:
    for write in writes:
        check_text(write.key, "a key")
        check_text(write.path, "a path")
    return writes


def history(context: StoreContext, filters: LineFilters) -> Iterator[LineCheckpoint]:
    """Iterate over checkpoints of lines, the greatest id first."""
    listing = Listing(context, filters)
    while (checkpoint := drive(context.driver, listing.next())) is not None:
        yield checkpoint


async def ahistory(context: StoreContext, filters: LineFilters) -> AsyncIterator[LineCheckpoint]:
    """`history`, as an async iterator."""
    listing = Listing(context, filters)
    while (checkpoint := await adrive(context.driver, listing.next())) is not None:
        yield checkpoint
