"""The rows of tasks: runs without code of their own, which the process that runs the task claims and ends.

Opening a task takes the thread's turn (log/turns.py), and a process with an open task keeps the turn. The next
checkpoint names the next task: two processes that each stored one would do the same work under two names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache, partial
from typing import NamedTuple

from perdure.errors import ThreadDeleted
from perdure.log.turns import Held, Turn, take_turn
from perdure.runs.journal import rows
from perdure.runs.journal.rows import RUN_ENCRYPTED, WAITS, FenceToken, NewRun
from perdure.runs.journal.thread_runs import IS_TASK
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, Statement, write

_TRIES = 3
# A finished task runs again only if its checkpoint is continued again. Its records stay valid.
_CLAIM = Sql(
    f"""UPDATE run SET status = 'running', owner = :owner, fence = fence + 1, starts = starts + 1,
        lease_until = {{now}} + :lease, wakeup_pending = 0, waiting = NULL, changed_at = {{now}}, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence
        AND (status <> 'running' OR lease_until <= {{now}} OR :dead = 1)
    RETURNING {", ".join(RunRow._fields)}""",
    opens=RUN_ENCRYPTED,
)
_LOCK = Sql("SELECT owner, head FROM thread WHERE tenant = :tenant AND thread = :thread {for_update}")
_OPEN = f"WHERE tenant = :tenant AND root = :thread AND status = 'running' AND owner = :owner AND {IS_TASK}"
_BUSY = Sql(f"SELECT 1 FROM run {_OPEN} AND lease_until > {{now}} LIMIT 1")
_FENCE = Sql(f"UPDATE run SET fence = fence + 1, lease_until = 0 {_OPEN}")
_END = Sql(
    f"""UPDATE run SET status = :status, owner = NULL, waiting = :waiting, wake_at = :wake_at, changed_at = {{now}},
        {rows.SUM}, keep_until = NULL
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = 'running'""",
    seals=WAITS,
)


@lru_cache(64)  # called for every save of a line
def turn_of(owner: str, gone: str = "") -> Turn:
    """Return the turn of a process in a thread. `gone` is an owner that is known to have ended."""
    return Turn(owner, gone, _BUSY, _FENCE)


class NewTask(NamedTuple):
    """The run of a task. `check` takes the thread's head, and raises if the task's checkpoint was continued already."""

    tenant: int
    thread: int
    new: NewRun
    check: Callable[[int | None], Generator[Batch, list[Rows], None]]


def take(
    task: NewTask, *, owner: str, lease_us: int, clock_us: Callable[[], int], is_dead: Callable[[str], bool]
) -> Flow[RunRow | None]:
    """Create the run of a task, or take it over from the last process, and return its row.

    Return None if another process is at work in the thread, or if another process or OS thread is in the task.
    """
    gone = ""
    for _ in range(_TRIES):
        opening = partial(_open, task, turn_of(owner, gone), is_dead(owner), lease_us, clock_us())
        try:
            return (yield from write(opening))
        except Held as held:
            if held.owner == gone or not is_dead(held.owner):
                return None
            gone = held.owner
    return None


def _open(task: NewTask, turn: Turn, is_free: bool, lease_us: int, now: int) -> Program[RunRow]:
    """Take the turn and the run in one transaction: in between, another process could take the turn away."""
    tenant, thread, new, check = task
    [locked] = yield Batch(_LOCK(tenant=tenant, thread=thread))
    if not locked:
        raise ThreadDeleted(f"there is no thread any more that run {new.id!r} belongs to")
    holder, head = locked[0]
    taking = yield from take_turn(turn, tenant, thread, holder, now)
    yield from check(head)
    insert = rows.insert_statements(tenant, new, now, turn.owner, lease_us)
    # The statements that fence the old owner come first: it may be the owner of this very task.
    *_, inserted, _, there = yield Batch(*taking, *insert, rows.BY_ID(tenant=tenant, id=new.id))
    row = RunRow._make(there[0])
    if inserted:
        return row
    dead = is_free if row.owner == turn.owner else row.owner == turn.gone
    params = {"fence": row.fence, "owner": turn.owner, "lease": lease_us, "now": now, "dead": int(dead)}
    [claimed] = yield Batch(_CLAIM(tenant=tenant, run=row.run, **params), last=True)
    if not claimed:
        raise Held(str(row.owner))
    return RunRow._make(claimed[0])


def end(token: FenceToken, total: rows.JournalSum, *, done: bool, waiting: str | None, now: int) -> Statement:
    """Return the statement that ends a task's run as done, or as waiting until the task runs again."""
    return _END(
        **token._asdict(),
        **total._asdict(),
        status="done" if done else "waiting",
        waiting=waiting,
        wake_at=0 if done else rows.NEVER,
        now=now,
    )
