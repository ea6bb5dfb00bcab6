"""The ids that callers give their records and tasks, as they are stored: short, and in the same order. Pure."""

from __future__ import annotations

import uuid

from holdfast.errors import UsageError

_TEXT = 0xFF  # first byte of an id that is no UUID


def pack_id(text: str) -> bytes:
    """An id as it is stored: 16 bytes for a UUID as everybody writes it. The order of ids stays the same."""
    if len(text) == 36:
        try:
            packed = uuid.UUID(text)
        except ValueError:
            pass
        else:
            if packed.bytes[0] != _TEXT and str(packed) == text:
                return packed.bytes
    try:
        return bytes((_TEXT,)) + text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"an id must be valid Unicode, not {text[:60]!r}") from error


def unpack_id(packed: bytes) -> str:
    """The id again."""
    if packed[:1] == bytes((_TEXT,)):
        return packed[1:].decode()
    return str(uuid.UUID(bytes=packed))
