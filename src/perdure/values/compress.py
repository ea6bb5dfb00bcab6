"""Compress and decompress with Zstandard; full texts of keyframes.

Python 3.14 has zstd in the standard library; for older versions `backports.zstd` is the same module under another name.
No other module compresses by itself. A decoder never allocates more than its caller allows: it checks the size that a
frame claims, and also limits the output, because a claim can be false.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.errors import Undecodable
from perdure.values.limits import INFLATED_MAX

# Typing sees the backport on every version: the two modules have the same interface.
if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd

__all__ = [
    "Compressor",
    "Decompressor",
    "Parameter",
    "Shelf",
    "compress_against",
    "compress_full",
    "decompress_bounded",
    "decompress_full",
    "inflate",
    "zstd",
]

Compressor = zstd.ZstdCompressor
Decompressor = zstd.ZstdDecompressor
Parameter = zstd.CompressionParameter

# Measured on the last state of bench/workload.py (1.39 MB): level 3 takes 7 ms for 352 KB, level 8 29 ms for 328 KB.
# One save in hundreds writes a keyframe, and keyframes are a third of all stored bytes.
FULL_LEVEL = 8
_REUSED_BYTES_MAX = 16 * 1024
_RESTING_MAX = 8
_SMALL_LEVEL = 3  # a higher one takes longer to clear its tables than to compress

# The largest window that zstd's decoder accepts, as a power of two (128 MiB).
WINDOW_LOG_MAX = 27

# Above _LARGE_MIN, a frame that refers to another text gets a higher level. Above _LONG_MIN, long-distance matching
# finds what is no longer in the tables.
_LARGE_MIN = 256 * 1024
_LONG_MIN = 8 << 20

_FULL_OPTIONS: dict[int, int] = {
    Parameter.compression_level: FULL_LEVEL,
    Parameter.checksum_flag: 0,  # the content's hash covers what comes out
    Parameter.content_size_flag: 1,
}


class Shelf:
    """Keeps compressors for the next use: making one takes longer than compressing a small text.

    Threads share them, because some programs use each thread only once.
    """

    def __init__(self, make: Callable[[], Compressor]) -> None:
        self._make = make
        self._resting: list[Compressor] = []

    def compress(self, text: bytes) -> bytes:
        """Return the text as one frame."""
        try:
            compressor = self._resting.pop()  # atomic: no two threads get the same one
        except IndexError:
            compressor = self._make()
        frame = compressor.compress(text, Compressor.FLUSH_FRAME)
        if len(self._resting) < _RESTING_MAX:
            self._resting.append(compressor)  # not reached after an error, which leaves it in an unknown state
        return frame


_small = Shelf(lambda: Compressor(options={**_FULL_OPTIONS, Parameter.compression_level: _SMALL_LEVEL}))


def compress_full(text: bytes) -> bytes:
    """Compress the whole text of a keyframe: one frame with its content size."""
    if len(text) > _REUSED_BYTES_MAX:  # a shared compressor would keep its memory
        return zstd.compress(text, options=_FULL_OPTIONS)
    return _small.compress(text)


def compress_against(text: bytes, old: bytes) -> bytes:
    """Compress a text with another one as its prefix, which `decompress_bounded(…, prefix=…)` needs too."""
    size = len(text) + len(old)
    options: dict[int, int] = {
        # Faster levels miss many small edits all over a large place: 15 KB where this level needs 12.
        Parameter.compression_level: 9 if size > _LARGE_MIN else 3,
        Parameter.min_match: 7 if size > _LARGE_MIN else 0,
        # Without a checksum a wrong prefix would decompress to garbage without an error.
        Parameter.checksum_flag: 1,
        Parameter.window_log: min(max(size.bit_length(), 10), WINDOW_LOG_MAX),
        Parameter.enable_long_distance_matching: 1 if size > _LONG_MIN else 0,
    }
    return zstd.compress(text, options=options, zstd_dict=zstd.ZstdDict(old, is_raw=True).as_prefix)


def inflate(decompressor: Decompressor, data: bytes, claimed: int) -> bytes:
    """Decompress `data` to at most one byte more than claimed. One more shows a false claim, and ends an empty frame.

    All decompression passes through here. A claim above the limit on texts is damage: a few bytes can claim gigabytes.
    Raises Undecodable, and what zstd raises.
    """
    if claimed > INFLATED_MAX:
        raise Undecodable(
            f"something compressed claims {claimed} bytes where {INFLATED_MAX} are allowed; it is damaged"
        )
    return decompressor.decompress(data, claimed + 1)


def decompress_full(blob: bytes, size: int) -> bytes:
    """Return the text of a keyframe, which must have exactly `size` bytes."""
    return decompress_bounded(blob, size, exact=True)


def decompress_bounded(
    blob: bytes,
    size_max: int,
    *,
    prefix: zstd.ZstdDict | None = None,
    dictionary: zstd.ZstdDict | None = None,
    exact: bool = False,
) -> bytes:
    """Decompress a blob that must be one frame, to at most `size_max` bytes; with `exact`, to exactly as many."""
    try:
        claimed = zstd.get_frame_info(blob).decompressed_size
        if claimed is None or claimed > size_max or (exact and claimed != size_max):
            raise Undecodable(f"a compressed text claims {claimed} bytes where {size_max} are allowed; it is damaged")
        decompressor = zstd.ZstdDecompressor(zstd_dict=prefix.as_prefix if prefix is not None else dictionary)
        text = inflate(decompressor, blob, claimed)
        whole = decompressor.eof and not decompressor.unused_data and len(text) == claimed
    except (zstd.ZstdError, EOFError, ValueError, OverflowError, MemoryError) as problem:
        raise Undecodable(f"a compressed text cannot be read: {problem}") from problem
    if not whole:
        raise Undecodable("a compressed text is cut short or has bytes after its end; the record is damaged")
    return text
