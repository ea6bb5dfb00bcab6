"""Checking new code against the runs that are under way, before it is deployed: each is replayed, nothing is changed.

`ok` means that the code goes the way that the journal says, as far as that goes. What comes after cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from perdure.errors import NonDeterministic, UsageError
from perdure.runs.functions.specs import DurableSpec, known_durables
from perdure.runs.history.replay import ReplayRunner
from perdure.runs.journal import control
from perdure.runs.journal.rows import OPEN, RunRow
from perdure.storage.program import Flow, drive, read
from perdure.threads.context import Context
from perdure.threads.store import ThreadStore
from perdure.values.safe_repr import shown

_PAGE = 100


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """What new code means for one open run."""

    run: str
    function: str
    status: str
    old_version: str
    new_version: str | None
    verdict: Literal["ok", "differs", "unknown", "unreadable"]
    path: str | None = None  # where it goes another way
    expected: str | None = None  # what the journal says
    actual: str | None = None  # what the new code does
    answered: int = 0  # how many recorded calls fit

    @property
    def is_ok(self) -> bool:
        return self.verdict == "ok"

    @property
    def problem(self) -> str | None:
        """What is wrong, for people."""
        if self.verdict == "differs":
            where = f"at step {self.path}: " if self.path else ""
            return f"{where}{self.expected} before, and now {self.actual}"
        return self.actual

    def __str__(self) -> str:
        line = f"{self.run} ({self.function}, {self.status}): {self.verdict}"
        return f"{line} {self.problem}" if self.problem else line


Functions = ModuleType | Iterable[Callable[..., Any]] | None


def check_code(store: ThreadStore, functions: Functions = None) -> list[CodeFinding]:
    """Replay every open run against the code that is here: of a module, of some functions, or all that are known."""
    ctx, specs = store._context, _specs(functions)
    tenant, found = drive(ctx.driver, _open_runs(ctx))
    return [_finding(ctx, tenant, row, specs.get(row.function)) for row in found]


def _specs(functions: Functions) -> dict[str, DurableSpec]:
    if functions is None:
        return known_durables()
    given = list(vars(functions).values()) if isinstance(functions, ModuleType) else list(functions)
    found = [getattr(fn, "perdure_durable", None) for fn in given]
    specs = {spec.name: spec for spec in found if isinstance(spec, DurableSpec)}
    if not specs:
        raise UsageError(
            "there is no durable function to check: put @perdure.durable above the functions that runs are of"
        )
    return specs


def _open_runs(ctx: Context) -> Flow[tuple[int, list[RunRow]]]:
    tenant = yield from ctx.tenant()
    if tenant is None:
        return 0, []
    found: list[RunRow] = []
    for status in OPEN:
        before = 2**62
        while True:
            op = partial(control.listed, tenant, status=status, function=None, queue=None, before=before, limit=_PAGE)
            page = yield from read(op)
            found += page
            if len(page) < _PAGE:
                break
            before = page[-1].run
    return tenant, sorted(found)


def _finding(ctx: Context, tenant: int, row: RunRow, spec: DurableSpec | None) -> CodeFinding:
    about = (row.id, row.function, row.status, row.version, None if spec is None else spec.version)
    if spec is None:
        return CodeFinding(*about, "unknown", actual="the code has no function of this name")
    try:
        found = ReplayRunner(ctx, tenant, row, spec, as_resumed=True).run()
    except NonDeterministic as error:
        return CodeFinding(*about, "differs", error.path, error.expected, error.actual)
    except Exception as error:  # whatever is wrong with one run, the others are looked at too
        return CodeFinding(*about, "unreadable", actual=f"{type(error).__name__}: {error}")
    if found.error is not None:
        return CodeFinding(
            *about, "differs", "", "it continued", f"the function raises {shown(found.error, 200)}", found.answered
        )
    return CodeFinding(*about, "ok", answered=found.answered)
