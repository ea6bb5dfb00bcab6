"""Programs on the schedule table, for those who declare, list and control schedules."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from perdure.errors import NotFound, UsageError
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import decompress
from perdure.runs.journal.rows import NEVER, NOW
from perdure.runs.journal.turns import SCHEDULE_KEY
from perdure.runs.schedules.timetable import Timetable
from perdure.runs.tables import SCHEDULE
from perdure.storage.program import Batch, Program, Sql


class ScheduleRow(NamedTuple):
    """One row of the schedule table, in the order of its columns."""

    name: str
    function: str
    version: str
    args: bytes
    cron: str | None
    every_us: int | None
    timezone: str
    queue: str
    priority: int
    overlap: str
    catch_up: str
    jitter_us: int
    paused: int
    last_at: int
    next_at: int
    last_run: str | None
    skipped: int

    @property
    def timetable(self) -> Timetable:
        return Timetable(self.cron, self.every_us, self.timezone)

    @property
    def run_key(self) -> str:
        return f"{SCHEDULE_KEY}{self.name}"

    def run_id(self, at: int) -> str:
        """Return the id of the run of an instant."""
        moment = datetime.fromtimestamp(at // 1_000_000, UTC)
        fraction = f".{at % 1_000_000:06}" if at % 1_000_000 else ""  # only of one that a person started
        return f"{self.name}@{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"


COLUMNS = ", ".join(ScheduleRow._fields)
OPENS = SCHEDULE.opens(ScheduleRow._fields)
# What declares a schedule, besides the version. A second declaration must say the same, or replace it.
DEFINITION = (
    "function", "args", "cron", "every_us", "timezone", "queue", "priority", "overlap", "catch_up", "jitter_us",
)  # fmt: skip
_VALUES = ", ".join(f":{name}" for name in ScheduleRow._fields)
_ADD = Sql(
    f"""INSERT INTO schedule (tenant, {COLUMNS}) VALUES (:tenant, {_VALUES})
    ON CONFLICT (tenant, name) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in (*DEFINITION, "version", "last_at", "next_at"))}""",
    seals={"args": SCHEDULE.encrypted("args")},
)
_ONE = Sql(f"SELECT {COLUMNS} FROM schedule WHERE tenant = :tenant AND name = :name {{for_update}}", opens=OPENS)
_FIND = Sql(f"SELECT {COLUMNS} FROM schedule WHERE tenant = :tenant AND name = :name", opens=OPENS)
_LIST = Sql(f"SELECT {COLUMNS} FROM schedule WHERE tenant = :tenant ORDER BY name LIMIT :limit", opens=OPENS)
_SET_VERSION = Sql("UPDATE schedule SET version = :version WHERE tenant = :tenant AND name = :name")
_PLACE = Sql(
    """UPDATE schedule SET paused = :paused, last_at = :last_at, next_at = :next_at
    WHERE tenant = :tenant AND name = :name"""
)
_DELETE = Sql("DELETE FROM schedule WHERE tenant = :tenant AND name = :name RETURNING name")


def no_schedule(name: str) -> NotFound:
    return NotFound(f"there is no schedule {name!r} in this store for this tenant; `perdure schedules` lists them")


def declare(tenant: int, fields: Mapping[str, Any], now: int, *, replace: bool) -> Program[ScheduleRow]:
    """Add a schedule, or find the one of its name. Raises UsageError if that one differs and is not to be replaced."""
    rows, [[now]] = yield Batch(_ONE(tenant=tenant, name=fields["name"]), NOW(now=now))
    known = ScheduleRow._make(rows[0]) if rows else None
    table = Timetable(fields["cron"], fields["every_us"], fields["timezone"])
    new = ScheduleRow(**fields, paused=0, last_at=now, next_at=table.after(now), last_run=None, skipped=0)
    if known is not None:
        changed = [name for name in DEFINITION if _comparable(known, name) != _comparable(new, name)]
        if not changed:
            yield Batch(_SET_VERSION(tenant=tenant, name=new.name, version=new.version), last=True)
            return known._replace(version=new.version)
        if not replace:
            names = ", ".join(name.removesuffix("_us") for name in changed)
            raise UsageError(
                f"there is another schedule {new.name!r}: its {names} differ. Pass replace=True (`--replace`) to "
                "change it, or choose another name"
            )
        next_at = NEVER if known.paused else new.next_at
        new = new._replace(paused=known.paused, next_at=next_at, last_run=known.last_run, skipped=known.skipped)
    yield Batch(_ADD(tenant=tenant, **new._asdict()), last=True)
    return new


def _comparable(row: ScheduleRow, name: str) -> Any:
    return digest(decompress(row.args)) if name == "args" else getattr(row, name)


def find(tenant: int, name: str) -> Program[ScheduleRow]:
    """Return a schedule. Raises NotFound."""
    [rows] = yield Batch(_FIND(tenant=tenant, name=name), last=True)
    if not rows:
        raise no_schedule(name)
    return ScheduleRow._make(rows[0])


def lock(tenant: int, name: str, now: int) -> Program[tuple[ScheduleRow, int]]:
    """Return a schedule, locked, and the time by the database's clock. Raises NotFound."""
    rows, [[now]] = yield Batch(_ONE(tenant=tenant, name=name), NOW(now=now))
    if not rows:
        raise no_schedule(name)
    return ScheduleRow._make(rows[0]), now


def listed(tenant: int, limit: int) -> Program[list[ScheduleRow]]:
    [rows] = yield Batch(_LIST(tenant=tenant, limit=limit), last=True)
    return [ScheduleRow._make(row) for row in rows]


def place(tenant: int, name: str, now: int, *, paused: bool) -> Program[ScheduleRow]:
    """Pause a schedule, or let it continue with its next instant from now on."""
    row, now = yield from lock(tenant, name, now)
    row = row._replace(
        paused=int(paused), last_at=max(row.last_at, now), next_at=NEVER if paused else row.timetable.after(now)
    )
    about = {"paused": row.paused, "last_at": row.last_at, "next_at": row.next_at}
    yield Batch(_PLACE(tenant=tenant, name=name, **about), last=True)
    return row


def delete(tenant: int, name: str) -> Program[None]:
    [rows] = yield Batch(_DELETE(tenant=tenant, name=name), last=True)
    if not rows:
        raise no_schedule(name)
