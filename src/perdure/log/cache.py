"""The cache of bases: the last text of each line, so that a save finds its difference without reading.

One cache per store, shared by all its handles and threads, bounded in bytes. Losing an entry costs one load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from perdure.log.records import Record
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary

Key = tuple[int, int, int]  # tenant, tree, record
K = TypeVar("K", bound=tuple[Any, ...])
_OVERHEAD_BYTES = 4 * 1024
FOREIGN = -1  # the generation of a base that was not read through its own thread


class Base:
    """A record with its state's text, its dictionary and its encoder, for the next difference against it."""

    __slots__ = (
        "_encoders",
        "data",
        "dictionary",
        "digests",
        "generation",
        "key_size",
        "key_thread",
        "parts",
        "record",
        "weight_bytes",
    )

    def __init__(
        self,
        record: Record,
        data: bytes,
        digests: tuple[bytes, ...],
        dictionary: Dictionary,
        key_size: int,
        key_thread: int,
        generation: int,
        encoder: Encoder | None = None,
    ) -> None:
        self.record = record
        self.data = data
        self.digests = digests
        self.dictionary = dictionary
        self.key_size = key_size
        #: the thread that wrote the keyframe of its chain
        self.key_thread = key_thread
        #: of the record's own thread when `record` was read or written; FOREIGN: unknown
        self.generation = generation
        #: an estimate of its memory
        self.weight_bytes = len(data) + _OVERHEAD_BYTES + (dictionary.memory_bytes if encoder is not None else 0)
        self._encoders = [encoder] if encoder is not None else []
        #: data that the writer attached to the text's parts, by name
        self.parts: Mapping[str, Any] = {}

    def know(self, parts: Mapping[str, Any], weight_bytes: int) -> None:
        """Attach a writer's data about the text's parts. `weight_bytes`: the memory that it takes."""
        self.parts = parts
        self.weight_bytes += weight_bytes

    def take_encoder(self) -> Encoder:
        """Return the encoder whose stream ends in this record to the first caller, and a new one to all others."""
        try:
            return self._encoders.pop()  # atomic: of two threads only one gets it
        except IndexError:
            return Encoder(self.dictionary)


class Weighted(Protocol):
    """A value that a cache may hold."""

    @property
    def weight_bytes(self) -> int: ...


W = TypeVar("W", bound=Weighted)


class TenantCache(Generic[K, W]):
    """An LRU cache bounded in bytes. The newest value is kept whatever its size. Keys begin with a tenant."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[K, W] = OrderedDict()
        self._keyless: set[int] = set()  # tenants whose encryption key is gone
        self._lock = threading.Lock()

    def get(self, key: K) -> W | None:
        with self._lock:
            base = self._known.get(key)
            if base is not None:
                self._known.move_to_end(key)
            return base

    def put(self, key: K, base: W, *, instead_of: K | None = None) -> None:
        """Add a value. `instead_of`: the key of a value to drop, which the same writer no longer needs."""
        known = self._known
        with self._lock:
            if key[0] in self._keyless:
                return  # it was read before its encryption key was deleted
            for old in (key, instead_of):
                if old is not None and (gone := known.pop(old, None)) is not None:
                    self._bytes -= gone.weight_bytes
            known[key] = base
            self._bytes += base.weight_bytes
            while self._bytes > self._bytes_max and len(known) > 1:
                self._bytes -= known.popitem(last=False)[1].weight_bytes

    def forget(self, tenant: int, part: object) -> None:
        """Drop all values whose key begins with `(tenant, part)`."""
        with self._lock:
            for key in [key for key in self._known if key[:2] == (tenant, part)]:
                self._bytes -= self._known.pop(key).weight_bytes

    def forget_tenant(self, tenant: int) -> None:
        """Drop all values of a tenant whose encryption key is gone, and accept no more of them."""
        with self._lock:
            self._keyless.add(tenant)
            for key in [key for key in self._known if key[0] == tenant]:
                self._bytes -= self._known.pop(key).weight_bytes

    def know_tenant(self, tenant: int) -> None:
        """Accept values of a tenant again: it has an encryption key."""
        with self._lock:
            self._keyless.discard(tenant)

    def drop(self, key: K) -> None:
        with self._lock:
            gone = self._known.pop(key, None)
            if gone is not None:
                self._bytes -= gone.weight_bytes


BaseCache = TenantCache[Key, Base]
