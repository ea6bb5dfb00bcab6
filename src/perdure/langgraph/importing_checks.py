"""Comparing what is in the store with what is in the source, after an import.

A checkpoint is read back by the code that a saver reads with. Two values are the same if their texts are: the codec
writes types too, and sets in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.errors import PerdureError, Unstorable
from perdure.langgraph import flows
from perdure.langgraph.checkpoints import from_text, to_text
from perdure.langgraph.flows import Entry, Keeper
from perdure.langgraph.history import Ancestors
from perdure.langgraph.importing_rows import Reading
from perdure.langgraph.importing_sources import Stored
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.serde import PerdureSerde, value_from_text
from perdure.log.label_ids import pack_id
from perdure.log.pending import Write
from perdure.storage.program import drive
from perdure.values.codec import encode


class Checking:
    """Finds differences; each is a line of text."""

    def __init__(self, saver: PerdureSaver, reading: Reading) -> None:
        self._driver = saver.store._context.driver
        self._keeper = Keeper(saver.store._context)
        self._reading = reading
        self._line: Ancestors | None = None  # of the thread and namespace at hand

    def checkpoint(self, thread: str, space: str, stored: Stored, *, lenient: bool) -> list[str]:
        """How one checkpoint differs from its row. `lenient`: it may have been written to since it was imported."""
        where = f"thread {thread!r}{f' (namespace {space!r})' if space else ''}, checkpoint {stored.id}"
        try:
            entry = self._entry(thread, space, stored.id)
            if entry is None:
                return [f"{where}: it is missing"]
            found = list(self._of_checkpoint(thread, stored, entry))
            found += self._of_writes(thread, space, stored, entry, lenient)
        except PerdureError as error:
            found = [f"it cannot be compared: {error}"]
        return [f"{where}: {difference}" for difference in found]

    def content(self, thread: str, space: str, stored: Stored) -> str | None:
        """What differs in one checkpoint, without its writes. Raises what makes it impossible to say."""
        entry = self._entry(thread, space, stored.id)
        found = self._of_checkpoint(thread, stored, entry) if entry is not None else iter(("it is missing",))
        return next((f"checkpoint {stored.id}: {difference}" for difference in found), None)

    def lacking(self, thread: str, space: str, stored: Stored) -> list[Write]:
        """The writes of a row that the store lacks; and the questions, answers and errors that are others there: they
        are replaced as a run goes on."""
        if not stored.writes:
            return []
        entry = self._entry(thread, space, stored.id)
        read = {write[:2]: write for write in entry.writes} if entry is not None else {}
        return [
            write
            for write in self._reading.writes(thread, space, stored)
            if (there := read.get(write[:2])) is None or (write.idx < 0 and not self._same_write(there, write))
        ]

    def newest(self, thread: str, space: str, id_: str, known: set[str]) -> Iterator[str]:
        """Whether a run would go on from the same checkpoint. One that is not of the source is a later run's."""
        entry = drive(self._driver, flows.get(self._keeper, thread, space, None))
        packed = {pack_id(one) for one in known}
        if entry is None or (entry.id != pack_id(id_) and entry.id in packed):
            yield f"thread {thread!r} (namespace {space!r}): its newest checkpoint is not {id_}"

    def _entry(self, thread: str, space: str, id_: str) -> Entry | None:
        if self._line is None or (self._line.thread, self._line.space) != (thread, space):
            self._line = Ancestors(self._keeper, thread, space)
        return drive(self._driver, self._line.entry(pack_id(id_)))

    def _of_checkpoint(self, thread: str, stored: Stored, entry: Entry) -> Iterator[str]:
        expected = self._reading.decoded(thread, stored)
        read = from_text(entry.text, self._reading.serde, self._reading.codec)
        try:
            if self._text(*read) == self._text(*expected, stored.parent):
                return
        except Unstorable:
            pass  # of a serializer that the caller assigned: part by part, then
        if read.parent != stored.parent:
            yield f"its parent is {read.parent}, not {stored.parent}"
        if not self._same(read.metadata, expected.metadata):
            yield "its metadata differs"
        values, wanted = read.checkpoint.pop("channel_values"), dict(expected.checkpoint)
        wanted_values = wanted.pop("channel_values", None) or {}
        for channel in sorted(values.keys() | wanted_values.keys()):
            if channel not in values or channel not in wanted_values:
                yield f"channel {channel!r} is {'missing' if channel in wanted_values else 'new'}"
            elif not self._same(values[channel], wanted_values[channel]):
                yield f"channel {channel!r} differs"
        for key in sorted(read.checkpoint.keys() | wanted.keys()):
            if not self._same(read.checkpoint.get(key), wanted.get(key)):
                yield f"its {key!r} differs"

    def _text(self, checkpoint: dict[str, Any], metadata: dict[str, Any], parent: str | None) -> bytes:
        codec = self._reading.codec
        return to_text(checkpoint, metadata, parent, PerdureSerde(codec), codec)

    def _of_writes(self, thread: str, space: str, stored: Stored, entry: Entry, lenient: bool) -> Iterator[str]:
        expected = {(write.task, write.idx): write for write in self._reading.writes(thread, space, stored)}
        read = {(write.task, write.idx): write for write in entry.writes}
        if expected.keys() - read.keys():
            yield f"{len(expected.keys() - read.keys())} of its {len(expected)} pending writes are missing"
        if not lenient and read.keys() - expected.keys():
            yield f"{len(read.keys() - expected.keys())} pending writes are not the source's"
        for key in expected.keys() & read.keys():
            if not self._same_write(read[key], expected[key]):
                yield f"a pending write to channel {expected[key].channel!r} differs"

    def _same_write(self, read: Write, expected: Write) -> bool:
        if (read.channel, read.path) != (expected.channel, expected.path):
            return False
        serde, codec = self._reading.serde, self._reading.codec
        return self._same(value_from_text(read.text, serde, codec), value_from_text(expected.text, serde, codec))

    def _same(self, one: Any, other: Any) -> bool:
        codec = self._reading.codec
        try:
            return encode(one, codec) == encode(other, codec)
        except Unstorable:  # of a serializer that the caller assigned
            return bool(type(one) is type(other) and one == other)
