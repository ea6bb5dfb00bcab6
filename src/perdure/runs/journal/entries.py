"""What a journal is made of: entries, their bodies as MessagePack, and the sum that covers them.

An entry says what happened at one place of the call tree. Entries of parallel branches may be committed in any order,
so the journal has no chain of hashes: a run's row keeps the sum of the hashes of all its entries, and their number.

Must never happen here: a changed meaning of a kind or a field that a released version has written.
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
VALUE: Final = 4  # a value that was drawn: time, chance, a winner, a patch
WAIT: Final = 5  # a question, a sleep, a signal or a child is waited for
NOTE: Final = 6  # emitted for those who watch; the code never reads it
SPAWN: Final = 7  # a child run was started
CHANGE: Final = 8  # a fork's own result in place of a recorded one

NAMING: Final = "naming"  # the path of the secret that names of tasks are made with; no call

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
_READ_AGAIN: Final = (INTENT, DONE, NOTE)  # kinds whose values are asked for by `Execution.text`, or not at all
KEPT_MAX_BYTES: Final = 1024  # larger values that the code has been given are not kept in memory
DIGEST_MASK: Final = (1 << 62) - 1  # two of these add up without overflow in either database
_COMPRESS_MIN_BYTES = 128
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # no JSON text begins with these
pack = msgspec.msgpack.Encoder().encode  # an entry as a body
_head = struct.Struct(">QQH").pack


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One thing that happened. `value` is the text of a result, perhaps compressed; `extra` what only some have."""

    path: str
    name: str
    at: int  # microseconds since 1970
    args_hash: bytes | None = None
    attempt: int = 1
    value: bytes | None = None
    extra: dict[str, Any] | None = None
    duration_us: int = 0  # of the body


class EntryInStore(Entry, array_like=True, frozen=True, gc=False):
    """An entry without its value, which is read from its row when it is needed: `journal.read_value`. Never written."""

    run: int = 0
    seq: int = 0


class Recorded(msgspec.Struct, frozen=True, gc=False):
    """An entry with its place in the journal of the run that wrote it. `own` is False for what a fork shares with its
    origin."""

    run: int
    seq: int
    kind: int
    entry: Entry
    own: bool = True


_unpack = msgspec.msgpack.Decoder(Entry).decode


def unpack(body: bytes) -> Entry:
    """The entry behind a body. Raises JournalDamaged."""
    try:
        return _unpack(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, TypeError) as error:
        raise JournalDamaged(f"a journal entry cannot be read ({error}); run `perdure store verify`") from error


def entry_digest(run: int, seq: int, kind: int, body: bytes) -> int:
    """What one entry adds to its run's sum. The run is in it: an entry cannot be moved to another journal."""
    return int.from_bytes(blake3(_head(run, seq, kind) + body).digest(8), "big") & DIGEST_MASK


def compress(text: bytes) -> bytes:
    """A text as it is stored: compressed if that makes it smaller."""
    if len(text) < _COMPRESS_MIN_BYTES:
        return text
    packed = compress_alone(text)
    return packed if len(packed) < len(text) else text


def decompress(stored: bytes) -> bytes:
    """Such a text again. Raises Undecodable."""
    return decompress_alone(stored) if stored[:4] == _ZSTD_MAGIC else stored


def without_value(recorded: Recorded) -> Recorded:
    """Return the row without its value if that is large and can be read again when it is needed."""
    entry, run, seq = recorded.entry, recorded.run, recorded.seq
    if recorded.kind not in _READ_AGAIN or entry.value is None or len(entry.value) <= KEPT_MAX_BYTES:
        return recorded
    left = EntryInStore(
        entry.path, entry.name, entry.at, entry.args_hash, entry.attempt, None, entry.extra, entry.duration_us, run, seq
    )
    return Recorded(run, seq, recorded.kind, left, recorded.own)


def completion(found: Sequence[Recorded]) -> Entry | None:
    """How a call ended, if it did. The last word counts: a fork may have changed it, a retry of the run reopened it."""
    for recorded in reversed(found):
        if recorded.kind == FAILED:
            return None
        if recorded.kind in (DONE, CHANGE):
            return recorded.entry
    return None


def opening(found: Sequence[Recorded]) -> Entry | None:
    """The wait or spawn that a call began with, if it did."""
    for recorded in found:
        if recorded.kind in (WAIT, SPAWN):
            return recorded.entry
    return None
