"""Finding the one byte that changed, by the CRC-32 that was kept of what it was. Pure.

A CRC is linear: what a changed byte does to it depends on the change and on how many bytes follow, and can be rolled
back byte by byte. So all texts that differ in one byte and have the wanted CRC are found in one pass. It is a guess
until something stronger (a hash) says that it is right; about one text in 2**24 / length has a wrong one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

LENGTH_MAX = 32 << 20  # some seconds


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0xEDB88320 if value & 1 else value >> 1
        table.append(value)
    return table


_TABLE = _table()
_BY_TOP = {entry >> 24: index for index, entry in enumerate(_TABLE)}  # the top bytes are all different
_CHANGE = {entry: index for index, entry in enumerate(_TABLE) if index}


def one_byte_off(data: bytes, crc: int) -> Iterator[bytes]:
    """Every text that differs from `data` in one byte and has this CRC-32."""
    left = zlib.crc32(data) ^ crc
    if not 0 < left < 1 << 32 or len(data) > LENGTH_MAX:
        return
    for at in range(len(data) - 1, -1, -1):
        change = _CHANGE.get(left)
        if change is not None:
            yield data[:at] + bytes((data[at] ^ change,)) + data[at + 1 :]
        index = _BY_TOP[left >> 24]
        left = (left ^ _TABLE[index]) << 8 & 0xFFFFFFFF | index
