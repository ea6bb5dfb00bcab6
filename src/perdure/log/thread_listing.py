"""Programs that list and count threads, the most recently saved first, and read few others.

A condition that few threads meet is searched first, and the threads are then read by number. Conditions that very many
meet are looked up thread by thread, in the order of `active`, the minute of the last save.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from perdure.log.tables import TAG_VALUE
from perdure.log.thread_table import MINUTE_US, THREAD_COLUMNS, THREAD_ENCRYPTED, ThreadRow, tag_value, thread_row
from perdure.storage.program import Batch, Program, Rows, Sql

_RARE_MAX = 5_000  # threads that are read by number at most
EARLIEST, LATEST = -(2**63), 2**63 - 1  # a row with a damaged time is listed, too
_TAGGED = Sql(
    f"SELECT thread FROM tag WHERE tenant = :tenant AND key = :key AND value = :value LIMIT {_RARE_MAX + 1}",
    seals={"value": TAG_VALUE},
)
_NAMED = Sql(
    f"SELECT thread FROM thread WHERE tenant = :tenant AND name >= :prefix AND name < :prefix_end LIMIT {_RARE_MAX + 1}"
)


class ThreadPosition(NamedTuple):
    """A place in the list. Threads that were saved earlier come after it."""

    updated_at: int = LATEST
    thread: int = LATEST


@dataclass(frozen=True)
class ThreadFilter:
    """Conditions on threads; all must hold. `where`: items of the metadata."""

    where: Mapping[str, Any] = field(default_factory=dict)
    since: int = EARLIEST
    until: int = LATEST
    prefix: str = ""

    @property
    def prefix_bounds(self) -> dict[str, str]:
        return {"prefix": self.prefix, "prefix_end": f"{self.prefix}\U0010ffff"}


def list_threads(tenant: int, conditions: ThreadFilter, before: ThreadPosition, limit: int) -> Program[list[ThreadRow]]:
    """Return threads, the most recently saved first. Threads without a head have no record yet: they are left out."""
    rows = yield from _read(tenant, conditions, before, limit, ", ".join(f"t.{column}" for column in THREAD_COLUMNS))
    return [thread_row(row) for row in rows]


def count_threads(tenant: int, conditions: ThreadFilter, limit: int) -> Program[int]:
    """Count threads, up to a limit."""
    return len((yield from _read(tenant, conditions, ThreadPosition(), limit, "t.thread")))


def _read(
    tenant: int, conditions: ThreadFilter, before: ThreadPosition, limit: int, columns: str
) -> Generator[Batch, list[Rows], Rows]:
    before = min(before, ThreadPosition(conditions.until, -1))
    params: dict[str, Any] = {
        "tenant": tenant, "limit": limit, "at": before.updated_at, "thread": before.thread, "since": conditions.since,
        "last_minute": before.updated_at // MINUTE_US, "first_minute": conditions.since // MINUTE_US,
    }  # fmt: skip
    searches = [_TAGGED(tenant=tenant, key=key, value=tag_value(value)) for key, value in conditions.where.items()]
    if conditions.prefix:
        searches.append(_NAMED(tenant=tenant, **conditions.prefix_bounds))
    answers = (yield Batch(*searches)) if searches else []
    is_rare = [len(rows) <= _RARE_MAX for rows in answers]
    few = [{row[0] for row in rows} for rows, rare in zip(answers, is_rare, strict=True) if rare]
    if few:
        params["ids"] = orjson.dumps(sorted(set.intersection(*few))).decode()
    common = [item for item, rare in zip(conditions.where.items(), is_rare, strict=False) if not rare]
    for n, (key, value) in enumerate(common):
        params |= {f"key{n}": key, f"value{n}": tag_value(value)}
    by_name = bool(conditions.prefix) and not is_rare[-1]
    if by_name:
        params |= conditions.prefix_bounds
    [rows] = yield Batch(_reading(columns, bool(few), len(common), by_name)(**params), last=True)
    return rows


@lru_cache(maxsize=64)
def _reading(columns: str, few: bool, tags: int, by_name: bool) -> Sql:
    """Return the statement that reads threads by number (`few`), or in the order of their last save."""
    conditions = ["t.tenant = :tenant", "t.head IS NOT NULL", "(t.updated_at, t.thread) < (:at, :thread)"]
    conditions += ["t.updated_at >= :since", "t.active <= :last_minute", "t.active >= :first_minute"]
    conditions += ["t.thread IN {numbers:ids}"] * few + ["t.name >= :prefix AND t.name < :prefix_end"] * by_name
    # A scalar subquery: PostgreSQL would turn an EXISTS into a join that reads everything.
    conditions += [
        f"""(SELECT g.thread FROM tag g WHERE g.tenant = t.tenant AND g.key = :key{n} AND g.value = :value{n}
            AND g.thread = t.thread) IS NOT NULL"""
        for n in range(tags)
    ]
    active = "t.active + 0" if few else "t.active"  # sorted, else a database may read all threads for a few of them
    text = f"""SELECT {columns} FROM thread t WHERE {" AND ".join(conditions)}
        ORDER BY {active} DESC, t.updated_at DESC, t.thread DESC LIMIT :limit"""
    options: dict[str, Any] = {"seals": {f"value{n}": TAG_VALUE.at(f"key{n}") for n in range(tags)}, "tolerant": True}
    options["opens"] = THREAD_ENCRYPTED if "metadata" in columns else None
    return Sql(text, **options)
