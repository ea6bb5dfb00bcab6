"""`External`: a large value that a state refers to by its hash. The value itself is in the store's folder of objects.

Pure: what reads and writes objects is `threads/externals.py`. A state holds the hash and the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar, cast

from blake3 import blake3

from perdure.errors import Undecodable, Unstorable, UsageError
from perdure.values.codec import decode, encode
from perdure.values.compress import compress_full, decompress_bounded
from perdure.values.limits import SIZE_MAX
from perdure.values.registry import Codec, register

T = TypeVar("T")
_HASH_BYTES = 32
_UNSET: Any = object()
_BYTES, _TEXT = b"b", b"t"  # how a content begins: bytes as they are, or the compressed text of another value


class Reader(Protocol):
    """What reads the contents of a store, of one tenant."""

    def read(self, external: External[Any]) -> bytes: ...

    async def aread(self, external: External[Any]) -> bytes: ...

    @property
    def codec(self) -> Codec: ...


# The values that the state which is being encoded refers to, and the codec for those that are new.
_noted: ContextVar[tuple[Codec, list[External[Any]]] | None] = ContextVar("perdure_externals", default=None)
_reader: ContextVar[Reader | None] = ContextVar("perdure_external_reader", default=None)


class External(Generic[T]):
    """A large value in a thread's state: `thread.save({"video": perdure.External(data)})`.

    The state holds its hash and size, and `perdure.open(…, objects=…)` says where values are. A loaded one is read by
    `get()` or `await aget()`. The value must not change after it was saved once.
    """

    __slots__ = ("_content", "_hash", "_reader", "_size", "_value")

    def __init__(self, value: T) -> None:
        self._value: T = value
        self._content: bytes | None = None
        self._hash: bytes | None = None
        self._size = -1
        self._reader: Reader | None = None

    @property
    def hash(self) -> str:
        """The BLAKE3 hash of its content, in hex; empty before the first save."""
        return self._hash.hex() if self._hash is not None else ""

    @property
    def size_bytes(self) -> int:
        """The size of its content as it is stored, without encryption; -1 before the first save."""
        return self._size

    def get(self) -> T:
        """Return the value. The first use reads it and checks its hash."""
        if self._value is _UNSET and self._reader is not None:
            self._value = self._decoded(self._reader.read(self), self._reader.codec)
        return self._whole()

    async def aget(self) -> T:
        """`get`, awaited."""
        if self._value is _UNSET and self._reader is not None:
            self._value = self._decoded(await self._reader.aread(self), self._reader.codec)
        return self._whole()

    def _whole(self) -> T:
        if self._value is _UNSET:
            raise UsageError("this External was not loaded by thread.load() of a store that was opened with objects=…")
        return self._value

    def _decoded(self, content: bytes, codec: Codec) -> T:
        kind, body = content[:1], content[1:]
        if kind == _BYTES:
            return cast(T, body)
        if kind != _TEXT:
            raise Undecodable(f"the value {self.hash} is of a kind that this version of Perdure does not know")
        return cast(T, decode(decompress_bounded(body, SIZE_MAX), codec))

    def content(self, codec: Codec) -> bytes | None:
        """Return what is stored of a new value; None for one that was loaded."""
        if self._content is None and self._hash is None:
            value: Any = self._value
            self._content = _BYTES + value if type(value) is bytes else _TEXT + compress_full(encode(value, codec))
            self._hash, self._size = content_hash(self._content), len(self._content)
        return self._content

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, External):
            return NotImplemented
        return self is other or (self._hash is not None and self._hash == other._hash)

    def __hash__(self) -> int:
        return hash(self._hash)

    def __repr__(self) -> str:
        return f"<External {self.hash[:12]}, {self._size} bytes>" if self._hash else "<External, not saved yet>"


def content_hash(content: bytes) -> bytes:
    return blake3(content).digest(_HASH_BYTES)


@contextmanager
def noting(codec: Codec) -> Iterator[list[External[Any]]]:
    """Yield a list that gets the values which states refer to that are encoded in the block."""
    noted: list[External[Any]] = []
    before = _noted.set((codec, noted))
    try:
        yield noted
    finally:
        _noted.reset(before)


@contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """Let values that are decoded in the block be read by a reader."""
    before = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(before)


def _dump(external: External[Any]) -> list[Any]:
    place = _noted.get()
    if place is None:
        raise Unstorable(
            "an External is kept by save and update of a thread alone, in a store that says where such values are: "
            'perdure.open(…, objects="s3://bucket/folder" or a folder)'
        )
    codec, noted = place
    token = _noted.set(None)  # one inside of another would not be collected with it
    try:
        external.content(codec)
    finally:
        _noted.reset(token)
    noted.append(external)
    return [external.hash, external._size]


def _load(body: Any) -> External[Any]:
    if type(body) is not list or len(body) != 2 or type(body[0]) is not str or type(body[1]) is not int:
        raise Undecodable("a stored External has another form")
    external: External[Any] = External(_UNSET)
    external._hash, external._size, external._reader = bytes.fromhex(body[0]), body[1], _reader.get()
    return external


register(External, name="perdure.External", dump=_dump, load=_load)
