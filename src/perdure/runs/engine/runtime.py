"""State of this process for the runs it executes in one database: its owner, their leases and what they emit.

One thread per database lives as long as runs execute. It renews their leases, and notices when a run was cancelled,
paused or taken over while its code was busy.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from perdure.errors import LeaseLost, StoreClosed
from perdure.runs.engine.claims import Claims, Hold
from perdure.runs.engine.liveness import Owner
from perdure.runs.execution.execution import LEASE_US, Execution
from perdure.runs.journal import rows
from perdure.runs.run_table import RunRow
from perdure.runs.streams.writer import StreamWriter
from perdure.storage.events import event, said
from perdure.storage.per_driver import PerDriver
from perdure.storage.program import Driver, Transaction
from perdure.threads.context import Cursor, StoreContext

TICK_S = 1.0
_MEMBERS_MAX = 10_000
_NOTIFY_S = 0.005  # NOTIFY takes a lock that makes commits wait for each other
_log = logging.getLogger("perdure")


class MemberCache(NamedTuple):
    """What a process keeps of a member that it has given back."""

    cursor: Cursor
    addresses: dict[str, Any]


def new_owner(driver: Driver) -> Owner:
    """Return a new owner of runs in this database."""
    path = driver.capabilities.path
    return Owner(path if driver.dialect == "sqlite" and path != ":memory:" else None)


class Runtime:
    """The runs of this process in one database, and the thread that renews their leases."""

    lease_us = LEASE_US

    def __init__(self, driver: Driver) -> None:
        self.owner = new_owner(driver)
        self.claims = Claims()
        self.stream = StreamWriter()
        # No reference to the driver: the runtime lives until the driver is dropped. Executions refer to the driver.
        self._executions: dict[Execution, Callable[[], None]] = {}  # each with the function that leaves it
        # Reentrant as in claims.py: the garbage collector may end an execution on any thread, under any lock.
        self._lock = threading.RLock()
        self._none_left = threading.Condition(self._lock)
        self._beating = False  # a thread renews leases
        self.members: OrderedDict[tuple[int, int], MemberCache] = OrderedDict()  # by tenant and run
        self.listeners: set[Callable[[], None]] = set()  # the workers of this process
        self._notified_s = 0.0

    def add(self, execution: Execution, leave: Callable[[], None]) -> None:
        """Renew an execution's lease from now on. `leave` is called if its event loop is closed before it ends."""
        execution.stream = self.stream
        execution.renewed_us = execution.ctx.clock_us()
        with self._lock:
            self._executions[execution] = leave
            if not self._beating:
                _thread.start_new_thread(self._beat, ())
                self._beating = True

    def remember(self, member: tuple[int, int], cache: MemberCache) -> None:
        """Keep where a member's state is, until it is claimed here again."""
        with self._lock:
            self.members[member] = cache
            self.members.move_to_end(member)
            if len(self.members) > _MEMBERS_MAX:
                self.members.popitem(last=False)

    def mail_sent(self) -> bool:
        """Wake the workers of this process. Return whether it is time to wake those of others too."""
        for listener in tuple(self.listeners):
            listener()
        now = monotonic()
        is_time = now - self._notified_s >= _NOTIFY_S
        if is_time:
            self._notified_s = now
        return is_time

    def remove(self, execution: Execution) -> None:
        with self._lock:
            self._executions.pop(execution, None)
            if not self._executions:
                self._none_left.notify()

    def _leave_closed_loops(self) -> None:
        """Leave the runs whose event loop is closed.

        Ctrl-C and SystemExit in a task end the loop, and the coroutine that awaits the task may then never end.
        """
        with self._lock:
            closed = [leave for execution, leave in self._executions.items() if execution.loop_is_closed]
        for leave in closed:
            leave()

    def owns(self, owner: str | None) -> bool:
        return owner is not None and owner == self.owner.text

    def is_left(self, tenant: int, row: RunRow) -> bool:
        """Return whether a running run's owner is certainly dead, or is this process and has given the run up."""
        if row.status != "running" or row.owner is None:
            return False
        self._leave_closed_loops()
        return not self.claims.holds(tenant, row.id) if self.owns(row.owner) else self.owner.is_dead(row.owner)

    def hold(self, ctx: StoreContext) -> Hold:
        """Return a new holder of the claims of one flow."""
        return Hold(ctx, self.claims, self.owner.text, self.lease_us)

    # --- leases

    def renew(self) -> None:
        """Renew the leases of all runs that this process executes, now."""
        with self._lock:
            executions = list(self._executions)
        if executions:
            self._look_after(executions)

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
                        self._executions.pop(execution, None)  # their next journal call raises
            except Exception as error:  # no database: the runs' own writes report it, and this thread continues
                fields = event("leases.not_renewed", runs=len(executions), error=type(error).__name__)
                _log.warning("leases could not be renewed: %s", said(error), extra=fields)

    def _tick_s(self) -> float:
        """Return the pause between two rounds: a sixth of the shortest lease, at most `TICK_S`."""
        return min([TICK_S, *(execution.lease_us / 6e6 for execution in self._executions)])

    def _look_after(self, executions: list[Execution]) -> None:
        """Renew the leases of which a third is over, and apply operators' requests to all executions."""
        ctx = executions[0].ctx
        now = ctx.clock_us()
        late = {execution for execution in executions if now - execution.renewed_us > execution.lease_us // 3}
        leases = [(execution.token, execution.lease_us if execution in late else 0) for execution in executions]
        answers = ctx.driver.run(Transaction(partial(rows.renew, leases, now=now), write=bool(late)))
        for execution, answer in zip(executions, answers, strict=True):
            if execution in late:
                execution.renewed_us = now
            if answer is None:  # the lease is lost, and cannot be renewed
                self.remove(execution)
            _apply_answer(execution, answer)
            execution.check_time()


def _apply_answer(execution: Execution, answer: tuple[str | None] | None) -> None:
    if answer is not None:
        execution.apply_request(answer[0])
        return
    try:
        if execution.alive:
            execution.on_lease_lost()
    except LeaseLost:
        pass  # the code's next journal call raises it


_runtimes = PerDriver(Runtime)


def runtime_of(ctx: StoreContext) -> Runtime:
    """Return the runtime of this process for a store's database."""
    return _runtimes.of(ctx.driver)


def close_runtime(ctx: StoreContext) -> None:
    """Drop the runtime of a store that is being closed, and release its owner."""
    runtime = _runtimes.pop(ctx.driver)
    if runtime is not None:
        runtime.stream.close()
        runtime.owner.close()
