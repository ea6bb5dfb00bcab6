"""Cold differences, up to 64 of one chain in a row of table `pack`: what such a row holds, and reading it.

Compressed together, against the end of the keyframe's text, differences take a fifth less than each for itself.
A packed record has no row in `body`: its column `body` is the pack's number, negative. Its place in the pack is its
place among the pack's records, in the order of their ids; nothing else says it, and the record's hash tells if it were
wrong. Putting records into packs is `pack_writer.py`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from perdure.errors import Undecodable
from perdure.log.records import SALT_BYTES
from perdure.storage import columns
from perdure.storage.program import Batch, Rows, Sql
from perdure.values.compress import decompress_bounded, pack_against, zstd

MEMBERS_MAX = 64
# What is kept in one row, before compression: a load of any member decompresses all of it.
BYTES_MAX = 1 << 20
PREFIX_BYTES = 128 * 1024  # of the keyframe's end; measured: 32 KiB give a tenth more bytes, all of it none less
_VERSION = 1
_SIZE_BYTES = 4
_DATA_MAX = 2 * BYTES_MAX
_NO_KEY_BYTES = 8  # a shorter prefix is none

PACK = Sql(
    "SELECT pack, data FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens={1: columns.PACK},
    tolerant=True,
)
# Which of a pack's records is this one?
_BEFORE = Sql(
    """SELECT r.body, p.data, (SELECT count(*) FROM record o WHERE o.tenant = r.tenant AND o.tree = r.tree
        AND o.id >= p.first AND o.id < r.id AND o.body = r.body)
    FROM record r JOIN pack p ON p.tenant = r.tenant AND p.pack = -r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = :id AND r.body < 0""",
    opens={1: columns.PACK},
    tolerant=True,
)


def packed_mark(tenant: int) -> str:
    """The key in `meta` that says how far packing has come."""
    return f"packed {tenant}"


class Member(NamedTuple):
    """What a pack keeps of a record."""

    salt: bytes
    diff: bytes  # as values/delta.py has it before it is compressed


def make_pack(members: Sequence[Member], key_text: bytes) -> bytes:
    """A pack's data: version, count, the salts, and a frame with the lengths and the differences."""
    number = len(members)
    sizes = struct.pack(f"<{number}I", *(len(member.diff) for member in members))
    frame = pack_against(sizes + b"".join([member.diff for member in members]), key_text[-PREFIX_BYTES:])
    return bytes((_VERSION, number)) + b"".join([member.salt for member in members]) + frame


def salts_in(data: bytes) -> list[bytes]:
    """The salts of a pack's records. Raises Undecodable."""
    count = _count(data)
    return [data[at : at + SALT_BYTES] for at in range(2, 2 + count * SALT_BYTES, SALT_BYTES)]


def diffs_in(data: bytes, key_text: bytes) -> list[bytes]:
    """The differences of a pack's records. Raises Undecodable."""
    number = _count(data)
    payload = decompress_bounded(data[2 + number * SALT_BYTES :], _DATA_MAX, prefix=_prefix(key_text[-PREFIX_BYTES:]))
    at = number * _SIZE_BYTES
    if len(payload) < at:
        raise Undecodable("a pack of differences is malformed")
    sizes = struct.unpack(f"<{number}I", payload[:at])
    if at + sum(sizes) != len(payload):
        raise Undecodable("a pack's lengths do not add up to what it holds")
    diffs = []
    for size in sizes:
        diffs.append(payload[at : at + size])
        at += size
    return diffs


def _prefix(text: bytes) -> zstd.ZstdDict | None:
    return zstd.ZstdDict(text, is_raw=True) if len(text) >= _NO_KEY_BYTES else None


def _count(data: bytes) -> int:
    if len(data) < 2 or data[0] != _VERSION or not 1 <= data[1] <= MEMBERS_MAX or len(data) < 2 + data[1] * SALT_BYTES:
        raise Undecodable("a pack of differences is malformed")
    return data[1]


class Packs:
    """The packs of a chain, by number; each is opened once."""

    __slots__ = ("_data", "_diffs")

    def __init__(self, rows: Iterable[tuple[object, ...]]) -> None:
        self._data: dict[object, bytes] = {}
        for pack, data in rows:
            if type(data) is bytes:
                self._data[pack] = data
        self._diffs: dict[int, list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._data)

    def number(self, pack: int) -> int:
        """How many records a pack has. Raises Undecodable."""
        return _count(self._found(pack))

    def salt(self, pack: int, index: int) -> bytes:
        """The salt of a pack's record. Raises Undecodable."""
        data = self._found(pack)
        if index >= _count(data):
            raise Undecodable("a pack has fewer records than belong to it")
        return data[2 + index * SALT_BYTES : 2 + (index + 1) * SALT_BYTES]

    def diff(self, pack: int, index: int, key_text: bytes) -> bytes:
        """The difference of a pack's record. Raises Undecodable."""
        diffs = self._diffs.get(pack)
        if diffs is None:
            diffs = self._diffs[pack] = diffs_in(self._found(pack), key_text)
        if index >= len(diffs):
            raise Undecodable("a pack has fewer records than belong to it")
        return diffs[index]

    def _found(self, pack: int) -> bytes:
        data = self._data.get(pack)
        if data is None:
            raise Undecodable("a pack of differences is missing or damaged")
        return data


def packed_salt(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], bytes | None]:
    """The salt of a record that was packed meanwhile."""
    [rows] = yield Batch(_BEFORE(tenant=tenant, tree=tree, id=record))
    for body, data, index in rows:
        try:
            return Packs([(-body, data)]).salt(-body, index)
        except Undecodable:
            return None
    return None
