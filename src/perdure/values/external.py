"""`External`: a large value that a stored text refers to by its hash. The value itself is in the store's objects.

Pure: what reads and writes objects is `threads/externals.py`. The text of a state or a result holds hash and size. Only
code that records which values a text refers to may encode one: in a block of `noting`, or by `encode_noting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar, cast

from blake3 import blake3

from perdure.errors import Undecodable, UsageError
from perdure.values.class_adapters import CannotTake
from perdure.values.codec import decode, encode
from perdure.values.compress import compress_full, decompress_bounded
from perdure.values.limits import SIZE_MAX
from perdure.values.registry import Codec, reader, register

T = TypeVar("T")
_HASH_BYTES = 32
_UNSET: Any = object()
_BYTES, _TEXT = b"b", b"t"  # how a content begins: bytes as they are, or the text of another value


class Reader(Protocol):
    """What reads the contents of a store, of one tenant."""

    def read(self, external: External[Any]) -> bytes: ...

    async def aread(self, external: External[Any]) -> bytes: ...

    @property
    def codec(self) -> Codec: ...


# The values that the text which is being encoded refers to, and the codec for those that are new.
_noted: ContextVar[tuple[Codec, list[External[Any]]] | None] = ContextVar("perdure_externals", default=None)
_shared: ContextVar[Mapping[str, External[Any]]] = ContextVar("perdure_shared_externals", default={})  # noqa: B039


class External(Generic[T]):
    """A large value in a thread's state, a graph's state or a run: `thread.save({"video": perdure.External(data)})`.

    What is saved holds its hash and size, and `perdure.open(…, objects=…)` says where values are. A loaded one is read
    by `get()` or `await aget()`, and not before. The value must not change after it was saved once.
    """

    __slots__ = ("_encoded", "_reader", "_value")

    def __init__(self, value: T) -> None:
        self._value: T = value
        # Its hash, size and content (None if it was loaded). One attribute, because several threads may encode it.
        self._encoded: tuple[bytes, int, bytes | None] | None = None
        self._reader: Reader | None = None

    @property
    def hash(self) -> str:
        """The BLAKE3 hash of its content, in hex; empty before the first save."""
        return self._encoded[0].hex() if self._encoded is not None else ""

    @property
    def size_bytes(self) -> int:
        """The size of its content, without compression and encryption; -1 before the first save."""
        return self._encoded[1] if self._encoded is not None else -1

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
            raise UsageError("this External was loaded from a store that was opened without objects=…")
        return self._value

    def _decoded(self, content: bytes, codec: Codec) -> T:
        body = content[1:]
        return cast(T, body if content[:1] == _BYTES else decode(body, codec))

    def content(self, codec: Codec) -> bytes | None:
        """Return what is hashed and stored of a new value; None for one that was loaded."""
        if self._encoded is None:
            value: Any = self._value
            content = _BYTES + value if type(value) is bytes else _TEXT + encode(value, codec)
            self._encoded = content_hash(content), len(content), content
        return self._encoded[2]

    @classmethod
    def of_content(cls, key: bytes, content: bytes) -> External[Any]:
        """Return a value to be stored, by what is hashed and stored of it."""
        external: External[Any] = External(None)
        external._encoded = key, len(content), content
        return external

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, External):
            return NotImplemented
        return self is other or (self.hash != "" and self.hash == other.hash)

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"<External {self.hash[:12]}, {self.size_bytes} bytes>" if self.hash else "<External, not saved yet>"


def content_hash(content: bytes) -> bytes:
    return blake3(content).digest(_HASH_BYTES)


def packed(content: bytes) -> bytes:
    """Return a content as an object holds it: texts are compressed. Its hash does not depend on the compressor."""
    return content if content[:1] == _BYTES else _TEXT + compress_full(content[1:])


def unpacked(stored: bytes) -> bytes:
    """Return the content of an object. Raises Undecodable."""
    if stored[:1] == _BYTES:
        return stored
    if stored[:1] != _TEXT:
        raise Undecodable("it is of a kind that this version of Perdure does not know")
    return _TEXT + decompress_bounded(stored[1:], SIZE_MAX)


def keys_of(values: Sequence[External[Any]]) -> list[bytes]:
    """Return the hashes of encoded values, each once, in an order that all writers share."""
    return sorted({bytes.fromhex(value.hash) for value in values})


@contextmanager
def noting(codec: Codec) -> Iterator[list[External[Any]]]:
    """Yield a list that gets the values which texts refer to that are encoded in the block."""
    noted: list[External[Any]] = []
    before = _noted.set((codec, noted))
    try:
        yield noted
    finally:
        _noted.reset(before)


def encode_noting(value: object, codec: Codec) -> tuple[bytes, Sequence[External[Any]]]:
    """Encode a value. Return the text and the large values that it refers to; none without a place for them."""
    if codec.values is None:
        return encode(value, codec), ()
    with noting(codec) as noted:
        return encode(value, codec), noted


@contextmanager
def sharing(values: Mapping[str, External[Any]]) -> Iterator[None]:
    """Let texts that are decoded in the block give these objects: their values may not be stored yet."""
    before = _shared.set(values)
    try:
        yield
    finally:
        _shared.reset(before)


def _dump(external: External[Any]) -> list[Any]:
    place = _noted.get()
    if place is None:
        raise CannotTake(
            "it is kept in states of threads and graphs, in runs and messages to them, and nowhere else; the store "
            'must say where such values are: perdure.open(…, objects="s3://bucket/folder" or a folder)'
        )
    codec, noted = place
    token = _noted.set(None)  # one inside of another would not be collected with it
    try:
        external.content(codec)
    finally:
        _noted.reset(token)
    noted.append(external)
    return [external.hash, external.size_bytes]


def _load(body: Any) -> External[Any]:
    if type(body) is not list or len(body) != 2 or type(body[0]) is not str or type(body[1]) is not int:
        raise Undecodable("a stored External has another form")
    if (known := _shared.get().get(body[0])) is not None:
        return known
    external: External[Any] = External(_UNSET)
    external._encoded, external._reader = (bytes.fromhex(body[0]), body[1], None), reader.get()
    return external


register(External, name="perdure.External", dump=_dump, load=_load)
