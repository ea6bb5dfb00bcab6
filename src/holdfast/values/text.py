"""A state as one JSON text with a table of its leaves, and the hash of that text.

The text is what is stored, compared and hashed. The table of leaves (where each value of the nested dicts
starts and ends) is never stored: it only helps to find a difference fast, and `split_text` makes it again
from the text.

What must never happen here: a leaf table that does not fit its text. Where the text is not what
`encode_text` writes, the whole text is one leaf: less fine, never wrong. And the same text must always give
the same digest, however its chunks' digests were come by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from holdfast.values.codec import encode_at, encode_key, is_plain_dict
from holdfast.values.limits import DEPTH_MAX as CODEC_DEPTH_MAX
from holdfast.values.limits import SIZE_MAX, SMALL_TEXT_BYTES
from holdfast.values.plain import TooMany, dumps_plain, is_plain, small_plain_text
from holdfast.values.registry import Codec

__all__ = ["CHUNK_BYTES", "LEAVES_MAX", "Leaf", "Path", "Text", "chunk_digests", "content_digest", "digest"]
__all__ += ["encode_text", "split_text"]

LEAVES_MAX = 256
DEPTH_MAX = 16
CHUNK_BYTES = 64 * 1024

Path = tuple[str, ...]
Leaf = tuple[Path, int, int]

# An object whose first key starts with a caret is a tagged value of the codec, never a plain dict.
_TAG_START = b'{"^'

_decode_level = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Text:
    """The compact JSON text of a state; leaf i is `data[starts[i]:ends[i]]`, in the order of the text."""

    data: bytes
    paths: tuple[Path, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves as (path, start, end)."""
        return list(zip(self.paths, self.starts, self.ends, strict=True))


class _Table:
    """Leaves as they are met, and how many more the state may have."""

    __slots__ = ("ends", "left", "paths", "starts")

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.left = LEAVES_MAX

    def add(self, path: Path, start: int, end: int) -> None:
        self.paths.append(path)
        self.starts.append(start)
        self.ends.append(end)

    def opens(self, count: int, depth: int) -> bool:
        """Whether a dict of so many entries is opened; if so, its entries are taken off what is left."""
        # The dict itself was counted as one leaf by the dict around it.
        if count == 0 or depth > DEPTH_MAX or count - 1 > self.left - 1:
            return False
        self.left -= count - 1
        return True

    def text(self, data: bytes) -> Text:
        return Text(data, tuple(self.paths), tuple(self.starts), tuple(self.ends))


def encode_text(state: object, codec: Codec) -> Text:
    """Encode a state to its text. Raises `Unstorable`, naming the path, for a value that cannot be stored."""
    # A small state is encoded in one go, as one leaf: finding its differences does not look at leaves.
    if (small := small_plain_text(state, SMALL_TEXT_BYTES)) is not None:
        return Text(small, ((),), (0,), (len(small),))
    if type(state) is dict and (plain := _encode_plain(state)) is not None:
        return plain
    table = _Table()
    pieces: list[bytes] = []
    _encode(state, codec, (), 0, pieces, table)
    return table.text(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _encode_plain(state: dict[str, object]) -> Text | None:
    """The text of a plain state, looked through once as a whole instead of leaf by leaf. None: it is not plain."""
    table = _Table()
    pieces: list[bytes] = []
    try:
        if not table.opens(len(state), 0) or not is_plain(state, CODEC_DEPTH_MAX):
            return None
        _walk_plain(state, (), 0, pieces, table)
    except (TypeError, TooMany):  # keys that are not text, lone surrogates, integers beyond 64 bit
        return None
    data = b"".join(pieces)
    # A key that starts with a caret would look like a tag, and errors want paths: the other way knows both.
    return None if b"^" in data or len(data) > SIZE_MAX else table.text(data)


def _walk_plain(value: dict[str, object], path: Path, at: int, pieces: list[bytes], table: _Table) -> int:
    """Append the pieces of a plain dict that starts at offset `at`; returns the offset behind it."""
    opening = b"{"
    for key, inner in value.items():
        piece = opening + dumps_plain(key) + b":"
        pieces.append(piece)
        start = at + len(piece)
        here = (*path, key)
        if type(inner) is dict and table.opens(len(inner), len(here)):
            at = _walk_plain(inner, here, start, pieces, table)
        else:
            leaf = dumps_plain(inner)
            pieces.append(leaf)
            at = start + len(leaf)
            table.add(here, start, at)
        opening = b","
    pieces.append(b"}")
    return at + 1


def _encode(value: object, codec: Codec, path: Path, at: int, pieces: list[bytes], table: _Table) -> int:
    """Append the pieces of one value that starts at offset `at`; returns the offset behind it."""
    if isinstance(value, dict) and is_plain_dict(value) and table.opens(len(value), len(path)):
        opening = b"{"
        for key, inner in value.items():
            piece = opening + encode_key(key) + b":"
            pieces.append(piece)
            at = _encode(inner, codec, (*path, key), at + len(piece), pieces, table)
            opening = b","
        pieces.append(b"}")
        return at + 1
    piece = encode_at(value, codec, path)
    pieces.append(piece)
    end = at + len(piece)
    table.add(path, at, end)
    return end


def split_text(data: bytes) -> Text:
    """Recover the text that `encode_text` made, leaves and all, from its bytes alone."""
    table = _Table()
    try:
        if _split(data, 0, len(data), (), data, table) == len(data):
            return table.text(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return Text(data, ((),), (0,), (len(data),))


def _split(data: bytes, at: int, end: int, path: Path, raw: bytes | msgspec.Raw, table: _Table) -> int:
    """Add the leaves of the value `data[at:end]`; returns the offset behind it, or -1 if it is not ours."""
    if data.startswith(b"{", at) and not data.startswith(_TAG_START, at):
        entries = _decode_level(raw)
        if table.opens(len(entries), len(path)):
            opening = b"{"
            for key, inner in entries.items():
                piece = opening + encode_key(key) + b":"
                # A text that is spaced, escaped or doubled in another way than ours shows here.
                if not data.startswith(piece, at):
                    return -1
                start = at + len(piece)
                at = _split(data, start, start + len(memoryview(inner)), (*path, key), inner, table)
                if at < 0:
                    return -1
                opening = b","
            return at + 1 if at + 1 == end and data.startswith(b"}", at) else -1
    table.add(path, at, end)
    return end


def digest(salt: bytes, data: bytes) -> bytes:
    """The content hash of a text: 32 bytes that say nothing about it to whoever lacks the salt."""
    return content_digest(salt, len(data), chunk_digests(data))


def content_digest(salt: bytes, size: int, chunks: Sequence[bytes]) -> bytes:
    """The content hash from the digests of the chunks of a text of `size` bytes."""
    # Both lengths are fixed in width, so that no two inputs give the same bytes.
    head = len(salt).to_bytes(8, "big") + salt + size.to_bytes(8, "big")
    return blake3(head + b"".join(chunks)).digest()


def chunk_digests(
    data: bytes,
    known: Sequence[bytes] = (),
    common_head: int = 0,
    same: Sequence[tuple[int, int]] = (),
) -> tuple[bytes, ...]:
    """The digest of each 64 KiB chunk; chunks that did not change are taken from `known`.

    `known` are the chunk digests of another text that has the same bytes as `data` at the same offsets in
    `data[:common_head]` and in every range (start, end) of `same`, ascending. Hashing costs 156 µs per MB,
    which would be most of a save.
    """
    size = len(data)
    if size < CHUNK_BYTES:
        return (blake3(data).digest(),) if size else ()
    view = memoryview(data)
    hasher: Callable[..., blake3] = blake3
    ranges = iter(((0, common_head), *same))
    start, end = next(ranges)
    found: list[bytes] = []
    for number, at in enumerate(range(0, size, CHUNK_BYTES)):
        stop = at + CHUNK_BYTES
        while end < stop:
            nearer = next(ranges, None)
            if nearer is None:
                start, end = size, size + CHUNK_BYTES
            else:
                start, end = nearer
        # Only whole chunks: the last one of the other text may have ended elsewhere.
        if start <= at and stop <= size and number < len(known):
            found.append(known[number])
        else:
            found.append(hasher(view[at:stop]).digest())
    return tuple(found)
