"""What a saver remembers of the threads that it has seen. Bounded; losing an entry costs one read.

A thread's number tells a late write of a deleted thread from an early one of a thread of the same name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

_THREADS_MAX = 4096
_TIPS_MAX = 16  # namespaces of one thread whose newest record is remembered


class Tip(NamedTuple):
    """The newest record of a namespace: its id, and where its channels stand in its text, if that is known."""

    id: bytes
    record: int
    spans: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Seen:
    """A thread: its number, the tree of its records, its metadata, and the newest records by namespace."""

    thread: int
    tree: int
    metadata: Mapping[str, Any]
    tips: OrderedDict[str, Tip] = field(default_factory=OrderedDict)
    puts: int = 0  # since its history was last shortened
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_tip(self, space: str, tip: Tip) -> None:
        with self._lock:
            self._note_tip(space, tip)

    def newest(self) -> list[Tip]:
        """All of them, the most recently used last."""
        with self._lock:
            return list(self.tips.values())

    def _note_tip(self, space: str, tip: Tip) -> None:
        known = self.tips.get(space)
        if known is None or known.record != tip.record or tip.spans:
            self.tips[space] = tip
        self.tips.move_to_end(space)
        while len(self.tips) > _TIPS_MAX:
            self.tips.popitem(last=False)


class Known:
    """Threads by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._keyless: set[int] = set()  # tenants whose keys are gone
        self._graves: OrderedDict[str, bytes] = OrderedDict()  # the newest ids of threads that are gone

    def get(self, name: str) -> Seen | None:
        with self._lock:
            seen = self._seen.get(name)
            if seen is not None:
                self._seen.move_to_end(name)
            return seen

    def note(self, tenant: int, name: str, thread: int, tree: int, metadata: Mapping[str, Any]) -> Seen:
        """What was found in the store: the same entry, unless the name now stands for another thread."""
        with self._lock:
            if tenant in self._keyless:
                return Seen(thread, tree, metadata)  # it was read before its key went: for its reader only
            seen = self._seen.get(name)
            if seen is None or seen.thread != thread:
                seen = self._seen[name] = Seen(thread, tree, metadata)
            seen.metadata = metadata
            self._seen.move_to_end(name)
            while len(self._seen) > _THREADS_MAX:
                self._seen.popitem(last=False)
            return seen

    def forget(self, name: str) -> None:
        """The thread is not there (any more). What is written on its checkpoints from now on comes too late."""
        with self._lock:
            seen = self._seen.pop(name, None)
            if seen is not None and (tips := seen.newest()):
                self._bury(name, max(tip.id for tip in tips))

    def forget_tenant(self, tenant: int) -> None:
        """A tenant's key is gone. Perhaps it is another's: then what goes here costs a read."""
        with self._lock:
            self._keyless.add(tenant)
            self._seen.clear()

    def know_tenant(self, tenant: int) -> None:
        """A tenant's key is there (again)."""
        with self._lock:
            self._keyless.discard(tenant)

    def bury(self, name: str, newest: bytes) -> None:
        """A thread was deleted whose newest checkpoint had this id."""
        with self._lock:
            self._bury(name, newest)

    def _bury(self, name: str, newest: bytes) -> None:
        self._graves[name] = max(newest, self._graves.pop(name, b""))
        while len(self._graves) > _THREADS_MAX:
            self._graves.popitem(last=False)

    def is_too_late(self, name: str, id_: bytes) -> bool:
        """Whether a checkpoint is one of a thread that is gone: ids grow with time, so an older one than its newest."""
        with self._lock:
            return id_ <= self._graves.get(name, b"")
