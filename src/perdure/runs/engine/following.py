"""Follow a run from any process: the entries of its journal, and between them what its steps emit.

The values of an execution are read before the journal, so that every entry that precedes them is known. Where an entry
ends a step they are read again: the step stored its last ones before it ended.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from perdure.errors import UsageError
from perdure.runs.engine import flows
from perdure.runs.engine.models import Event, EventKind, blob_in, noted, value_text
from perdure.runs.journal import journal, rows
from perdure.runs.journal.entries import CHANGE, DONE, FAILED, INTENT, NAMING, NOTE, SPAWN, VALUE, WAIT, Recorded
from perdure.runs.journal.rows import FINISHED
from perdure.runs.run_table import RunRow
from perdure.runs.streams.rows import Chunk, chunks_after
from perdure.storage.program import Flow, Program, read, side_by_side, sleep
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.codec import decode
from perdure.values.safe_repr import shown

_RUNNING_PAUSE_S = 0.025
_PAUSES_S = (0.01, 0.02, 0.05, 0.1)  # the last one is repeated
_ENDS = (DONE, FAILED, CHANGE)
_KINDS: dict[int, EventKind] = {
    INTENT: "intent", DONE: "done", FAILED: "failed", VALUE: "value", WAIT: "wait", NOTE: "emit", SPAWN: "spawn",
    CHANGE: "change",
}  # fmt: skip
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_decoder = msgspec.msgpack.Decoder(tuple[_Number, list[tuple[_Number, _Number]], _Number, _Number, dict[str, _Number]])
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _Cursor:
    """How far a reader is. As text it comes back from browsers, so it is checked and holds numbers and paths only."""

    floor: int = 0  # every entry up to this number was returned, …
    # … and these, as first and last numbers: parallel branches commit in any order, and killed ones leave gaps
    beyond: list[tuple[int, int]] = field(default_factory=list)
    fence: int = 0  # the execution that the reader follows, …
    upto: int = 0  # … and the last of its values that was returned
    steps: dict[str, int] = field(default_factory=dict)  # steps with chunks and no end: the index of the next chunk

    def text(self) -> str:
        parts = (self.floor, self.beyond, self.fence, self.upto, self.steps)
        return urlsafe_b64encode(_encoder.encode(parts)).decode().rstrip("=")

    @classmethod
    def of(cls, text: str) -> _Cursor:
        if not text:
            return cls()
        try:
            return cls(*_decoder.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4))))
        except (ValueError, TypeError, AttributeError):  # msgspec's errors are ValueErrors
            raise UsageError(f"after= is the cursor of an event of this run, not {shown(text)}") from None

    def has_passed(self, seq: int) -> bool:
        at = bisect_right(self.beyond, seq, key=lambda part: part[0]) - 1
        return seq <= self.floor or (at >= 0 and seq <= self.beyond[at][1])

    def pass_entry(self, seq: int) -> None:
        at = bisect_right(self.beyond, seq, key=lambda part: part[0])
        first = last = seq
        if at < len(self.beyond) and self.beyond[at][0] == seq + 1:
            last = self.beyond.pop(at)[1]
        if at and self.beyond[at - 1][1] == seq - 1:
            first = self.beyond.pop(at - 1)[0]
        insort(self.beyond, (first, last))
        while self.beyond and self.beyond[0][0] <= self.floor + 1:
            self.floor = max(self.floor, self.beyond.pop(0)[1])


class Follower:
    """A reader of one run, who gets each event once."""

    def __init__(self, ctx: StoreContext, run_id: str, after: str, *, recorded: bool = True) -> None:
        self._ctx = ctx
        self._run_id = run_id
        self._cursor = _Cursor.of(after)
        self._tenant = self._run = 0
        self._pauses: Iterator[float] = iter(_PAUSES_S)
        self._is_skipping = not (recorded or after)
        self._ended: set[str] = set()  # steps that had ended when it began: their chunks linger for a while
        self.is_over = False

    def more(self) -> Flow[list[Event]]:
        """Wait for new events and return them."""
        if not self._run:
            self._tenant, located = yield from flows.locate(self._ctx, self._run_id)
            self._run = located.run
            self._cursor.fence = self._cursor.fence or located.fence
        if self._is_skipping:
            _, recorded = yield from read(self._row_and_entries)
            for one in recorded:
                self._cursor.pass_entry(one.seq)
            self._ended = {one.entry.path for one in recorded if one.kind in (DONE, CHANGE)}
            self._is_skipping = False
        self._pauses = iter(_PAUSES_S)
        while True:
            before = yield from self._chunks()
            row, recorded = yield from read(self._row_and_entries)
            if row is None:
                raise flows.no_run(self._run_id)
            news = self._news(row, recorded)
            ends = any(one.kind in _ENDS for one in news)
            chunks = (yield from self._chunks()) if ends else before
            if row.fence != self._cursor.fence:
                events = self._follow(row, news, chunks)
            else:
                known = before[-1].number if before else 0
                events = yield from self._merge(row, news, chunks, known)
            if events:
                return events
            yield from sleep(_RUNNING_PAUSE_S if row.status == "running" else next(self._pauses, _PAUSES_S[-1]))

    def _chunks(self) -> Flow[list[Chunk]]:
        chunks = yield from chunks_after(self._tenant, self._run, self._cursor.fence, self._cursor.upto)
        return [chunk for chunk in chunks if chunk.path not in self._ended] if self._ended else chunks

    def _row_and_entries(self) -> Program[tuple[RunRow | None, list[Recorded]]]:
        entries = journal.entries_after(self._tenant, self._run, self._cursor.floor)
        programs: list[Program[Any]] = [rows.numbered(self._tenant, self._run), entries]
        row, recorded = yield from side_by_side(programs)
        return row, recorded

    def _news(self, row: RunRow, recorded: list[Recorded]) -> list[Recorded]:
        """Return the entries that were not returned before."""
        self._cursor.floor = max(self._cursor.floor, row.since, row.origin_seq)  # its own entries have higher numbers
        return [one for one in recorded if not self._cursor.has_passed(one.seq)]

    def _follow(self, row: RunRow, news: list[Recorded], chunks: list[Chunk]) -> list[Event]:
        """Turn to another execution of the run. Of the one before, return what belongs to steps that ended."""
        ended = {one.entry.path for one in news if one.kind in _ENDS}
        events = [event for chunk in chunks if chunk.path in ended for event in self._deliver(chunk)]
        begun_anew = [path for path in self._cursor.steps if path not in ended]
        events += [self._reset(path, "", row.changed_at) for path in begun_anew]
        self._cursor.fence, self._cursor.upto = row.fence, 0
        return events

    def _merge(self, row: RunRow, news: list[Recorded], chunks: list[Chunk], known: int) -> Flow[list[Event]]:
        """Return new entries and chunks in their order.

        The entry that ends a step follows its chunks. Chunks after number `known` are returned only before such an
        entry: an entry that precedes others of them may not have been read.
        """
        events: list[Event] = []
        done = 0  # how many chunks were returned
        for one in news:
            path, attempt = one.entry.path, one.entry.attempt
            if one.kind in _ENDS:
                own = [at for at, chunk in enumerate(chunks) if chunk.path == path and chunk.attempt <= attempt]
                upto = max(done, own[-1] + 1 if own else 0)
                events += [event for chunk in chunks[done:upto] for event in self._deliver(chunk)]
                done = upto
            key = blob_in(one.entry)
            bodies = yield from flows.bodies_of(self._tenant, [] if key is None else [key])
            self._cursor.pass_entry(one.seq)
            if one.kind in (DONE, CHANGE):
                self._cursor.steps.pop(path, None)
            if path != NAMING:  # its value is a secret
                events.append(self._event(one, bodies))
            if one.kind == FAILED and path in self._cursor.steps:
                events.append(self._reset(path, one.entry.name, one.entry.at))
        for chunk in chunks[done:]:
            if chunk.number <= known:
                events += self._deliver(chunk)
        if row.status in FINISHED:
            self.is_over = True
            at = moment(row.changed_at)
            events.append(Event("status", "", row.function, row.status, at, None, self._cursor.text()))
        return events

    def _deliver(self, chunk: Chunk) -> list[Event]:
        """Return the events of a chunk: before it, that its step began anew, or that others are missing."""
        cursor, events, at = self._cursor, [], moment(chunk.at)
        expected = cursor.steps.get(chunk.path, 0)
        if chunk.index < expected:
            events.append(self._reset(chunk.path, chunk.name, chunk.at))
            expected = 0
        if chunk.index > expected:
            cursor.steps[chunk.path] = chunk.index
            cursor.upto = chunk.number - 1
            missing = chunk.index - expected
            events.append(Event("lost", chunk.path, chunk.name, missing, at, None, cursor.text()))
        cursor.steps[chunk.path] = chunk.index + 1
        cursor.upto = chunk.number
        value = decode(chunk.text, self._ctx.codec, raw=True)
        events.append(Event("chunk", chunk.path, chunk.name, value, at, None, cursor.text()))
        return events

    def _reset(self, path: str, name: str, at: int) -> Event:
        self._cursor.steps.pop(path, None)
        return Event("reset", path, name, None, moment(at), None, self._cursor.text())

    def _event(self, recorded: Recorded, bodies: Mapping[bytes, bytes]) -> Event:
        entry = recorded.entry
        text = value_text(entry, bodies)
        value = decode(text, self._ctx.codec, raw=True) if text is not None else noted(entry.extra)
        return Event(
            _KINDS[recorded.kind], entry.path, entry.name, value, moment(entry.at), recorded.seq, self._cursor.text()
        )
