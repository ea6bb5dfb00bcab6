"""`Worker`: claims due runs and executes them until it is stopped.

One thread claims runs; threads and one event loop execute them (`pool.py`). When stopped, it lets its runs finish or
park, and then interrupts the others at their next step: another worker resumes them. No error of a run's code and no
loss of the database ends the worker. It never logs states or arguments.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.errors import (
    OutcomeUnknown,
    PerdureError,
    StoreClosed,
    StoreError,
    UsageError,
)
from perdure.log.store_size import take_sample
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine.claims import Claim
from perdure.runs.engine.execute import PASSING
from perdure.runs.engine.local import RunExecution
from perdure.runs.engine.runtime import new_owner, runtime_of
from perdure.runs.execution.instrumentation import count_event
from perdure.runs.functions.specs import DurableSpec, known_durables, said_version
from perdure.runs.journal import claiming
from perdure.runs.journal.claiming import Search, ServedTenants, Taken, View
from perdure.runs.journal.queues import Queue, declared, without_trace, write_limits
from perdure.runs.maintenance import retention
from perdure.runs.maintenance.deployments import revert_failing
from perdure.runs.maintenance.tenant_isolation import for_tenant
from perdure.runs.schedules.firing import fire_due
from perdure.runs.workers.pool import WorkerPool
from perdure.runs.workers.resumers import Resuming
from perdure.storage.events import event, said
from perdure.storage.prepared import settle_quietly
from perdure.storage.program import Flow, Program, drive, read, write
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.values.amounts import plural

if TYPE_CHECKING:
    from types import FrameType

    from perdure.ops.store import Store

T = TypeVar("T")
_GRACE_S = 1.0  # time for interrupted code to reach its next journal call
_TROUBLE_PAUSE_MAX_S = 5.0
_LISTEN_S = 0.5
_MAINTENANCE_FIRST_S, _MAINTENANCE_EVERY_S = 60.0, 3600.0  # when to check whether today's maintenance is done
_VERSIONS_EVERY_S = 60.0
_CANARIES_EVERY_S = 10.0
_RESTS_US = 5_000_000  # a delay before a run whose execution broke off is claimed again: it may break off again
_DEFAULT_QUEUE = "default"
_log = logging.getLogger("perdure")


class Worker:
    """Executes the due runs of a store: `perdure.Worker(store).run()`.

    It claims runs of these `queues` and durable `functions` (default: all that this process knows, or none if there are
    `graphs`), and resumes threads of `graphs` whose questions were answered, up to `concurrency` at once.
    `where` selects the threads by their metadata, if several graphs share the store. Runs belong to the store's tenant,
    or with `all_tenants` to any. It looks for work at least every `poll_s` seconds. After SIGTERM or SIGINT its runs
    have `drain_s` seconds to finish or park before they are released.
    """

    def __init__(
        self,
        store: Store,
        functions: Sequence[Callable[..., Any]] | None = None,
        *,
        graphs: Sequence[object] = (),
        where: Mapping[str, Any] | None = None,
        queues: Sequence[str | Queue] | str | Queue = (_DEFAULT_QUEUE,),
        concurrency: int = 8,
        all_tenants: bool = False,
        poll_s: float = 0.5,
        drain_s: float = 30.0,
    ) -> None:
        chosen = (queues,) if isinstance(queues, str | Queue) else tuple(queues)
        self.queues = tuple(dict.fromkeys(queue.name if isinstance(queue, Queue) else queue for queue in chosen))
        if not self.queues:
            raise UsageError("queues=(): name at least one queue")
        for name in self.queues:
            check_name(name, "queue")
        if not isinstance(concurrency, int) or concurrency < 1:
            raise UsageError(f"concurrency={concurrency!r}: how many runs at once, at least 1")
        if not poll_s > 0 or not drain_s >= 0:
            raise UsageError(f"poll_s={poll_s!r}, drain_s={drain_s!r}: seconds; poll_s above 0")
        self.concurrency, self.all_tenants, self.poll_s, self.drain_s = concurrency, all_tenants, poll_s, drain_s
        self.counts: Counter[str] = Counter()  # how executions ended: done, waiting, failed, lost …
        functions = [] if functions is None and graphs else functions
        self._functions = None if functions is None else {spec.name: spec for spec in map(durable_spec, functions)}
        self._resuming = Resuming(store, graphs, where or {})
        self._store = store
        self._ctx: StoreContext = store._context
        self._contexts: dict[int, StoreContext] = {}
        self._tenant: int | None = None
        self._specs: Mapping[str, DurableSpec] = {}
        self._active: dict[int, RunExecution] = {}
        # A SimpleQueue, because a signal handler may call put() while the same thread is inside get().
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._working = threading.Lock()
        self._stopping = self._hurry = False
        self._recover = False
        self._eager = False
        self._troubles = 0
        self._told_versions: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<Worker of queues {', '.join(self.queues)}: {self._busy} of {self.concurrency} runs>"

    @property
    def _busy(self) -> int:
        return len(self._active) + len(self._resuming.active)

    def run(self, *, until_idle: bool = False) -> None:
        """Work until `stop`, until SIGTERM or SIGINT (main thread only), or with `until_idle` until nothing is due."""
        with self._signals():
            self._work(until_idle)

    async def arun(self, *, until_idle: bool = False) -> None:
        """Work as `run` does, on other threads. Cancelling it stops the worker and waits for its end."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1, "perdure-worker") as own:
            ending = asyncio.get_running_loop().run_in_executor(own, self._work, until_idle)
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                self.stop()
                await ending
                raise

    def stop(self) -> None:
        """Claim no more runs, and end when the current ones have. A second call releases them now. Does not wait."""
        self._hurry = self._stopping
        self._stopping = True
        self._wakeups.put(None)

    # --- the loop

    def _work(self, until_idle: bool) -> None:
        if not self._working.acquire(blocking=False):
            raise UsageError("this worker runs already; make another one")
        try:
            self._prepare()
            self._owner = new_owner(self._ctx.driver)
            self._pool = WorkerPool(self._job_ended)
            ended = threading.Event()
            listeners = runtime_of(self._ctx).listeners
            listeners.add(self._look_soon)
            threading.Thread(target=self._listen, args=(ended,), name="perdure-worker-listen", daemon=True).start()
            try:
                while not self._stopping and (pause_s := self._turn(until_idle)) is not None:
                    self._wait(pause_s)
            finally:
                self._stopping = True
                listeners.discard(self._look_soon)
                self._drain()
                ended.set()
                self._pool.close()
                self._owner.close()
        finally:
            self._stopping = self._hurry = False
            self._working.release()

    def _prepare(self) -> None:
        self._tenant = None if self.all_tenants else self._do(self._ctx.ensure_tenant())
        if self._tenant is not None:
            self._contexts[self._tenant] = self._ctx
        limited = declared(self.queues)
        if limited:
            self._do(write(partial(write_limits, limited, self._ctx.clock_us())))
        self._warn_of_queues()
        now_s = time.monotonic()
        self._maintenance_at_s, self._versions_at_s = now_s + _MAINTENANCE_FIRST_S, now_s
        self._canaries_at_s = now_s
        self._schedules_at_s, self._seen_us = now_s, 2**62  # it may have been set back before

    def _turn(self, until_idle: bool) -> float | None:
        """Look for due runs, claim and start them. Return the seconds to wait, or None to end if nothing is due."""
        try:
            is_busy = self._busy > 0  # read first: what ends after the look may make something due
            self._resuming.start(self.concurrency - self._busy, self._pool.call, self._pool.await_, self._resumed)
            most = self.concurrency - self._busy
            if not until_idle:
                self._maintain_when_due()
            self._revert_when_due()
            self._fire_schedules()
            pause_s = self.poll_s if most <= 0 else self._find_work(most, until_idle and not is_busy and not self._busy)
        except PASSING as error:
            self._troubles += 1
            self._recover = self._recover or isinstance(error, OutcomeUnknown)
            self._eager = False
            fields = event("worker.retries", error=type(error).__name__, troubles=self._troubles)
            _log.warning("the worker could not look for runs, and retries: %s", said(error), extra=fields)
            return float(min(_TROUBLE_PAUSE_MAX_S, self.poll_s * 2**self._troubles))
        self._troubles = 0
        return None if pause_s is None else min(pause_s, max(0.0, self._schedules_at_s - time.monotonic()))

    def _find_work(self, most: int, ends: bool) -> float | None:
        """Claim and start up to `most` runs. Return the seconds to wait; None if it `ends` and nothing is due."""
        search = self._search()
        dead: list[str] = []
        view: View | None = None
        if not self._eager:
            view = self._read(partial(claiming.look, search, self._ctx.clock_us()))
            dead = [owner for owner in view.owners if owner != search.owner and self._owner.is_dead(owner)]
            late = any(left_us <= 0 for left_us in view.owners.values())
            if not (view.due or dead or late or self._recover):
                self._warn_of_versions(search)
                return None if ends else self._pause_s(view)
        recover, self._recover = self._recover, False  # before the claim: a run lost meanwhile sets it again
        op = partial(
            claiming.claim,
            search,
            most,
            lease=runtime_of(self._ctx).lease_us,
            dead=dead,
            recover=recover,
            now=self._ctx.clock_us(),
        )
        try:
            taken, wait_us, left = self._do(write(op))
        except BaseException:
            self._recover = self._recover or recover
            raise
        count_event("taken_over", 0 if recover else left)
        for one in taken:
            self._start(one)
        self._eager = len(taken) == most  # more may be due: claim again without a look
        if taken:
            return self.poll_s if self._eager else 0.0
        if view is None:
            return 0.0
        return self.poll_s if wait_us is None else min(self.poll_s, wait_us / 1e6)

    def _pause_s(self, view: View) -> float:
        """Return the seconds until the next wait or lease ends, at most `poll_s`: a notification may be missed."""
        ends = [*view.owners.values()] + ([] if view.next_us is None else [view.next_us])
        return min([self.poll_s, *(max(0.001, left_us / 1e6) for left_us in ends)])

    def _search(self) -> Search:
        self._specs = known_durables() if self._functions is None else self._functions
        return Search(self._owner.text, self.queues, self._specs, self._served(), tuple(self._active))

    def _served(self) -> ServedTenants:
        return ServedTenants.of(self._ctx.driver, self._tenant)

    def _start(self, taken: Taken) -> None:
        spec = self._specs[taken.row.function]
        ctx = self._contexts.get(taken.tenant)
        if ctx is None:
            ctx = replace(self._ctx, tenant_name=taken.tenant_name, known_tenant=taken.tenant)
            self._contexts[taken.tenant] = ctx
        row, runtime = taken.row, runtime_of(self._ctx)
        claim = Claim(ctx, taken.tenant, row.id, row.fence, self._owner.text, runtime.lease_us)
        claim.later_us = _RESTS_US
        job = RunExecution(ctx, taken.tenant, row, spec, runtime.claims.enter(claim), args=taken.args)
        job.execution.in_worker = True
        self._active[taken.row.run] = job
        self._pool.start(job)

    def _look_soon(self) -> None:
        if self._busy < self.concurrency:
            self._wakeups.put(None)

    def _wait(self, seconds: float) -> None:
        try:
            self._wakeups.get(timeout=seconds) if seconds > 0 else self._wakeups.get_nowait()
            while True:
                self._wakeups.get_nowait()
        except Empty:
            pass

    # --- ended runs

    def _job_ended(self, job: RunExecution, status: str, error: BaseException | None) -> None:
        """Note that an execution has ended. Called on the run's thread or on the loop."""
        if error is not None:
            run, kind = job.execution.row.id, _kind(error)
            fields = event("run.uncaught", run=run, error=kind)
            _log.error("run %s: no handler caught %s; it is queued again", run, kind, extra=fields)
        # Perhaps only the store was unavailable: claim the run again if this worker still owns it.
        self._recover = self._recover or (status == "lost" and error is None)
        number = job.execution.row.run
        if self._active.get(number) is job:  # it may have been claimed again already
            self._active.pop(number, None)
        self.counts[status] += 1
        self._wakeups.put(None)

    def _resumed(self, status: str) -> None:
        """Count the resumption of a graph's thread, if there was one. Called on its thread."""
        if status:
            self.counts[status] += 1
        self._wakeups.put(None)

    # --- stopping

    def _drain(self) -> None:
        if (count := self._busy) and not self._hurry:
            _log.info(
                "stopping: %d %s %g s to finish or park; a second signal (Ctrl-C) releases the rest at once",
                count,
                "run has" if count == 1 else "runs have",
                self.drain_s,
                extra=event("worker.draining", runs=count),
            )
        self._wait_for_runs(self.drain_s)
        if not self._active:
            return
        for job in list(self._active.values()):
            job.execution.interrupt("the worker that ran it was told to stop")
        self._wait_for_runs(_GRACE_S)
        left = list(self._active.values())
        if not left:
            return
        # Their code cannot be stopped. The runs are released all the same: nothing more is recorded here.
        fields = event("runs.not_stopped", runs=len(left))
        _log.warning("%s did not stop in time; other workers resume them", plural(len(left), "run"), extra=fields)
        for job in left:
            job.release()
        runtime_of(self._ctx).claims.settle()

    def _wait_for_runs(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._busy and not self._hurry and (left_s := deadline - time.monotonic()) > 0:
            self._wait(min(left_s, self.poll_s))  # Python may see a signal that arrives just before only afterwards

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def asked(number: int, frame: FrameType | None) -> None:
            if self._stopping:  # a third signal ends the process, in case the database hangs
                for each in before:
                    signal.signal(each, signal.SIG_DFL)
            self.stop()

        for number in before:
            signal.signal(number, asked)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- background work

    def _listen(self, ended: threading.Event) -> None:
        """Wake the worker on notifications. Polling finds runs whose notification was missed."""
        notifications = self._ctx.driver.listen()
        try:
            while not ended.is_set():
                try:
                    if notifications.wait(_LISTEN_S):
                        self._wakeups.put(None)
                except StoreClosed:
                    return
                except StoreError as error:
                    fields = event("worker.polls", error=_kind(error))
                    _log.info("LISTEN failed, and the worker polls instead: %s", said(error), extra=fields)
                    ended.wait(_LISTEN_S)
        finally:
            notifications.close()

    def _maintain_when_due(self) -> None:
        if time.monotonic() >= self._maintenance_at_s:
            self._maintenance_at_s = time.monotonic() + _MAINTENANCE_EVERY_S
            self._pool.call(self._maintain)

    def _revert_when_due(self) -> None:
        if time.monotonic() >= self._canaries_at_s:
            self._canaries_at_s = time.monotonic() + _CANARIES_EVERY_S
            self._do(revert_failing(self._tenant))
            settle_quietly(self._ctx.driver)

    def _fire_schedules(self) -> None:
        """Start the runs of schedules whose instants have come, however busy this worker is."""
        if time.monotonic() < self._schedules_at_s:
            return
        left_us, self._seen_us = self._do(fire_due(self._ctx, self._served(), self._seen_us))
        pause_s = self.poll_s if left_us is None else min(self.poll_s, left_us / 1e6)
        self._schedules_at_s = time.monotonic() + pause_s

    def _maintain(self) -> None:
        """Do the daily maintenance of each tenant, unless another worker has done it."""
        ctx = self._ctx
        try:
            tenants = [(self._tenant, ctx.tenant_name)] if self._tenant is not None else []
            for tenant, name in tenants or self._do(retention.all_tenants()):
                work = retention.daily_maintenance(tenant, ctx.clock_us, self._store._maintain_tenant)
                done = self._do(for_tenant(tenant, name, work))
                if done is not None:
                    _log.log(
                        logging.INFO if any(done) else logging.DEBUG,
                        "maintenance removed journals of %d finished runs, %d threads, %d checkpoints",
                        *done,
                        extra=event("maintenance.done", runs=done.runs, threads=done.threads),
                    )
            self._do(take_sample(ctx.clock_us))
        except PerdureError as error:
            fields = event("maintenance.failed", error=_kind(error))
            _log.warning("maintenance was not finished: %s", said(error), extra=fields)

    def _warn_of_queues(self) -> None:
        """Warn of queues that are neither declared nor used: a misspelt name would be served in silence."""
        names = [name for name in self.queues if name != _DEFAULT_QUEUE]
        for name in self._read(partial(without_trace, names, self._tenant)) if names else ():
            _log.warning(
                "no queue %r is declared, and no run or schedule uses it: check the name if you expect work",
                name,
                extra=event("worker.unknown_queue", queue=name),
            )

    def _warn_of_versions(self, search: Search) -> None:
        if time.monotonic() < self._versions_at_s:
            return
        self._versions_at_s = time.monotonic() + _VERSIONS_EVERY_S
        for function, version, count in self._read(partial(claiming.other_versions, search, self._ctx.clock_us())):
            if (function, version) not in self._told_versions:
                self._told_versions.add((function, version))
                _log.warning(
                    "this worker has %s of %s and leaves %s of %s: keep a worker of that version, or see "
                    "`perdure check`",
                    said_version(self._specs[function].version),
                    function,
                    plural(count, "due run"),
                    said_version(version),
                    extra=event("worker.other_version", function=function, version=version, runs=count),
                )

    def _do(self, flow: Flow[T]) -> T:
        return drive(self._ctx.driver, flow)

    def _read(self, op: Callable[[], Program[T]]) -> T:
        flow: Flow[T] = read(op)
        return self._do(flow)


def _kind(error: BaseException) -> str:
    return type(error).__name__
