"""What the file of an exported thread holds, and every check before anything of it is believed.

    H   the thread: name, metadata, head, how many records
    D   tombstones: records whose states were pruned, and whose hashes their children's hashes are made of
    T   checkpoints: the row, the salt, and the state's text or its difference to one that came before it in the file
    W   pending writes of LangGraph's, as text
    S L namespaces and ids of LangGraph's

Each block is a MessagePack array of what its section holds (H: one). Values stay the texts that they are in a store:
nothing of a file is ever executed, and the codec that decodes them later knows only registered classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import msgspec

from perdure.errors import UsageError
from perdure.log.ids import ID_MAX, ROOM
from perdure.log.label_ids import ID_BYTES_MAX
from perdure.log.records import SALT_BYTES
from perdure.threads.checks import check_metadata, check_name, check_note, check_text
from perdure.values.limits import SIZE_MAX

KIND = "thread"
_NUMBER_MAX = 1 << 60
_HASH_BYTES = 32
_NAME_MAX = 100_000  # a namespace is made of the names of nested nodes


class ThreadPart(msgspec.Struct, forbid_unknown_fields=True):
    """The thread, as far as it is not of one store only."""

    token: bytes  # of this export
    store: str  # where it comes from
    exported_at: int
    name: str
    metadata: str  # JSON
    created_at: int
    updated_at: int
    head: int
    head_hash: bytes
    is_whole: bool  # False: one line only
    checkpoints: int


class TombPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A record whose state is gone."""

    id: int
    parent: int | None
    kind: str
    at: int
    step: int
    note: str | None
    metadata: str | None
    size: int
    hash: bytes
    erased: bool = False  # the history goes on behind it


class StatePart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A checkpoint. `data` is its text, or with a `base` the splices that make it of that one's text."""

    id: int
    parent: int | None
    parent_hash: bytes | None  # only if the parent comes later in the file
    kind: str
    at: int
    step: int
    note: str | None
    metadata: str | None
    hash: bytes
    salt: bytes
    base: int | None
    data: bytes


class WritePart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A pending write."""

    space: str
    id: bytes
    task: bytes
    idx: int
    channel: str
    path: str
    text: bytes


class SpacePart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A namespace, and its newest checkpoint."""

    name: str
    head: int | None


class LabelPart(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An id that a caller gave a checkpoint."""

    space: str
    id: bytes
    record: int
    run: bytes | None


Part = ThreadPart | TombPart | StatePart | WritePart | SpacePart | LabelPart
SECTIONS: dict[str, type[Part]] = {
    "H": ThreadPart,
    "D": TombPart,
    "T": StatePart,
    "W": WritePart,
    "S": SpacePart,
    "L": LabelPart,
}
_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    section: msgspec.msgpack.Decoder(GenericAlias(list, (kind,))) for section, kind in SECTIONS.items()
}


def encode_parts(parts: Sequence[Part]) -> bytes:
    return _encode(parts)


def decode_parts(section: str, data: bytes) -> list[Any]:
    """The parts of a block, each checked. Raises UsageError that says what cannot be."""
    if section not in _decoders:
        raise UsageError(f"it has a section {section!r} that this Perdure does not know")
    try:
        parts: list[Any] = _decoders[section].decode(data)
        for part in parts:
            _CHECKS[section](part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"what it says cannot be: {error}") from error
    return parts


def _check_thread(part: ThreadPart) -> None:
    check_name(part.name)
    _metadata(part.metadata)
    _text(part.store)
    _record(part.head)
    _bytes(part.head_hash, _HASH_BYTES, _HASH_BYTES)
    _bytes(part.token, 16, 16)
    _numbers(part.exported_at, part.created_at, part.updated_at, part.checkpoints)


def _check_row(part: TombPart | StatePart) -> None:
    _record(part.id)
    if part.parent is not None and not 0 < part.parent < part.id:
        raise UsageError("a checkpoint comes before the one that it goes on from")
    check_name(part.kind, "kind")
    check_note(part.note)
    if part.metadata is not None:
        _metadata(part.metadata)
    _numbers(part.at, part.step)
    _bytes(part.hash, _HASH_BYTES, _HASH_BYTES)


def _check_tomb(part: TombPart) -> None:
    _check_row(part)
    _numbers(part.size, most=SIZE_MAX)


def _check_state(part: StatePart) -> None:
    _check_row(part)
    _bytes(part.salt, SALT_BYTES, SALT_BYTES)
    if part.parent_hash is not None:
        _bytes(part.parent_hash, _HASH_BYTES, _HASH_BYTES)
    if part.base is not None and not 0 < part.base < part.id:
        raise UsageError("a checkpoint comes before the one that it is made of")
    if part.base is None and len(part.data) > SIZE_MAX:
        raise UsageError(f"a text of {len(part.data):,} bytes")


def _check_write(part: WritePart) -> None:
    _text(part.space)
    _bytes(part.id, 1, ID_BYTES_MAX)
    _bytes(part.task, 1, ID_BYTES_MAX)
    _numbers(abs(part.idx))
    _text(part.channel)
    _text(part.path)


def _check_space(part: SpacePart) -> None:
    _text(part.name)
    if part.head is not None:
        _record(part.head)


def _check_label(part: LabelPart) -> None:
    _text(part.space)
    _bytes(part.id, 1, ID_BYTES_MAX)
    _record(part.record)
    if part.run is not None:
        _bytes(part.run, 1, ID_BYTES_MAX)


_CHECKS: dict[str, Any] = {
    "H": _check_thread,
    "D": _check_tomb,
    "T": _check_state,
    "W": _check_write,
    "S": _check_space,
    "L": _check_label,
}


def _record(record: int) -> None:
    if not 0 < record < ID_MAX - ROOM:
        raise UsageError(f"the id {record}")


def _metadata(text: str) -> None:
    check_text(text, "metadata")
    check_metadata(msgspec.json.decode(text, type=dict[str, Any]))


def _text(text: str) -> None:
    if len(text) > _NAME_MAX:
        raise UsageError(f"a name of {len(text):,} characters")
    check_text(text, "a name")


def _bytes(data: bytes, least: int, most: int) -> None:
    if not least <= len(data) <= most:
        raise UsageError(f"{len(data)} bytes where {least} to {most} belong")


def _numbers(*numbers: int, most: int = _NUMBER_MAX) -> None:
    for number in numbers:
        if not 0 <= number <= most:
            raise UsageError(f"the number {number}")
