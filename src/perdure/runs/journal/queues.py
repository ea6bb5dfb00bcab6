"""Queues and what they allow: how many runs at once, and how many of one tenant.

A queue is declared in code, at module level; a worker that serves it writes its limits to the store when it begins, and
they hold for all workers from then on. A queue that was not declared has no limits. Only workers keep to limits:
`store.run` runs at once, though what it runs counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import UsageError
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.checks import check_name

_PUT = Sql(
    """INSERT INTO queue (queue, concurrency, tenant_concurrency) VALUES (:queue, :concurrency, :tenant_concurrency)
    ON CONFLICT (queue) DO UPDATE SET concurrency = excluded.concurrency,
        tenant_concurrency = excluded.tenant_concurrency"""
)
_declared: dict[str, Queue] = {}


class Queue:
    """A queue: `search = perdure.Queue("search", concurrency=4)`, then `store.start(fn, queue="search")`.

    `concurrency` bounds the runs of the queue that run at once, `tenant_concurrency` those of one tenant.
    """

    __slots__ = ("concurrency", "name", "tenant_concurrency")

    def __init__(self, name: str, *, concurrency: int | None = None, tenant_concurrency: int | None = None) -> None:
        self.name = check_name(name, "queue")
        self.concurrency = _count(concurrency, "concurrency")
        self.tenant_concurrency = _count(tenant_concurrency, "tenant_concurrency")
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


def write_limits(queues: Sequence[Queue]) -> Program[None]:
    """What the code says is what holds."""
    statements = [
        _PUT(queue=queue.name, concurrency=queue.concurrency, tenant_concurrency=queue.tenant_concurrency)
        for queue in queues
    ]
    yield Batch(*statements, last=True)


class QueueCapacity:
    """How much the limits of one queue leave, while a claim fills it. Pure."""

    def __init__(self, concurrency: int | None, tenant_concurrency: int | None, running: dict[int, int]) -> None:
        self._concurrency, self._tenant_concurrency, self._tenants = concurrency, tenant_concurrency, running

    @property
    def places(self) -> int:
        """How many more runs may run."""
        return 2**31 if self._concurrency is None else self._concurrency - sum(self._tenants.values())

    @property
    def full(self) -> list[int]:
        """The tenants that may run no more."""
        most = self._tenant_concurrency
        return [] if most is None else [tenant for tenant, count in self._tenants.items() if count >= most]

    def enter(self, tenant: int) -> bool:
        """Let a run in, if there is room for it."""
        if self.places < 1 or tenant in self.full:
            return False
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        return True
