"""A sandbox: a store that is thrown away, filled from a snapshot as it is used, for code that must touch nothing.

Recorded effects answer from the journal and others are refused. Sockets and processes are refused by an audit hook of
the interpreter, for the code inside of the `with` block and for every task and thread that it starts.

Outside of its reach is what Python does not report: sockets that a C library opens itself (libpq, gRPC), processes of
multiprocessing's `spawn`, work handed to a thread that was there before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self

from perdure.errors import NotFound, UsageError
from perdure.memory.labels import path_of
from perdure.memory.search import searcher_of
from perdure.runs.engine import flows
from perdure.runs.journal.rows import numbered
from perdure.storage.program import drive, read, write_repair
from perdure.transfers.memory import copy_memory
from perdure.transfers.runs import copy_run
from perdure.transfers.transfer import transfer_some

if TYPE_CHECKING:
    from perdure.memory.handle import Memory
    from perdure.runs.engine.models import Step
    from perdure.runs.handle import Run
    from perdure.runs.history.replay import Replay
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore
    from perdure.threads.thread import Thread

_REFUSED = frozenset(
    [f"socket.{name}" for name in ("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname")]
    + ["socket.gethostbyaddr", "socket.getnameinfo", "subprocess.Popen", "pty.spawn"]
    + [f"os.{name}" for name in ("system", "exec", "fork", "forkpty", "posix_spawn", "spawn", "startfile")]
)
_MARK = "_perdure_sandboxed"
_inside: ContextVar[bool | None] = ContextVar("perdure_sandbox", default=None)
_installing = threading.Lock()
_installed = False
_plain_start = threading.Thread.start


class Sandbox:
    """`with snap.sandbox() as box:` what is asked for is copied from the snapshot when it is first asked for."""

    store: SnapshotStore  # what was brought so far

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._exit = ExitStack()
        self._brought: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        live = self._snapshot._context
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="perdure-sandbox-"))
            keys = live.driver.capabilities.keys
            given = {"tenant": live.tenant_name, "keys": None if keys is None else keys.provider}
            self.store = stack.enter_context(self._snapshot._live._open(Path(folder, "sandbox.db"), **given))
            self.store._context.codec, self.store._context.refuses_effects = live.codec, True
            searcher_of(self.store._context).embedding = searcher_of(live).embedding
            _install()
            stack.enter_context(_switched(True))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def thread(self, name: str) -> Thread:
        """A thread as it was, to load and to save to; empty if there was none."""
        if self._is_new("thread", name):
            with _switched(False):
                try:
                    transfer_some(self._source, self.store._context, [name], (), "", None, move=False)
                except NotFound:
                    pass
        return self.store.thread(name)

    def get_run(self, id: str) -> Run:
        """A run as it was, whatever its status, with all of its family."""
        with _switched(False):
            self._bring_run(id)
        return self.store.get_run(id)

    def memory(self, *labels: str) -> Memory:
        """The memory of a namespace as it was, with those below and above it."""
        under = path_of(labels)
        with _switched(False):
            copy_memory(
                self._source,
                self.store._context,
                lambda path: (path.startswith(under) or under.startswith(path)) and self._is_new("memory", path),
            )
        return self.store.memory(*labels)

    def replay(self, run: str, fn: Any = None) -> Replay:
        """Run the code of today against a run's journal as it was: `store.replay`."""
        return self.store.replay(self.get_run(run), fn)

    def fork(
        self,
        run: str,
        *,
        at: Step | str | int | None = None,
        id: str | None = None,
        changes: Mapping[Any, Any] | None = None,
        keys: Literal["new", "same"] | None = None,
    ) -> Run:
        """A fork of a run as it was: `store.fork`. Its steps run here; at the first effect that is not recorded it is
        stuck."""
        return self.store.fork(self.get_run(run), at=at, id=id, changes=changes, keys=keys)

    @property
    def _source(self) -> Any:
        return self._snapshot.store._context

    def _is_new(self, kind: str, name: str) -> bool:
        known = (kind, name) in self._brought
        self._brought.add((kind, name))
        return not known

    def _bring_run(self, run_id: str) -> None:
        source, target = self._source, self.store._context
        if drive(target.driver, target.tenant()) is not None and self._has_run(run_id):
            return
        tenant, row = drive(source.driver, flows.locate(source, run_id))
        top = drive(source.driver, read(partial(numbered, tenant, row.root))) or row
        to = drive(target.driver, target.ensure_tenant())
        drive(target.driver, write_repair(partial(copy_run, source, to, top.id, lambda _rows: None, as_is=True)))

    def _has_run(self, run_id: str) -> bool:
        try:
            self.store.get_run(run_id)
        except NotFound:
            return False
        return True


def _install() -> None:
    """An audit hook cannot be removed: there is one, from the first sandbox of the process on."""
    global _installed
    with _installing:
        if not _installed:
            sys.addaudithook(_audit)
            threading.Thread.start = _start  # type: ignore[method-assign]  # not every Python reports threads
            _installed = True


def _audit(event: str, _args: tuple[Any, ...]) -> None:
    if event in _REFUSED and _is_inside():
        raise UsageError(f"{event}: a sandbox opens no socket and starts no process")


def _start(self: threading.Thread) -> None:
    if _is_inside():
        setattr(self, _MARK, True)  # it begins with an empty context
    _plain_start(self)


def _is_inside() -> bool:
    here = _inside.get()
    return bool(getattr(threading.current_thread(), _MARK, False)) if here is None else here


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    before = _inside.set(on)
    try:
        yield
    finally:
        _inside.reset(before)
