"""Programs that list and count runs, the newest first, without reading those that no condition selects.

A search reads one index in the order of `created_at, run`. `_choose` takes the index of the rarest condition; the other
conditions are looked up row by row. Each of them is a scalar subquery: PostgreSQL would turn an EXISTS into a join that
reads everything. A search for several kinds or statuses reads the index once for each of them and merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import orjson

from perdure.runs.journal.rows import COLUMNS, RUN_ENCRYPTED, STATUSES
from perdure.runs.run_table import NO_TASK, RunRow
from perdure.runs.tables import TAG_VALUE
from perdure.storage.program import Batch, Program, Rows, Sql, Statement

_RARE_MAX = 5_000  # runs that are counted at most to compare two conditions
_KINDS_MAX = 100  # kinds that a search merges at most
_LATEST = 2**62
# time: all runs; status, kind: merged readings; tasks: tasks of graphs with an open question
Source = Literal["time", "status", "kind", "parent", "prefix", "tag", "tasks"]


class Position(NamedTuple):
    """A place in the list. Older runs come after it."""

    created_at: int = _LATEST
    run: int = _LATEST


@dataclass(frozen=True)
class RunFilter:
    """Conditions on runs; all must hold. Those that are None or empty select every run."""

    statuses: tuple[str, ...] = ()
    function: str | None = None
    version: str | None = None
    queue: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    since: int = 0
    until: int = _LATEST
    prefix: str = ""
    parent: int | None = None
    tasks: bool = False  # all tasks of graphs, not only those that wait for a person

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that must have a value."""
        values = {name: getattr(self, name) for name in ("function", "version", "queue", "parent")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def has_span(self) -> bool:
        return self.since > 0 or self.until < _LATEST

    @property
    def is_about_kinds(self) -> bool:
        """Whether it names functions, versions, queues and statuses only, so that `run_count` has the answer."""
        return not (self.tags or self.has_span or self.prefix or self.parent is not None or self.tasks)

    @property
    def prefix_bounds(self) -> dict[str, str]:
        return {"prefix": self.prefix, "prefix_end": f"{self.prefix}\U0010ffff"}


class RunKind(NamedTuple):
    """How many runs have the same function, version, queue and status."""

    function: str
    version: str
    queue: str
    status: str
    n: int


_KIND = "function, version, queue, status"
_COUNTS = Sql(
    f"""SELECT {_KIND}, CAST(sum(n) AS bigint) FROM run_count WHERE tenant = :tenant
    GROUP BY {_KIND} HAVING sum(n) > 0"""
)
# At a snapshot there are no counts.
_COUNTED = Sql(f"SELECT {_KIND}, count(*) FROM run WHERE tenant = :tenant AND {NO_TASK} GROUP BY {_KIND}")
_ROWS = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run IN {{numbers:ids}}", opens=RUN_ENCRYPTED)
_KINDS_OF = Sql(f"SELECT {_KIND}, count(*) FROM run WHERE tenant = :tenant AND run IN {{numbers:ids}} GROUP BY {_KIND}")
_NOT_TASK = NO_TASK.replace("function", "r.function")
_ASKING_TASK = f"""r.run IN (SELECT a.run FROM ask a WHERE a.tenant = :tenant AND a.status = 'open')
    AND {_NOT_TASK.replace("<>", "=")}"""
_MEASURED = {
    "tag": "run_tag WHERE tenant = :tenant AND key = :key AND value = :value AND at >= :since AND at < :until",
    "parent": "run WHERE tenant = :tenant AND parent = :parent",
    "prefix": "run WHERE tenant = :tenant AND id >= :prefix AND id < :prefix_end",
    "time": f"run WHERE tenant = :tenant AND created_at >= :since AND created_at < :until AND {NO_TASK}",
}
_MEASURES = {
    source: Sql(
        f"SELECT count(*) FROM (SELECT 1 FROM {condition} LIMIT {_RARE_MAX}) AS few",
        seals={"value": TAG_VALUE} if source == "tag" else None,
    )
    for source, condition in _MEASURED.items()
}


def page(tenant: int, where: RunFilter, before: Position, limit: int, *, live: bool = True) -> Program[list[RunRow]]:
    """Return runs that meet the conditions and are older than a position, the newest first."""
    places = yield from _places(tenant, where, before, limit, live)
    if not places:
        return []
    [rows] = yield Batch(_ROWS(tenant=tenant, ids=_ids(places)), last=True)
    return sorted(map(RunRow._make, rows), key=lambda row: (row.created_at, row.run), reverse=True)


def counts(tenant: int, where: RunFilter, limit: int, *, live: bool = True) -> Program[tuple[list[RunKind], bool]]:
    """Return how many runs of each kind meet the conditions, and whether the count stopped at the limit."""
    if where.is_about_kinds:
        [rows] = yield Batch((_COUNTS if live else _COUNTED)(tenant=tenant), last=True)
        return _selected(where, rows), False
    places = yield from _places(tenant, where, Position(), limit + 1, live)
    if not places:
        return [], False
    [rows] = yield Batch(_KINDS_OF(tenant=tenant, ids=_ids(places[:limit])), last=True)
    return list(map(RunKind._make, rows)), len(places) > limit


def totals(kinds: Iterable[RunKind], by: str) -> dict[str, int]:
    """Return the counts by one column: statuses in the order of a run's life, others the largest first."""
    total: Counter[str] = Counter()
    for kind in kinds:
        total[getattr(kind, by)] += kind.n
    if by == "status":
        return {status: total[status] for status in STATUSES if status in total}
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _selected(where: RunFilter, rows: Rows) -> list[RunKind]:
    """Return the kinds that meet the conditions on function, version, queue and status."""
    return [
        kind
        for kind in map(RunKind._make, rows)
        if (not where.statuses or kind.status in where.statuses)
        and all(name == "parent" or getattr(kind, name) == value for name, value in where.columns.items())
    ]


def _ids(places: Iterable[Position]) -> str:
    return orjson.dumps([place.run for place in places]).decode()


def _places(
    tenant: int, where: RunFilter, before: Position, limit: int, live: bool
) -> Generator[Batch, list[Rows], list[Position]]:
    """Return the places of the newest runs that meet the conditions and are older than a position."""
    source, tags, kinds = yield from _choose(tenant, where, live)
    before = min(before, Position(where.until, -1))
    about = {"tenant": tenant, "at": before.created_at, "run": before.run, "since": where.since, "limit": limit}
    if source == "status":
        kinds = [{"status": status} for status in where.statuses or STATUSES]
    if source in ("status", "kind"):
        statements = [_statement("time", where, tags, about, kind) for kind in kinds]
    else:
        statements = [_statement(source, where, tags, about)]
    if not where.tasks and not tags and (not where.statuses or "waiting" in where.statuses):
        statements.append(_statement("tasks", where, tags, about))
    answers = (yield Batch(*statements)) if statements else []
    return sorted({Position._make(row) for rows in answers for row in rows}, reverse=True)[:limit]


class _Plan(NamedTuple):
    """The index that a search reads, the keys of tags, the rarest first, and the conditions of each merged reading."""

    source: Source
    tags: list[str]
    kinds: list[dict[str, str]]


def _choose(tenant: int, where: RunFilter, live: bool) -> Generator[Batch, list[Rows], _Plan]:
    """Choose the index of the condition that selects the fewest runs."""
    span = {"tenant": tenant, "since": where.since, "until": where.until}
    measures: dict[tuple[Source, str], Statement] = {
        ("tag", key): _MEASURES["tag"](**span, key=key, value=value) for key, value in where.tags.items()
    }
    if where.parent is not None:
        measures["parent", ""] = _MEASURES["parent"](tenant=tenant, parent=where.parent)
    if where.prefix:
        measures["prefix", ""] = _MEASURES["prefix"](tenant=tenant, **where.prefix_bounds)
    if measures and where.has_span:
        measures["time", ""] = _MEASURES["time"](**span)
    has_named_kind = any(name != "parent" for name in where.columns)
    has_kind = has_named_kind or bool(where.statuses)
    if where.tasks or not (measures or has_kind):
        return _Plan("status" if where.tasks else "time", list(where.tags), [])
    *answers, known = yield Batch(*measures.values(), (_COUNTS if live else _COUNTED)(tenant=tenant))
    kinds = _selected(where, known)
    # A condition that selects very many may select all.
    most = max(_RARE_MAX, sum(kind[-1] for kind in known))
    sizes = {
        measured: most if (size := rows[0][0]) >= _RARE_MAX else size
        for measured, rows in zip(measures, answers, strict=True)
    }
    tags = sorted(where.tags, key=lambda key: sizes["tag", key])
    if has_kind:
        sizes["kind", ""] = sum(kind.n for kind in kinds)
    source, _ = rarest = min(sizes, key=lambda measured: sizes[measured])
    if source == "kind" and (len(kinds) > _KINDS_MAX or not has_named_kind):
        source = "status" if where.statuses else "time"
    elif source == "prefix" and sizes[rarest] == most:
        source = "time"
    names = ("function", "version", "queue", "status")
    return _Plan(source, tags, [{name: getattr(kind, name) for name in names} for kind in kinds])


def _statement(
    source: Source,
    where: RunFilter,
    tags: Sequence[str],
    about: Mapping[str, Any],
    kind: Mapping[str, str] | None = None,
) -> Statement:
    """Return the reading of one index. `kind` narrows the conditions of the search."""
    columns = {**where.columns, **(kind or {})}
    statuses = () if "status" in columns else where.statuses
    params = {**about, **columns, **{f"status{n}": status for n, status in enumerate(statuses)}}
    for n, key in enumerate(tags):
        params |= {f"key{n}": key, f"value{n}": where.tags[key]}
    if where.prefix:
        params |= where.prefix_bounds
    return _reading(source, tuple(columns), len(statuses), bool(where.prefix), len(tags), where.tasks)(**params)


@lru_cache(maxsize=256)
def _reading(source: Source, columns: tuple[str, ...], statuses: int, prefix: bool, tags: int, tasks: bool) -> Sql:
    """Return the statement that reads places from one index, for conditions of this form."""
    conditions = [f"r.{name} = :{name}" for name in columns]
    if prefix:
        conditions.append("r.id >= :prefix AND r.id < :prefix_end")
    if statuses:
        conditions.append(f"r.status IN ({', '.join(f':status{n}' for n in range(statuses))})")
    if source == "tasks":
        conditions.append(_ASKING_TASK)
    elif not tasks and source != "tag":
        conditions.append(_NOT_TASK)
    table, row, at = "run r", "r", "r.created_at"
    if source == "tag":
        table, row, at = "run_tag g", "g", "g.at"
        of_run = " AND ".join(("r.tenant = g.tenant AND r.run = g.run", *conditions))
        conditions = [f"(SELECT r.run FROM run r WHERE {of_run}) IS NOT NULL"] if conditions else []
        conditions.append("g.key = :key0 AND g.value = :value0")
    conditions += [
        f"""(SELECT t.run FROM run_tag t WHERE t.tenant = {row}.tenant AND t.key = :key{n} AND t.value = :value{n}
            AND t.at = {at} AND t.run = {row}.run) IS NOT NULL"""
        for n in range(int(source == "tag"), tags)
    ]
    # "+ 0" hides the order of time from the planner, which may else read all runs in that order for a few of them.
    plus = " + 0" if source in ("prefix", "tasks") else ""
    time, number = f"{at}{plus}", f"{row}.run{plus}"
    return Sql(
        f"""SELECT {at}, {row}.run FROM {table} WHERE {row}.tenant = :tenant AND ({time}, {number}) < (:at, :run)
        AND {time} >= :since AND {" AND ".join(conditions) or "1 = 1"}
        ORDER BY {time} DESC, {number} DESC LIMIT :limit""",
        seals={f"value{n}": TAG_VALUE.at(f"key{n}") for n in range(tags)},
    )
