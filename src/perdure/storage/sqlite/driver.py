"""The SQLite driver: one file, many threads, tasks and processes.

Writes pass through the commit queue (`commit_queue.py`, `writer.py`) behind a file lock (`file_lock.py`). Reads have
connections of their own and never wait for writers. A store in memory has one connection for all. In a forked child
every call raises: SQLite's locks and caches belong to the parent.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from sys import audit
from threading import Condition, Lock, RLock, get_ident
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import apsw

from perdure.errors import Damaged, ForkedProcess, StoreClosed, UsageError
from perdure.storage.notifications import FileNotifications, NoNotifications, Notifications
from perdure.storage.prepared import Patience, PreparedHere
from perdure.storage.program import (
    WRITE_EVENT,
    Capabilities,
    Driver,
    Maintenance,
    Program,
    Statement,
    Transaction,
)
from perdure.storage.sqlite import opening
from perdure.storage.sqlite.commit_queue import CommitQueue
from perdure.storage.sqlite.errors import translate
from perdure.storage.sqlite.file_lock import FileLock
from perdure.storage.sqlite.opening import MEMORY, Durability, Target, connect
from perdure.storage.sqlite.volatile import VolatileFile
from perdure.storage.sqlite.writer import (
    CountDiffers,
    Hook,
    Writer,
    perform,
    perform_append,
    perform_at,
    perform_from,
)
from perdure.storage.wrapping import SnapshotDriver

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_IDLE_READERS_MAX = 4  # 2 MB of cache each
_TIMEOUT_S_MAX = 1_000_000  # SQLite counts milliseconds in 32 bits
_READ_THREADS_MAX = 4  # for async reads; they share the interpreter's lock, so more would not be faster


class SqliteDriver:
    """Runs programs on an SQLite store at `path`, or in memory with ":memory:".

    timeout_s: how long a write may wait for its turn before it raises Busy.
    hook: called with the name of each step ("begin", "statement:0", …, "commit", "committed"), for fault tests. An
    error that it raises rolls the transaction back.
    """

    dialect: Literal["sqlite"] = "sqlite"

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "full",
        timeout_s: float = 30.0,
        vfs: str | None = None,
        create: bool = True,
        read_only: bool = False,
        hook: Hook | None = None,
    ) -> None:
        if str(durability) == "replicated":
            raise UsageError(
                'durability="replicated" waits for a standby of PostgreSQL, and this store is a file: leave it out, or '
                "copy the file with Litestream or `perdure store replicate`"
            )
        if durability not in ("full", "normal"):
            raise UsageError(f'durability is "full" or "normal", not {durability!r}')
        if not 0 <= timeout_s <= _TIMEOUT_S_MAX:
            raise UsageError(f"timeout_s is from 0 to {_TIMEOUT_S_MAX} seconds, not {timeout_s!r}")
        real_path = MEMORY if str(path) == MEMORY else os.path.realpath(path)
        self._target = Target(real_path, durability, timeout_s, vfs, read_only)
        self._hook = hook
        self._pid = os.getpid()
        self._close_lock = Lock()
        self._closed = ""  # the reason, once it is closed
        self._given_back = False
        # Entered instead of the condition: Ctrl-C can interrupt the condition's methods before they release the lock.
        self._state_lock = RLock()
        self._state = Condition(self._state_lock)
        self._reading: set[int] = set()  # threads; an interrupted one may stay until its next read
        # Stacks by snapshot (0: none), because the connection that was used last has the warmest cache.
        self._readers: dict[int, list[apsw.Connection]] = {}
        self._read_threads: ThreadPoolExecutor | None = None
        self._watcher: apsw.Connection | None = None
        self._watched = os.urandom(8).hex()  # `data_version` says nothing about the commits before its connection
        connection, self._lock = self._open(create)
        self._writer = Writer(self._target, connection, self._lock, hook, self._lose)
        self._queue = CommitQueue(self._writer.commit, timeout_s)
        self._volatile = VolatileFile(self._target)
        _drivers.add(self)

    def __repr__(self) -> str:
        return f"<SqliteDriver {self.path}>"

    @property
    def path(self) -> str:
        """Return the store's file, absolute and without symlinks, or ":memory:"."""
        return self._target.path

    @property
    def capabilities(self) -> Capabilities:
        if self._target.in_memory:
            return Capabilities(self, self.path)
        return Capabilities(self, self.path, place=self.path, data_version=self._data_version)

    def run(self, transaction: Transaction) -> Any:
        if transaction.volatile:
            return self._run_volatile(transaction)
        if not transaction.write:
            return self._read(transaction.op)
        self._check_write()
        work = partial(perform, transaction.op)
        if transaction.settles:
            return self._queue.run(work, settles=True)
        return self._settled(partial(self._queue.run, work, solo=transaction.solo))

    def at(self, epoch: int, token: str) -> Driver:
        """Return a driver that reads the store as it was at a snapshot (see `Driver`)."""
        return SnapshotDriver(self, token, partial(self._read, epoch=epoch), partial(self._aread, epoch=epoch))

    async def arun(self, transaction: Transaction) -> Any:
        """Run a program in one transaction without blocking the event loop.

        A task that is cancelled drops a write that has not begun. It waits for one that has, then raises
        CancelledError.
        """
        if transaction.volatile:
            return await self._on_thread(partial(self._run_volatile, transaction))
        if transaction.write:
            self._check_write()
            work = partial(perform, transaction.op)
            run = partial(self._queue.arun, work, solo=transaction.solo, settles=transaction.settles)
            return await self._asettled(run)
        return await self._aread(transaction.op)

    def _settled(self, work: Callable[[], Any]) -> Any:
        """Do work as soon as no prepared transaction is in the way."""
        patience: Patience | None = None
        while True:
            try:
                return work()
            except PreparedHere as prepared:
                patience = patience or Patience(self._target.timeout_s)
                patience.settle(self, prepared)

    async def _asettled(self, work: Callable[[], Awaitable[Any]]) -> Any:
        patience: Patience | None = None
        while True:
            try:
                return await work()
            except PreparedHere as prepared:
                patience = patience or Patience(self._target.timeout_s)
                await self._on_thread(partial(patience.settle, self, prepared))

    async def _aread(self, op: Callable[[], Program[Any]], epoch: int = 0) -> Any:
        return await self._on_thread(partial(self._read, op, epoch))

    def _run_volatile(self, transaction: Transaction) -> Any:
        if transaction.write:
            self._check_write()
        elif os.getpid() != self._pid:
            raise self._forked()
        if self._closed:
            raise StoreClosed(self._closed)
        return self._volatile.run(transaction.op, write=transaction.write)

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        from asyncio import get_running_loop

        if os.getpid() != self._pid:
            raise self._forked()
        try:
            answer = get_running_loop().run_in_executor(self._threads(), work)
        except RuntimeError as error:  # another thread has just shut the executor down
            raise StoreClosed(self._closed or "the interpreter is shutting down") from error
        return await answer

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """Run statements in one transaction, without the queue if no other writer is at work (see `Driver`)."""
        if os.getpid() != self._pid:  # `_check_write`, without a call: every save and step passes here
            raise self._forked()
        audit(WRITE_EVENT, self)
        try:
            return self._append(statements, counts)
        except PreparedHere:
            return bool(self._settled(partial(self._append, statements, counts)))

    def _append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        queue, writer = self._queue, self._writer
        thread = get_ident()
        try:
            if queue.try_lead(thread):
                queue.busy = True
                try:
                    return writer.append(statements, counts)
                finally:
                    queue.busy = False
        finally:
            queue.end_lead(thread)
        try:
            return bool(queue.run(partial(perform_append, statements, counts)))
        except CountDiffers:
            return False

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        self._check_write()
        work = partial(perform_append, statements, counts)
        try:
            return bool(await self._asettled(partial(self._queue.arun, work)))
        except CountDiffers:
            return False

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        """Rewrite the file (`reclaim`, `scrub`) or truncate its log (`scrub_log`). See `Driver`."""
        if os.getpid() != self._pid:
            raise self._forked()
        problem = self._volatile.scrub() if kind != "reclaim" else ""
        return str(self._queue.run(lambda _cursor, _hook: self._writer.maintain(kind), outside=True)) or problem

    def close(self) -> None:
        """Wait for running work, then close all connections. The last one to close moves the log into the store."""
        if os.getpid() != self._pid:
            return  # the parent's; see _forget_in_child
        with self._close_lock:
            if self._given_back:
                return
            self._shut(f"the store {self.path} was closed; open it again")
            self._queue.drain()
            with self._state_lock:
                self._state.wait_for(lambda: not self._reading - {get_ident()})
            if self._read_threads is not None:
                self._read_threads.shutdown()
            self._close_readers()
            if self._watcher is not None:
                self._quietly(self._watcher.close)
            self._quietly(self._volatile.close)
            self._quietly(self._writer.close)
            self._lock.close()
            self._given_back = True

    async def aclose(self) -> None:
        from asyncio import to_thread

        await to_thread(self.close)

    def listen(self) -> Notifications:
        """Return notifications of commits by this process and others."""
        return NoNotifications() if self._target.in_memory else FileNotifications(self.path)

    # Opening

    def _open(self, create: bool) -> tuple[apsw.Connection, FileLock]:
        target = self._target
        with _opening:  # one at a time in this process: no connection may exist while a file is made
            if not target.in_memory:
                _refuse_inherited(target.path)
                opening.check_place(target.path, create=create, mountinfo=opening.read_mountinfo())
                if create and not os.path.exists(target.path):
                    audit(WRITE_EVENT, self)
                    opening.make_file(target.path)
                    opening.remove_volatile(target.path)
            try:
                connection = connect(target, "writer")
                try:
                    return connection, opening.prepare(connection, target, create=create)
                except BaseException:
                    connection.close()
                    raise
            except apsw.Error as error:
                raise translate(error, target.path, target.timeout_s) from error

    # Reading

    def _data_version(self) -> str:
        """Return a text that changes with every commit of any process: a connection sees those of all others."""
        if os.getpid() != self._pid:
            raise self._forked()
        with self._close_lock:
            if self._closed:
                raise StoreClosed(self._closed)
            try:
                self._watcher = self._watcher or connect(self._target, "reader")
                return f"{self._watched}.{self._watcher.pragma('data_version')}"
            except apsw.Error as error:
                raise self._explain_read(error) from error

    def _read(self, op: Callable[[], Program[Any]], epoch: int = 0) -> Any:
        if os.getpid() != self._pid:
            raise self._forked()
        if self._target.in_memory:  # readers share the only connection with the writers
            return self._queue.run(partial(perform_at, epoch, op) if epoch else partial(perform, op), settles=True)
        connection = self._enter(epoch)
        healthy = False
        try:
            connection = connection or connect(self._target, "reader", epoch)
            result = self._read_with(connection.cursor(), op)
            healthy = True
            return result
        except apsw.Error as error:
            raise self._explain_read(error) from error
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.path} holds invalid text ({error}); run `perdure store verify`") from error
        except Exception:
            healthy = True
            raise
        finally:
            self._leave(connection, healthy, epoch)

    def _enter(self, epoch: int) -> apsw.Connection | None:
        """Count a reader, and return an idle connection or None."""
        with self._state_lock:
            if self._closed:
                raise StoreClosed(self._closed)
            self._reading.add(get_ident())
            idle = self._readers.get(epoch)
            if not idle:
                return None
            connection = idle.pop()
            if not idle:
                del self._readers[epoch]
            return connection

    def _leave(self, connection: apsw.Connection | None, healthy: bool, epoch: int) -> None:
        """End reading, and keep a healthy connection for the next reader.

        Connections to snapshots share their slots: that of the snapshot that was not read for longest is closed.
        """
        surplus = connection
        with self._state_lock:
            if healthy and not self._closed and connection is not None:
                surplus = self._keep(connection, epoch)
        if surplus is not None:
            self._quietly(surplus.close)
        with self._state_lock:
            self._reading.discard(get_ident())
            if self._closed:
                self._state.notify_all()

    def _keep(self, connection: apsw.Connection, epoch: int) -> apsw.Connection | None:
        """Make a connection idle. Return another one to close if there are too many, or None."""
        readers = self._readers
        idle = readers.pop(epoch, [])
        readers[epoch] = idle  # last: the dict is ordered by last use
        idle.append(connection)
        if epoch == 0:
            return idle.pop() if len(idle) > _IDLE_READERS_MAX else None
        snapshots = [at for at in readers if at]
        if sum(len(readers[at]) for at in snapshots) <= _IDLE_READERS_MAX:
            return None
        surplus = readers[snapshots[0]].pop()
        if not readers[snapshots[0]]:
            del readers[snapshots[0]]
        return surplus

    def _read_with(self, cursor: apsw.Cursor, op: Callable[[], Program[Any]]) -> Any:
        hook = self._hook
        program = op()
        try:
            batch = next(program)
        except StopIteration as stop:
            return stop.value
        # A single statement that ends the program is a transaction of its own.
        if batch.last and len(batch.statements) == 1 and len(batch.statements[0].sql.sqlite) == 1 and hook is None:
            return perform_from(program, batch, cursor, None)
        cursor.execute("BEGIN")
        try:
            if hook is not None:
                hook("begin")
            return perform_from(program, batch, cursor, hook)
        finally:
            if cursor.connection.in_transaction:
                cursor.execute("ROLLBACK")  # a read has nothing to commit, and this works after an error too

    def _explain_read(self, error: apsw.Error) -> BaseException:
        if isinstance(error, apsw.ReadOnlyError):
            return UsageError("a read transaction tried to write; ask for it with write=True")
        return translate(error, self.path, self._target.timeout_s)

    def _threads(self) -> ThreadPoolExecutor:
        with self._state_lock:
            if self._closed:
                raise StoreClosed(self._closed)
            if self._read_threads is None:
                from concurrent.futures import ThreadPoolExecutor

                self._read_threads = ThreadPoolExecutor(_READ_THREADS_MAX, "perdure-reader")
            return self._read_threads

    # Writing and ending

    def _shut(self, reason: str) -> None:
        with self._state_lock:
            self._closed = self._closed or reason
        self._queue.refuse(lambda: StoreClosed(self._closed))

    def _lose(self, reason: str) -> None:
        """Close the store after a failed fsync, on the leader's thread: no connection may keep its cache."""
        self._shut(reason)
        self._close_readers()
        self._quietly(self._writer.close)

    def _close_readers(self) -> None:
        with self._state_lock:
            readers, self._readers = self._readers, {}
        for idle in readers.values():
            for reader in idle:
                self._quietly(reader.close)

    def _quietly(self, close: Callable[[], None]) -> None:
        """Close a connection and ignore errors: they were reported at the write, or the data is safe in the log."""
        try:
            close()
        except apsw.Error:
            pass

    # Forked children

    def _check_write(self) -> None:
        if os.getpid() != self._pid:
            raise self._forked()
        audit(WRITE_EVENT, self)

    def _forked(self) -> ForkedProcess:
        return ForkedProcess(
            f"{self.path} was opened by process {self._pid} and this is its forked child {os.getpid()}; {_AFTER_FORK}"
        )

    def _forget_in_child(self) -> None:
        # Closing the connections here would drop the parent's locks and finish its log. An extra reference keeps them
        # open even while the interpreter ends.
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        if not self._target.in_memory and not self._given_back:
            try:
                status = os.stat(self._target.path)
                _inherited.add((status.st_dev, status.st_ino))
            except OSError:
                pass  # the file is gone, so it cannot be opened again
        self._lock.forget_in_child()


_drivers: WeakSet[SqliteDriver] = WeakSet()


# SQLite counts its locks per file and process. A forked child inherits the counts without the locks: a store opened
# there on the same file would have no protection, and lose its writes when the inherited one is closed.
_AFTER_FORK = "open stores after forking, or start workers by spawning"
_inherited: set[tuple[int, int]] = set()
_opening = Lock()


def _refuse_inherited(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError:
        return
    if (status.st_dev, status.st_ino) in _inherited:
        raise ForkedProcess(
            f"{path} was open in the process that this one was forked from, and SQLite cannot open the same file "
            f"on both sides of a fork; {_AFTER_FORK}"
        )


def _forget_all_in_child() -> None:
    global _opening
    _opening = Lock()  # another thread of the parent may have held it
    for driver in list(_drivers):
        driver._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
