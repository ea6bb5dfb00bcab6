"""Pack the ids that callers choose for records and tasks into short bytes that sort in the same order. Pure."""

from __future__ import annotations

from functools import lru_cache

from perdure.errors import Undecodable, UsageError

_TEXT = 0xFF  # first byte of an id that is not a UUID
ID_BYTES_MAX = 1000  # two of them must fit an entry of PostgreSQL's indexes
_GREGORIAN = 0x01B2_1DD2_1381_4000  # from 1582 to 1970, in steps of 100 ns


@lru_cache(4096)  # one id is packed several times: as a label, a parent and a task
def pack_id(text: str) -> bytes:
    """Return an id as it is stored: 16 bytes for a UUID in its usual form, else a prefix and UTF-8.

    The order of ids stays the same. Raise UsageError if the id is too long or not valid Unicode."""
    if len(text) == 36:
        try:
            packed = bytes.fromhex(text.replace("-", ""))
        except ValueError:
            pass
        else:
            if len(packed) == 16 and packed[0] != _TEXT and _uuid(packed) == text:
                return packed
    try:
        packed_text = bytes((_TEXT,)) + text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"an id must be valid Unicode, not {text[:60]!r}") from error
    if len(packed_text) > ID_BYTES_MAX:
        raise UsageError(f"an id has at most {ID_BYTES_MAX} bytes, this one {len(packed_text)}: {text[:60]!r}…")
    return packed_text


@lru_cache(4096)
def unpack_id(packed: bytes) -> str:
    """Return the id that was packed. Raise Undecodable if it is damaged."""
    try:
        if packed[:1] == bytes((_TEXT,)):
            return packed[1:].decode()
    except ValueError as error:
        raise Undecodable(f"a stored id is damaged: {packed[:40]!r}") from error
    if len(packed) != 16:
        raise Undecodable(f"a stored id is damaged: {packed[:40]!r}")
    return _uuid(packed)


def _uuid(packed: bytes) -> str:
    text = packed.hex()  # uuid.UUID takes four times as long
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_label_id(now_us: int, chance: bytes, after: bytes) -> bytes:
    """Return a new id that grows with time (a UUID of version 6) and is greater than `after`."""
    ticks = now_us * 10 + _GREGORIAN
    number = (ticks >> 12 & 0xFFFF_FFFF_FFFF) << 80 | 6 << 76 | (ticks & 0xFFF) << 64
    label_id = (number | 1 << 63 | int.from_bytes(chance, "big") & (1 << 62) - 1).to_bytes(16, "big")
    if label_id > after:
        return label_id
    if len(after) == 16 and after[0] != _TEXT:
        return (int.from_bytes(after, "big") + 1).to_bytes(16, "big")
    return after + b"+"
