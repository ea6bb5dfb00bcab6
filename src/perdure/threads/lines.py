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
from typing import Any, NamedTuple

from perdure.errors import Conflict, PerdureError
from perdure.log.label_ids import pack_id, unpack_id
from perdure.log.labels import Mark
from perdure.log.pending import Write
from perdure.log.turns import Turn
from perdure.storage.program import Flow, adrive, drive
from perdure.threads import line_flows, line_reads
from perdure.threads.checks import check_note
from perdure.threads.context import Context
from perdure.threads.line_engine import Encoded, Entry, LineEngine
from perdure.threads.line_listing import Listing, Wanted
from perdure.values.codec import decode, encode

_KIND = "line"


class LineCheckpoint(NamedTuple):
    """A checkpoint of a line: the id that its caller gave it, its state, and what was attached to it by key."""

    id: str
    state: Any
    attachments: Mapping[str, Any]


class _NoTurns:
    """A line of its own runs no effects: it takes no turns, and waits for none."""

    def of(self, gone: str = "") -> Turn:
        return Turn()

    def is_dead(self, owner: str) -> bool:
        return False

    def refuse(self, name: str) -> PerdureError:
        return Conflict(f"thread {name!r} is being run by another process: nothing was written; save again later")


class Line:
    """One line of checkpoints of a thread, by ids that the caller gives. Get one with `thread.line(namespace)`."""

    def __init__(self, context: Context, thread: str, metadata: Mapping[str, Any] | None, namespace: str) -> None:
        self._thread, self._metadata, self.namespace = thread, metadata or {}, namespace
        self._context, self._engine = context, LineEngine(context, _NoTurns())

    def __repr__(self) -> str:
        return f"<Line {self.namespace!r} of thread {self._thread!r}>"

    def save(
        self, state: Any, *, id: str, parent: str | None = None, note: str | None = None, exclusive: bool = False
    ) -> None:
        """Save a state under an id."""
        drive(self._context.driver, self._save(state, id, parent, note, exclusive))

    async def asave(
        self, state: Any, *, id: str, parent: str | None = None, note: str | None = None, exclusive: bool = False
    ) -> None:
        """`save`, awaited."""
        await adrive(self._context.driver, self._save(state, id, parent, note, exclusive))

    def load(self, id: str | None = None) -> LineCheckpoint | None:
        """A checkpoint by its id, or the newest. None: there is none."""
        return drive(self._context.driver, self._load(id))

    async def aload(self, id: str | None = None) -> LineCheckpoint | None:
        """`load`, awaited."""
        return await adrive(self._context.driver, self._load(id))

    def history(self, *, before: str | None = None, limit: int | None = None) -> Iterator[LineCheckpoint]:
        """Checkpoints by id, the greatest first: those below `before`. Read in pages."""
        listing, count = self._listing(before), 0
        while limit is None or count < limit:
            entry = drive(self._context.driver, listing.next(_any))
            if entry is None:
                return
            yield self._decoded(entry)
            count += 1

    async def ahistory(self, *, before: str | None = None, limit: int | None = None) -> AsyncIterator[LineCheckpoint]:
        """`history`, as an async iterator."""
        listing, count = self._listing(before), 0
        while limit is None or count < limit:
            entry = await adrive(self._context.driver, listing.next(_any))
            if entry is None:
                return
            yield self._decoded(entry)
            count += 1

    def attach(self, id: str, key: str, value: Any, *, replace: bool = False) -> None:
        """Add a value to a checkpoint, which may be saved later. The first value of a key stays, unless `replace`."""
        drive(self._context.driver, self._attach(id, key, value, replace))

    async def aattach(self, id: str, key: str, value: Any, *, replace: bool = False) -> None:
        """`attach`, awaited."""
        await adrive(self._context.driver, self._attach(id, key, value, replace))

    # --- as flows

    def _save(self, state: Any, id: str, parent: str | None, note: str | None, exclusive: bool) -> Flow[None]:
        encoded = Encoded(encode(state, self._context.codec), {})
        mark = Mark(self.namespace, pack_id(id), pack_id(parent) if parent is not None else None, None, exclusive)
        return line_flows.save(self._engine, self._thread, encoded, mark, check_note(note), self._metadata, kind=_KIND)

    def _attach(self, id: str, key: str, value: Any, replace: bool) -> Flow[None]:
        one = Write(pack_id(key), -1 if replace else 0, "", "", encode(value, self._context.codec))
        return line_flows.attach(self._engine, self._thread, self.namespace, pack_id(id), [one])

    def _load(self, id: str | None) -> Flow[LineCheckpoint | None]:
        packed = pack_id(id) if id is not None else None
        entry = yield from line_reads.load(self._engine, self._thread, self.namespace, packed)
        return None if entry is None else self._decoded(entry)

    def _listing(self, before: str | None) -> Listing:
        packed = pack_id(before) if before is not None else None
        return Listing(self._engine, Wanted(self._thread, self.namespace, before=packed))

    def _decoded(self, entry: Entry) -> LineCheckpoint:
        codec = self._context.codec
        attachments: dict[str, Any] = {}
        for one in entry.writes:  # by key; what replaces (index -1) comes before the first value (index 0), and wins
            attachments.setdefault(unpack_id(one.task), decode(one.text, codec))
        return LineCheckpoint(unpack_id(entry.id), decode(entry.text, codec), attachments)


def _any(entry: Entry) -> bool:
    return True
