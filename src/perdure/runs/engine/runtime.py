"""What a process keeps for the runs it owns in one database: who it is, their leases, and who listens to them.

One thread per database, alive while runs are: it lengthens the leases of runs whose bodies take long, and notices that
a run was cancelled, paused or taken over while its code was busy.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.errors import LeaseLost, StoreClosed
from perdure.runs.engine.claims import Claims, Hold
from perdure.runs.engine.liveness import Owner
from perdure.runs.execution.execution import LEASE_US, Execution
from perdure.runs.journal import rows
from perdure.storage.events import event, said
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Driver, Transaction
from perdure.threads.context import StoreContext

TICK_S = 1.0
Listener = Callable[[str, str, Any], None]
_log = logging.getLogger("perdure")


def new_owner(driver: Driver) -> Owner:
    """An owner of runs in this database."""
    if driver.dialect != "sqlite":
        return Owner.for_server()
    path = driver.capabilities.path
    return Owner.in_memory() if path == ":memory:" else Owner.for_sqlite(path)


class Runtime:
    """The runs of this process in one database: how long their leases are, and how long finished ones are kept."""

    lease_us = LEASE_US

    def __init__(self, driver: Driver) -> None:
        self.owner = new_owner(driver)
        self.claims = Claims()
        # Not the driver, whose life ends this one's: executions have it while they last.
        self._executions: dict[Execution, Callable[[], None]] = {}  # and what leaves each
        self._listeners: dict[tuple[int, int], list[Listener]] = {}
        # The garbage collector may end an execution on any thread, under any lock: as in claims.py.
        self._lock = threading.RLock()
        self._none_left = threading.Condition(self._lock)
        self._beating = False  # a thread renews leases

    def add(self, execution: Execution, leave: Callable[[], None]) -> None:
        """A run begins here: its lease is kept from now on. `leave` is called if its event loop is closed under it."""
        execution.on_chunk = partial(self._tell, (execution.tenant, execution.row.run))
        execution.renewed_us = execution.ctx.clock_us()
        with self._lock:
            self._executions[execution] = leave
            if not self._beating:
                _thread.start_new_thread(self._beat, ())
                self._beating = True

    def remove(self, execution: Execution) -> None:
        with self._lock:
            self._executions.pop(execution, None)
            if not self._executions:
                self._none_left.notify()

    def _leave_closed_loops(self) -> None:
        """Leave the runs whose event loop is closed. Ctrl-C and SystemExit in a task pass by the coroutine that waits
        for it, which may then never end."""
        with self._lock:
            closed = [leave for execution, leave in self._executions.items() if execution.loop_is_closed]
        for leave in closed:
            leave()

    def owns(self, owner: str | None) -> bool:
        return owner is not None and owner == self.owner.text

    def is_left(self, tenant: int, row: rows.RunRow) -> bool:
        """Return whether the owner of a running run is certainly gone, or is this process and has given it up."""
        if row.status != "running" or row.owner is None:
            return False
        self._leave_closed_loops()
        return not self.claims.holds(tenant, row.id) if self.owns(row.owner) else self.owner.is_dead(row.owner)

    def hold(self, ctx: StoreContext) -> Hold:
        """Return a new holder of the claims of one flow."""
        return Hold(ctx, self.claims, self.owner.text, self.lease_us)

    # --- live chunks

    def listen(self, tenant: int, run: int, listener: Listener) -> Callable[[], None]:
        """Hear the chunks and emitted values of a run that this process runs; gives what ends it."""
        key = (tenant, run)
        with self._lock:
            self._listeners.setdefault(key, []).append(listener)

        def stop() -> None:
            with self._lock:
                left = [known for known in self._listeners.get(key, []) if known is not listener]
                if left:
                    self._listeners[key] = left
                else:
                    self._listeners.pop(key, None)

        return stop

    def _tell(self, key: tuple[int, int], path: str, name: str, chunk: Any) -> None:
        for listener in self._listeners.get(key, ()):
            listener(path, name, chunk)

    # --- leases

    def _beat(self) -> None:
        while True:
            self._leave_closed_loops()
            with self._lock:
                if self._executions:
                    self._none_left.wait(self._tick_s())
                executions = list(self._executions)
                if not executions:
                    self._beating = False
                    return
            try:
                self._look_after(executions)
            except StoreClosed:
                with self._lock:
                    for execution in executions:
                        self._executions.pop(execution, None)  # their code is told by its next call
            except Exception as error:  # no database: the runs notice by themselves, and the thread continues
                found = event("leases.not_renewed", runs=len(executions), error=type(error).__name__)
                _log.warning("leases could not be renewed: %s", said(error), extra=found)

    def _tick_s(self) -> float:
        """Often enough for the shortest lease: it is renewed when a third of it is over."""
        return min([TICK_S, *(execution.lease_us / 6e6 for execution in self._executions)])

    def _look_after(self, executions: list[Execution]) -> None:
        """Lengthen the leases of which a third is over; see what operators ask of the others."""
        ctx = executions[0].ctx
        now = ctx.clock_us()
        late = {execution for execution in executions if now - execution.renewed_us > execution.lease_us // 3}
        leases = [(execution.token, execution.lease_us if execution in late else 0) for execution in executions]
        answers = ctx.driver.run(Transaction(partial(rows.renew, leases, now=now), write=bool(late)))
        for execution, answer in zip(executions, answers, strict=True):
            if execution in late:
                execution.renewed_us = now
            if answer is None:  # nothing of it can be renewed any more
                self.remove(execution)
            _apply_answer(execution, answer)


def _apply_answer(execution: Execution, answer: tuple[str | None] | None) -> None:
    if answer is not None:
        execution.apply_request(answer[0])
        return
    try:
        if execution.alive:
            execution.on_lease_lost()
    except LeaseLost:
        pass  # said to the code by its next journal call


_runtimes = PerDriver(Runtime)


def runtime_of(ctx: StoreContext) -> Runtime:
    """The runtime of this process for a store's database."""
    return _runtimes.of(ctx.driver)


def close_runtime(ctx: StoreContext) -> None:
    """The store is closed: give back what says that this process lives."""
    found = _runtimes.pop(ctx.driver)
    if found is not None:
        found.owner.close()
