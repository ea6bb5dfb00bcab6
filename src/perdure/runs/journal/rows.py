"""The run table as programs: making a run, claiming it, what it waits for, ending it.

The owner of a run holds its fence: every write says `fence = :fence`, and a claim makes the fence grow. So a process
that was taken for dead and comes back finds no row to write to. Time is the database's own (`{now}`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import NamedTuple

from perdure.errors import NotFound
from perdure.log.archived import check_archived
from perdure.runs.tables import ARGS, INPUT, JOURNAL_BODY, OUTCOME, RUN, WAITING
from perdure.storage.program import Batch, Program, Rows, Sql, Statement

NEVER = 2**61  # a wake_at without an end of its own
OPEN = ("queued", "running", "waiting", "paused", "stuck")
FINISHED = ("done", "failed", "cancelled", "undone", "exported")
ENDS = ("cancel", "undo")  # the requests of an operator that end a run, and undo what it did
STATUSES = (*OPEN, *FINISHED)
TASK = "task:"  # the function of a run that belongs to a thread begins so (thread_runs.py)


class RunRow(NamedTuple):
    """One row of the run table, in the order of its columns."""

    run: int
    id: str
    function: str
    version: str
    input: bytes
    incarnation: bytes
    parent: int | None
    parent_path: str | None
    root: int
    origin: int | None
    origin_seq: int
    status: str
    queue: str
    priority: int
    owner: str | None
    fence: int
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


COLUMNS = ", ".join(RunRow._fields)


class NewRun(NamedTuple):
    """What a run is made of."""

    id: str
    function: str
    version: str
    args: bytes
    input: bytes
    incarnation: bytes
    queue: str = "default"
    priority: int = 0
    parent: int | None = None
    parent_path: str | None = None
    root: int | None = None
    wake_at: int = 0
    origin: int | None = None
    origin_seq: int = 0
    bucket: int | None = None  # a deployment chooses the version by it (maintenance/deployments.py); None: this one


class FenceToken(NamedTuple):
    """Which run, and by which right: what every write of an owner names."""

    tenant: int
    run: int
    fence: int


# What is secret of a row that was selected as RunRow has it.
RUN_ENCRYPTED = RUN.opens(RunRow._fields)
WAITS = {"waiting": WAITING}
BY_ID = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND id = :id", opens=RUN_ENCRYPTED)
BY_NUMBER = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run = :run", opens=RUN_ENCRYPTED)
LOCK = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run = :run {{for_update}}", opens=RUN_ENCRYPTED)
# Writers of two runs lock both first, the one with the lower number first: so none waits for the other in turn.
LOCK_TWO = Sql(
    "SELECT run FROM run WHERE tenant = :tenant AND (run = :run OR id = :other) ORDER BY run {for_update}",
)
LOCK_WITH_PARENT = Sql(
    """SELECT run FROM run WHERE tenant = :tenant
    AND (run = :run OR run = (SELECT parent FROM run WHERE tenant = :tenant AND run = :run))
    ORDER BY run {for_update}"""
)
NOW = Sql(sqlite="SELECT :now", postgres="SELECT {now}")
_NOT_ARCHIVED = "NOT EXISTS (SELECT 1 FROM archived WHERE tenant = :tenant AND kind = 'run' AND name = :id)"
# A SELECT list of PostgreSQL wants to be told the types.
_DEPLOYED = """coalesce((SELECT CASE WHEN :bucket::bigint < share THEN canary ELSE version END FROM deployment
        WHERE tenant = :tenant AND function = :function AND :bucket::bigint IS NOT NULL), :version::text)"""
_NEW = f"""INSERT INTO run (tenant, {COLUMNS})
    SELECT :tenant::bigint, number, :id::text, :function::text, {_DEPLOYED}, :input::bytea, :incarnation::bytea,
        :parent::bigint, :parent_path::text, coalesce(:root::bigint, number), :origin::bigint, :origin_seq::bigint,
        :status::text, :queue::text, :priority::bigint, :owner::text, :fence::bigint, {{now}} + :lease::bigint,
        :wake_at::bigint, 0, NULL, NULL, 0, 0, :origin_seq::bigint, 0, {{now}}, {{now}}, NULL, 0, :bucket::bigint
    FROM counted WHERE {_NOT_ARCHIVED} ON CONFLICT (tenant, id) DO NOTHING RETURNING {COLUMNS}"""


def _untyped(text: str) -> str:
    """A statement of PostgreSQL as SQLite has it."""
    return re.sub(r"::\w+", "", text)


_INSERT = Sql(
    sqlite=(
        # Nothing is written, and no commit made, if the run is there: the same line again, mostly.
        """UPDATE counter SET number = number + 1
        WHERE NOT EXISTS (SELECT 1 FROM run WHERE tenant = :tenant AND id = :id)""",
        _untyped(_NEW).replace("FROM counted", "FROM counter"),
    ),
    # One statement, so that starting a run is one round trip.
    postgres=f"WITH counted AS (SELECT nextval('number') AS number) {_NEW}",
    seals={"input": INPUT},
    opens=RUN_ENCRYPTED,
)
# The arguments of a run that was made a moment ago: a random incarnation is used once.
_MADE = "tenant = :tenant AND id = :id AND incarnation = :incarnation"
_NEW_ARGS = f"""INSERT INTO run_value (tenant, run, kind, value) SELECT tenant, run, 'args', :args::bytea FROM run
    WHERE {_MADE} AND {_NOT_ARCHIVED} ON CONFLICT (tenant, run, kind) DO NOTHING"""
# An insert that waited for a row which an archive removed has not seen the stub; the next statement sees it.
_UNDO = f"WITH gone AS (DELETE FROM run WHERE {_MADE} AND NOT {_NOT_ARCHIVED})"
_ADD_ARGS = Sql(f"{_UNDO} {_NEW_ARGS}", sqlite=_untyped(_NEW_ARGS), seals={"args": ARGS})
ADD_VALUE = Sql(
    """INSERT INTO run_value (tenant, run, kind, value) VALUES (:tenant, :run, :kind, :value)
    ON CONFLICT (tenant, run, kind) DO UPDATE SET value = excluded.value""",
    seals={"value": OUTCOME},
)
_VALUE = Sql("SELECT value FROM run_value WHERE tenant = :tenant AND run = :run AND kind = :kind", opens={0: OUTCOME})
SET_ARGS = Sql(
    """INSERT INTO run_value (tenant, run, kind, value) VALUES (:tenant, :run, 'args', :args)
    ON CONFLICT (tenant, run, kind) DO UPDATE SET value = excluded.value""",
    seals={"args": ARGS},
)
_ARGS_OF = """SELECT v.value, r.incarnation FROM run_value v JOIN run r ON r.tenant = v.tenant AND r.run = v.run
    WHERE v.tenant = :tenant AND v.run = :run AND v.kind = 'args'"""
ARGS_OF = Sql(_ARGS_OF, opens={0: ARGS.at(1)})
CHECK_ARGS = Sql(_ARGS_OF, opens={0: ARGS.at(1)}, tolerant="all")
# A claim names the fence that it saw: of two that try, one finds the row changed.
_CLAIM = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, lease_until = {{now}} + :lease,
        wakeup_pending = 0, waiting = NULL, changed_at = {{now}}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND (
        (status IN ('queued', 'waiting') AND (wake_at <= {{now}} OR :early = 1))
        OR (status = 'running' AND (lease_until <= {{now}} OR :dead = 1))
        OR (status = 'stuck' AND :early = 1))
    RETURNING {COLUMNS}""",
    opens=RUN_ENCRYPTED,
)
# A claim that was given up. Its answer may be lost: so this names the run's id, and the fence that it would have.
_RELEASE = Sql(
    """UPDATE run SET status = 'queued', owner = NULL, wake_at = {now} + CAST(:later AS bigint), changed_at = {now}
    WHERE tenant = :tenant AND id = :id AND fence = :fence AND owner = :owner AND status = 'running'"""
)
_HELD = "FROM run WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'"
_ROW = "INSERT INTO journal (tenant, run, seq, kind, body) SELECT"
# The fence is checked by reading it, and nothing but the journal is written. PostgreSQL: FOR SHARE makes a takeover,
# which updates the row, wait for this commit, so that it reads the new entry; FOR KEY SHARE would let it pass.
_APPEND = Sql(
    sqlite=(
        f"{_ROW} :tenant, :run, :seq, :kind, :body {_HELD}",
        # Not RETURNING: SQLite makes a table for its rows, which takes longer than to look again.
        f"SELECT request {_HELD}",
    ),
    postgres=f"""WITH held AS (SELECT request {_HELD} {{for_share}}),
        added AS ({_ROW} :tenant::bigint, :run::bigint, :seq::bigint, :kind::bigint, :body::bytea FROM held)
        SELECT request FROM held""",
    seals={"body": JOURNAL_BODY},
)
_MORE = f"{_ROW} tenant, run, :seq::bigint, :kind::bigint, :body::bytea {_HELD}"
_APPEND_MORE = Sql(_MORE, sqlite=_untyped(_MORE), seals={"body": JOURNAL_BODY})
# The same as a transaction of its own. It writes nothing if an operator asks for something either: `_APPEND` says what.
_ALONE = f"{_MORE} AND request IS NULL {{for_share}}"
APPEND_ALONE = Sql(_ALONE, sqlite=_untyped(_ALONE), seals={"body": JOURNAL_BODY})
# What the journal adds up to, written when a run leaves its process: not with every step. Missing where a write ended
# in doubt: then what the row says of an earlier part of the journal stands.
SUM = """entries = coalesce(CAST(:entries AS bigint), entries), digest = coalesce(CAST(:digest AS bigint), digest),
        seq = coalesce(CAST(:last AS bigint), seq)"""
_REQUEST = Sql(f"SELECT request {_HELD}")
# The fence, before a transaction writes anything else, with the lock that `_APPEND` takes.
HELD = Sql(f"SELECT request {_HELD} {{for_share}}")
# The same for a transaction that writes no entry.
HOLD = Sql(f"SELECT run {_HELD} {{for_update}}")
_RENEW = Sql(
    sqlite="""UPDATE run SET lease_until = max(lease_until, {now} + :lease)
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING request""",
    postgres="""UPDATE run SET lease_until = greatest(lease_until, {now} + :lease)
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING request""",
)
# What an operator asked for in the last moment is not waited with. It is no news if the run was claimed with it, and
# the journal of a run that is being undone says so: then the request has done its part.
_NEWS = f"request IN {ENDS} AND request <> :known AND :undoing = 0"
_PARK = Sql(
    f"""UPDATE run SET owner = NULL, {SUM}, waiting = :waiting, changed_at = {{now}},
        status = CASE WHEN {_NEWS} THEN 'queued' ELSE :status END,
        wake_at = CASE WHEN {_NEWS} THEN 0
            WHEN (wakeup_pending = 1 OR request = 'pause') AND :status = 'waiting' THEN 0
            ELSE CAST(:wake_at AS bigint) END, wakeup_pending = 0,
        request = CASE WHEN request = 'pause' THEN CASE WHEN :status = 'paused' THEN NULL ELSE request END
            WHEN :undoing = 1 THEN NULL ELSE request END
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING wake_at""",
    seals=WAITS,
)
# An end that was asked for while the last step ran: its owner was told too late, and the next one does it.
_FINISH = Sql(
    f"""UPDATE run SET owner = NULL, {SUM}, waiting = :waiting, changed_at = {{now}},
        status = CASE WHEN request IN {ENDS} AND :stands = 1 THEN 'queued' ELSE :status END,
        wake_at = CASE WHEN request IN {ENDS} AND :stands = 1 THEN 0 ELSE wake_at END,
        request = CASE WHEN request IN {ENDS} AND :stands = 1 THEN request ELSE NULL END, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING status""",
    seals=WAITS,
)
# What a run may wait for has come. Also while the run is running: it may be about to wait.
WAKE = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END
    WHERE tenant = :tenant AND run = :run"""
)
WAKE_PARENT = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END
    WHERE tenant = :tenant AND run = (SELECT parent FROM run WHERE tenant = :tenant AND run = :child)"""
)
CLOSE_ASKS = Sql("UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND status = 'open'")
_RENEWED_START = Sql(
    """UPDATE run SET status = 'queued', owner = NULL, wake_at = 0, waiting = NULL,
        wakeup_pending = 0, entries = 0, digest = 0,
        since = CAST(:since AS bigint), seq = CAST(:since AS bigint),
        incarnation = :incarnation, changed_at = {now}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING run"""
)
# The answers too: a question of the next round has the same path, and they must not count for it.
_DROP_ROUND = [Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run") for table in ("answer", "ask")]
# What a fork shares must stay.
_DROP_ROUND += [
    Sql(
        f"""DELETE FROM {table} WHERE tenant = :tenant AND run = :run
        AND NOT EXISTS (SELECT 1 FROM run WHERE tenant = :tenant AND origin = :run)"""
    )
    for table in ("journal", "run_blob")
]


NOT_ON_RECORD = "what it did is not on record any more; `perdure retention` shows how long runs are kept"


def is_swept(row: RunRow) -> bool:
    """Whether retention has removed the journal of a finished run."""
    return row.entries == 0 and 0 < row.seq == row.since


def find(tenant: int, run_id: str) -> Program[RunRow | None]:
    [rows] = yield Batch(BY_ID(tenant=tenant, id=run_id), last=True)
    return RunRow._make(rows[0]) if rows else None


def numbered(tenant: int, run: int) -> Program[RunRow | None]:
    [rows] = yield Batch(BY_NUMBER(tenant=tenant, run=run), last=True)
    return RunRow._make(rows[0]) if rows else None


def value_of(tenant: int, run: int, kind: str) -> Program[bytes | None]:
    key = {"tenant": tenant, "run": run}
    [rows] = yield Batch(ARGS_OF(**key) if kind == "args" else _VALUE(**key, kind=kind), last=True)
    return rows[0][0] if rows else None


def create(
    tenant: int, new: NewRun, *, now: int, owner: str | None = None, lease: int = 0
) -> Program[tuple[RunRow, bool]]:
    """Make a run, with an owner at once or queued; or find the one that has its id. Says whether it was made. Raises
    NotFound if it is archived."""
    statements = insert_statements(tenant, new, now, owner, lease)
    made, _, found = yield Batch(*statements, BY_ID(tenant=tenant, id=new.id), last=True)
    if not found:
        raise NotFound(f"run {new.id!r} is archived")
    return RunRow._make(found[0]), bool(made)


def insert_statements(tenant: int, new: NewRun, now: int, owner: str | None, lease: int) -> tuple[Statement, Statement]:
    """What makes a run. The first one's answer is empty if its id is taken."""
    fields = new._asdict()
    args = fields.pop("args")
    status, fence = ("queued", 0) if owner is None else ("running", 1)
    return (
        _INSERT(tenant=tenant, status=status, owner=owner, fence=fence, lease=lease, now=now, **fields),
        _ADD_ARGS(tenant=tenant, id=new.id, incarnation=new.incarnation, args=args),
    )


def insert(
    tenant: int, new: NewRun, *, now: int, owner: str | None = None, lease: int = 0
) -> Generator[Batch, list[Rows], bool]:
    """The rows of a new run, inside another transaction. False: the id is taken."""
    made, _ = yield Batch(*insert_statements(tenant, new, now, owner, lease))
    yield from check_archived(tenant, "run", new.id)
    return bool(made)


def claim(
    tenant: int, run: int, *, fence: int, owner: str, lease: int, now: int, early: bool = False, dead: bool = False
) -> Program[RunRow | None]:
    """Take a run that is due, or whose owner is dead or late. None: another process has it, or was faster.

    `early` takes one that waits before its time, `dead` one whose owner is known to be gone.
    """
    statement = _CLAIM(
        tenant=tenant, run=run, fence=fence, owner=owner, lease=lease, now=now, early=int(early), dead=int(dead)
    )
    [rows] = yield Batch(statement, last=True)
    return RunRow._make(rows[0]) if rows else None


def release(tenant: int, run_id: str, *, fence: int, owner: str, later: int, now: int) -> Program[None]:
    """Queue a run whose claim was given up, `later` microseconds from now, if that owner still has it by that claim."""
    yield Batch(_RELEASE(tenant=tenant, id=run_id, fence=fence, owner=owner, later=later, now=now), last=True)


class JournalRow(NamedTuple):
    """A journal row that is about to be written."""

    seq: int
    kind: int
    body: bytes


class JournalSum(NamedTuple):
    """What a run's own journal adds up to: how many rows, the sum of their hashes, the greatest number."""

    entries: int | None
    digest: int | None
    last: int | None


UNKNOWN_SUM = JournalSum(None, None, None)


def append_statements(token: FenceToken, lines: Sequence[JournalRow], *, held: bool = False) -> list[Statement]:
    """Return the statements that write journal rows. The first one's answer is empty if the fence has moved. `held`:
    the transaction has looked at the fence before (HELD), and no answer is needed."""
    tenant, run, fence = token
    return [
        (_APPEND_MORE if number or held else _APPEND)(
            tenant=tenant, run=run, fence=fence, seq=line.seq, kind=line.kind, body=line.body
        )
        for number, line in enumerate(lines)
    ]


def append(token: FenceToken, lines: Sequence[JournalRow]) -> Program[tuple[str | None] | None]:
    """Write journal rows. None: the fence has moved, nothing was written; else what an operator asks for."""
    answers = yield Batch(*append_statements(token, lines), last=True)
    return answers[0][0] if answers[0] else None


def renew(tokens: Sequence[tuple[FenceToken, int]], *, now: int) -> Program[list[tuple[str | None] | None]]:
    """Lengthen leases, each by its own; 0: not. For each, what an operator asks for, or None if it is lost."""
    in_order = sorted(set(tokens))
    statements = (
        _RENEW(**token._asdict(), lease=lease, now=now) if lease else _REQUEST(**token._asdict())
        for token, lease in in_order
    )
    answers = yield Batch(*statements, last=True)
    found = {token: rows[0] if rows else None for (token, _), rows in zip(in_order, answers, strict=True)}
    return [found[token] for token, _ in tokens]


def park(
    token: FenceToken,
    total: JournalSum,
    *,
    status: str,
    wake_at: int,
    waiting: str,
    now: int,
    known: str | None = None,
    undoing: bool = False,
    also: Sequence[Statement] = (),
) -> Program[int | None]:
    """Give a run back until it is due. Gives the time it is due at; None: the fence has moved. `known` is the request
    of an operator that the run was claimed with. `undoing`: its journal says that it is being undone. `also` is written
    with it."""
    parts = {"status": status, "wake_at": wake_at, "waiting": waiting, "now": now}
    heeded = {"known": known or "", "undoing": int(undoing)}
    [rows] = yield Batch(_PARK(**token._asdict(), **total._asdict(), **parts, **heeded), last=not also)
    if rows and also:
        yield Batch(*also, last=True)
    return rows[0][0] if rows else None


def finish(
    token: FenceToken,
    lines: Sequence[JournalRow],
    total: JournalSum,
    *,
    status: str,
    outcome: bytes,
    waiting: str | None,
    now: int,
    stands: bool,
    also: Sequence[Statement] = (),
) -> Program[str | None]:
    """End a run: the last journal rows, its outcome, and a nudge for the run that started it. Gives its status: queued
    if what it did `stands` and is to be undone after all; None: the fence has moved."""
    statements = [LOCK_WITH_PARENT(tenant=token.tenant, run=token.run)]
    statements += append_statements(token, lines)
    parts = {"status": status, "waiting": waiting, "now": now, "stands": int(stands)}
    statements.append(_FINISH(**token._asdict(), **total._asdict(), **parts))
    answers = yield Batch(*statements)
    if not answers[-1]:
        return None
    tenant, run, _ = token
    yield Batch(
        ADD_VALUE(tenant=tenant, run=run, kind="outcome", value=outcome),
        *also,
        WAKE_PARENT(tenant=tenant, child=run),
        CLOSE_ASKS(tenant=tenant, run=run),
        last=True,
    )
    return str(answers[-1][0][0])


def start_over(token: FenceToken, *, since: int, args: bytes, incarnation: bytes, now: int) -> Program[bool]:
    """continue_as_new: the same run with new arguments and an empty journal, whose numbers are above `since`."""
    tenant, run, _ = token
    [rows] = yield Batch(_RENEWED_START(**token._asdict(), since=since, incarnation=incarnation, now=now))
    if not rows:
        return False
    yield Batch(
        *(drop(tenant=tenant, run=run) for drop in _DROP_ROUND),
        SET_ARGS(tenant=tenant, run=run, incarnation=incarnation, args=args),
        last=True,
    )
    return True
