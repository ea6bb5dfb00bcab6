"""The table of runs: its columns, its row in memory (`RunRow`), and what users see of a row (`RunInfo`, `Waiting`).

A new column is declared here alone: with `default=`, the statement that creates a run need not name it. The statements
are in `journal/rows.py`; the other tables of runs are in `tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec
import orjson

from perdure.storage.domains import Column, Index, Table
from perdure.threads.models import moment

SettledBy = Literal["", "answer", "resolve"]
TASK: Final = "task:"  # prefix of the function of a run that belongs to a thread (journal/thread_runs.py)
TEAM: Final = "perdure.team"  # the function of the run that stands for a team: no process has such a function
NO_TASK: Final = f"substr(function, 1, {len(TASK)}) <> '{TASK}'"
ENDED_STATUSES: Final = ("done", "failed", "cancelled", "undone")
OPEN_STATUSES: Final = ("queued", "running", "waiting", "paused", "stuck")
# One execution. Identity (id, function, version, args, incarnation, parent, origin) is fixed; other columns change.
RUN = Table(
    "run",
    (
        Column("run", "int"),
        Column("id", "ordered"),  # chosen by the caller
        Column("function", "text"),
        Column("version", "text"),
        # The digest of the arguments: a second start with the same id must have the same one.
        Column("input", "bytes", encrypted=("id", "function"), hashed=True),
        Column("incarnation", "bytes"),  # random: idempotency keys are derived from it
        Column("parent", "int", null=True),  # the run that started it
        Column("root", "int"),  # the run at the top of the family
        Column("origin", "int", null=True),  # a fork: the run whose journal it shares …
        Column("origin_seq", "int"),  # … up to this seq; its first own entry lists which entries count
        Column("status", "text"),
        Column("queue", "text"),
        Column("priority", "int"),
        Column("owner", "text", null=True),  # the process that runs it
        Column("fence", "int"),  # grows with each owner; a write with an older fence is refused
        Column("starts", "int", default="0"),  # how often a process has taken it
        Column("lease_until", "int"),
        Column("wake_at", "int"),  # queued or waiting: not due before this time
        Column("wakeup_pending", "int"),  # 1: something that it may wait for arrived while it ran
        Column("request", "text", null=True),  # what an operator asked for: cancel, pause, undo
        Column("waiting", "text", null=True, encrypted=("run",), hashed=True),  # JSON: what it waits for, to be shown
        Column("entries", "int"),  # how many journal rows, …
        Column("digest", "int"),  # … and the sum of their hashes
        Column("seq", "int"),  # the greatest seq in the journal
        Column("since", "int"),  # continue_as_new: journal rows up to this seq belong to an earlier round
        Column("created_at", "int"),
        Column("changed_at", "int"),  # when the status changed
        Column("keep_until", "int", null=True),  # finished: when a sweep may delete its journal; NULL: never
        Column("cut", "int"),  # on a promoted replica, journal rows from this seq on may be lost; 0: none
        Column("bucket", "int", null=True),  # random below 10,000: a deployment chose the version by it; NULL: none did
        # JSON; table run_tag has them to search by
        Column("tags", "text", null=True, encrypted=("id", "function"), hashed=True),
        Column("key", "text", null=True),  # what it shares with runs that it must not overlap: a schedule, a singleton
        Column("turn", "int", null=True),  # of a member of a team: how many messages it has taken; NULL: it is none
        Column("crashes", "int", default="0"),  # of a member: how often its next message has failed
        Column("reopened_at", "int", default="0"),  # when it was last retried or undone after its end, or rewound
    ),
    ("run",),
    (
        Index("run_id", "tenant, id", unique=True),
        # Two indexes, because very many runs may wait for people: a worker finds the due ones without scanning those.
        Index("run_queued", "queue, priority DESC, wake_at, run", where="status = 'queued'"),
        Index("run_waiting", "queue, wake_at", where="status = 'waiting'"),
        Index("run_running", "owner", where="status = 'running'"),
        Index("run_root", "tenant, root"),
        # Looked up when a process wants to write to a thread in which another one has running tasks.
        Index("run_open", "tenant, root", where="status = 'running'"),
        # Lists are ordered by created_at and run. The first three serve a search by any of their columns.
        Index("run_created", "tenant, created_at, run", where=NO_TASK),
        Index("run_listed", "tenant, status, created_at, run"),
        Index("run_kind", "tenant, function, version, queue, status, created_at, run", where=NO_TASK),
        Index("run_parent", "tenant, parent, created_at, run", where="parent IS NOT NULL"),
        Index("run_origin", "tenant, origin", where="origin IS NOT NULL"),
        Index("run_ended", "tenant, changed_at", where=f"status IN {ENDED_STATUSES}"),  # runs that ended lately
        Index("run_kept", "tenant, keep_until", where="keep_until IS NOT NULL"),
        Index("run_key", "tenant, key, run", where=f"key IS NOT NULL AND status IN {OPEN_STATUSES}"),
    ),
    owner="run",
    looked_up=(("id",), ("root",)),
    finds_changes=True,
    remembered="true",
    fillfactor=50,  # steps update no indexed column: with free space in the page, PostgreSQL does a HOT update
)


NEVER = 2**61  # the wake_at of a wait that no time ends


class RunRow(NamedTuple):
    """One row of the run table, in the order of its columns."""

    run: int
    id: str
    function: str
    version: str
    input: bytes
    incarnation: bytes
    parent: int | None
    root: int
    origin: int | None
    origin_seq: int
    status: str
    queue: str
    priority: int
    owner: str | None
    fence: int
    starts: int
    lease_until: int
    wake_at: int
    wakeup_pending: int
    request: str | None
    waiting: str | None
    entries: int
    digest: int
    seq: int
    since: int
    created_at: int
    changed_at: int
    keep_until: int | None
    cut: int
    bucket: int | None
    tags: str | None
    key: str | None
    turn: int | None
    crashes: int
    reopened_at: int


def tags_of(text: str | None) -> dict[str, str]:
    return orjson.loads(text) if text else {}


@dataclass(frozen=True)
class Waiting:
    """A description of what a run waits for. Fields that do not apply to its kind are empty."""

    kind: str
    """question, approval, doubt, deadline, retry, sleep, message, run, all; help if the run is stuck, resume if it is
    paused, worker if it is queued, turn if an earlier run of its schedule is open, graph if a graph has to run its task
    again"""
    shown: str = ""
    """in one line, as `perdure runs` shows it"""
    step: str = ""
    text: str = ""
    """the question, or the error of a stuck run"""
    name: str = ""
    """the function of the effect or step, or the type of the error"""
    key: str = ""
    topic: str = ""
    run: str = ""
    reason: str = ""
    """of a doubt: why `reconcile` could not tell"""
    has_happened: bool = False
    """of a doubt: the effect happened, and its result is lost"""
    settled_by: SettledBy = ""
    """the command with which a person ends the wait"""
    parts: tuple[Waiting, ...] = ()
    """of all: what the branches wait for"""

    @property
    def each(self) -> tuple[Waiting, ...]:
        """Its parts; if it has none, itself."""
        return self.parts or (self,)

    def as_text(self) -> str:
        """Return the JSON that a run's row stores."""
        return msgspec.json.encode(_short(asdict(self))).decode()

    @classmethod
    def of(cls, text: str | None) -> Waiting | None:
        """Decode the JSON in a run's row; None if there is none."""
        return None if text is None else msgspec.json.decode(text, type=cls)


_TURN = Waiting("turn", "the earlier runs of its schedule")
_EMPTY = {field.name: field.default for field in fields(Waiting)}


def _short(said: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in said.items() if value != _EMPTY[name]}
    return {**fields, "parts": [_short(part) for part in said["parts"]]} if said["parts"] else fields


def all_of(waits: Sequence[Waiting]) -> Waiting:
    return waits[0] if len(waits) == 1 else Waiting("all", f"{len(waits)} things", parts=tuple(waits))


@dataclass(frozen=True)
class RunInfo:
    """The state of a run when it was read."""

    id: str
    function: str
    version: str
    status: str
    queue: str
    priority: int
    waiting_for: Waiting | None
    wake_at: datetime | None
    attempts: int  # how often a process has started or resumed it
    created_at: datetime
    changed_at: datetime
    is_fork: bool
    is_child: bool
    request: str | None
    is_due: bool  # True: what it waited for has come, and a worker may claim it
    tags: dict[str, str]
    cursor: str  # its place in lists: `store.runs(before=cursor)` continues after it
    owner: str | None  # the process that runs it
    parent: str | None = None  # the run that started it, unless that was deleted
    origin: str | None = None  # the run that it was forked from, unless that was deleted

    @classmethod
    def of(cls, row: RunRow) -> RunInfo:
        waiting = row.status in ("waiting", "stuck", "paused", "queued")
        return cls(
            row.id,
            row.function,
            row.version,
            row.status,
            row.queue,
            row.priority,
            _TURN if row.status == "queued" and row.wake_at >= NEVER else Waiting.of(row.waiting),
            moment(row.wake_at) if waiting and 0 < row.wake_at < NEVER else None,
            row.starts,
            moment(row.created_at),
            moment(row.changed_at),
            row.origin is not None,
            row.parent is not None,
            row.request,
            row.status == "waiting" and row.wake_at == 0,
            tags_of(row.tags),
            f"{row.created_at}.{row.run}",
            row.owner,
        )
