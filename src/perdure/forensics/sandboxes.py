"""A sandbox: a store in memory, filled from a snapshot as it is used, to try code in.

By construction, nothing that is done with the sandbox's store reaches another one, and no effect of its runs is
executed: recorded ones answer from the journal and others are refused.

Beyond that there is a guard against mistakes: in the context of the `with` block (its own code, the tasks and branches
that inherit its context) an audit hook of the interpreter refuses new connections, new processes and writes to other
stores. Nothing is patched. Outside of its reach is what Python does not audit: data sent over a connection that is open
already, threads that begin with a context of their own, and what a C library does itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from perdure.errors import NotFound, UsageError
from perdure.memory.labels import path_of
from perdure.memory.scopes import search_alike
from perdure.storage.program import WRITE_EVENT, Driver, Program, drive, write_repair
from perdure.threads.externals import Contents
from perdure.transfers.memory import copy_memory
from perdure.transfers.runs import copy_run, family_head
from perdure.transfers.transfer import transfer_some

if TYPE_CHECKING:
    from perdure.memory.handle import Memory
    from perdure.ops.store import Store
    from perdure.runs.handle import Run
    from perdure.runs.history.replay import Replay
    from perdure.snapshots.handle import Snapshot
    from perdure.threads.thread import Thread

_REFUSED = {WRITE_EVENT, "subprocess.Popen", "pty.spawn"} | {
    *(f"socket.{name}" for name in ("connect", "bind", "sendto", "sendmsg")),
    *(f"socket.{name}" for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo")),
    *(f"os.{name}" for name in ("system", "exec", "fork", "forkpty", "posix_spawn", "spawn", "startfile")),
}
_inside: ContextVar[bool] = ContextVar("perdure_sandbox", default=False)
_drivers: WeakSet[Driver] = WeakSet()  # of sandboxes


@contextmanager
def sandbox(snapshot: Snapshot) -> Iterator[Sandbox]:
    """Open a store to try things in, with what a snapshot has: `with sandbox(snap) as box`.

    It is in memory, and gone at the end. No effect is executed in it. As a guard against mistakes, the code of the
    block opens no connection, starts no process and writes to no other store.
    """
    live = snapshot._context
    with snapshot._live._open(":memory:", tenant=live.tenant_name) as store:
        store._context.codec, store._context.refuses_effects = live.codec, True
        if live.objects is not None:
            store._context.objects, store._context.values_of = _Objects(), live
            store._context.codec = live.codec.with_values(Contents(store._context))
        search_alike(store._context, live)
        _drivers.add(store._context.driver.capabilities.base)
        _install()
        with _switched(True):
            yield Sandbox(snapshot, store)


class _Objects:
    """The large values that are saved in a sandbox: in memory, as its store is."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the memory of a sandbox"

    def put(self, name: str, data: bytes) -> None:
        self._data[name] = data

    def get(self, name: str) -> bytes:
        if name not in self._data:
            raise NotFound(f"there is no object {name} in {self}")
        return self._data[name]

    def delete(self, name: str) -> None:
        self._data.pop(name, None)


class Sandbox:
    """The store of a `with sandbox(snap) as box:`. Copies a thread, run or namespace at its first use."""

    def __init__(self, snapshot: Snapshot, store: Store) -> None:
        self.store = store  # what was brought so far
        self._source, self._target = snapshot.store._context, store._context
        self._threads: set[str] = set()  # that were brought
        self._namespaces: set[str] = set()
        self._copying = threading.RLock()

    def thread(self, name: str) -> Thread:
        """Return a thread as it was, to load and to save to. It is empty if there was none."""
        with self._copying, _switched(False):
            if name not in self._threads:
                with suppress(NotFound):
                    transfer_some(self._source, self._target, [name], (), "", None, move=False)
                self._threads.add(name)
        return self.store.thread(name)

    def get_run(self, id: str) -> Run:
        """Return a run as it was, whatever its status, with its parents and children."""
        with self._copying, _switched(False):
            with suppress(NotFound):
                return self.store.get_run(id)
            head = family_head(self._source, id)
            self._write(partial(copy_run, self._source, run_id=head.id, as_is=True))
        return self.store.get_run(id)

    def memory(self, *labels: str) -> Memory:
        """Return the memory of a namespace as it was, with those below and above it."""
        under = path_of(labels)
        namespaces: set[str] = set()

        def is_wanted(path: str) -> bool:
            if (path.startswith(under) or under.startswith(path)) and path not in self._namespaces:
                namespaces.add(path)
            return path in namespaces

        with self._copying, _switched(False):
            copy_memory(self._source, self._target, is_wanted)
            self._namespaces |= namespaces
        return self.store.memory(*labels)

    def replay(self, run: str, fn: Any = None) -> Replay:
        """Run the code of today against a run's journal as it was: `store.replay`."""
        return self.store.replay(self.get_run(run), fn)

    def fork(self, run: str, **options: Any) -> Run:
        """Fork a run as it was: `store.fork`. Its steps run here. The first effect without a record makes it stuck."""
        return self.store.fork(self.get_run(run), **options)

    def _write(self, copy: Callable[..., Program[Any]]) -> None:
        to = drive(self._target.driver, self._target.ensure_tenant())
        drive(self._target.driver, write_repair(partial(copy, to=to, advance=lambda _rows: None)))


# --- the guard


@cache
def _install() -> None:
    """Add the hook, at the first sandbox of the process: it cannot be removed. Outside of sandboxes it does nothing."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _REFUSED or not _inside.get() or (event == WRITE_EVENT and args[0] in _drivers):
        return
    raise UsageError(f"{event}: a sandbox opens no connection, starts no process and writes to no other store")


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    before = _inside.set(on)
    try:
        yield
    finally:
        _inside.reset(before)
