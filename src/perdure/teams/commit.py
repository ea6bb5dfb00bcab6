"""`perdure.two_phase`: one transaction over several stores, which commits in all of them or in none.

    1  prepare   each store but one records what it will do, and can do it whatever happens (`storage/prepared.py`)
    2  decide    that one store, the decider, commits its own part together with a row: the decision
    3  finish    the others do what they have recorded

A process that dies before 2 has changed nothing; after 2, the next process that works on a prepared store finishes it.
A PostgreSQL store decides if there is one: a process that settles must reach the decider, and SQLite prepares without
settings of a server.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from perdure.errors import Busy, OutcomeUnknown, PerdureError, UsageError
from perdure.log.cache import BaseCache
from perdure.memory.scopes import search_alike
from perdure.runs.execution.scope import current
from perdure.storage import prepared
from perdure.storage.events import event
from perdure.storage.program import (
    Batch,
    Capabilities,
    ConstraintFailed,
    Driver,
    Maintenance,
    Program,
    Rows,
    Sql,
    Statement,
    Transaction,
)
from perdure.storage.wrapping import WrappingDriver
from perdure.threads.thread_cache import ThreadCache

if TYPE_CHECKING:
    from perdure.ops.store import Store

_log = logging.getLogger("perdure")
_CACHE_BYTES = 1 << 20
_SECONDS_MAX = 60.0
_SAVE_ALL, _UNDO_ALL = Sql("SAVEPOINT two_phase"), Sql("ROLLBACK TO two_phase")
_SAVE, _UNDO, _KEEP = Sql("SAVEPOINT part"), Sql("ROLLBACK TO part"), Sql("RELEASE part")
_QUIET = Sql(postgres="SELECT set_config('perdure.prepares', 'on', true)")
_SLOTS = Sql(postgres="SELECT current_setting('max_prepared_transactions')::bigint")


class _Cancelled(Exception):
    """Ends a transaction of a block that failed."""


class _OpenTransaction:
    """A transaction of one store that stays open while the block runs. A thread of its own runs it."""

    def __init__(self, driver: Driver, store: str, ends_us: int) -> None:
        self.driver, self.store = driver, store
        self.statements: list[Statement] = []  # that write
        self.is_prepared = False
        self._ends_us = ends_us
        self._requests: SimpleQueue[Any] = SimpleQueue()  # batches; None ends it, an exception undoes it
        self._answers: SimpleQueue[list[Rows] | BaseException] = SimpleQueue()
        self._begun = self._ended = False
        self._thread: Thread | None = None

    def begin(self, gid: str = "") -> None:
        """Begin it. With `gid`, its end on PostgreSQL prepares it under that name."""
        transaction = Transaction(self._program, write=True, solo=True, prepare=gid)
        self._thread = Thread(target=self._work, args=(transaction,), name="perdure-two-phase", daemon=True)
        self._thread.start()
        self._answer()

    def _work(self, transaction: Transaction) -> None:
        try:
            self.driver.run(transaction)
            self._answers.put([])
        except BaseException as error:
            self._answers.put(error)

    def _program(self) -> Program[None]:
        if self._begun:  # a driver repeats a transaction that it has rolled back
            raise Busy("other writers were in the way of two_phase(): nothing was written; try again")
        self._begun = True
        self._answers.put([])
        while True:
            try:
                request = self._requests.get(timeout=max(0.0, (self._ends_us - prepared.clock_us()) / 1e6))
            except Empty:
                raise Busy("two_phase() took longer than its timeout_s: nothing was written") from None
            if request is None:
                return
            if isinstance(request, BaseException):
                raise request
            self._answers.put((yield request))

    def _answer(self) -> list[Rows]:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            self._ended = True
            raise answer
        return answer

    def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in it. Any error of the database ends it."""
        if self._ended:
            raise UsageError("this two_phase() has ended, or failed before: nothing of it is written")
        self._requests.put(Batch(*statements))
        return self._answer()

    def run(self, program: Program[Any]) -> None:
        for batch in program:
            self.ask(*batch.statements)

    def end(self) -> None:
        """Commit it, or prepare it."""
        if self._ended:
            raise UsageError("this two_phase() has failed before: nothing of it is written")
        self._requests.put(None)
        self._ended = True
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer

    def cancel(self) -> None:
        """Undo it, if it has not ended."""
        if self._thread is not None and not self._ended:
            self._ended = True
            self._requests.put(_Cancelled())
            self._answers.get()
        self.join()

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join()


class _JoinedDriver(WrappingDriver):
    """Runs every transaction of a store as a part of an open one."""

    def __init__(self, transaction: _OpenTransaction) -> None:
        super().__init__(transaction.driver)
        self._whole, self._lock = transaction, Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities._replace(base=self, place=None, data_version=None)

    def run(self, transaction: Transaction) -> Any:
        if transaction.volatile:
            return self.inner.run(transaction)
        with self._lock:
            before = len(self._whole.statements)
            if transaction.write:
                self._whole.ask(_SAVE())
            program = transaction.op()
            try:
                batch = next(program)
                while True:
                    rows = self._whole.ask(*batch.statements)
                    self._whole.statements += [one for one in batch.statements if not prepared.is_reading(one.sql)]
                    batch = program.send(rows)
            except StopIteration as stop:
                if transaction.write:
                    self._whole.ask(_KEEP())
                return stop.value
            except Exception:
                del self._whole.statements[before:]
                if transaction.write and not self._whole._ended:
                    self._whole.ask(_UNDO(), _KEEP())
                raise
            finally:
                program.close()

    async def arun(self, transaction: Transaction) -> Any:
        import asyncio  # late: most processes need none of it

        return await asyncio.to_thread(self.run, transaction)

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return False  # the caller then uses `run`

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return False

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        self._refuse()

    def listen(self) -> NoReturn:
        self._refuse()

    def at(self, epoch: int, token: str) -> NoReturn:
        self._refuse()

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise UsageError("this cannot be part of two_phase(): call it on the store itself, outside of the block")


class TwoPhase:
    """A transaction over several stores: `with perdure.two_phase(a, b) as (a, b): …`, or `async with`."""

    def __init__(self, stores: Sequence[Store], timeout_s: float) -> None:
        self._stores, self._timeout_s = stores, timeout_s
        self._gid = secrets.token_hex(16)
        self._parts: list[_OpenTransaction] = []

    def __enter__(self) -> tuple[Store, ...]:
        scope = current.get()
        if scope is not None and scope.body is None:
            raise UsageError(
                "two_phase() in a run would be repeated by a replay: call it in a function with @perdure.step"
            )
        drivers = [store._context.driver.capabilities.base for store in self._stores]
        ids = [prepared.store_id(driver) for driver in drivers]
        if len(set(ids)) != len(ids) or len(ids) < 2:
            raise UsageError("two_phase() wants two or more stores; for one store it is not needed")
        for driver in drivers:
            prepared.settle_all(driver, drivers)
        self._ends_us = prepared.clock_us() + int(self._timeout_s * 1e6)
        self._parts = [_OpenTransaction(driver, id, self._ends_us) for driver, id in zip(drivers, ids, strict=True)]
        self._decider = next((part for part in self._parts if part.driver.dialect == "postgres"), self._parts[0])
        try:
            for part in sorted(self._parts, key=lambda part: part.store):  # in one order, against deadlocks
                self._begin(part)
            return tuple(map(self._joined, self._stores, self._parts))
        except BaseException:
            self._cancel()
            raise

    def _begin(self, part: _OpenTransaction) -> None:
        if part is self._decider:
            part.begin()
        elif part.driver.dialect == "sqlite":
            part.begin()
            part.ask(_SAVE_ALL())
        else:
            part.begin(self._gid)
            [[(slots,)], _] = part.ask(_SLOTS(), _QUIET())
            if not slots:
                raise UsageError(
                    "two_phase() over two PostgreSQL stores needs prepared transactions, and this server has none: set "
                    "max_prepared_transactions = 20 in postgresql.conf and restart it"
                )

    def _joined(self, store: Store, part: _OpenTransaction) -> Store:
        """Return a store whose operations are parts of the transaction. It shares no cache: it may be undone."""
        ctx, joined = store._context, _JoinedDriver(part)
        driver: Driver = joined
        if ctx.driver is not part.driver:  # it is encrypted: statements are recorded as they are stored
            driver = copy(ctx.driver)
            driver.inner = joined  # type: ignore[attr-defined]
        caches: dict[str, Any] = {"cache": BaseCache(_CACHE_BYTES), "threads": ThreadCache(), "numbers": deque()}
        context = replace(ctx, driver=driver, large_warned={}, **caches)
        search_alike(context, ctx)
        return type(store)(context)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cancel()
            return
        try:
            for part in self._parts:
                if part is not self._decider:
                    self._prepare(part)
            self._decider.run(prepared.add_commit(self._gid, prepared.clock_us()))
        except ConstraintFailed:
            self._cancel()
            raise Busy("two_phase() was slower than its timeout_s, and another process has undone it") from None
        except BaseException:
            self._cancel()
            raise
        try:
            self._decider.end()
        except BaseException as error:  # also an interruption: it may be committed
            self._decider.join()
            if prepared.decide(self._decider.driver, self._gid) != prepared.COMMIT:
                self._cancel()
                raise
            self._finish()
            if not isinstance(error, OutcomeUnknown):
                raise
        else:
            self._finish()

    def _prepare(self, part: _OpenTransaction) -> None:
        decider = prepared.decider_text(self._decider.store, self._decider.driver)
        about = (self._gid, decider)
        if part.driver.dialect == "sqlite":
            if not part.statements:
                part.cancel()
                return
            redo = prepared.redo_of(part.statements)
            part.ask(_UNDO_ALL())
            part.run(prepared.add_prepared(*about, redo, self._ends_us))
        else:
            prepared.run(part.driver, lambda: prepared.add_prepared(*about, None, self._ends_us))
            part.is_prepared = True  # its row is there
        part.end()
        part.is_prepared = True

    def _finish(self) -> None:
        """Let the prepared stores follow the decision. One that cannot be reached follows later."""
        try:
            for part in self._parts:
                if part.is_prepared:
                    prepared.finish(part.driver, self._gid, prepared.COMMIT)
            prepared.run(self._decider.driver, lambda: prepared.forget_decision(self._gid))
        except PerdureError as error:
            message = "two_phase() is committed, and a store follows when it is next used: %s"
            _log.warning(message, error, extra=event("commit.unfinished"))

    def _cancel(self) -> None:
        for part in self._parts:
            part.cancel()
        for part in self._parts:
            if part.is_prepared:
                try:
                    prepared.finish(part.driver, self._gid, prepared.ABORT)
                except PerdureError as error:
                    message = "two_phase() is undone, and a store follows when it is next used: %s"
                    _log.warning(message, error, extra=event("commit.unfinished"))

    async def __aenter__(self) -> tuple[Store, ...]:
        import asyncio

        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.__exit__, kind, error, trace)


def two_phase(*stores: Store, timeout_s: float = 5.0) -> TwoPhase:
    """Write to several stores at once: all of it is committed, or nothing. Also `async with`.

    `with perdure.two_phase(a, b) as (a, b):` gives stores whose reads and writes are parts of the transaction. It is
    committed at the end of the block, and undone if the block raises. After `timeout_s` it is undone, and raises Busy.
    Meanwhile other writers of an SQLite store wait. Of two PostgreSQL stores the second must allow prepared
    transactions (`max_prepared_transactions`).
    """
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _SECONDS_MAX:
        raise UsageError(f"two_phase(timeout_s={timeout_s!r:.50}): seconds, up to {_SECONDS_MAX:g}")
    return TwoPhase(stores, float(timeout_s))


def settle(*stores: Store) -> int:
    """End the transactions over these stores whose process has died. Return how many were ended. Raises Busy."""
    drivers = [store._context.driver.capabilities.base for store in stores]
    return sum(prepared.settle_all(driver, drivers) for driver in drivers)
