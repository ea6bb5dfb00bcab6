"""`StoreContext.threads`: the numbers and newest records of threads that lines (`line_saves.py`) have read or saved.

With an entry, a save needs no lookup. The cache is bounded; a lost entry costs one read. It also remembers the newest
ids of deleted threads: a late write to a deleted thread must not start a new thread of the same name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_THREADS_MAX = 4096
_TIPS_MAX = 16  # namespaces of one thread whose newest record is remembered
Name = tuple[int, str]  # the tenant's number, and the thread's name


class Tip(NamedTuple):
    """The newest record of a namespace, and its id."""

    id: bytes
    record: int


@dataclass(slots=True)
class CachedThread:
    """A thread's number, the tree of its records, its metadata, and its newest records by namespace."""

    thread: int
    tree: int
    metadata: Mapping[str, Any]
    tips: OrderedDict[str, Tip] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_tip(self, namespace: str, tip: Tip) -> None:
        with self._lock:
            self.tips[namespace] = tip
            self.tips.move_to_end(namespace)
            while len(self.tips) > _TIPS_MAX:
                self.tips.popitem(last=False)

    def newest(self) -> list[Tip]:
        """Return the newest record of each namespace, the most recently noted last."""
        with self._lock:
            return list(self.tips.values())


class ThreadCache:
    """Threads by tenant and name: one cache for each store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: OrderedDict[Name, CachedThread] = OrderedDict()
        self._keyless: set[int] = set()  # tenants whose keys are gone
        self._deleted: OrderedDict[Name, bytes] = OrderedDict()  # the newest ids of deleted threads

    def get(self, name: Name) -> CachedThread | None:
        with self._lock:
            thread = self._threads.get(name)
            if thread is not None:
                self._threads.move_to_end(name)
            return thread

    def note(self, name: Name, thread: int, tree: int, metadata: Mapping[str, Any]) -> CachedThread:
        """Cache a thread as the store has it. Return its entry, a new one if the name now means another thread."""
        with self._lock:
            if name[0] in self._keyless:
                return CachedThread(thread, tree, metadata)  # read before the key was removed: do not cache it
            cached = self._threads.get(name)
            if cached is None or cached.thread != thread:
                cached = self._threads[name] = CachedThread(thread, tree, metadata)
            cached.metadata = metadata
            self._threads.move_to_end(name)
            while len(self._threads) > _THREADS_MAX:
                self._threads.popitem(last=False)
            return cached

    def forget(self, name: Name) -> None:
        """Drop a thread that no longer exists. Later writes to its checkpoints are too late."""
        with self._lock:
            thread = self._threads.pop(name, None)
        if thread is not None and (tips := thread.newest()):
            self.mark_deleted(name, max(tip.id for tip in tips))

    def forget_tenant(self, tenant: int) -> None:
        """Drop the threads of a tenant whose key was removed."""
        with self._lock:
            self._keyless.add(tenant)
            for name in [name for name in self._threads if name[0] == tenant]:
                del self._threads[name]

    def know_tenant(self, tenant: int) -> None:
        """Allow caching the threads of a tenant whose key is available (again)."""
        with self._lock:
            self._keyless.discard(tenant)

    def mark_deleted(self, name: Name, newest: bytes) -> None:
        """Remember the newest checkpoint id of a deleted thread."""
        with self._lock:
            self._deleted[name] = max(newest, self._deleted.pop(name, b""))
            while len(self._deleted) > _THREADS_MAX:
                self._deleted.popitem(last=False)

    def is_too_late(self, name: Name, id_: bytes) -> bool:
        """Return whether a checkpoint may be of a deleted thread: ids grow with time, so none exceeds its newest."""
        with self._lock:
            return id_ <= self._deleted.get(name, b"")
