"""Queues and what they allow: how many runs at once, how many of one tenant, how many starts per second.

A queue is declared in code, at module level; a worker that serves it writes its limits to the store when it begins, and
they hold for all workers from then on. A queue that was not declared has no limits. Only workers keep to limits:
`store.run` runs at once, though what it runs counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from perdure.errors import UsageError
from perdure.storage.program import Batch, Program, Rows, Sql
from perdure.threads.checks import check_name

_PUT = Sql(
    """INSERT INTO queue (queue, concurrency, tenant_concurrency, rate, burst, tokens, filled_at)
    VALUES (:queue, :concurrency, :tenant_concurrency, :rate, :burst, coalesce(:burst, 0), {now})
    ON CONFLICT (queue) DO UPDATE SET concurrency = excluded.concurrency,
        tenant_concurrency = excluded.tenant_concurrency, rate = excluded.rate, burst = excluded.burst,
        tokens = CASE WHEN queue.rate IS NULL OR queue.tokens > excluded.tokens THEN excluded.tokens
            ELSE queue.tokens END""",
    postgres="""INSERT INTO queue AS q (queue, concurrency, tenant_concurrency, rate, burst, tokens, filled_at)
    VALUES (:queue, :concurrency, :tenant_concurrency, CAST(:rate AS double precision),
        CAST(:burst AS double precision), coalesce(CAST(:burst AS double precision), 0), {now})
    ON CONFLICT (queue) DO UPDATE SET concurrency = excluded.concurrency,
        tenant_concurrency = excluded.tenant_concurrency, rate = excluded.rate, burst = excluded.burst,
        tokens = CASE WHEN q.rate IS NULL OR q.tokens > excluded.tokens THEN excluded.tokens ELSE q.tokens END""",
)
_declared: dict[str, Queue] = {}


class Queue:
    """A queue: `search = perdure.Queue("search", concurrency=4)`, then `store.start(fn, queue="search")`.

    `concurrency` bounds the runs of the queue that run at once, `tenant_concurrency` those of one tenant, `rate` how
    many runs begin per second (a resume after a wait is not counted), `burst` how many may begin at once after a quiet
    time (default: one second's worth).
    """

    __slots__ = ("burst", "concurrency", "name", "rate", "tenant_concurrency")

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        tenant_concurrency: int | None = None,
        rate: float | None = None,
        burst: float | None = None,
    ) -> None:
        self.name = check_name(name, "queue")
        self.concurrency = _count(concurrency, "concurrency")
        self.tenant_concurrency = _count(tenant_concurrency, "tenant_concurrency")
        if rate is not None and not rate > 0:
            raise UsageError(f"rate={rate!r}: how many runs may begin per second, above 0")
        if burst is not None and (rate is None or not burst >= 1):
            raise UsageError(f"burst={burst!r}: at least 1, and only with a rate")
        self.rate = None if rate is None else float(rate)
        self.burst = None if rate is None else float(max(1.0, rate) if burst is None else burst)
        _declared[self.name] = self

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


def _count(value: int | None, what: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(f"{what}={value!r}: a count of runs, at least 1")
    return value


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
            burst=queue.burst,
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
    burst: float | None
    tokens: float
    filled_at: int
    now: int

    def filled(self) -> float:
        """The tokens that there are by now. A clock that went back adds none, and takes none."""
        if self.rate is None:
            return 0.0
        fresh = self.rate * max(0, self.now - self.filled_at) / 1e6
        return min(self.burst or 1.0, self.tokens + fresh)


class QueueCapacity:
    """How much the limits of queues leave, while a claim fills it. Pure."""

    def __init__(self, limits: dict[str, Limits], running: Rows) -> None:
        self._limits = limits
        self._count: dict[str, int] = {}
        self._tenant_count: dict[tuple[str, int], int] = {}
        self._full: dict[str, set[int]] = {}
        self._tokens = {name: queue.filled() for name, queue in limits.items() if queue.rate is not None}
        self._started: set[str] = set()
        self._held: set[str] = set()  # queues in which a start had to wait for a token
        self.passed_over = False  # a run that was not let in may have hidden others that would be
        for queue, tenant, count in running:
            self._add(queue, tenant, int(count))

    def enter(self, queue: str, tenant: int, *, starts: bool) -> bool:
        """Let a run in, if there is room for it."""
        limits = self._limits.get(queue)
        if limits is None:
            return True
        if self.places(queue, 1) < 1:
            return False
        if tenant in self._full.get(queue, ()):
            self.passed_over = True
            return False
        if starts and queue in self._tokens:
            if self._tokens[queue] < 1:
                self._held.add(queue)
                self.passed_over = True
                return False
            self._tokens[queue] -= 1
            self._started.add(queue)
        self._add(queue, tenant, 1)
        return True

    def _add(self, queue: str, tenant: int, count: int) -> None:
        self._count[queue] = self._count.get(queue, 0) + count
        number = self._tenant_count[queue, tenant] = self._tenant_count.get((queue, tenant), 0) + count
        limits = self._limits.get(queue)
        if limits is not None and limits.tenant_concurrency is not None and number >= limits.tenant_concurrency:
            self._full.setdefault(queue, set()).add(tenant)

    def places(self, queue: str, most: int) -> int:
        """How many more runs of a queue may run, up to `most`."""
        limits = self._limits.get(queue)
        if limits is None or limits.concurrency is None:
            return most
        return min(most, limits.concurrency - self._count.get(queue, 0))

    def narrowed(self, queue: str) -> dict[str, Any]:
        """What a search of this queue must leave out."""
        full = sorted(self._full.get(queue, ()))
        return {"full": orjson.dumps(full).decode(), "starts": int(queue not in self._held)}

    def tokens_changed(self) -> list[tuple[str, float, int]]:
        """The buckets to write back: queue, tokens, when that was."""
        found = []
        for name, tokens in self._tokens.items():
            limits = self._limits[name]
            if name in self._started or limits.now < limits.filled_at:  # a clock that went back starts counting anew
                found.append((name, tokens, limits.now))
        return found

    def wait_us(self) -> int | None:
        """When the next token comes that a run waits for."""
        waits = [
            int((1 - self._tokens[name]) * 1e6 / rate) + 1
            for name in self._held
            if (rate := self._limits[name].rate) is not None
        ]
        return min(waits, default=None)
