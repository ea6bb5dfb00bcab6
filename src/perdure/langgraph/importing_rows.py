"""From a row of a stock saver's database to what Perdure stores: decoded, checked, encoded.

What a checkpoint becomes here is what the stock saver would hand out for the same row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import TASKS

from perdure.errors import PerdureError, Undecodable, UnknownType, Unstorable
from perdure.langgraph.checkpoints import run_key, to_text
from perdure.langgraph.configs import note_of, tags_of
from perdure.langgraph.importing_sources import Stored
from perdure.langgraph.importing_values import Decoder, Unloadable
from perdure.langgraph.saver import PerdureSaver
from perdure.langgraph.serde import PerdureSerde, value_to_text
from perdure.log.label_ids import pack_id
from perdure.log.labels import Mark
from perdure.log.pending import Write
from perdure.values.codec import Codec

_EMPTY = "empty"  # the type of a channel's value that is none


class Put(NamedTuple):
    """A checkpoint that is to be put."""

    text: bytes
    mark: Mark
    note: str | None
    tags: Mapping[str, Any]
    at_us: int


class Item(NamedTuple):
    """What goes into the store together: a checkpoint (None: it is there already) and writes that are pending on it."""

    thread: str
    space: str
    id: bytes
    writes: Sequence[Write]
    put: Put | None = None


class Decoded(NamedTuple):
    """A row's checkpoint and metadata, as the stock saver hands them out."""

    checkpoint: dict[str, Any]
    metadata: dict[str, Any]


class Reading:
    """Turns rows into items. `unknown` holds the types that the last row had and that could not be made."""

    def __init__(self, saver: PerdureSaver, trust: Sequence[str], serde: SerializerProtocol | None) -> None:
        known: Codec = saver.store._context.codec
        if isinstance(saver.serde, PerdureSerde):
            known = saver.serde.codec  # with what a graph's schema has added
        #: what the saver trusts, and what the caller of the import does
        self.codec = Codec((*known.trust, *trust), classes=known.classes)
        self.serde: SerializerProtocol = saver.serde
        if isinstance(saver.serde, PerdureSerde):
            self.serde = PerdureSerde(self.codec)
        self._decoder = Decoder(self.codec, serde)
        self.unknown: dict[Unloadable, None] = {}

    def item(self, thread: str, space: str, stored: Stored) -> Item:
        """All of a row. Raises UnknownType, Undecodable, Unstorable, which name the thread and the checkpoint."""
        decoded = self.decoded(thread, stored)
        with _naming(thread, stored.id):
            text = to_text(decoded.checkpoint, decoded.metadata, stored.parent, self.serde, self.codec)
            run = decoded.metadata.get("run_id")
            mark = Mark(
                space,
                pack_id(stored.id),
                pack_id(stored.parent) if stored.parent is not None else None,
                run_key(str(run)) if run is not None else None,
                orphan=True,  # its parent may have been pruned there
            )
            note, tags = note_of(decoded.metadata), tags_of(decoded.metadata)
            if not isinstance(self.serde, PerdureSerde):  # what an assigned serializer hides is not shown elsewhere
                note, tags = None, {}
            put = Put(text, mark, note, tags, _moment(decoded.checkpoint.get("ts")))
        return Item(thread, space, mark.id, self.writes(thread, space, stored), put)

    def decoded(self, thread: str, stored: Stored) -> Decoded:
        """A row's checkpoint and metadata."""
        with self._decoding(thread, stored.id):
            checkpoint = stored.data if stored.type is None and stored.values is not None else self._value(stored)
            if type(checkpoint) is not dict or type(checkpoint.get("channel_versions")) is not dict:
                raise Undecodable("it is no checkpoint")
            if checkpoint.get("id") != stored.id:
                raise Undecodable(f"its row says {stored.id}, but it says itself {str(checkpoint.get('id'))[:100]}")
            if stored.values is not None:
                checkpoint = self._put_together(checkpoint, stored)
            metadata = stored.metadata if stored.metadata is not None else {}
            if isinstance(metadata, str | bytes):
                metadata = json.loads(metadata)
            if type(metadata) is not dict:
                raise Undecodable("its metadata is no JSON object")
        return Decoded(checkpoint, metadata)

    def writes(self, thread: str, space: str, stored: Stored) -> list[Write]:
        """The writes of a row as they are stored in Perdure; nothing is numbered anew."""
        packed: list[Write] = []
        with self._decoding(thread, stored.id):
            for write in stored.writes:
                value = self._decoder.value(write.type, write.data)
                try:
                    text = value_to_text(value, self.serde) if not self._decoder.problems else b""
                except Unstorable as error:
                    raise Unstorable(f"a write to channel {write.channel!r}: {error}", path=error.path) from error
                packed.append(Write(pack_id(write.task), write.idx, write.channel, write.path, text))
        return packed

    def _value(self, stored: Stored) -> Any:
        return self._decoder.value(stored.type, stored.data)

    def _put_together(self, checkpoint: dict[str, Any], stored: Stored) -> dict[str, Any]:
        """PostgreSQL's: small values are in the checkpoint, others apart."""
        values = dict(checkpoint.get("channel_values") or {})
        for channel, (kind, data) in (stored.values or {}).items():
            if kind != _EMPTY:
                values[channel] = self._decoder.value(kind, data)
        versions = dict(checkpoint["channel_versions"])
        if stored.sends:
            values[TASKS] = [self._decoder.value(kind, data) for kind, data in stored.sends]
            if versions:
                versions[TASKS] = max(versions.values())
        return {**checkpoint, "channel_versions": versions, "channel_values": values}

    @contextmanager
    def _decoding(self, thread: str, id_: str) -> Iterator[None]:
        self.unknown = {}
        with _naming(thread, id_):
            try:
                yield
            except PerdureError:
                self._decoder.problems = {}
                raise
            except Exception as error:  # stored bytes may be anything, and so may a serializer of the caller's
                self._decoder.problems = {}
                raise Undecodable(f"it cannot be read: {error!r}"[:500]) from error
            self.unknown = dict(self._decoder.problems)
            self._decoder.check()


@contextmanager
def _naming(thread: str, id_: str) -> Iterator[None]:
    """Errors inside say which checkpoint they are about."""
    where = f"thread {thread[:200]!r}, checkpoint {id_[:100]}"
    try:
        yield
    except Unstorable as error:
        raise Unstorable(f"{where}: {error}", path=error.path) from error
    except UnknownType as error:
        raise UnknownType(f"{where}: {error}", type_name=error.type_name) from error
    except PerdureError as error:
        raise type(error)(f"{where}: {error}") from error


def _moment(stamp: Any) -> int:
    """When a checkpoint was made, in microseconds; never in the future."""
    now = time.time_ns() // 1000
    try:
        made = datetime.fromisoformat(stamp)
        if made.tzinfo is None:
            made = made.replace(tzinfo=UTC)
        return max(0, min(now, int(made.timestamp() * 1_000_000)))
    except (TypeError, ValueError, OverflowError):
        return now
