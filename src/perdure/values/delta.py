"""Differences in their stored form, and applying them to a text.

A difference is the MessagePack array `[skip, drop, insert, ...]` of its splices. A small one is stored as it is. The
others of a chain form one zstd stream with the dictionary of the keyframe: each stores what the stream grew by. A
writer without the stream (a new process, a fork, a writer that lost a race) starts a new one. Foreign bytes never crash
the decoder nor make it loop or allocate beyond its bound: everything malformed raises Undecodable.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from perdure.errors import Undecodable
from perdure.values.compress import Compressor, Decompressor, decompress_bounded, inflate, zstd
from perdure.values.dictionary import Dictionary
from perdure.values.diff import Splices
from perdure.values.limits import INFLATED_MAX, NODES_MAX, SIZE_MAX

# Below this a difference is stored as it is: compressing it would cost more than it saves.
RAW_MAX = 96
_START = 1  # first byte of a stored difference: it starts a stream; 2: it continues the stream of those before it
# First bytes of differences that are read together: MessagePack arrays that are stored as they are, or one stream.
_RUN = re.compile(rb"[\x90-\xff]+|[\x01\x02]\x02*")
_MAGIC = b"\x28\xb5\x2f\xfd"  # every zstd stream starts with it; not stored
_BATCH_BYTES = 1 << 18  # as stored
_LONG_BYTES = 1 << 20
_ARRAY_32 = 0xDD  # MessagePack: an array of up to 2**32 values
# The next splice is expected where one grew the text by more than this: the gap moves there, unless it is near.
_GAP_MIN = 64
_NEAR = 1024

_pack = msgspec.msgpack.Encoder().encode
_MALFORMED = (msgspec.MsgspecError, zstd.ZstdError, EOFError, ValueError, MemoryError, RecursionError)
_unpack_all = msgspec.msgpack.Decoder(list[list[int | bytes]]).decode


class Encoder:
    """Encodes the differences of one chain, each on top of the one before. Not for two threads at once."""

    __slots__ = ("_compressor", "_dictionary")

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary
        self._compressor: Compressor | None = None

    def encode(self, splices: Splices) -> bytes:
        """Return the stored form of a difference. The next one builds on it: if it is not kept, drop the encoder."""
        payload = _pack(splices)
        if len(payload) < RAW_MAX:
            return payload
        if self._compressor is not None:
            return b"\x02" + self._compressor.compress(payload, Compressor.FLUSH_BLOCK)
        self._compressor = self._dictionary.compressor()
        return b"\x01" + self._compressor.compress(payload, Compressor.FLUSH_BLOCK)[len(_MAGIC) :]


class Decoder:
    """Decodes the differences of one chain, in order. Raises Undecodable for anything that is not one."""

    __slots__ = ("_decompressor", "_dictionary", "_payload_max")

    def __init__(self, dictionary: Dictionary, size_max: int = SIZE_MAX) -> None:
        self._dictionary = dictionary
        self._decompressor: Decompressor | None = None
        # The inserted bytes fit a text of `size_max`. Numbers of splices are stored beside them.
        self._payload_max = min(2 * size_max + _LONG_BYTES, INFLATED_MAX)

    def decode(self, diffs: Iterable[bytes]) -> list[Splices]:
        """Return the splices of the next stored differences."""
        return [splices for batch in self.batches(diffs) for splices in batch]

    def batches(self, diffs: Iterable[bytes]) -> Iterator[list[Splices]]:
        """Yield the splices of a chain of any length in batches, so that memory stays bounded."""
        listed = list(diffs)
        kinds = bytes([diff[0] if diff else 0 for diff in listed])
        pieces: list[bytes] = []
        count = size = start = 0
        try:
            while start < len(listed):
                run = _RUN.match(kinds, start)
                if run is None:
                    raise Undecodable(f"a difference starts with {kinds[start]}, which is no kind of difference")
                alike = listed[start : run.end()]
                if (length := sum(map(len, alike))) > _BATCH_BYTES:
                    alike = alike[: max(1, bisect_right(list(accumulate(map(len, alike))), _BATCH_BYTES))]
                pieces += alike if kinds[start] > 2 else (self._decompress(alike, kinds[start] == _START),)
                count += len(alike)
                size += length
                start += len(alike)
                if size > _BATCH_BYTES:
                    yield _unpack_splices(pieces, count)
                    pieces, count, size = [], 0, 0
            yield _unpack_splices(pieces, count)
        except _MALFORMED as problem:
            raise Undecodable(f"a difference is malformed: {problem}") from problem

    def _decompress(self, diffs: list[bytes], starts: bool) -> bytes:
        """Return what the stream holds for these differences. Unpacking shows whether it is complete."""
        parts = [diff[1:] for diff in diffs]
        if starts:
            self._decompressor = self._dictionary.decompressor()
            parts.insert(0, _MAGIC)
        if self._decompressor is None:
            raise Undecodable("a difference continues a stream whose start is missing")
        payload = inflate(self._decompressor, b"".join(parts), self._payload_max)
        if len(payload) > self._payload_max or self._decompressor.eof:
            raise Undecodable("a difference holds more than a text can take")
        if len(payload) > _LONG_BYTES and payload[0] == _ARRAY_32 and int.from_bytes(payload[1:5], "big") > NODES_MAX:
            raise Undecodable("a difference claims more splices than a text has values")  # each takes 8 bytes and more
        return payload


def _unpack_splices(payloads: list[bytes], count: int) -> list[Splices]:
    """Unpack several differences in one call: behind the header of an array they are one message."""
    return _unpack_all(b"".join((b"\xdd" + count.to_bytes(4, "big"), *payloads)))


def apply_all(keyframe_text: bytes, batches: Iterable[list[Splices]], *, size_max: int = SIZE_MAX) -> bytes:
    """Return the text after a chain of differences, oldest first. Raises Undecodable if one exceeds `size_max`."""
    text = _Gapped(keyframe_text, size_max)
    for splices in batches:
        text.apply(splices)
    return text.whole()


class _Gapped:
    """A text in two parts. Most splices are at one place, the end of a list: where the parts meet, nothing moves."""

    __slots__ = ("_left", "_right", "_size_max")

    def __init__(self, text: bytes, size_max: int) -> None:
        self._left = bytearray(text)
        self._right = bytearray()
        self._size_max = size_max

    def whole(self) -> bytes:
        return b"".join((self._left, self._right))

    def apply(self, differences: list[Splices]) -> None:
        """Apply differences in order. Raises Undecodable."""
        try:
            self._apply(differences)
        except (TypeError, ValueError, OverflowError, MemoryError) as problem:
            raise Undecodable(f"a difference is malformed: {problem}") from problem

    def _apply(self, differences: list[Splices]) -> None:
        # The hot loop of every load: it keeps lengths in variables and makes one slice assignment for each splice.
        left, right, size_max = self._left, self._right, self._size_max
        middle, behind = len(left), len(right)
        skip: Any
        drop: Any
        insert: Any
        for flat in differences:
            at = 0
            parts = iter(flat)
            for skip, drop, insert in zip(parts, parts, parts, strict=True):
                at += skip
                added = len(insert)
                if at == middle and drop == 0 <= skip:
                    left += insert  # the fast path: most splices are at the gap
                    at = middle = at + added
                    continue
                end = at + drop if drop >= 0 else at - 1 - drop
                if skip < 0 or end > middle + behind:
                    raise Undecodable(f"a difference reaches byte {end} of a text of {middle + behind}")
                if drop < 0:
                    insert = self._unpatch(at, end, insert)
                    added, drop = len(insert), end - at
                growth = added - drop
                if end <= middle and (growth <= _GAP_MIN or middle - end < _NEAR):
                    left[at:end] = insert
                    middle += growth
                elif at > middle and growth <= _GAP_MIN:
                    right[at - middle : end - middle] = insert
                    behind += growth
                else:
                    self._move_gap(at, end)
                    left += insert
                    middle, behind = at + added, len(right)
                at += added
            if middle + behind > size_max:
                raise Undecodable(f"a difference makes a text over the limit of {size_max} bytes")

    def _move_gap(self, at: int, end: int) -> None:
        """Drop the bytes from `at` to `end`, and move the gap there."""
        left, right = self._left, self._right
        middle = len(left)
        if end <= middle:
            right[:0] = left[end:]
            del left[at:]
        elif at <= middle:
            del right[: end - middle], left[at:]
        else:
            left += right[: at - middle]
            del right[: end - middle]

    def _unpatch(self, at: int, end: int, frame: bytes) -> bytes:
        """Return the new bytes of a patch, made of its frame and the old bytes."""
        middle = len(self._left)
        old = bytes(self._left[at:end]) + bytes(self._right[max(0, at - middle) : max(0, end - middle)])
        return decompress_bounded(frame, self._size_max, prefix=zstd.ZstdDict(old, is_raw=True))


def apply_undoable(text: bytes, splices: Splices) -> tuple[bytes, Splices]:
    """Return the text after one difference, and the difference that undoes it. Raises Undecodable."""
    parts: list[bytes] = []
    back: Splices = []
    at = 0
    flat = iter(splices)
    skip: Any
    drop: Any
    insert: Any
    try:
        for skip, drop, insert in zip(flat, flat, flat, strict=True):
            start = at + skip
            end = start + (drop if drop >= 0 else -1 - drop)
            if skip < 0 or end > len(text):
                raise Undecodable(f"a difference reaches byte {end} of a text of {len(text)}")
            if drop < 0:
                insert = decompress_bounded(insert, SIZE_MAX, prefix=zstd.ZstdDict(text[start:end], is_raw=True))
            parts += (text[at:start], insert)
            back += (skip, len(insert), text[start:end])
            at = end
        parts.append(text[at:])
        after = b"".join(parts)
    except (TypeError, ValueError, OverflowError, MemoryError) as problem:
        raise Undecodable(f"a difference is malformed: {problem}") from problem
    if len(after) > SIZE_MAX:
        raise Undecodable(f"a difference makes a text over the limit of {SIZE_MAX} bytes")
    return after, back
