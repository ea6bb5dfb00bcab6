"""Programs with which workers look for due runs and claim them.

A claim is one transaction. It locks the limits of its queues, so that two workers cannot both take the last place. Then
it takes over the runs of dead or late owners, then due runs by priority, time and age. A worker claims only runs of
functions that it has, in exactly the version that the run began with.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal.queues import Limits, QueueCapacity
from perdure.runs.journal.rows import DIED
from perdure.runs.run_table import RunRow
from perdure.runs.tables import ARGS, INPUT
from perdure.storage.program import Batch, Driver, Program, Rows, Sql

_BETWEEN = "\x1f"  # separates a function and its version in one text


class ServedTenants(NamedTuple):
    """The tenants that a worker serves: one, or (None) all, except those whose data it cannot read."""

    tenant: int | None
    barred: tuple[int, ...] = ()  # it has no key for them
    keyed: bool = False  # it has keys; without any, it serves no encrypted tenant

    @classmethod
    def of(cls, driver: Driver, tenant: int | None) -> ServedTenants:
        keys = driver.capabilities.keys
        return cls(tenant) if keys is None else cls(tenant, keys.barred(), True)

    def params(self, now: int) -> dict[str, Any]:
        return {"tenant": self.tenant, "barred": _json(self.barred), "keyed": int(self.keyed), "now": now}


def served(row: str) -> str:
    """Return the condition that a row belongs to one of `ServedTenants`."""
    return f"""(CAST(:tenant AS bigint) IS NULL OR {row}.tenant = :tenant) AND {row}.tenant NOT IN {{numbers:barred}}
        AND (:keyed = 1 OR NOT EXISTS (SELECT 1 FROM tenant_key k WHERE k.tenant = {row}.tenant))"""


# (SELECT {now}) takes the time once, so that an index can be searched by it.
# A fence near overflow is damage. It must not stop the claims of all other runs; `verify` reports it.
_OURS = f"""{served("r")}
        AND (r.function || '{_BETWEEN}' || r.version) IN {{texts:exact}}
        AND r.fence BETWEEN 0 AND 1000000000000000000"""
_LIMITS = Sql(
    """SELECT queue, concurrency, tenant_concurrency, rate, tokens, filled_at, {now} FROM queue
    WHERE queue IN {texts:queues} AND coalesce(concurrency, tenant_concurrency, rate) IS NOT NULL
    ORDER BY queue {for_update}"""
)
_RUNNING = Sql(
    """SELECT r.queue, r.tenant, count(*) FROM run r WHERE r.status = 'running' AND r.queue IN {texts:queues}
    GROUP BY r.queue, r.tenant"""
)
_SET_TOKENS = Sql("UPDATE queue SET tokens = :tokens, filled_at = :at WHERE queue = :queue")
_FOUND = "r.tenant, r.run, r.fence, r.status, r.queue, r.priority, r.wake_at"
# Due runs: one statement for each status, because each status has its own index.
_DUE = [
    Sql(
        f"""SELECT {_FOUND} FROM run r
        WHERE r.status = '{status}' AND r.queue = :queue AND r.wake_at <= (SELECT {{now}}) AND {_OURS}
        AND r.tenant NOT IN {{numbers:full}} AND (r.fence > 0 OR :starts = 1)
        ORDER BY r.priority DESC, r.wake_at, r.run LIMIT :limit {{skip_locked}}"""
    )
    for status in ("queued", "waiting")
]
_LEFT = Sql(
    f"""SELECT {_FOUND} FROM run r WHERE r.status = 'running' AND r.queue IN {{texts:queues}} AND {_OURS}
    AND r.run NOT IN {{numbers:active}}
    AND (r.lease_until <= {{now}} OR r.owner IN {{texts:dead}} OR (r.owner = :owner AND :recover = 1))
    ORDER BY r.priority DESC, r.lease_until LIMIT :limit {{skip_locked}}"""
)


def _column(name: str) -> int:
    return 3 + RunRow._fields.index(name)


# Returns the arguments too, so that a run that begins needs no further read.
_TAKE = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, lease_until = {{now}} + :lease,
        wakeup_pending = 0, waiting = NULL, changed_at = {{now}}{DIED}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = :status
    RETURNING (SELECT v.value FROM run_value v WHERE v.tenant = run.tenant AND v.run = run.run AND v.kind = 'args'),
        (SELECT t.name FROM tenant t WHERE t.tenant = run.tenant), tenant, {", ".join(RunRow._fields)}""",
    opens={0: ARGS.at(_column("incarnation")), _column("input"): INPUT.at(_column("id"), _column("function"))},
    tolerant=True,  # an unreadable run gets stuck when it begins, and holds up no other
    keyless=True,
)
_ANY_QUEUED = Sql(
    f"""SELECT 1 FROM run r WHERE r.status = 'queued' AND r.queue = :queue AND r.wake_at <= (SELECT {{now}}) AND {_OURS}
    LIMIT 1"""
)
_FIRST_WAITING = Sql(
    f"""SELECT r.wake_at, {{now}} FROM run r WHERE r.status = 'waiting' AND r.queue = :queue AND {_OURS}
    ORDER BY r.wake_at LIMIT 1"""
)
_OWNERS = Sql(
    f"""SELECT r.owner, min(r.lease_until), {{now}} FROM run r WHERE r.status = 'running'
    AND r.queue IN {{texts:queues}} AND {_OURS} AND r.run NOT IN {{numbers:active}} GROUP BY r.owner"""
)
_OTHER_VERSIONS = Sql(
    f"""SELECT r.function, r.version, count(*) FROM run r WHERE (r.status = 'queued' OR r.status = 'waiting')
    AND r.queue IN {{texts:queues}} AND r.wake_at <= (SELECT {{now}}) AND r.function IN {{texts:names}}
    AND NOT ({_OURS}) AND (CAST(:tenant AS bigint) IS NULL OR r.tenant = :tenant)
    GROUP BY r.function, r.version ORDER BY r.function, r.version LIMIT 100"""
)
_TENANTS = Sql("SELECT tenant, name FROM tenant WHERE tenant > :after ORDER BY tenant LIMIT :limit")


class Search(NamedTuple):
    """A worker's search. `active` are the runs that it already executes."""

    owner: str
    queues: tuple[str, ...]
    specs: Mapping[str, DurableSpec]  # the functions that it has
    tenants: ServedTenants
    active: tuple[int, ...]

    def params(self, now: int) -> dict[str, Any]:
        return {
            **self.tenants.params(now),
            "exact": _json(f"{name}{_BETWEEN}{spec.version}" for name, spec in self.specs.items()),
            "names": _json(self.specs),
            "queues": _json(self.queues),
            "active": _json(self.active),
            "owner": self.owner,
        }


class View(NamedTuple):
    """What a worker sees in its queues without claiming anything."""

    due: bool
    next_us: int | None  # time until the next wait ends
    owners: dict[str, int]  # owners of running runs, with the time left of their earliest lease; 0 or less: expired


class ClaimableRun(NamedTuple):
    tenant: int
    run: int
    fence: int
    status: str
    queue: str
    priority: int
    wake_at: int


class Taken(NamedTuple):
    """A claimed run, with its tenant and its arguments."""

    args: bytes | None
    tenant_name: str
    tenant: int
    row: RunRow


class Claimed(NamedTuple):
    """The result of a claim. `wait_us` is the time until a rate limit lets the next run begin."""

    taken: list[Taken]
    wait_us: int | None = None
    left: int = 0  # how many candidates belonged to dead or late owners


def _json(values: Iterable[Any]) -> str:
    return orjson.dumps(list(values)).decode()


def look(search: Search, now: int) -> Program[View]:
    """Return whether there is anything to claim. Only reads, so that an idle worker costs the store little."""
    params = search.params(now)
    queues = search.queues
    answers = yield Batch(
        _OWNERS(**params),
        *(_ANY_QUEUED(**params, queue=queue) for queue in queues),
        *(_FIRST_WAITING(**params, queue=queue) for queue in queues),
        last=True,
    )
    owners, queued, waiting = answers[0], answers[1 : 1 + len(queues)], answers[1 + len(queues) :]
    left = [_left_us(*rows[0]) for rows in waiting if rows]
    first = min(left, default=None)
    due = any(queued) or (first is not None and first <= 0)
    return View(due, first, {str(owner): _left_us(until, at) for owner, until, at in owners})


def _left_us(until: Any, now: int) -> int:
    return int(until) - int(now) if type(until) is int else 0  # a damaged time counts as past: the claim handles it


def claim(search: Search, most: int, *, lease: int, dead: Sequence[str], recover: bool, now: int) -> Program[Claimed]:
    """Claim up to `most` runs. `dead` are owners that have certainly ended.

    `recover` also claims runs that this owner holds but does not execute, because the answer to its claim was lost.
    """
    params = search.params(now)
    answers = yield Batch(
        _LIMITS(**params),
        _LEFT(**params, limit=most, dead=_json(dead), recover=int(recover)),
        *(sql(**params, queue=queue, limit=most, full="[]", starts=1) for queue in search.queues for sql in _DUE),
    )
    limits = {row[0]: Limits._make(row) for row in answers[0]}
    chosen = [ClaimableRun._make(row) for row in answers[1][:most]]
    left = len(chosen)
    room: dict[str, QueueCapacity] = {}
    if limits and left < most:
        room, pages = yield from _within(limits, search, most, params)
    else:
        pages = answers[2:]
    for candidate in sorted(
        (ClaimableRun._make(row) for page in pages for row in page),
        key=lambda one: (-one.priority, one.wake_at, one.run),
    ):
        capacity = room.get(candidate.queue)
        if len(chosen) < most and (capacity is None or capacity.enter(candidate.tenant, starts=candidate.fence == 0)):
            chosen.append(candidate)
    tokens = [
        _SET_TOKENS(queue=queue, tokens=capacity.tokens, at=limits[queue].now)
        for queue, capacity in room.items()
        if capacity.is_changed
    ]
    wait_us = min((one.wait_us for one in room.values() if one.wait_us is not None), default=None)
    if not chosen and not tokens:
        return Claimed([], wait_us)
    takes = [_TAKE(owner=search.owner, lease=lease, now=now, **candidate._asdict()) for candidate in chosen]
    taken = (yield Batch(*takes, *tokens, last=True))[: len(takes)]
    return Claimed(
        [Taken(row[0], row[1], row[2], RunRow._make(row[3:])) for rows in taken for row in rows], wait_us, left
    )


def _within(
    limits: dict[str, Limits], search: Search, most: int, params: dict[str, Any]
) -> Generator[Batch, list[Rows], tuple[dict[str, QueueCapacity], list[Rows]]]:
    """Return the capacity of each limited queue, and the due runs that may be claimed.

    If this claim fills a tenant, its further runs may hide those of others until the worker's next claim, which follows
    at once.
    """
    [counts] = yield Batch(_RUNNING(queues=params["queues"]))  # after the locks, so that no worker can change it
    room = {
        name: QueueCapacity(one, {tenant: int(count) for queue, tenant, count in counts if queue == name})
        for name, one in limits.items()
    }
    statements = []
    for queue in search.queues:
        one = room.get(queue)
        places, full, starts = (most, [], True) if one is None else (one.places, one.full, one.may_start)
        limit = max(0, min(most, places))
        narrowed = {"limit": limit, "full": _json(full), "starts": int(starts)}
        statements += [sql(**params, queue=queue, **narrowed) for sql in _DUE]
    return room, (yield Batch(*statements))


def other_versions(search: Search, now: int) -> Program[list[tuple[str, str, int]]]:
    """Return function, version and number of due runs whose functions this worker has in another version."""
    [rows] = yield Batch(_OTHER_VERSIONS(**search.params(now)), last=True)
    return [(str(function), str(version), int(count)) for function, version, count in rows]


def tenants(after: int, limit: int) -> Program[list[tuple[int, str]]]:
    """Return a page of the store's tenants, as numbers and names."""
    [rows] = yield Batch(_TENANTS(after=after, limit=limit, tenant=None), last=True)
    return [(int(number), str(name)) for number, name in rows]
