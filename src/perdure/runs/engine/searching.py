"""The search for runs behind `store.runs`, `store.count_runs` and bulk operations: checks of conditions, cursors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict

from perdure.errors import UsageError
from perdure.runs.calls.tags import check_tags
from perdure.runs.engine.flows import locate
from perdure.runs.journal import listing
from perdure.runs.journal.listing import Position, RunFilter
from perdure.runs.journal.rows import STATUSES
from perdure.runs.run_table import RunRow
from perdure.storage.program import Flow, read
from perdure.storage.wrapping import SnapshotDriver
from perdure.threads.checks import check_name, microseconds, parse_cursor
from perdure.threads.context import StoreContext

if TYPE_CHECKING:
    from perdure.runs.handle import Run

Dimension = Literal["status", "function", "version", "queue"]
_ALL = 2**62


class RunConditions(TypedDict, total=False):
    """The conditions of a search for runs. All that are named must hold."""

    statuses: str | Sequence[str] | None
    function: str | None
    version: str | None
    queue: str | None
    tags: Mapping[str, str | int] | None
    since: datetime | None
    until: datetime | None
    id_prefix: str | None
    parent: str | Run | None
    tasks: bool


class Counts(dict[str, int]):
    """Counts of runs by status, or by the column that the caller named."""

    is_partial = False
    """True: there are more, and the count stopped at its limit."""

    @property
    def total(self) -> int:
        """How many runs there are in all."""
        return sum(self.values())


def filter_of(ctx: StoreContext, where: RunConditions) -> Flow[RunFilter]:
    """Check conditions and return them as the database needs them. Raises UsageError, NotFound."""
    from perdure.runs.handle import run_id_of

    # Python does not check these keywords at run time. Without this, a search by a misspelt one would select every run.
    if unknown := sorted(where.keys() - RunConditions.__annotations__.keys()):
        raise UsageError(f"{unknown[0]}= is no condition: {', '.join(RunConditions.__annotations__)}")
    statuses = where.get("statuses") or ()
    if not isinstance(statuses, Iterable):
        raise UsageError(f"statuses={statuses!r}: one or several of {', '.join(STATUSES)}")
    statuses = (statuses,) if isinstance(statuses, str) else tuple(statuses)
    for status in statuses:
        if status not in STATUSES:
            raise UsageError(f"status {status!r}: one of {', '.join(STATUSES)}")
    function, queue, version = where.get("function"), where.get("queue"), where.get("version")
    for what, name in (("function", function), ("queue", queue), ("run", where.get("id_prefix") or None)):
        if name is not None:
            check_name(name, what)
    if version:
        check_name(version, "version")
    since, until = where.get("since"), where.get("until")
    parent = where.get("parent")
    return RunFilter(
        tuple(dict.fromkeys(statuses)),
        function,
        version,
        queue,
        check_tags(where.get("tags")),
        0 if since is None else microseconds(since, "since"),
        _ALL if until is None else microseconds(until, "until"),
        where.get("id_prefix") or "",
        None if parent is None else (yield from locate(ctx, run_id_of(ctx, parent)))[1].run,
        where.get("tasks", False),
    )


def find_runs(ctx: StoreContext, where: RunConditions, before: str | None, limit: int | None) -> Flow[list[RunRow]]:
    """Return the rows of runs, the newest first."""
    place = Position(*(() if before is None else parse_cursor(before)))
    conditions = yield from filter_of(ctx, where)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    most = _ALL if limit is None else limit
    return (yield from read(partial(listing.page, tenant, conditions, place, most, live=is_live(ctx))))


def count_runs(ctx: StoreContext, where: RunConditions, by: Dimension, limit: int) -> Flow[Counts]:
    """Count runs by status, function, version or queue."""
    if by not in ("status", "function", "version", "queue"):
        raise UsageError(f"by={by!r}: status, function, version or queue")
    conditions = yield from filter_of(ctx, where)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return Counts()
    kinds, is_partial = yield from read(partial(listing.counts, tenant, conditions, limit, live=is_live(ctx)))
    counted = Counts(listing.totals(kinds, by))
    counted.is_partial = is_partial
    return counted


def is_live(ctx: StoreContext) -> bool:
    """Return whether this is the store as it is now, not a snapshot of it."""
    return not isinstance(ctx.driver.capabilities.base, SnapshotDriver)
