"""The context of a store, a handle's cursor, and the base class of handles.

The context has the driver, codec, caches, tenant, clock and random source that flows use. The clock and the random
source are nowhere else, so that tests can set them and programs stay pure.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from perdure.log.cache import BaseCache
from perdure.log.ids import new_id
from perdure.log.thread_table import ensure_tenant, find_tenant
from perdure.storage.object_folder import Objects
from perdure.storage.program import Driver, Flow, adrive, drive, read, write
from perdure.threads.thread_cache import ThreadCache
from perdure.values.registry import Codec

WARN_BYTES = 5_000_000
T = TypeVar("T")


class Entropy:
    """Random bytes of the operating system, fetched a page at a time.

    A system call for each save would cost more than its hashes, and would release the GIL in the middle of it. A caller
    takes a page from the list and puts it back.
    """

    def __init__(self) -> None:
        self._pages: list[tuple[int, bytes, int]] = []  # the process's id, the bytes, how many of them are used

    def __call__(self, size: int) -> bytes:
        try:
            pid, data, at = self._pages.pop()  # atomic: no two threads get the same page
        except IndexError:
            pid, data, at = 0, b"", 0
        if at + size > len(data) or pid != os.getpid():  # a forked process must not draw the same bytes
            pid, data, at = os.getpid(), os.urandom(max(4096, size)), 0
        self._pages.append((pid, data, at + size))
        return data[at : at + size]


def clock_us() -> int:
    """Return the microseconds since 1970."""
    return time.time_ns() // 1000


@dataclass(slots=True, repr=False, eq=False)
class StoreContext:
    """A store as one tenant sees it."""

    driver: Driver
    codec: Codec
    cache: BaseCache
    tenant_name: str
    clock_us: Callable[[], int] = clock_us
    entropy: Callable[[int], bytes] = field(default_factory=Entropy)
    ticks: Callable[[], float] = time.monotonic  # seconds, for measuring durations
    linger_s: float = (
        1.0  # a run stays in its process for a shorter wait; 0: the clock is a test's, and each wait parks
    )
    warn_bytes: int = WARN_BYTES  # larger states log a warning
    large_warned: dict[tuple[str, str], int] = field(default_factory=dict)  # (tenant, thread): size of the next warning
    threads: ThreadCache = field(default_factory=ThreadCache)  # the threads that lines have seen, of all tenants
    refuses_effects: bool = False  # a sandbox: effects return their recorded results, and none runs
    objects: Objects | None = None  # where the large values of states are
    values_of: StoreContext | None = None  # this is a copy in memory: it reads the large values of another store
    known_tenant: int | None = None  # the tenant's number, once it was looked up
    numbers: deque[int] = field(default_factory=deque)  # reserved for new threads, taken in ascending order

    def tenant(self) -> Flow[int | None]:
        """Return the tenant's number, or None if nothing was ever written for it."""
        if self.known_tenant is None:
            number = yield from read(lambda: find_tenant(self.tenant_name))
            if number is None:  # another call may know it by now
                return self.known_tenant
            self.known_tenant = number
        return self.known_tenant

    def ensure_tenant(self) -> Flow[int]:
        """Return the tenant's number. Create the tenant on first use."""
        tenant = yield from self.tenant()
        if tenant is None:
            tenant = self.known_tenant = yield from write(lambda: ensure_tenant(self.tenant_name))
        return tenant

    def shares_transactions(self, other: StoreContext) -> bool:
        """Return whether one transaction may hold writes of both: they are open on the same database."""
        if self.driver is other.driver:
            return True
        ours, theirs = self.driver.capabilities, other.driver.capabilities
        is_one_place = ours.place is not None and ours.place == theirs.place
        return is_one_place and (ours.keys is None) == (theirs.keys is None)

    def is_same_tenant(self, other: StoreContext) -> bool:
        """Return whether both are of the same database and tenant, so that their handles mean the same rows."""
        return self.tenant_name == other.tenant_name and self.shares_transactions(other)

    def seen_from(self, module: str) -> StoreContext:
        """Return this context with the codec as the code of a module sees it."""
        codec = self.codec.seen_from(module)
        return self if codec is self.codec else replace(self, codec=codec)

    def new_record_id(self, at: int, after: int) -> int:
        return new_id(at, int.from_bytes(self.entropy(4), "little"), after)


@dataclass(slots=True, repr=False, eq=False)
class Cursor:
    """A handle's position on a thread. All users of the handle share it, in any thread of the process.

    `record` is the checkpoint that the handle last loaded or saved. The next save follows it. If another writer has
    moved the head since, that save becomes a branch. Concurrent saves of the same handle (`own`) do not branch.
    """

    name: str
    merge: Mapping[str, Any] | None = None
    thread: int | None = None
    tree: int = 0
    record: int | None = None
    found_nothing: bool = False  # a load found no checkpoint: the first save follows none, even if one appears
    own: deque[int] = field(default_factory=lambda: deque(maxlen=1024))
    on_branch: bool = False  # its saves do not move the head; the warning was logged
    lost_head: int | None = None  # a head whose record is missing; a load returned `record` in its place

    def disown(self, record: int) -> None:
        """Forget an id that was drawn but not used. Another writer may have it; following that one would be a race."""
        try:
            self.own.remove(record)
        except ValueError:
            pass

    def resolve(self, thread: int, tree: int) -> None:
        self.thread, self.tree = thread, tree


class Handle:
    """The base of public handles: it runs flows in its store, blocking or awaited (`storage/twins.py`)."""

    _context: StoreContext

    def _run(self, flow: Flow[T]) -> T:
        return drive(self._context.driver, flow)

    async def _arun(self, flow: Flow[T]) -> T:
        return await adrive(self._context.driver, flow)
