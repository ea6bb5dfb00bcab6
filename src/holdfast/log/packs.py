"""Cold differences, up to 64 of one chain in a row of table `pack`: what such a row holds, and reading it.

Compressed together, against the end of the keyframe's text, differences take a fifth less than each for itself; a load
reads one row instead of 64, and decompresses all of it. A packed record has no row in `body`: its column `body` is
the pack's number, negative. Its place in the pack is its place among the pack's records, in the order of their ids;
nothing else says it, and the record's hash tells if it were wrong. Putting records into packs is `packing.py`'s.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import Undecodable
from holdfast.log.records import SALT_BYTES
from holdfast.storage import cells
from holdfast.storage.far_cells import not_far
from holdfast.storage.program import Batch, Rows, Sql
from holdfast.values.compress import decompress_bounded, pack_against, zstd

MEMBERS_MAX = 64
# A pack in which so many are together is left alone; smaller ones are joined with what comes after them.
MEMBERS_MIN = 32
# What is kept in one row, before compression: a load of any member decompresses all of it.
BYTES_MAX = 1 << 20
PREFIX_BYTES = 128 * 1024  # of the keyframe's end; measured: 32 KiB give a tenth more bytes, all of it none less
_VERSION = 1
_SIZE_BYTES = 4
_DATA_MAX = 2 * BYTES_MAX

PACK = Sql(
    "SELECT pack, checksum, data FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens={2: cells.PACK},
    tolerant=True,
)
# Which of a pack's records is this one?
_BEFORE = Sql(
    """SELECT r.body, p.checksum, p.data, (SELECT count(*) FROM record o WHERE o.tenant = r.tenant AND o.tree = r.tree
        AND o.id >= p.first AND o.id < r.id AND o.body = r.body)
    FROM record r JOIN pack p ON p.tenant = r.tenant AND p.pack = -r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = :id AND r.body < 0""",
    opens={2: cells.PACK},
    tolerant=True,
)


def packed_mark(tenant: int) -> str:
    """The key in `meta` that says how far packing has come."""
    return f"packed {tenant}"


class Member(NamedTuple):
    """What a pack keeps of a record."""

    salt: bytes
    diff: bytes  # as values/delta.py has it before it is compressed


def pack_checksum(data: bytes) -> int:
    """The checksum of a pack's row."""
    return zlib.crc32(data)


def make_pack(members: Sequence[Member], key_text: bytes) -> bytes:
    """A pack's data: version, count, the salts, then one frame with the lengths and the differences."""
    sizes = b"".join(len(member.diff).to_bytes(_SIZE_BYTES, "little") for member in members)
    salts = b"".join(member.salt for member in members)
    payload = sizes + b"".join(member.diff for member in members)
    return bytes((_VERSION, len(members))) + salts + pack_against(payload, key_text[-PREFIX_BYTES:])


def salts_in(data: bytes) -> list[bytes]:
    """The salts of a pack's records. Raises Undecodable."""
    count = _count(data)
    return [data[at : at + SALT_BYTES] for at in range(2, 2 + count * SALT_BYTES, SALT_BYTES)]


def diffs_in(data: bytes, key_text: bytes) -> list[bytes]:
    """The differences of a pack's records. Raises Undecodable."""
    count = _count(data)
    prefix = zstd.ZstdDict(key_text[-PREFIX_BYTES:], is_raw=True) if len(key_text) >= 8 else None
    payload = decompress_bounded(data[2 + count * SALT_BYTES :], _DATA_MAX, prefix=prefix)
    at, diffs = count * _SIZE_BYTES, []
    for number in range(count):
        size = int.from_bytes(payload[number * _SIZE_BYTES : (number + 1) * _SIZE_BYTES], "little")
        diffs.append(payload[at : at + size])
        at += size
    if at != len(payload):
        raise Undecodable("a pack's lengths do not add up to what it holds")
    return diffs


def _count(data: bytes) -> int:
    if len(data) < 2 or data[0] != _VERSION or not 1 <= data[1] <= MEMBERS_MAX or len(data) < 2 + data[1] * SALT_BYTES:
        raise Undecodable("a pack of differences is malformed")
    return data[1]


class Packs:
    """The packs of a chain, by number; each is opened once."""

    __slots__ = ("_data", "_diffs")

    def __init__(self, rows: Iterable[tuple[object, ...]]) -> None:
        self._data: dict[object, bytes] = {}
        for pack, checksum, data in rows:
            if type(data) is bytes and checksum == pack_checksum(data):
                self._data[pack] = data
            else:
                not_far(data)  # what is damaged is as good as lost; what is elsewhere is not
        self._diffs: dict[int, list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._data)

    def salt(self, pack: int, index: int) -> bytes:
        """The salt of a pack's record. Raises Undecodable."""
        salts = salts_in(self._found(pack))
        if index >= len(salts):
            raise Undecodable("a pack has fewer records than belong to it")
        return salts[index]

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
    for body, checksum, data, index in rows:
        try:
            return Packs([(-body, checksum, data)]).salt(-body, index)
        except Undecodable:
            return None
    return None
