"""Cold differences, up to 64 of one chain in a row of table `pack`: what such a row holds, and reading it.

Compressed together, against the end of the keyframe's text, differences take a fifth less than each for itself.
A packed record has no row in `body`: its column `body` is the pack's number, negative. Its place in the pack is its
place among the pack's records, in the order of their ids; nothing else says it, and the record's hash tells if it were
wrong. Putting records into packs is `pack_writer.py`'s.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from perdure.errors import Undecodable
from perdure.log.records import SALT_BYTES
from perdure.storage import columns
from perdure.storage.program import Batch, Rows, Sql
from perdure.values.compress import decompress_bounded, pack_against, zstd
from perdure.values.delta import unpack_splices
from perdure.values.diff import Splices

MEMBERS_MAX = 64
# What is kept in one row, before compression: a load of any member decompresses all of it.
BYTES_MAX = 1 << 20
PREFIX_BYTES = 128 * 1024  # of the keyframe's end; measured: 32 KiB give a tenth more bytes, all of it none less
_VERSION = 1
_DATA_MAX = 2 * BYTES_MAX
_NO_KEY_BYTES = 8  # a shorter prefix is none

PACK_COLUMNS = "pack, data"
PACKED_DATA = {1: columns.PACK}
PACK = Sql(
    f"SELECT {PACK_COLUMNS} FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens=PACKED_DATA,
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
    """A pack's data: version, count, the salts, and a frame with the differences, one behind the other."""
    frame = pack_against(b"".join([member.diff for member in members]), key_text[-PREFIX_BYTES:])
    return bytes((_VERSION, len(members))) + b"".join([member.salt for member in members]) + frame


def salts_in(data: bytes) -> list[bytes]:
    """The salts of a pack's records. Raises Undecodable."""
    count = _count(data)
    return [data[at : at + SALT_BYTES] for at in range(2, 2 + count * SALT_BYTES, SALT_BYTES)]


def splices_in(data: bytes, prefix: zstd.ZstdDict | None) -> list[Splices]:
    """The differences of a pack's records; `prefix` is `prefix_of` the keyframe's text. Raises Undecodable."""
    number = _count(data)
    return unpack_splices([decompress_bounded(data[2 + number * SALT_BYTES :], _DATA_MAX, prefix=prefix)], number)


def prefix_of(key_text: bytes) -> zstd.ZstdDict | None:
    """What the packs of a chain are compressed against."""
    return zstd.ZstdDict(key_text[-PREFIX_BYTES:], is_raw=True) if len(key_text) >= _NO_KEY_BYTES else None


def _count(data: bytes) -> int:
    if len(data) < 2 or data[0] != _VERSION or not 1 <= data[1] <= MEMBERS_MAX or len(data) < 2 + data[1] * SALT_BYTES:
        raise Undecodable("a pack of differences is malformed")
    return data[1]


class Packs:
    """The packs of a chain, by number."""

    __slots__ = ("_data", "_prefix")

    def __init__(self, rows: Iterable[tuple[object, ...]]) -> None:
        self._data: dict[object, bytes] = {}
        for pack, data in rows:
            if type(data) is bytes:
                self._data[pack] = data
        self._prefix: tuple[bytes, zstd.ZstdDict | None] = (b"", None)

    def salt(self, pack: int, index: int) -> bytes:
        """The salt of a pack's record. Raises Undecodable."""
        data = self._found(pack)
        if index >= _count(data):
            raise Undecodable("a pack has fewer records than belong to it")
        return data[2 + index * SALT_BYTES : 2 + (index + 1) * SALT_BYTES]

    def splices(self, pack: int, number: int, key_text: bytes) -> list[Splices]:
        """The differences of the first so many of a pack's records. Raises Undecodable."""
        if self._prefix[0] is not key_text:
            self._prefix = key_text, prefix_of(key_text)
        splices = splices_in(self._found(pack), self._prefix[1])
        if number > len(splices):
            raise Undecodable("a pack has fewer records than belong to it")
        return splices[:number]

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
