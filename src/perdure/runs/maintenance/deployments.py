"""Deployments: which version of a function new runs get, a share of them for a canary, and when that is taken back.

`store.start` chooses inside the INSERT of the run (`journal/rows.py`). A function without a row here keeps the version
of the code that starts it; so does every run that a process runs itself, every child and every fork.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import exp, lgamma
from typing import Any

from perdure.errors import ReadOnlyStore, UsageError
from perdure.log.thread_table import next_number
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine.flows import BUCKETS
from perdure.runs.functions.specs import said_version
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, read, write
from perdure.threads.checks import check_name, check_text
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

_FAILURES_MIN, _P_MAX = 5, 0.01  # so many failures, and chance explains them less often than this: taken back
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
_SELECT = Sql(f"SELECT {_COLUMNS} FROM deployment WHERE tenant = :tenant ORDER BY function")
# A transfer: what the target has deployed itself, or by the same transfer before, stays.
_COPY = Sql(
    f"""INSERT INTO deployment (tenant, {_COLUMNS})
    VALUES (:tenant, :function, :version, :canary, :share, :since, :run_after, :reverted)
    ON CONFLICT (tenant, function) DO NOTHING"""
)
# A stuck run counts as failed: the code would end its worker, or does not fit its own journal.
_COUNT = Sql(
    """SELECT version, status, count(*) FROM run WHERE tenant = :tenant AND status IN ('done', 'failed', 'stuck')
        AND run > :run_after AND created_at >= :since AND function = :function GROUP BY version, status"""
)
# Looked at often: what is done, which may be millions of runs, is counted only if enough has failed. SQLite takes the
# index of statuses only for a query that it covers.
_SUSPECT = Sql(
    f"""SELECT DISTINCT d.tenant FROM deployment d WHERE d.canary IS NOT NULL
    AND (CAST(:tenant AS bigint) IS NULL OR d.tenant = :tenant)
    AND (SELECT count(*) FROM run r WHERE r.tenant = d.tenant AND r.run IN (
            SELECT f.run FROM run f
            WHERE f.tenant = d.tenant AND f.status IN ('failed', 'stuck') AND f.run > d.run_after)
        AND r.created_at >= d.since AND r.function = d.function AND r.version = d.canary) >= {_FAILURES_MIN}"""
)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How the runs of one version have ended since its deployment."""

    ended: int
    failed: int  # of these


@dataclass(frozen=True, slots=True)
class Deployment:
    """Which version new runs of a function get. With a canary, `share` of them get that one."""

    function: str
    version: str
    canary: str | None
    share: float
    since: datetime
    reverted: str | None  # why the last canary was taken back
    runs: Outcomes | None = None  # of the version, while a canary is compared with it
    canary_runs: Outcomes | None = None


def deploy(ctx: StoreContext, fn: Callable[..., Any] | str, version: str, canary: float | None) -> Flow[None]:
    """Give a version to new runs of a function: all of them, or the share `canary`."""
    function = check_name(fn, "function") if isinstance(fn, str) else durable_spec(fn).name
    check_text(version, "a version")
    if canary is not None and not (isinstance(canary, float) and 0.5 / BUCKETS < canary < 1 - 0.5 / BUCKETS):
        raise UsageError(f"canary={canary!r}: a share between 0 and 1, such as 0.05; without it all new runs")
    tenant = yield from ctx.ensure_tenant()
    share = 0 if canary is None else round(canary * BUCKETS)
    yield from write(partial(_deploy, tenant, function, version, share, ctx.clock_us()))


def _deploy(tenant: int, function: str, version: str, share: int, now: int) -> Program[None]:
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
    """The deployments of a tenant. A canary that fails significantly more is taken back first."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    try:
        yield from revert_failing(tenant)
    except ReadOnlyStore:  # a snapshot, a standby: it shows what is there
        pass
    return [found for found, _ in (yield from read(partial(_read, tenant)))]


def revert_failing(tenant: int | None) -> Flow[None]:
    """Take back the canaries that fail significantly more than the version beside them: of a tenant, or of all."""
    for (number,) in (yield from read(partial(_suspects, tenant))):
        for found, since in (yield from read(partial(_read, number))):
            if (reason := _reason(found)) is None:
                continue
            op = partial(_revert, number, found.function, found.canary, since, reason)
            if (yield from write(op)):
                about = event("deployment.reverted", function=found.function, version=found.canary)
                _log.warning("deployment of %s: %s", found.function, reason, extra=about)


def _suspects(tenant: int | None) -> Program[Rows]:
    [found] = yield Batch(_SUSPECT(tenant=tenant), last=True)
    return found


def read_rows(tenant: int) -> Program[Rows]:
    """The table, as far as a tenant goes."""
    [found] = yield Batch(_SELECT(tenant=tenant))
    return found


def copy_rows(tenant: int, rows: Rows) -> Program[None]:
    """Write rows of another store, before its runs come and get numbers here."""
    number = yield from next_number()
    for row in rows:
        about = dict(zip(_COLUMNS.split(", "), row, strict=True)) | {"run_after": number}
        yield Batch(_COPY(tenant=tenant, **about))


def _read(tenant: int) -> Program[list[tuple[Deployment, int]]]:
    """The deployments of a tenant with their counts, and when each was made."""
    made = []
    for function, version, canary, share, since, run_after, reverted in (yield from read_rows(tenant)):
        outcomes: list[Outcomes | None] = [None, None]
        if canary is not None:
            [counts] = yield Batch(_COUNT(tenant=tenant, function=function, since=since, run_after=run_after))
            outcomes = [_outcomes(counts, version), _outcomes(counts, canary)]
        about = Deployment(function, version, canary, share / BUCKETS, moment(since), reverted, *outcomes)
        made.append((about, since))
    return made


def _outcomes(counts: Rows, version: str) -> Outcomes:
    ended = {status: count for found, status, count in counts if found == version}
    return Outcomes(sum(ended.values()), sum(ended.values()) - ended.get("done", 0))


def _revert(tenant: int, function: str, canary: str | None, since: int, reason: str) -> Program[bool]:
    [found] = yield Batch(_REVERT(tenant=tenant, function=function, canary=canary, since=since, reverted=reason))
    return bool(found)


def _reason(found: Deployment) -> str | None:
    """Why a canary is to be taken back; None: it is not."""
    runs, tried = found.runs, found.canary_runs
    if runs is None or tried is None or tried.failed < _FAILURES_MIN:
        return None
    chance = fisher(tried, runs)
    if chance >= _P_MAX:
        return None
    return (
        f"{said_version(found.canary or '')} was reverted: {tried.failed} of {tried.ended} runs failed, and "
        f"{runs.failed} of {runs.ended} of {said_version(found.version)} (p = {chance:.2g})"
    )


def fisher(tried: Outcomes, runs: Outcomes) -> float:
    """Fisher's exact test, one-sided: how likely chance alone gives `tried` as many failures, or more."""
    total, failed = tried.ended + runs.ended, tried.failed + runs.failed

    def log_ways(of: int, some: int) -> float:
        return lgamma(of + 1) - lgamma(some + 1) - lgamma(of - some + 1)

    every = log_ways(total, tried.ended)
    worse = range(tried.failed, min(tried.ended, failed) + 1)
    return sum(exp(log_ways(failed, n) + log_ways(total - failed, tried.ended - n) - every) for n in worse)
