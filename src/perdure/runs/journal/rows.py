"""Programs on the run table: create, claim, park and finish a run, and append to its journal.

Every write of an owner says `fence = :fence`, and a claim increases the fence. So a process that was taken for dead and
comes back finds no row to write to. Times are those of the database's clock (`{now}`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Sequence
from typing import Any, NamedTuple

import orjson

from perdure.errors import NotFound
from perdure.log.archived import check_archived
from perdure.runs.journal import values
from perdure.runs.journal.turns import release_held
from perdure.runs.run_table import NEVER as NEVER
from perdure.runs.run_table import OPEN_STATUSES, RUN, RunRow, tags_of
from perdure.runs.run_table import TASK as TASK
from perdure.runs.tables import ARGS, INPUT, JOURNAL_BODY, OF_VALUE, OUTCOME, TAG_VALUE, TAGS, WAITING
from perdure.storage.program import Batch, Program, Rows, Sql, Statement
from perdure.values.external import External, keys_of

OPEN = OPEN_STATUSES
FINISHED = ("done", "failed", "cancelled", "undone", "exported")
ENDS = ("cancel", "undo")  # the requests of an operator that end a run and undo its effects
STATUSES = (*OPEN, *FINISHED)


COLUMNS = ", ".join(RunRow._fields)


class NewRun(NamedTuple):
    """The fields of a run that is to be created."""

    id: str
    function: str
    version: str
    args: bytes
    input: bytes
    incarnation: bytes
    queue: str = "default"
    priority: int = 0
    parent: int | None = None
    root: int | None = None
    wake_at: int = 0
    origin: int | None = None
    origin_seq: int = 0
    bucket: int | None = None  # a deployment chooses the version by it (maintenance/deployments.py); None: `version`
    tags: str | None = None  # JSON (tags.py)
    key: str | None = None
    turn: int | None = None  # 0 for a member of a team
    status: str = "queued"
    trace: str = ""  # the span that starts it, as W3C's traceparent; "" if tracing is off
    values: Sequence[External[Any]] = ()  # the large values that its arguments refer to


class FenceToken(NamedTuple):
    """The run and the fence that every write of an owner names."""

    tenant: int
    run: int
    fence: int


# The encrypted columns of a row that was selected in the order of RunRow.
RUN_ENCRYPTED = RUN.opens(RunRow._fields)
WAITS = {"waiting": WAITING}
BY_ID = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND id = :id", opens=RUN_ENCRYPTED)
BY_NUMBER = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run = :run", opens=RUN_ENCRYPTED)
LOCK = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run = :run {{for_update}}", opens=RUN_ENCRYPTED)
# A writer of two runs first locks both, the lower number first, so that two writers cannot deadlock.
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
# PostgreSQL needs the types of parameters in a SELECT list.
_DEPLOYED = """coalesce((SELECT CASE WHEN :bucket::bigint < share THEN canary ELSE version END FROM deployment
        WHERE tenant = :tenant AND function = :function AND :bucket::bigint IS NOT NULL), :version::text)"""
_NEW_RUN = {
    "tenant": ":tenant::bigint",
    "run": "number",
    "id": ":id::text",
    "function": ":function::text",
    "version": _DEPLOYED,
    "input": ":input::bytea",
    "incarnation": ":incarnation::bytea",
    "parent": ":parent::bigint",
    "root": "coalesce(:root::bigint, number)",
    "origin": ":origin::bigint",
    "origin_seq": ":origin_seq::bigint",
    "status": ":status::text",
    "queue": ":queue::text",
    "priority": ":priority::bigint",
    "owner": ":owner::text",
    "fence": ":fence::bigint",
    "starts": "CASE WHEN :status::text = 'running' THEN 1 ELSE 0 END",
    "lease_until": "{now} + :lease::bigint",
    "wake_at": ":wake_at::bigint",
    "wakeup_pending": "0",
    "entries": "0",
    "digest": "0",
    "seq": ":origin_seq::bigint",
    "since": "0",
    "created_at": "{now}",
    "changed_at": "{now}",
    "cut": "0",
    "bucket": ":bucket::bigint",
    "tags": ":tags::text",
    "key": ":key::text",
    "turn": ":turn::bigint",
}  # columns that may be NULL or have a default need not be here
_NEW = f"""INSERT INTO run ({", ".join(_NEW_RUN)}) SELECT {", ".join(_NEW_RUN.values())}
    FROM counted WHERE {_NOT_ARCHIVED} ON CONFLICT (tenant, id) DO NOTHING RETURNING {COLUMNS}"""


def untyped(text: str) -> str:
    """Return a PostgreSQL statement without its casts, for SQLite."""
    return re.sub(r"::\w+", "", text)


_INSERT = Sql(
    sqlite=(
        # Writes nothing, and so needs no commit, if the run exists: usually the same program runs again.
        """UPDATE counter SET number = number + 1
        WHERE NOT EXISTS (SELECT 1 FROM run WHERE tenant = :tenant AND id = :id)""",
        untyped(_NEW).replace("FROM counted", "FROM counter"),
    ),
    # One statement, so that starting a run is one round trip.
    postgres=f"WITH counted AS (SELECT nextval('number') AS number) {_NEW}",
    seals={"input": INPUT, "tags": TAGS},
    opens=RUN_ENCRYPTED,
)
# The run that the statement before has created: its random incarnation is used once.
_MADE = "tenant = :tenant AND id = :id AND incarnation = :incarnation"
_NEW_ARGS = f"""INSERT INTO run_value (tenant, run, kind, value) SELECT tenant, run, 'args', :args::bytea FROM run
    WHERE {_MADE} AND {_NOT_ARCHIVED} ON CONFLICT (tenant, run, kind) DO NOTHING"""
# If an insert waited for a row that archiving removed, it has not seen the stub in `archived`. The next statement does.
_UNDO = f"WITH gone AS (DELETE FROM run WHERE {_MADE} AND NOT {_NOT_ARCHIVED})"
_ADD_ARGS = Sql(f"{_UNDO} {_NEW_ARGS}", sqlite=untyped(_NEW_ARGS), seals={"args": ARGS})
_ADD_TAG = Sql(
    f"""INSERT INTO run_tag (tenant, key, value, at, run)
    SELECT tenant, CAST(:key AS text), CAST(:value AS text), created_at, run FROM run WHERE {_MADE}
    ON CONFLICT (tenant, key, value, at, run) DO NOTHING""",
    seals={"value": TAG_VALUE},
)
ADD_VALUE = Sql(
    """INSERT INTO run_value (tenant, run, kind, value) VALUES (:tenant, :run, :kind, :value)
    ON CONFLICT (tenant, run, kind) DO UPDATE SET value = excluded.value""",
    seals={"value": OUTCOME},
)
TRACE = "trace"  # a kind of value: the spans that started a run and executed it last (execution/instrumentation.py)
ENVIRONMENT = "environment"  # a kind of value: the hash of the environment in which a run succeeded
_VALUE = Sql("SELECT value FROM run_value WHERE tenant = :tenant AND run = :run AND kind = :kind", opens={0: OUTCOME})
SET_ARGS = Sql(
    """INSERT INTO run_value (tenant, run, kind, value) VALUES (:tenant, :run, 'args', :args)
    ON CONFLICT (tenant, run, kind) DO UPDATE SET value = excluded.value""",
    seals={"args": ARGS},
)
_ARGS_OF = """SELECT v.value, r.incarnation FROM run_value v JOIN run r ON r.tenant = v.tenant AND r.run = v.run
    WHERE v.tenant = :tenant AND v.run = :run AND v.kind = 'args'"""
ARGS_OF = Sql(_ARGS_OF, opens={0: ARGS.at(1)})
CHECK_ARGS = Sql(_ARGS_OF, opens={0: ARGS.at(1)}, tolerant=True)
# The owner of a member of a team has died: after some such deaths its message is taken for the cause.
DIED = ", crashes = crashes + CASE WHEN status = 'running' AND turn IS NOT NULL THEN 1 ELSE 0 END"
# A claim names the fence that was read: of two concurrent claims, one finds the row changed.
_CLAIM = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, starts = starts + 1,
        lease_until = {{now}} + :lease, wakeup_pending = 0, waiting = NULL, changed_at = {{now}}{DIED}
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND (
        (status IN ('queued', 'waiting') AND (wake_at <= {{now}} OR :early = 1))
        OR (status = 'running' AND (lease_until <= {{now}} OR :dead = 1))
        OR (status = 'stuck' AND :early = 1))
    RETURNING {COLUMNS}""",
    opens=RUN_ENCRYPTED,
)
# For a claim that was given up. Its answer may have been lost, so this names the run's id and the expected fence.
_RELEASE = Sql(
    """UPDATE run SET status = 'queued', owner = NULL, wake_at = {now} + CAST(:later AS bigint), changed_at = {now}
    WHERE tenant = :tenant AND id = :id AND fence = :fence AND owner = :owner AND status = 'running'"""
)
_HELD = "FROM run WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'"
_ROW = "INSERT INTO journal (tenant, run, seq, kind, body) SELECT"
# The fence is checked by reading it, and only the journal is written. On PostgreSQL, FOR SHARE makes a takeover, which
# updates the row, wait for this commit, so that it reads the new entry. FOR KEY SHARE would not make it wait.
_APPEND = Sql(
    sqlite=(
        f"{_ROW} :tenant, :run, :seq, :kind, :body {_HELD}",
        # Not RETURNING: SQLite makes a temporary table for it, which takes longer than a second query.
        f"SELECT request {_HELD}",
    ),
    postgres=f"""WITH held AS (SELECT request {_HELD} {{for_share}}),
        added AS ({_ROW} :tenant::bigint, :run::bigint, :seq::bigint, :kind::bigint, :body::bytea FROM held)
        SELECT request FROM held""",
    seals={"body": JOURNAL_BODY},
)
_MORE = f"{_ROW} tenant, run, :seq::bigint, :kind::bigint, :body::bytea {_HELD}"
_APPEND_MORE = Sql(_MORE, sqlite=untyped(_MORE), seals={"body": JOURNAL_BODY})
# An append as a transaction of its own. It writes nothing if there is an operator's request, which `_APPEND` returns.
_ALONE = f"{_MORE} AND request IS NULL {{for_share}}"
APPEND_ALONE = Sql(_ALONE, sqlite=untyped(_ALONE), seals={"body": JOURNAL_BODY})
# The sum of the journal, written when a run leaves its process, not with every step. It is NULL if the outcome of a
# write is unknown: then the row keeps the sum of an earlier part of the journal.
SUM = """entries = coalesce(CAST(:entries AS bigint), entries), digest = coalesce(CAST(:digest AS bigint), digest),
        seq = coalesce(CAST(:last AS bigint), seq)"""
_REQUEST = Sql(f"SELECT request {_HELD}")
# Checks the fence before a transaction writes anything else, with the lock that `_APPEND` takes.
HELD = Sql(f"SELECT request {_HELD} {{for_share}}")
# Checks the fence for a transaction that writes no entry.
HOLD = Sql(f"SELECT run {_HELD} {{for_update}}")
_RENEW = Sql(
    sqlite="""UPDATE run SET lease_until = max(lease_until, {now} + :lease)
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING request""",
    postgres="""UPDATE run SET lease_until = greatest(lease_until, {now} + :lease)
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING request""",
)
# If a request to end the run arrives just before it parks, the run is queued instead. A request does not count if the
# run was claimed with it, or if the journal says that the run is being undone: then it was carried out already.
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
# If the request to end the run came during the last step, its owner did not see it in time. The next owner handles it.
_FINISH = Sql(
    f"""UPDATE run SET owner = NULL, {SUM}, waiting = :waiting, changed_at = {{now}},
        status = CASE WHEN request IN {ENDS} AND :stands = 1 THEN 'queued' ELSE :status END,
        wake_at = CASE WHEN request IN {ENDS} AND :stands = 1 THEN 0 ELSE wake_at END,
        request = CASE WHEN request IN {ENDS} AND :stands = 1 THEN request ELSE NULL END, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running' RETURNING status""",
    seals=WAITS,
)
# Wakes a run because something that it may wait for has come. Also a running one, which may be about to wait.
WAKE = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END
    WHERE tenant = :tenant AND run = :run"""
)
WAKE_PARENT = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END
    WHERE tenant = :tenant AND run = (SELECT parent FROM run WHERE tenant = :tenant AND run = :child)"""
)
CLOSE_ASKS = Sql("UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND status = 'open'")

NOT_ON_RECORD = "what it did is not on record any more; `perdure retention` shows how long runs are kept"


def is_swept(row: RunRow) -> bool:
    """Return whether retention has removed the journal of a finished run."""
    return row.entries == 0 and 0 < row.seq == row.since


def find(tenant: int, run_id: str) -> Program[RunRow | None]:
    [rows] = yield Batch(BY_ID(tenant=tenant, id=run_id), last=True)
    return RunRow._make(rows[0]) if rows else None


def look_up(tenant: int, run_id: str) -> Generator[Batch, list[Rows], RunRow | None]:
    """Return a run by its id, as a part of another program."""
    return (yield from look_up_all(tenant, [run_id])).get(run_id)


def look_up_all(tenant: int, ids: Collection[str]) -> Generator[Batch, list[Rows], dict[str, RunRow]]:
    """Return those runs that exist, by their ids, as a part of another program."""
    answers = (yield Batch(*(BY_ID(tenant=tenant, id=one) for one in ids))) if ids else []
    return {row.id: row for answer in answers for row in map(RunRow._make, answer)}


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
    """Create a run, or find the one with its id. Return its row, and whether it was created.

    With `owner` the new run is running, without it is queued. Raises NotFound if the id is archived, and Retired.
    """
    statements = insert_statements(tenant, new, now, owner, lease)
    is_last = not (new.trace or new.values)
    inserted, *_, existing = yield Batch(*statements, BY_ID(tenant=tenant, id=new.id), last=is_last)
    if not existing:
        raise NotFound(f"run {new.id!r} is archived")
    if inserted:
        yield from _add_parts(tenant, existing[0][0], new, now)
    return RunRow._make(existing[0]), bool(inserted)


def insert_statements(tenant: int, new: NewRun, now: int, owner: str | None, lease: int) -> list[Statement]:
    """Return the statements that create a run. The answer to the first is empty if the id is taken."""
    fields = new._asdict()
    args, _, _ = fields.pop("args"), fields.pop("trace"), fields.pop("values")
    fence = 0
    if owner is not None:
        fields["status"], fence = "running", 1
    identity = {"tenant": tenant, "id": new.id, "incarnation": new.incarnation}
    return [
        _INSERT(tenant=tenant, owner=owner, fence=fence, lease=lease, now=now, **fields),
        _ADD_ARGS(**identity, args=args),
        *(_ADD_TAG(**identity, key=key, value=value) for key, value in tags_of(new.tags).items()),
    ]


def insert(
    tenant: int, new: NewRun, *, now: int, owner: str | None = None, lease: int = 0
) -> Generator[Batch, list[Rows], bool]:
    """Create a run inside another transaction. Return False if the id is taken."""
    inserted, *_ = yield Batch(*insert_statements(tenant, new, now, owner, lease))
    yield from check_archived(tenant, "run", new.id)
    if inserted:
        yield from _add_parts(tenant, inserted[0][0], new, now)
    return bool(inserted)


def _add_parts(tenant: int, run: int, new: NewRun, now: int) -> Generator[Batch, list[Rows], None]:
    """Write what few new runs have: the span that started them, large values. Raises Retired."""
    if new.values:
        yield from values.refer(tenant, run, OF_VALUE, keys_of(new.values), now)
    if new.trace:
        yield Batch(trace_statement(tenant, run, {"started": new.trace}))


def trace_statement(tenant: int, run: int, spans: dict[str, str]) -> Statement:
    return ADD_VALUE(tenant=tenant, run=run, kind=TRACE, value=orjson.dumps(spans))


def claim(
    tenant: int, run: int, *, fence: int, owner: str, lease: int, now: int, early: bool = False, dead: bool = False
) -> Program[RunRow | None]:
    """Claim a run that is due, or whose owner is dead or late. Return None if another process has it.

    `early` also claims a run that is stuck or not due yet; `dead` says that the owner has certainly ended.
    """
    statement = _CLAIM(
        tenant=tenant, run=run, fence=fence, owner=owner, lease=lease, now=now, early=int(early), dead=int(dead)
    )
    [rows] = yield Batch(statement, last=True)
    return RunRow._make(rows[0]) if rows else None


def release(tenant: int, run_id: str, *, fence: int, owner: str, later: int, now: int) -> Program[None]:
    """Queue a run whose claim was given up, due in `later` microseconds, if the run still has that owner and fence."""
    yield Batch(_RELEASE(tenant=tenant, id=run_id, fence=fence, owner=owner, later=later, now=now), last=True)


class JournalRow(NamedTuple):
    seq: int
    kind: int
    body: bytes


class JournalSum(NamedTuple):
    """The sum of a run's own journal: the number of rows, the sum of their hashes, the greatest row number."""

    entries: int | None
    digest: int | None
    last: int | None


UNKNOWN_SUM = JournalSum(None, None, None)


def append_statements(token: FenceToken, lines: Sequence[JournalRow], *, held: bool = False) -> list[Statement]:
    """Return the statements that write journal rows. The answer to the first is empty if the fence has moved.

    With `held` the transaction has checked the fence before (HELD), and no answer is needed.
    """
    tenant, run, fence = token
    return [
        (_APPEND_MORE if number or held else _APPEND)(
            tenant=tenant, run=run, fence=fence, seq=line.seq, kind=line.kind, body=line.body
        )
        for number, line in enumerate(lines)
    ]


def append(token: FenceToken, lines: Sequence[JournalRow]) -> Program[tuple[str | None] | None]:
    """Write journal rows. Return the operator's request in a tuple; None if the fence has moved: nothing is written."""
    answers = yield Batch(*append_statements(token, lines), last=True)
    return answers[0][0] if answers[0] else None


def renew(tokens: Sequence[tuple[FenceToken, int]], *, now: int) -> Program[list[tuple[str | None] | None]]:
    """Renew each lease for its own duration; with 0, only read. Return the operator's request for each, in a tuple.

    None in place of a tuple means that the run is lost.
    """
    in_order = sorted(set(tokens))
    statements = (
        _RENEW(**token._asdict(), lease=lease, now=now) if lease else _REQUEST(**token._asdict())
        for token, lease in in_order
    )
    answers = yield Batch(*statements, last=True)
    answer_of = {token: rows[0] if rows else None for (token, _), rows in zip(in_order, answers, strict=True)}
    return [answer_of[token] for token, _ in tokens]


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
    """Release a run until it is due. Return the time it is due at; None if the fence has moved.

    `known` is the operator's request that the run was claimed with. `undoing` says that its journal has the beginning
    of an undo. `also` is written in the same transaction.
    """
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
    key: str | None = None,
    also: Sequence[Statement] = (),
) -> Program[str | None]:
    """End a run: write its last journal rows and its outcome, and wake its parent. Return its status.

    The status is "queued" if its effects stand (`stands`) and an operator has asked to undo them. Return None if the
    fence has moved.
    """
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
        *release_held(tenant, key),
        WAKE_PARENT(tenant=tenant, child=run),
        CLOSE_ASKS(tenant=tenant, run=run),
        last=True,
    )
    return str(answers[-1][0][0])
