"""Verification of all that a tenant has, in a store or at a snapshot of it, and of the snapshots themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from perdure.runs.engine.searching import is_live
from perdure.snapshots import rows
from perdure.storage.domains import versioned_tables
from perdure.storage.program import Flow, Progress, read
from perdure.threads.context import StoreContext
from perdure.threads.models import Problem, Report


def verify_tenant(ctx: StoreContext, progress: Progress | None = None) -> Flow[Report]:
    """Check every record, every run and every version of memory."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return Report(0, 0)
    from perdure.log import verify as threads  # imported late: few programs verify
    from perdure.memory import verify as memory
    from perdure.runs.maintenance import verify as runs
    from perdure.threads import externals

    report = Report.of((yield from threads.verify_tenant(tenant, progress)))
    of_runs = yield from runs.verify_runs(tenant, progress, live=is_live(ctx))
    versions, of_memory = yield from memory.verify_memory(ctx, tenant)
    of_values = yield from externals.verify(ctx, tenant)
    problems = [
        *report.problems,
        *(Problem("(store)" if run is None else f"(run {run})", None, text, run) for run, text in of_runs.problems),
        *(Problem("(external values)", None, text) for text in of_values),
        *(Problem(f"(memory {name})" if name else "(memory)", None, text) for name, text in of_memory),
    ]
    return replace(report, runs=of_runs.runs, versions=versions, problems=tuple(problems))


def snapshot_problems(ctx: StoreContext) -> Flow[list[Problem]]:
    """Return what is wrong with the snapshots, and with the rows of this tenant that they keep."""
    tenant = (yield from ctx.tenant()) or 0
    sentences = yield from read(partial(rows.problems, tenant, list(versioned_tables().values())))
    return [Problem("(snapshots)", None, sentence) for sentence in sentences]
