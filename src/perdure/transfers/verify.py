"""Verify a whole store, tenant by tenant, after a restore or a repair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perdure.errors import PerdureError
from perdure.runs.maintenance.tenant_isolation import OF_THE_STORE
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.models import Problem, Report

_TENANTS = Sql("SELECT name FROM tenant ORDER BY tenant")


def tenant_names() -> Program[list[str]]:
    """Return the names of all tenants. Skip a name that is not text: it is damaged and cannot be used."""
    [rows] = yield Batch(_TENANTS(tenant=None), last=True)
    return [name for (name,) in rows if type(name) is str]


def verify_all(store: Any, tenants: Iterable[str]) -> Report:
    threads = checkpoints = runs = versions = 0
    problems: list[Problem] = []
    for name in tenants:
        try:
            report: Report = store.tenant(name).ops.verify()
        except OF_THE_STORE:
            raise
        except PerdureError as error:  # report it, and check the other tenants
            report = Report(0, 0, (Problem("(store)", None, f"tenant {name!r} could not be checked: {error}"),))
        threads, checkpoints, runs = threads + report.threads, checkpoints + report.checkpoints, runs + report.runs
        versions += report.versions
        problems += report.problems
    return Report(threads, checkpoints, tuple(problems), runs, versions)
