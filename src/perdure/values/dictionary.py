"""The zstd dictionary that all differences after one keyframe share: the end of the keyframe's text.

Differences are small and mostly repeat earlier text. `TABLES`, `COMMON`, `DICT_BYTES` and `DICT_BYTES_MIN` are part of
the file format: stored differences can be read only with exactly these bytes.
"""

from __future__ import annotations

from perdure.values.compress import Compressor, Decompressor, Parameter, Shelf, decompress_bounded, zstd
from perdure.values.limits import SIZE_MAX

# The size of the dictionary, and the level. Measured on bench/workload.py, per difference of 987 B: with 32 KiB it
# takes 301 B and 6 µs. With 64 KiB it takes 299 B, and the dictionary twice as long to build. Level 1 needs a tenth
# more bytes, level 6 a fortieth less in three times the time.
DICT_BYTES = 32 * 1024
DICT_LEVEL = 3
# Shorter texts share one dictionary: building tables for each (70 µs at 1 KB) would take longer than saving it.
DICT_BYTES_MIN = 4096
COMMON = (
    b'{"id":"","type":"tool","name":"","arguments":{"path":"","query":""},"status":"done","result":null,'
    b'"error":false,"updated_at":"2026-01-01T00:00:00Z","tool_call_id":"call_","messages":[{"role":"system",'
    b'"content":"You are a helpful assistant."},{"role":"user","content":"},{"role":"assistant","content":"'
)
# The start of every dictionary: zstd's header and entropy tables, trained once (zstd.finalize_dict) on messages made of
# READMEs, licences and source code. Without them each difference would carry its own, at 40 B and 4 µs. Tables trained
# on the thread itself save no more.
TABLES = bytes.fromhex(
    "37a430ec9f2b7e3248109044531d000c000c10b400e805216100b001005b80abfe136499fd277a71caff6976656818ad"
    "0df62323e2bc3065d45ff06e62dbb66d9bfef81bd2729b47e0167863f90da4d2360301000c0886c42291805838a4912f"
    "04808013968f9b0f130dd142a2403012865128c55008c74010832008c5208619c620519419000064d3149a381204310a"
    "a47808218388e2040000000000010000000400000008000000"
)
# How far back a difference may refer, as a power of two. It bounds the memory of a writer for each hot thread.
_WINDOW_LOG = 18
_OPTIONS: dict[int, int] = {
    Parameter.compression_level: DICT_LEVEL,
    Parameter.window_log: _WINDOW_LOG,
    Parameter.checksum_flag: 0,  # the content hash covers the text
    Parameter.content_size_flag: 0,
    Parameter.dict_id_flag: 0,
}
_SHORT = zstd.ZstdDict(TABLES + COMMON)
# For short texts level 1 needs no more bytes, and its tables are built faster.
_SHORT_OPTIONS = {**_OPTIONS, Parameter.compression_level: 1, Parameter.window_log: 14}


class Dictionary:
    """Compresses the differences after one keyframe. It is cheap to make, and any thread may use it."""

    __slots__ = ("_content", "_zstd_dict", "memory_bytes")

    def __init__(self, keyframe_text: bytes) -> None:
        short = len(keyframe_text) < DICT_BYTES_MIN
        self._content: bytes = b"" if short else keyframe_text[-DICT_BYTES:]
        self._zstd_dict: zstd.ZstdDict | None = _SHORT if short else None
        #: memory of the dictionary and one encoder, as measured; most of it is the compressor's tables
        self.memory_bytes = 900 * 1024 if self._content else 42 * 1024

    @property
    def zstd_dict(self) -> zstd.ZstdDict:
        # Two threads may both make one: they are equal, and one of them is dropped.
        if self._zstd_dict is None:
            self._zstd_dict = zstd.ZstdDict(TABLES + self._content)
        return self._zstd_dict

    def compressor(self) -> Compressor:
        options = _OPTIONS if self._content else _SHORT_OPTIONS
        return Compressor(options=options, zstd_dict=self.zstd_dict.as_digested_dict)

    def decompressor(self) -> Decompressor:
        return Decompressor(zstd_dict=self.zstd_dict)


_ALONE_OPTIONS = {**_SHORT_OPTIONS, Parameter.compression_level: DICT_LEVEL, Parameter.content_size_flag: 1}
_alone = Shelf(lambda: Compressor(options=_ALONE_OPTIONS, zstd_dict=_SHORT.as_digested_dict))


def compress_alone(text: bytes) -> bytes:
    """Compress a text outside of any chain to one frame, with the dictionary of short texts."""
    if len(text) > DICT_BYTES:
        return zstd.compress(text, options={Parameter.compression_level: DICT_LEVEL}, zstd_dict=_SHORT)
    return _alone.compress(text)


def decompress_alone(blob: bytes) -> bytes:
    """Return the text of a frame of `compress_alone`. Raises Undecodable."""
    return decompress_bounded(blob, SIZE_MAX, dictionary=_SHORT)
