"""What a save builds on: the base's text, kept in memory so that finding the difference reads nothing.

One cache per store, shared by all its handles and threads, bounded in bytes. Losing an entry costs one load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from perdure.log.records import Record
from perdure.values.delta import Encoder
from perdure.values.dictionary import Dictionary

Key = tuple[int, int, int]  # tenant, tree, record
_OVERHEAD_BYTES = 4 * 1024


class Base:
    """A record with its state's text, and what the next difference against it needs."""

    __slots__ = (
        "_encoders",
        "data",
        "dictionary",
        "digests",
        "generation",
        "key_size",
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
        generation: int,
        encoder: Encoder | None = None,
    ) -> None:
        self.record = record
        self.data = data
        self.digests = digests
        self.dictionary = dictionary
        self.key_size = key_size
        #: of the tree's threads, when this was known to be how the record is stored
        self.generation = generation
        #: about what it keeps in memory
        self.weight_bytes = len(data) + _OVERHEAD_BYTES + (dictionary.memory_bytes if encoder is not None else 0)
        self._encoders = [encoder] if encoder is not None else []
        #: what its writer knows of the text's parts, by name
        self.parts: Mapping[str, Any] = {}

    def know(self, parts: Mapping[str, Any], weight_bytes: int) -> None:
        """Keep what its writer knows of the text's parts, which takes so much memory."""
        self.parts = parts
        self.weight_bytes += weight_bytes

    def take_encoder(self) -> Encoder:
        """The encoder whose stream ends in this record, for the first caller; a new one for all others."""
        try:
            return self._encoders.pop()  # in one step: of two threads only one gets it
        except IndexError:
            return Encoder(self.dictionary)


class BaseCache:
    """The most recently used bases, up to so many bytes. The newest is kept however large it is."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bases: OrderedDict[Key, Base] = OrderedDict()
        self._keyless: set[int] = set()  # tenants whose keys are gone
        self._lock = threading.Lock()

    def get(self, key: Key) -> Base | None:
        with self._lock:
            base = self._bases.get(key)
            if base is not None:
                self._bases.move_to_end(key)
            return base

    def put(self, key: Key, base: Base, *, instead_of: Key | None = None) -> None:
        """Keep a base; `instead_of` names the one that the same writer needs no more."""
        bases = self._bases
        with self._lock:
            if key[0] in self._keyless:
                return  # it was read before its key went
            for old in (key, instead_of):
                if old is not None and (gone := bases.pop(old, None)) is not None:
                    self._bytes -= gone.weight_bytes
            bases[key] = base
            self._bytes += base.weight_bytes
            while self._bytes > self._bytes_max and len(bases) > 1:
                self._bytes -= bases.popitem(last=False)[1].weight_bytes

    def forget(self, tenant: int, tree: int) -> None:
        """Drop everything of a tree: it was erased."""
        with self._lock:
            for key in [key for key in self._bases if key[:2] == (tenant, tree)]:
                self._bytes -= self._bases.pop(key).weight_bytes

    def forget_tenant(self, tenant: int) -> None:
        """Drop everything of a tenant, and keep nothing more: its key is gone."""
        with self._lock:
            self._keyless.add(tenant)
            for key in [key for key in self._bases if key[0] == tenant]:
                self._bytes -= self._bases.pop(key).weight_bytes

    def know_tenant(self, tenant: int) -> None:
        """A tenant's key is there (again)."""
        with self._lock:
            self._keyless.discard(tenant)

    def drop(self, key: Key) -> None:
        with self._lock:
            gone = self._bases.pop(key, None)
            if gone is not None:
                self._bytes -= gone.weight_bytes
