"""Deployments: which version of a function new runs get, a share of them for a canary, and when that is reverted.

`store.start` chooses inside the INSERT of the run (`journal/rows.py`). A function without a row here keeps the version
of the code that starts it; so does every run that a process runs itself, every child and every fork.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import exp, log
from statistics import fmean
from typing import Any

from perdure.errors import NotFound, ReadOnlyStore, UsageError
from perdure.log.thread_table import next_number
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine.flows import BUCKETS
from perdure.runs.functions.specs import said_version
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, fetch, write
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.amounts import plural

_CHANCE = 0.01  # a canary that fails as often as the other version is reverted at most so often
_log = logging.getLogger("perdure")
_COLUMNS = "function, version, canary, share, since, run_after, reverted"
_SET = Sql(
    """INSERT INTO deployment (tenant, function, version, canary, share, since, run_after, reverted)
    VALUES (:tenant, :function, :version, NULL, 0, {now}, :run_after, NULL)
    ON CONFLICT (tenant, function) DO UPDATE SET version = excluded.version, canary = NULL, share = 0,
        since = excluded.since, run_after = excluded.run_after, reverted = NULL"""
)
_TRY = Sql(
    """UPDATE deployment SET canary = :canary, share = :share, since = {now}, run_after = :run_after, reverted = NULL
    WHERE tenant = :tenant AND function = :function RETURNING version"""
)
_REVERT = Sql(
    """UPDATE deployment SET canary = NULL, share = 0, reverted = :reverted
    WHERE tenant = :tenant AND function = :function AND canary = :canary AND since = :since RETURNING function"""
)
_REMOVE = Sql("DELETE FROM deployment WHERE tenant = :tenant AND function = :function RETURNING function")
SELECT = Sql(f"SELECT {_COLUMNS} FROM deployment WHERE tenant = :tenant ORDER BY function")
# A transfer: what the target has deployed itself, or by the same transfer before, stays.
_COPY = Sql(
    f"""INSERT INTO deployment (tenant, {_COLUMNS})
    VALUES (:tenant, :function, :version, :canary, :share, :since, :run_after, :reverted)
    ON CONFLICT (tenant, function) DO NOTHING"""
)
# With the failures since, of runs whose version was chosen here. A stuck run counts: the code would end its worker, or
# does not fit its own journal. The inner SELECT: SQLite takes the index of statuses only for a query that it covers.
_ONE = "d.tenant, d.function, d.version, d.canary, d.share, d.since, d.reverted"
_COUNTED = Sql(
    f"""SELECT {_ONE},
        count(CASE WHEN r.version = d.version THEN 1 END), count(CASE WHEN r.version = d.canary THEN 1 END)
    FROM deployment d LEFT JOIN run r ON d.canary IS NOT NULL AND r.tenant = d.tenant AND r.run IN (
            SELECT f.run FROM run f
            WHERE f.tenant = d.tenant AND f.status IN ('failed', 'stuck') AND f.run > d.run_after)
        AND r.created_at >= d.since AND r.function = d.function AND r.bucket IS NOT NULL
    WHERE CAST(:tenant AS bigint) IS NULL OR d.tenant = :tenant
    GROUP BY {_ONE} ORDER BY d.tenant, d.function"""
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Which version new runs of a function get. With a canary, `share` of them get that one."""

    function: str
    version: str
    canary: str | None
    share: float
    since: datetime
    reverted: str | None  # why the last canary was reverted
    failed: int  # runs of the version since, while a canary is compared with it
    canary_failed: int


def deploy(ctx: StoreContext, fn: Callable[..., Any] | str, version: str | None, canary: float | None) -> Flow[None]:
    """Give a version to new runs of a function: all of them, or the share `canary`. None removes the deployment."""
    function = check_name(fn, "function") if isinstance(fn, str) else durable_spec(fn).name
    if version:  # "" is code without one
        check_name(version, "version")
    if canary is not None and not (isinstance(canary, float) and 0.5 / BUCKETS < canary < 1 - 0.5 / BUCKETS):
        raise UsageError(f"canary={canary!r}: a share between 0 and 1, such as 0.05; without it all new runs")
    if version is None and canary is not None:
        raise UsageError("canary= needs a version")
    tenant = yield from ctx.ensure_tenant()
    share = 0 if canary is None else round(canary * BUCKETS)
    yield from write(partial(_deploy, tenant, function, version, share, ctx.clock_us()))


def _deploy(tenant: int, function: str, version: str | None, share: int, now: int) -> Program[None]:
    if version is None:
        [found] = yield Batch(_REMOVE(tenant=tenant, function=function))
        if not found:
            raise NotFound(f"there is no deployment of {function!r}; `perdure deployments` lists them")
        return
    about = {"tenant": tenant, "function": function, "run_after": (yield from next_number()), "now": now}
    if not share:
        yield Batch(_SET(version=version, **about))
        return
    [found] = yield Batch(_TRY(canary=version, share=share, **about))
    if not found:
        raise UsageError(
            f"a canary of {function} needs a version to compare it with: deploy the one in use first, to all new runs"
        )
    if found[0][0] == version:
        raise UsageError(f"{said_version(version)} of {function} is deployed already: a canary is another one")


def deployments(ctx: StoreContext) -> Flow[list[Deployment]]:
    """The deployments of a tenant. A canary that fails more often than its version is reverted first."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    try:
        yield from revert_failing(tenant)
    except ReadOnlyStore:  # a snapshot, a standby: it shows what is there
        pass
    found = yield from fetch(_COUNTED, tenant=tenant)
    return [
        Deployment(function, version, canary, share / BUCKETS, moment(since), *others)
        for _, function, version, canary, share, since, *others in found
    ]


def revert_failing(tenant: int | None) -> Flow[None]:
    """Take back the canaries that fail more often than the version beside them: of a tenant, or of all."""
    found = yield from fetch(_COUNTED, tenant=tenant)
    for number, function, version, canary, share, since, _, failed, tried in found:
        if canary is None or evidence(share / BUCKETS, tried, failed) * _CHANCE < 1:
            continue
        reason = (
            f"{said_version(canary)} was reverted: {plural(tried, 'failed run')} of it and {failed} of "
            f"{said_version(version)}, with {100 * share / BUCKETS:g}% of the runs"
        )
        if (yield from write(partial(_revert, number, function, canary, since, reason))):
            about = event("deployment.reverted", function=function, version=canary)
            _log.warning("deployment of %s: %s", function, reason, extra=about)


def evidence(share: float, tried: int, failed: int) -> float:
    """How much likelier these numbers of failures, of a canary and of the version beside it, are if the canary fails
    more often than if both fail equally often: the mean over 1.4, 2, 2.8, … 1,024 times as often.

    Runs get the canary by chance, so under equality each failure is the canary's with the probability `share`. The mean
    is then a martingale that begins at 1, and exceeds N at any time with a probability of at most 1/N (Ville), however
    often it is looked at."""
    ratios = [2 ** (n / 2) for n in range(1, 21)]
    logs = [tried * log(ratio) - (tried + failed) * log(1 - share + share * ratio) for ratio in ratios]
    return fmean(exp(min(value, 99.0)) for value in logs)


def copy_rows(tenant: int, rows: Rows) -> Program[None]:
    """Write rows of another store, before its runs come and get numbers here."""
    number = yield from next_number()
    for row in rows:
        about = dict(zip(_COLUMNS.split(", "), row, strict=True)) | {"run_after": number}
        yield Batch(_COPY(tenant=tenant, **about))


def _revert(tenant: int, function: str, canary: str, since: int, reason: str) -> Program[bool]:
    [found] = yield Batch(_REVERT(tenant=tenant, function=function, canary=canary, since=since, reverted=reason))
    return bool(found)
