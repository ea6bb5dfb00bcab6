"""Cold differences, up to 64 of one chain in a row of table `pack`: what such a row holds, and reading it.

Compressed together, against the end of the keyframe's text, differences take a fifth less than each for itself. A pack
that others of its chain come after holds them twice: all of them as one difference, which is what a load of anything
behind the pack applies, and each by itself, compressed against that one, so that only what it does not say takes room.
A packed record has no row in `body`: its column `body` is the pack's number, negative. Its place in the pack is its
place among the pack's records, in the order of their ids; nothing else says it, and the record's hash tells if it were
wrong. Putting records into packs is `packing.py`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from perdure.errors import Undecodable
from perdure.log.records import SALT_BYTES
from perdure.storage import cells
from perdure.storage.program import Batch, Rows, Sql
from perdure.values.composing import compose
from perdure.values.compress import decompress_bounded, pack_against, zstd
from perdure.values.delta import Run, pack_splices, run_of, unpack_run

MEMBERS_MAX = 64
# A pack in which so many are together is left alone; smaller ones are joined with what comes after them.
MEMBERS_MIN = 32
# What is kept in one row, before compression: a load of any member decompresses all of it.
BYTES_MAX = 1 << 20
PREFIX_BYTES = 128 * 1024  # of the keyframe's end; measured: 32 KiB give a tenth more bytes, all of it none less
_VERSION = 2  # 1 was never released
_SIZE_BYTES = 4
_DATA_MAX = 2 * BYTES_MAX
_NO_KEY_BYTES = 8  # a shorter prefix is none

PACK = Sql(
    "SELECT pack, data FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens={1: cells.PACK},
    tolerant=True,
)
# Which of a pack's records is this one?
_BEFORE = Sql(
    """SELECT r.body, p.data, (SELECT count(*) FROM record o WHERE o.tenant = r.tenant AND o.tree = r.tree
        AND o.id >= p.first AND o.id < r.id AND o.body = r.body)
    FROM record r JOIN pack p ON p.tenant = r.tenant AND p.pack = -r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = :id AND r.body < 0""",
    opens={1: cells.PACK},
    tolerant=True,
)


def packed_mark(tenant: int) -> str:
    """The key in `meta` that says how far packing has come."""
    return f"packed {tenant}"


class Member(NamedTuple):
    """What a pack keeps of a record."""

    salt: bytes
    diff: bytes  # as values/delta.py has it before it is compressed


def make_pack(members: Sequence[Member], key_text: bytes, *, passed: bool = True) -> bytes:
    """A pack's data: version, count, the salts, the length of a frame with all differences as one and the frame (none,
    if that cannot be said, or nothing of the chain comes after: not `passed`), and another with the lengths and the
    differences, each by itself."""
    number = len(members)
    diffs = b"".join([member.diff for member in members])
    composed = compose(unpack_run(run_of(number, diffs))) if passed else None
    whole = pack_splices(composed) if composed is not None else b""
    tail = key_text[-PREFIX_BYTES:]
    frame = pack_against(whole, tail) if whole else b""
    sizes = struct.pack(f"<{number}I", *(len(member.diff) for member in members))
    each = pack_against(sizes + diffs, whole or tail, repeats=bool(whole))
    salts = b"".join([member.salt for member in members])
    return bytes((_VERSION, number)) + salts + len(frame).to_bytes(_SIZE_BYTES, "little") + frame + each


class _Frames(NamedTuple):
    """Where the parts of a pack begin, and what is read with its keyframe's text."""

    number: int
    whole: bytes  # compressed: all differences as one; empty if there is none
    each: bytes  # compressed: the lengths, and the differences


def _frames(data: bytes) -> _Frames:
    number = _count(data)
    at = 2 + number * SALT_BYTES
    size = int.from_bytes(data[at : at + _SIZE_BYTES], "little")
    at += _SIZE_BYTES
    if at + size > len(data):
        raise Undecodable("a pack of differences is malformed")
    return _Frames(number, data[at : at + size], data[at + size :])


def salts_in(data: bytes) -> list[bytes]:
    """The salts of a pack's records. Raises Undecodable."""
    count = _count(data)
    return [data[at : at + SALT_BYTES] for at in range(2, 2 + count * SALT_BYTES, SALT_BYTES)]


def diffs_in(data: bytes, key_text: bytes) -> list[bytes]:
    """The differences of a pack's records. Raises Undecodable."""
    frames = _frames(data)
    sizes, payload = _each(frames, _whole(frames, key_text), key_text)
    at, diffs = 0, []
    for size in sizes:
        diffs.append(payload[at : at + size])
        at += size
    return diffs


def whole_in(data: bytes, key_text: bytes) -> bytes:
    """All differences of a pack as one; empty if it has none. Raises Undecodable."""
    return _whole(_frames(data), key_text)


def _whole(frames: _Frames, key_text: bytes) -> bytes:
    if not frames.whole:
        return b""
    return decompress_bounded(frames.whole, _DATA_MAX, prefix=_prefix(key_text[-PREFIX_BYTES:]))


def _each(frames: _Frames, whole: bytes, key_text: bytes) -> tuple[tuple[int, ...], bytes]:
    """The lengths of a pack's differences, and these one behind the other."""
    payload = decompress_bounded(frames.each, _DATA_MAX, prefix=_prefix(whole or key_text[-PREFIX_BYTES:]))
    start = frames.number * _SIZE_BYTES
    if len(payload) < start:
        raise Undecodable("a pack of differences is malformed")
    sizes = struct.unpack(f"<{frames.number}I", payload[:start])
    if start + sum(sizes) != len(payload):
        raise Undecodable("a pack's lengths do not add up to what it holds")
    return sizes, payload[start:]


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

    def run(self, pack: int, number: int | None, key_text: bytes) -> Run:
        """What the first so many records of a pack change (None: all of them), as few differences. Raises
        Undecodable."""
        frames = _frames(self._found(pack))
        whole = _whole(frames, key_text)
        if whole and number in (None, frames.number):
            return run_of(1, whole)
        if number is not None and number > frames.number:
            raise Undecodable("a pack has fewer records than belong to it")
        sizes, payload = _each(frames, whole, key_text)
        wanted = frames.number if number is None else number
        return run_of(wanted, payload[: sum(sizes[:wanted])])

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
