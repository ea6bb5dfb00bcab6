"""`Clock`: a test sets the time of a store. Sleeps, deadlines, retries, schedules, leases and expiry take no time.

Under this clock every wait parks its run, however short it is. Bodies keep real time: the `timeout_s` of a step,
`asyncio.sleep`, `time.sleep`. Only one process may use the store.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from perdure.errors import UsageError
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.journal.rows import NEVER
from perdure.runs.workers.worker import Worker
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.threads.models import moment
from perdure.values.durations import check_duration

if TYPE_CHECKING:
    from perdure.ops.store import Store

START = datetime(2026, 1, 1, tzinfo=UTC)
_NEXT = Sql(
    f"""SELECT min(at) FROM (
        SELECT min(wake_at) AS at FROM run
            WHERE status IN ('queued', 'waiting') AND wake_at > :now AND wake_at < {NEVER}
        UNION ALL SELECT min(lease_until) FROM run WHERE status = 'running' AND lease_until > :now AND owner <> :owner
        UNION ALL SELECT min(next_at) FROM schedule WHERE next_at > :now AND next_at < {NEVER}) AS due"""
)
_QUEUES = Sql("SELECT DISTINCT queue FROM run WHERE status IN ('queued', 'waiting') AND wake_at <= :now ORDER BY queue")


class Clock:
    """The clock of a store in a test: `clock.advance("1h")` lets an hour pass and runs what becomes due.

    It begins at `start` and stands still between two calls. All functions that the process knows are run, of all
    queues and tenants.
    """

    def __init__(self, store: Store, start: datetime = START) -> None:
        if start.tzinfo is None:
            raise UsageError(f"Clock(start={start!r}): a datetime with a time zone")
        self._store, self._us = store, int(start.timestamp() * 1e6)
        context = store._context
        context.clock_us, context.linger_s = self._now_us, 0.0
        base = context.driver.capabilities.base
        if base.dialect == "postgres":
            base.use_callers_clock()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Clock at {self.now.isoformat()}>"

    @property
    def now(self) -> datetime:
        return moment(self._us)

    def _now_us(self) -> int:
        return self._us

    def advance(self, by: str | timedelta) -> None:
        """Let time pass ("90s", "15m", "1h", "7d"), and run what becomes due, each at its time."""
        target = self._us + check_duration(by, "advance", zero=True) // timedelta(microseconds=1)
        self.run_due()
        while (at := self._next()) is not None and at <= target:
            self._us = at
            self.run_due()
        self._us = target
        self.run_due()

    def run_due(self) -> None:
        """Run what is due now, without letting time pass."""
        runtime_of(self._store._context).renew()  # what runs in this process keeps its lease over a jump
        queues: tuple[str, ...] = ("default",)
        served: set[str] = set()
        while not served.issuperset(queues):
            served.update(queues)
            Worker(self._store, queues=sorted(served), all_tenants=True, poll_s=0.005, drain_s=0).run(until_idle=True)
            queues = self._read(_QUEUES)

    def _next(self) -> int | None:
        """Return the next time at which something becomes due."""
        at: int | None
        [at] = self._read(_NEXT, owner=runtime_of(self._store._context).owner.text)
        return at

    def _read(self, sql: Sql, **params: str) -> tuple[Any, ...]:
        def program() -> Program[tuple[Any, ...]]:
            [rows] = yield Batch(sql(now=self._us, tenant=None, **params), last=True)
            return tuple(value for (value,) in rows)

        values: tuple[Any, ...] = self._store._context.driver.run(Transaction(program))
        return values
