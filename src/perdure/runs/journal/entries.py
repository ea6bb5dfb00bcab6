"""Journal entries, their bodies as MessagePack, and the sum that covers them.

Entries of parallel branches may be committed in any order, so the journal has no chain of hashes. Instead a run's row
keeps the number of its entries and the sum of their hashes. Must never happen here: a changed meaning of a kind or a
field that a released version has written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from blake3 import blake3

from perdure.errors import JournalDamaged
from perdure.runs.tables import INTENT as INTENT
from perdure.values.dictionary import compress_alone, decompress_alone

DONE: Final = 2  # a step, effect or wait has ended: its result, or its error
FAILED: Final = 3  # an attempt failed, and another one follows
VALUE: Final = 4  # a recorded value: the time, a random number, a winner, a patch
WAIT: Final = 5  # a question, a sleep, a signal or a child is waited for
NOTE: Final = 6  # emitted for watchers; the code never reads it
SPAWN: Final = 7  # a child run was started
CHANGE: Final = 8  # a fork's own result in place of a recorded one

NAMING: Final = "naming"  # the path of the secret key of task names, which is no call

KIND_NAMES: Final = {
    INTENT: "intent",
    DONE: "done",
    FAILED: "failed",
    VALUE: "value",
    WAIT: "wait",
    NOTE: "note",
    SPAWN: "spawn",
    CHANGE: "change",
}
_READ_AGAIN: Final = (INTENT, DONE, NOTE)  # kinds whose values only `Execution.text` reads, if anything does
KEPT_MAX_BYTES: Final = 1024  # larger values that the code has received are not kept in memory
DIGEST_MASK: Final = (1 << 62) - 1  # two of these add up without overflow in either database
_COMPRESS_MIN_BYTES = 128
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # no JSON text begins with these bytes
pack = msgspec.msgpack.Encoder().encode  # an entry as a body
_head = struct.Struct(">QQH").pack


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One journal entry. `value` is the text of a result, perhaps compressed; `extra` has the less common fields."""

    path: str
    name: str
    at: int  # microseconds since 1970
    args_hash: bytes | None = None
    attempt: int = 1
    value: bytes | None = None
    extra: dict[str, Any] | None = None
    duration_us: int = 0  # of the body


class EntryInStore(Entry, array_like=True, frozen=True, gc=False):
    """An entry whose value is read from its row when needed (`journal.read_value`). Never written."""

    run: int = 0
    seq: int = 0


class Recorded(msgspec.Struct, frozen=True, gc=False):
    """An entry with its place in the journal of the run that wrote it.

    `own` is False for the entries that a fork shares with its origin.
    """

    run: int
    seq: int
    kind: int
    entry: Entry
    own: bool = True


_unpack = msgspec.msgpack.Decoder(Entry).decode


def unpack(body: bytes) -> Entry:
    """Return the entry in a body. Raises JournalDamaged."""
    try:
        return _unpack(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, TypeError) as error:
        raise JournalDamaged(f"a journal entry cannot be read ({error}); run `perdure store verify`") from error


def entry_digest(run: int, seq: int, kind: int, body: bytes) -> int:
    """Return what one entry adds to its run's sum. It covers the run, so no entry can be moved to another journal."""
    return int.from_bytes(blake3(_head(run, seq, kind) + body).digest(8), "big") & DIGEST_MASK


def compress(text: bytes) -> bytes:
    """Return a text as it is stored: compressed if that makes it smaller."""
    if len(text) < _COMPRESS_MIN_BYTES:
        return text
    packed = compress_alone(text)
    return packed if len(packed) < len(text) else text


def decompress(stored: bytes) -> bytes:
    """Return the text that `compress` stored. Raises Undecodable."""
    return decompress_alone(stored) if stored[:4] == _ZSTD_MAGIC else stored


def without_value(recorded: Recorded) -> Recorded:
    """Return the row without its value if the value is large and can be read again when needed."""
    entry, run, seq = recorded.entry, recorded.run, recorded.seq
    if recorded.kind not in _READ_AGAIN or entry.value is None or len(entry.value) <= KEPT_MAX_BYTES:
        return recorded
    left = EntryInStore(
        entry.path, entry.name, entry.at, entry.args_hash, entry.attempt, None, entry.extra, entry.duration_us, run, seq
    )
    return Recorded(run, seq, recorded.kind, left, recorded.own)


def completion(rows: Sequence[Recorded]) -> Entry | None:
    """Return the entry that ended a call; None if it has not ended.

    The last one counts: a fork may have changed the end, and a retry of the run may have reopened the call.
    """
    for recorded in reversed(rows):
        if recorded.kind == FAILED:
            return None
        if recorded.kind in (DONE, CHANGE):
            return recorded.entry
    return None


def opening(rows: Sequence[Recorded]) -> Entry | None:
    """Return the wait or spawn that a call began with; None if there is none."""
    for recorded in rows:
        if recorded.kind in (WAIT, SPAWN):
            return recorded.entry
    return None
