"""Deployments: which version of a function new runs get, which share gets a canary, and when a canary is reverted.

`store.start` chooses the version in the INSERT of the run (`journal/rows.py`). Without a deployment, a run gets the
version of the code that starts it. So does a run that `store.run` executes, a child and a fork.
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

from perdure.errors import NotFound, UsageError
from perdure.log.thread_table import next_number
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine.flows import BUCKETS
from perdure.runs.functions.specs import said_version
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, change, fetch, write
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.amounts import plural

_CHANCE = 0.01  # the highest probability of reverting a canary that fails as often as the other version
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
# For a transfer. A deployment that the target already has stays.
_COPY = Sql(
    f"""INSERT INTO deployment (tenant, {_COLUMNS})
    VALUES (:tenant, :function, :version, :canary, :share, :since, :run_after, :reverted)
    ON CONFLICT (tenant, function) DO NOTHING"""
)
# Counts failures since the deployment, of runs whose version it chose. A stuck run counts: its code would end its
# worker, or does not fit its journal. The inner SELECT is for SQLite, which uses the index only if it covers the query.
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
    """The version that new runs of a function get. With a canary, `share` is the fraction that gets it."""

    function: str
    version: str
    canary: str | None
    share: float
    since: datetime
    reverted: str | None  # why the last canary was reverted
    failed: int  # failed runs of the version since the canary began
    canary_failed: int


def deploy(ctx: StoreContext, fn: Callable[..., Any] | str, version: str | None, canary: float | None) -> Flow[None]:
    """Set the version of new runs of a function, or of the share `canary` of them. None removes the deployment."""
    function = check_name(fn, "function") if isinstance(fn, str) else durable_spec(fn).name
    if version:  # "" means code without a version
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
        [rows] = yield Batch(_REMOVE(tenant=tenant, function=function))
        if not rows:
            raise NotFound(f"there is no deployment of {function!r}; `perdure deployments` lists them")
        return
    about = {"tenant": tenant, "function": function, "run_after": (yield from next_number()), "now": now}
    if not share:
        yield Batch(_SET(version=version, **about))
        return
    [rows] = yield Batch(_TRY(canary=version, share=share, **about))
    if not rows:
        raise UsageError(
            f"a canary of {function} needs a version to compare it with: deploy the one in use first, to all new runs"
        )
    if rows[0][0] == version:
        raise UsageError(f"{said_version(version)} of {function} is deployed already: a canary is another one")


def deployments(ctx: StoreContext) -> Flow[list[Deployment]]:
    """List the deployments of a tenant. Writes nothing: workers revert the canaries that fail too often."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    rows = yield from fetch(_COUNTED, tenant=tenant)
    return [
        Deployment(function, version, canary, share / BUCKETS, moment(since), *others)
        for _, function, version, canary, share, since, *others in rows
    ]


def revert_failing(tenant: int | None) -> Flow[None]:
    """Revert the canaries that fail more often than the deployed version, of one tenant or (None) of all."""
    rows = yield from fetch(_COUNTED, tenant=tenant)
    for number, function, version, canary, share, since, _, failed, tried in rows:
        if canary is None or evidence(share / BUCKETS, tried, failed) * _CHANCE < 1:
            continue
        reason = (
            f"{said_version(canary)} was reverted: {plural(tried, 'failed run')} of it and {failed} of "
            f"{said_version(version)}, with {100 * share / BUCKETS:g}% of the runs"
        )
        key = {"tenant": number, "function": function, "canary": canary, "since": since}
        if (yield from change(_REVERT(**key, reverted=reason))):
            about = event("deployment.reverted", function=function, version=canary)
            _log.warning("deployment of %s: %s", function, reason, extra=about)


def evidence(share: float, tried: int, failed: int) -> float:
    """Return the likelihood ratio of "the canary fails more often" to "both versions fail equally often".

    `tried` are the failures of the canary, `failed` those of the other version. The ratio is a mean over canaries that
    fail 1.4, 2, 2.8, … 1,024 times as often. Runs get the canary at random. So if both fail equally often, each failure
    is the canary's with probability `share`, and the mean is a martingale that begins at 1. It ever exceeds N with a
    probability of at most 1/N (Ville), however often it is checked."""
    ratios = [2 ** (n / 2) for n in range(1, 21)]
    logs = [tried * log(ratio) - (tried + failed) * log(1 - share + share * ratio) for ratio in ratios]
    return fmean(exp(min(value, 99.0)) for value in logs)


def copy_rows(tenant: int, rows: Rows) -> Program[None]:
    """Insert deployments of another store. Call it before its runs get their numbers in this store."""
    number = yield from next_number()
    for row in rows:
        about = dict(zip(_COLUMNS.split(", "), row, strict=True)) | {"run_after": number}
        yield Batch(_COPY(tenant=tenant, **about))
