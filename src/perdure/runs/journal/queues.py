"""Queues and their limits: runs at once, runs of one tenant at once, starts per second.

A queue is declared in code, at module level. A worker that serves it writes its limits to the store when it starts, and
from then on they apply to all workers. A queue that was not declared has no limits. Only workers obey limits:
`store.run` runs at once, but its runs count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from perdure.errors import UsageError
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.checks import check_name

_VALUES = """(queue, concurrency, tenant_concurrency, rate, tokens, filled_at)
    VALUES (:queue, :concurrency, :tenant_concurrency, CAST(:rate AS double precision),
        CAST(:tokens AS double precision), {now})
    ON CONFLICT (queue) DO UPDATE SET concurrency = excluded.concurrency,
        tenant_concurrency = excluded.tenant_concurrency, rate = excluded.rate,
        tokens = CASE WHEN q.rate IS NULL OR q.tokens > excluded.tokens THEN excluded.tokens ELSE q.tokens END"""
_PUT = Sql(f"INSERT INTO queue AS q {_VALUES}")
_OF_TENANT = "queue = :queue AND (CAST(:tenant AS bigint) IS NULL OR tenant = :tenant)"
_TRACES = Sql(
    f"""SELECT 1 FROM queue WHERE queue = :queue
    UNION ALL SELECT 1 FROM run_count WHERE {_OF_TENANT}
    UNION ALL SELECT 1 FROM schedule WHERE {_OF_TENANT} LIMIT 1"""
)
_declared: dict[str, Queue] = {}


class Queue:
    """A queue: `search = perdure.Queue("search", concurrency=4)`, then `store.start(fn, queue="search")`.

    `concurrency` limits how many runs of the queue run at once, `tenant_concurrency` how many of one tenant. `rate`
    limits how many runs begin per second; a resume after a wait does not count. After a quiet time, the runs of one
    second may begin at once.
    """

    __slots__ = ("concurrency", "name", "rate", "tenant_concurrency")

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        tenant_concurrency: int | None = None,
        rate: float | None = None,
    ) -> None:
        self.name = check_name(name, "queue")
        self.concurrency = _count(concurrency, "concurrency")
        self.tenant_concurrency = _count(tenant_concurrency, "tenant_concurrency")
        self.rate = _rate(rate)
        _declared[self.name] = self

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


def _count(value: int | None, option: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(f"{option}={value!r}: a count of runs, at least 1")
    return value


def _rate(value: float | None) -> float | None:
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf):
        raise UsageError(
            f"rate={value!r}: a number above 0, how many runs may begin per second (10 a minute: rate=10 / 60)"
        )
    return None if value is None else float(value)


def _tokens_max(rate: float | None) -> float:
    """Return how many runs may begin at once after a quiet time."""
    return 0.0 if rate is None else max(1.0, rate)


def declared(names: Sequence[str]) -> list[Queue]:
    """Return those of the named queues that were declared in this process."""
    return [_declared[name] for name in names if name in _declared]


def write_limits(queues: Sequence[Queue], now: int) -> Program[None]:
    """Write the declared limits to the store. They replace those that it has."""
    statements = [
        _PUT(
            queue=queue.name,
            concurrency=queue.concurrency,
            tenant_concurrency=queue.tenant_concurrency,
            rate=queue.rate,
            tokens=_tokens_max(queue.rate),
            now=now,
        )
        for queue in queues
    ]
    yield Batch(*statements, last=True)


def without_trace(names: Sequence[str], tenant: int | None) -> Program[list[str]]:
    """Return the queues that the store has no limits, runs and schedules of. A tenant of None means all tenants."""
    answers = yield Batch(*(_TRACES(queue=name, tenant=tenant) for name in names), last=True)
    return [name for name, rows in zip(names, answers, strict=True) if not rows]


class Limits(NamedTuple):
    """A queue's limits in the store, its tokens at `filled_at`, and the time of the read."""

    queue: str
    concurrency: int | None
    tenant_concurrency: int | None
    rate: float | None
    tokens: float
    filled_at: int
    now: int


class QueueCapacity:
    """The capacity that the limits of one queue leave, updated while a claim fills it. No I/O."""

    def __init__(self, limits: Limits, running: dict[int, int]) -> None:
        self._limits = limits
        self._tenants = running
        fresh = (limits.rate or 0.0) * max(0, limits.now - limits.filled_at) / 1e6  # none if the clock went back
        self.tokens = min(_tokens_max(limits.rate), limits.tokens + fresh)
        self._started = False

    @property
    def places(self) -> int:
        """The number of runs that may still be claimed."""
        most = self._limits.concurrency
        return 2**31 if most is None else most - sum(self._tenants.values())

    @property
    def full(self) -> list[int]:
        """The tenants that have reached their limit."""
        most = self._limits.tenant_concurrency
        return [] if most is None else [tenant for tenant, count in self._tenants.items() if count >= most]

    @property
    def may_start(self) -> bool:
        return self._limits.rate is None or self.tokens >= 1

    def enter(self, tenant: int, *, starts: bool) -> bool:
        """Count a run if there is room for it. Return False if there is none."""
        if self.places < 1 or tenant in self.full or (starts and not self.may_start):
            return False
        if starts and self._limits.rate is not None:
            self.tokens, self._started = self.tokens - 1, True
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        return True

    @property
    def is_changed(self) -> bool:
        """Whether the tokens must be written: a run began, or the clock went back and counting restarts."""
        return self._limits.rate is not None and (self._started or self._limits.now < self._limits.filled_at)

    @property
    def wait_us(self) -> int | None:
        """The time until the next run may begin; None if it may begin now."""
        rate = self._limits.rate
        return None if rate is None or self.may_start else int((1 - self.tokens) * 1e6 / rate) + 1
