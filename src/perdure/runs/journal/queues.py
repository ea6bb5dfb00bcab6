"""Queues and what they allow: how many runs at once, how many of one tenant, how many starts per second.

A queue is declared in code, at module level; a worker that serves it writes its limits to the store when it begins, and
they hold for all workers from then on. A queue that was not declared has no limits. Only workers keep to limits:
`store.run` runs at once, though what it runs counts.
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
_declared: dict[str, Queue] = {}


class Queue:
    """A queue: `search = perdure.Queue("search", concurrency=4)`, then `store.start(fn, queue="search")`.

    `concurrency` bounds the runs of the queue that run at once, `tenant_concurrency` those of one tenant, `rate` how
    many runs begin per second (a resume after a wait is not counted; after a quiet time one second's worth at once).
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


def _count(value: int | None, what: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(f"{what}={value!r}: a count of runs, at least 1")
    return value


def _rate(value: float | None) -> float | None:
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf):
        raise UsageError(
            f"rate={value!r}: a number above 0, how many runs may begin per second (10 a minute: rate=10 / 60)"
        )
    return None if value is None else float(value)


def _tokens_max(rate: float | None) -> float:
    """How many runs may begin at once after a quiet time."""
    return 0.0 if rate is None else max(1.0, rate)


def declared(names: Sequence[str]) -> list[Queue]:
    """Those of these queues that were declared in this process."""
    return [_declared[name] for name in names if name in _declared]


def write_limits(queues: Sequence[Queue], now: int) -> Program[None]:
    """What the code says is what holds."""
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


class Limits(NamedTuple):
    """A queue's limits as the store has them, and its tokens at `now`."""

    queue: str
    concurrency: int | None
    tenant_concurrency: int | None
    rate: float | None
    tokens: float
    filled_at: int
    now: int


class QueueCapacity:
    """How much the limits of one queue leave, while a claim fills it. Pure."""

    def __init__(self, limits: Limits, running: dict[int, int]) -> None:
        self._limits = limits
        self._tenants = running
        fresh = (limits.rate or 0.0) * max(0, limits.now - limits.filled_at) / 1e6  # a clock that went back adds none
        self.tokens = min(_tokens_max(limits.rate), limits.tokens + fresh)
        self._started = False

    @property
    def places(self) -> int:
        """How many more runs may run."""
        most = self._limits.concurrency
        return 2**31 if most is None else most - sum(self._tenants.values())

    @property
    def full(self) -> list[int]:
        """The tenants that may run no more."""
        most = self._limits.tenant_concurrency
        return [] if most is None else [tenant for tenant, count in self._tenants.items() if count >= most]

    @property
    def may_start(self) -> bool:
        return self._limits.rate is None or self.tokens >= 1

    def enter(self, tenant: int, *, starts: bool) -> bool:
        """Let a run in, if there is room for it."""
        if self.places < 1 or tenant in self.full or (starts and not self.may_start):
            return False
        if starts and self._limits.rate is not None:
            self.tokens, self._started = self.tokens - 1, True
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        return True

    @property
    def is_changed(self) -> bool:
        """Whether the tokens are to be written. A clock that went back starts counting anew."""
        return self._limits.rate is not None and (self._started or self._limits.now < self._limits.filled_at)

    @property
    def wait_us(self) -> int | None:
        """When the next run may begin; None: now."""
        rate = self._limits.rate
        return None if rate is None or self.may_start else int((1 - self.tokens) * 1e6 / rate) + 1
