"""Check new code against the open runs before it is deployed. Each run is replayed; nothing is changed.

`ok` means that the code agrees with the journal as far as the journal goes. It says nothing about later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from perdure.errors import NonDeterministic, UsageError
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.history.replay import ReplayRunner
from perdure.runs.journal import control, listing
from perdure.runs.journal.listing import Position, RunFilter
from perdure.runs.journal.rows import OPEN
from perdure.runs.run_table import RunRow
from perdure.storage.program import Flow, drive, read, write
from perdure.threads.context import Handle, StoreContext
from perdure.values.safe_repr import shown

_LIBRARY = "perdure."  # begins the function of runs that no code of users has, such as that of a team
_PAGE = 100


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """The result of replaying one open run with new code."""

    run: str
    function: str
    status: str
    verdict: Literal["ok", "differs", "unknown", "unreadable", "running"]
    problem: str | None = None
    answered: int = 0  # how many recorded calls matched

    @property
    def is_ok(self) -> bool:
        """Whether the code can resume the run."""
        return self.verdict == "ok"


def check_code(store: Handle, functions: Iterable[Any]) -> list[CodeFinding]:
    """Replay every open run with the durable functions among `functions`, and return a finding for each.

    Teams and their members are left out: a member has no journal between two messages.
    """
    known = [getattr(fn, "perdure_durable", None) for fn in functions]
    specs = {spec.name: spec for spec in known if isinstance(spec, DurableSpec)}
    if not specs:
        raise UsageError(
            "there is no durable function to check: put @perdure.durable above the functions that runs are of"
        )
    ctx = store._context
    tenant, rows = drive(ctx.driver, _open_runs(ctx))
    calls = [row for row in rows if row.turn is None and not row.function.startswith(_LIBRARY)]
    return [_finding(ctx, tenant, row, specs.get(row.function)) for row in calls]


def move_runs(store: Handle, fn: Callable[..., Any]) -> list[CodeFinding]:
    """Move the open runs of other versions of a function to this version, if their replay passes.

    The verdict "ok" means that a run was moved. A run that a process executes is not moved."""
    spec = durable_spec(fn)
    ctx = store._context
    tenant, rows = drive(ctx.driver, _open_runs(ctx, spec.name))
    return [_move(ctx, tenant, row, spec) for row in rows if row.version != spec.version]


def _move(ctx: StoreContext, tenant: int, row: RunRow, spec: DurableSpec) -> CodeFinding:
    result = _finding(ctx, tenant, row, spec)
    if result.is_ok and not drive(ctx.driver, write(partial(control.move, tenant, row, spec.version))):
        return replace(result, verdict="running", problem="it runs with the other version: move it when it waits again")
    return result


def _open_runs(ctx: StoreContext, function: str | None = None) -> Flow[tuple[int, list[RunRow]]]:
    tenant = yield from ctx.tenant()
    if tenant is None:
        return 0, []
    runs: list[RunRow] = []
    before: Position | None = Position()
    while before is not None:
        page = yield from read(partial(listing.page, tenant, RunFilter(OPEN, function), before, _PAGE))
        runs += page
        before = Position(page[-1].created_at, page[-1].run) if len(page) == _PAGE else None
    return tenant, sorted(runs)


def _finding(ctx: StoreContext, tenant: int, row: RunRow, spec: DurableSpec | None) -> CodeFinding:
    about = (row.id, row.function, row.status)
    if spec is None:
        return CodeFinding(*about, "unknown", "the code has no function of this name")
    try:
        replay = ReplayRunner(ctx, tenant, row, spec, as_resumed=True).run()
    except NonDeterministic as error:
        return CodeFinding(*about, "differs", f"at step {error.path}: {error.expected} before, and now {error.actual}")
    except Exception as error:  # a problem of one run must not stop the check of the others
        return CodeFinding(*about, "unreadable", f"{type(error).__name__}: {error}")
    if replay.error is not None:
        return CodeFinding(*about, "differs", f"the function raises {shown(replay.error, 200)} now", replay.answered)
    return CodeFinding(*about, "ok", answered=replay.answered)
