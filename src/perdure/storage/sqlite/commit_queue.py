"""The commit queue: many callers, one writer, one fsync for all who wait.

A caller that finds no leader leads on its own thread: it commits its job with those that queued meanwhile, then hands
the lead to the next waiter. One background thread leads jobs of event loops. There is no SQL here, the mutex is never
held while anything blocks, and no leader leaves without handing over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from perdure.errors import StoreError
from perdure.storage import metrics
from perdure.storage.settling import until_done

if TYPE_CHECKING:  # asyncio takes a third of the time that importing Perdure may take
    from asyncio import AbstractEventLoop, Future
    from concurrent.futures import ThreadPoolExecutor

# Called in the open transaction with the writer's cursor and the hook of fault tests.
Work = Callable[[Any, Any], Any]
JOBS_MAX = 256  # per group: bounds how many jobs one failed commit fails
WORK_S_MAX = 0.020  # per group: bounds how long its first job waits for the others


class Job:
    """One write transaction, queued or under way."""

    __slots__ = (
        "deadline",
        "done",
        "dropped",
        "error",
        "future",
        "leads",
        "loop",
        "outside",
        "result",
        "settles",
        "solo",
        "taken",
        "thread",
        "wake",
        "work",
    )

    def __init__(
        self, work: Work, solo: bool, deadline: float, *, settles: bool = False, outside: bool = False
    ) -> None:
        self.work = work
        self.solo = solo  # joins no group, and no job joins it
        self.settles = settles  # runs although the store is prepared (`storage/prepared.py`); then it is solo
        self.outside = outside  # runs outside of any transaction
        self.deadline = deadline  # for getting its turn, in time.monotonic
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False  # result and error are final
        self.taken = False  # a leader runs it, or has run it
        self.dropped = False  # its caller left before a leader took it: it never runs
        self.thread = 0  # the thread of a blocking caller
        self.leads = False  # a blocking waiter that was woken to lead
        self.wake: Lock | None = None  # held until a blocking waiter is done or leads
        self.loop: AbstractEventLoop | None = None
        self.future: Future[Any] | None = None

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True


class Group:
    """The jobs of one commit: the leader's first, then those that joined while it ran."""

    __slots__ = ("_queue", "jobs", "started")

    def __init__(self, queue: CommitQueue, first: Job) -> None:
        self._queue = queue
        self.jobs = [first]
        self.started = monotonic()

    def take(self) -> Job | None:
        """Return the next job to join. None if no job waits, the group is full, or the next job must be alone."""
        if not self._queue.waiting or self.jobs[0].solo or len(self.jobs) >= JOBS_MAX:
            return None
        if monotonic() - self.started > WORK_S_MAX:
            return None
        job = self._queue.pop(joins=True)
        if job is not None:
            self.jobs.append(job)
            if (sink := metrics.sink) is not None:
                self._queue.record_wait(job, sink)
        return job

    def wake(self) -> None:
        """Wake the callers of finished jobs. It can be called again for jobs that finish later."""
        by_loop: dict[AbstractEventLoop, list[Job]] = {}
        for job in self.jobs:
            if not job.done:
                continue
            if job.loop is not None:
                by_loop.setdefault(job.loop, []).append(job)
                job.loop = None
            elif job.wake is not None:
                wake, job.wake = job.wake, None
                wake.release()
        for loop, jobs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, jobs)  # one wake-up per loop and group: each costs a syscall
            except RuntimeError:
                pass  # the loop is closed: no task waits there


def _resolve(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future is None or job.future.done():
            continue  # cancelled meanwhile
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


class CommitQueue:
    """Queues jobs for `commit(group)`, which runs on the leader's thread and finishes every job of the group."""

    def __init__(self, commit: Callable[[Group], None], timeout_s: float) -> None:
        self._commit = commit
        self._timeout_s = timeout_s
        self._mutex = Lock()
        self._idle = Condition(self._mutex)
        self._leading = False
        # The thread of a blocking caller that leads. Ctrl-C may interrupt it just before it hands over: if it is not
        # `busy`, its next call does that.
        self._leader = 0
        self.busy = False
        self._refusal: Callable[[], StoreError] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self.waiting: deque[Job] = deque()

    def try_lead(self, thread: int) -> bool:
        """Take the lead for one commit without a job. Return False if another writer is at work.

        Call `end_lead` afterwards, also if this call itself is interrupted.
        """
        with self._mutex:
            if self._refusal is not None:
                raise self._refusal()
            if self._leading and (self._leader != thread or self.busy):
                return False
            self._leader, self._leading = thread, True
            return True

    def end_lead(self, thread: int) -> None:
        """Hand the lead to the next waiter, if this thread has it."""
        with self._mutex:
            if self._leader != thread or self.busy:
                return
            if not self.waiting and self._refusal is None:
                self._leader, self._leading = 0, False
                return
        self._hand_over()

    def run(self, work: Work, *, solo: bool = False, settles: bool = False, outside: bool = False) -> Any:
        """Commit one job, blocking. With `outside`, run it outside of a transaction when its turn comes."""
        is_alone = solo or settles or outside
        job = Job(work, is_alone, monotonic() + self._timeout_s, settles=settles, outside=outside)
        job.thread = thread = get_ident()
        wake: Lock | None = None
        try:
            with self._mutex:
                if self._refusal is not None:
                    raise self._refusal()
                if self._leading and (self._leader != thread or self.busy):
                    job.wake = wake = Lock()
                    wake.acquire()
                    self.waiting.append(job)
                else:
                    self._leader, self._leading, job.leads = thread, True, True
            if wake is not None:
                wake.acquire()
            if not job.done:
                self._lead(job, wake is not None)
        except BaseException:  # KeyboardInterrupt
            if wake is not None and not (job.done or job.leads or self._drop(job)):
                wake.acquire()  # a leader has taken the job, so it ends first; a second interruption ends this wait
            raise
        finally:
            if self._leader == thread and not self.busy:  # interrupted: hand over what it still leads
                self._hand_over()
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # or the traceback keeps itself alive
        return job.result

    async def arun(self, work: Work, *, solo: bool = False, settles: bool = False) -> Any:
        """Commit one job for a task.

        A task that is cancelled drops a job that has not begun. It waits for one that has: it must not be committed
        after a later write.
        """
        from asyncio import get_running_loop

        job = Job(work, solo or settles, monotonic() + self._timeout_s, settles=settles)
        job.loop = get_running_loop()
        job.future = job.loop.create_future()
        with self._mutex:
            if self._refusal is not None:
                raise self._refusal()
            self.waiting.append(job)
            start, self._leading = not self._leading, True
        if start:
            self._start_background()
        try:
            return await job.future
        except BaseException as error:
            from asyncio import CancelledError

            if not self._drop(job) and isinstance(error, CancelledError) and not job.done:
                job.future = job_future = get_running_loop().create_future()
                await until_done(job_future)
            raise

    def _drop(self, job: Job) -> bool:
        """Withdraw a job. Return False if a leader has taken it."""
        with self._mutex:
            job.dropped = not job.taken
            return job.dropped

    def pop(self, *, joins: bool = False) -> Job | None:
        """Return the next job that a caller still waits for. With `joins`, return None if it must be alone."""
        with self._mutex:
            while self.waiting:
                if joins and self.waiting[0].solo:
                    return None
                job = self.waiting.popleft()
                if not job.dropped:
                    job.taken = True
                    return job
        return None

    def record_wait(self, job: Job, sink: metrics.Sink) -> None:
        """Record how long a job waited for its turn."""
        waited_s = monotonic() - (job.deadline - self._timeout_s)
        sink.record(metrics.LOCK_WAIT, max(0.0, waited_s), "sqlite", "queue")

    def refuse(self, refusal: Callable[[], StoreError]) -> None:
        """Refuse new jobs from now on. The first refusal counts."""
        with self._mutex:
            if self._refusal is None:
                self._refusal = refusal

    def drain(self) -> None:
        """Wait until all queued jobs are done, and end the background thread. Call `refuse` first."""
        with self._mutex:
            self._idle.wait_for(lambda: not self._leading)
        if self._executor is not None:
            self._executor.shutdown()

    def _lead(self, job: Job, waited: bool) -> None:
        group = Group(self, job)
        try:
            if waited and (sink := metrics.sink) is not None:
                self.record_wait(job, sink)
            self.busy = True
            self._commit(group)
        finally:
            self.busy = False
            if len(group.jobs) > 1:
                # Interrupted: the work of the others was rolled back, and the next leader repeats it.
                again = [other for other in group.jobs if other is not job and not other.done]
                if again:
                    with self._mutex:
                        self.waiting.extendleft(reversed(again))
                group.wake()
            self._hand_over()

    def _hand_over(self) -> None:
        with self._mutex:
            while self.waiting and self.waiting[0].dropped:
                self.waiting.popleft()
            self._leader = 0
            if not self.waiting:
                self._leading = False
                if self._refusal is not None:
                    self._idle.notify_all()
                return
            heir = self.waiting[0]
            if heir.wake is not None:
                # Interruptions come only after calls: either all of this happens or none of it.
                wake, heir.wake, heir.leads, self._leader = heir.wake, None, True, heir.thread
                del self.waiting[0]
                wake.release()
                return
        self._start_background()

    def _start_background(self) -> None:
        # One thread is enough: there is at most one leader, and readers never make it wait.
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(1, "perdure-writer")
        try:
            self._executor.submit(self._lead_in_background)
        except RuntimeError:  # no new threads while the interpreter shuts down: lead on this one
            self._lead_in_background()

    def _lead_in_background(self) -> None:
        job = self.pop()
        if job is not None:
            if (sink := metrics.sink) is not None:
                self.record_wait(job, sink)
            group = Group(self, job)
            try:
                self._commit(group)
            except BaseException as error:  # this thread has no caller that could handle it
                for unfinished in group.jobs:
                    if not unfinished.done:
                        unfinished.fail(error)
            group.wake()
        self._hand_over()
