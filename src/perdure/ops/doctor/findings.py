"""What the doctor reports, and how it reads the machine. Tests give it another machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

from perdure.errors import Damaged, PerdureError
from perdure.runs.maintenance.tenant_isolation import GARBAGE
from perdure.storage.program import Batch, Flow, Row, Rows, Sql, Transaction
from perdure.storage.sqlite import opening as sqlite_open
from perdure.threads.context import Context, clock_us

Level = Literal["ok", "note", "warning", "problem"]
MB, GB = 10**6, 10**9
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's list: what was looked at, how it stands, and what to do."""

    check: str
    level: Level
    message: str
    hint: str = ""  # empty: nothing


def disk_of(path: str) -> tuple[int, int]:
    """The size and the free bytes of the disk under a path."""
    found = shutil.disk_usage(path)
    return found.total, found.free


@dataclass(frozen=True, slots=True)
class Machine:
    """What the doctor asks the machine."""

    disk: Callable[[str], tuple[int, int]] = disk_of
    mountinfo: Callable[[], str] = sqlite_open.read_mountinfo
    clock_us: Callable[[], int] = clock_us


@dataclass(frozen=True, slots=True)
class CheckContext:
    """A store that is looked at. `driver` is the one that talks to the database, below encryption."""

    ctx: Context
    driver: Any
    machine: Machine

    @property
    def is_sqlite(self) -> bool:
        return bool(self.driver.dialect == "sqlite")


Check = Callable[[CheckContext], Flow[list[Finding]]]


def query(context: CheckContext, sql: Sql, **params: Any) -> Flow[Rows]:
    """The rows of one statement, in a read transaction of its own: a check that fails takes no other with it."""

    def program() -> Generator[Batch, list[Rows], Rows]:
        [rows] = yield Batch(sql(**params), last=True)
        return rows

    rows: Rows = yield Transaction(program)
    return rows


def query_one(context: CheckContext, sql: Sql, **params: Any) -> Flow[Row]:
    """The first row."""
    rows = yield from query(context, sql, **params)
    return rows[0]


def looked(context: CheckContext, name: str, look: Check) -> Flow[list[Finding]]:
    """What a check finds. One that fails says so and takes no other with it."""
    try:
        return (yield from look(context))
    except Damaged as error:
        return [Finding(name, "problem", f"the store is damaged: {error}", "run `perdure store verify`")]
    except PerdureError as error:
        return [Finding(name, "note", f"could not be looked at: {error}", "")]
    except OSError as error:
        return [Finding(name, "note", f"could not be looked at: {error.strerror or error}", "")]
    except GARBAGE as error:
        return [Finding(name, "problem", f"the store is damaged: {error}", "run `perdure store verify`")]


def span(seconds: float) -> str:
    """A time, for people: its largest unit."""
    for unit, each in (("days", DAY_S), ("hours", HOUR_S), ("minutes", MINUTE_S)):
        if seconds >= 2 * each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"


def many(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"
