"""Programs for operators: cancel, pause, resume and undo runs, and move them to another version of their code.

A run that no process executes is changed at once. Otherwise its row gets a `request`, which its owner reads when it
renews the lease or records a step. `engine/flows.py` and `engine/bulk.py` call these programs.
"""

from __future__ import annotations

from collections.abc import Generator

import orjson

from perdure.errors import RunError
from perdure.runs.journal.rows import (
    ADD_VALUE,
    CLOSE_ASKS,
    ENDS,
    FINISHED,
    LOCK,
    LOCK_WITH_PARENT,
    NEVER,
    NOT_ON_RECORD,
    WAKE_PARENT,
    is_swept,
)
from perdure.runs.journal.standing import lasting_of, needs_undo
from perdure.runs.journal.turns import release_held, take_turn
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Program, Rows, Sql

_REQUEST = Sql(
    "UPDATE run SET request = :request WHERE tenant = :tenant AND run = :run AND status = 'running' RETURNING run"
)
_SET_STATUS = Sql(
    f"""UPDATE run SET status = :status, fence = fence + 1, owner = NULL, waiting = NULL, wake_at = :wake_at,
        changed_at = {{now}}, request = :request,
        reopened_at = CASE WHEN status IN {FINISHED} THEN {{now}} ELSE reopened_at END
    WHERE tenant = :tenant AND run = :run AND status = :before RETURNING run"""
)

_FORGIVE = Sql("UPDATE run SET crashes = 0 WHERE tenant = :tenant AND run = :run")

# The fence increases, so that a process that read the run before cannot claim it with the old code.
_MOVE = Sql(
    """UPDATE run SET version = :version, bucket = NULL, fence = fence + 1
    WHERE tenant = :tenant AND run = :run AND fence = :fence AND status = :status AND status <> 'running'
    RETURNING run"""
)


def move(tenant: int, row: RunRow, version: str) -> Program[bool]:
    """Move a run to another version of its code. Return False if it is running, or has run since the row was read."""
    about = {"tenant": tenant, "run": row.run, "fence": row.fence, "status": row.status}
    [moved] = yield Batch(_MOVE(**about, version=version), last=True)
    return bool(moved)


def ask_for(tenant: int, run: int, request: str, now: int) -> Program[str]:
    """Cancel, pause, resume or undo a run; "end" cancels it and undoes nothing. Return its status afterwards.

    "running" means that the request is stored for its owner, "queued" that its next owner carries it out. Raises
    RunError, JournalDamaged.
    """
    row = yield from _locked(tenant, run)
    if row.status == "running" and request == "end":
        raise RunError(
            f"run {row.id!r} is running: only one that no process runs can end with its effects standing. "
            f"`perdure run pause {row.id}`, then cancel it again"
        )
    if row.status == "running":
        yield Batch(_REQUEST(tenant=tenant, run=run, request=_stronger_request(request, row.request)))
        return "running"
    status, wake_at, wish = _after(request, row)
    if status is None:
        return row.status
    if request == "end":
        return (yield from _cancel(tenant, row, now, ""))
    if request == "cancel" and not (yield from needs_undo(tenant, row, children=False)):
        return (yield from _cancel(tenant, row, now, (yield from lasting_of(tenant, row))))
    statement = _SET_STATUS(
        tenant=tenant, run=run, status=status, before=row.status, wake_at=wake_at, request=wish, now=now
    )
    if request == "resume" and row.status == "stuck":  # a message that stopped its member gets all its attempts again
        yield Batch(_FORGIVE(tenant=tenant, run=run))
    yield Batch(statement, *(take_turn(tenant, row) if request == "resume" and wish is None else ()))
    return status


def _locked(tenant: int, run: int) -> Generator[Batch, list[Rows], RunRow]:
    """Lock a run and its parent, and return the run's row."""
    _, rows = yield Batch(LOCK_WITH_PARENT(tenant=tenant, run=run), LOCK(tenant=tenant, run=run))
    return RunRow._make(rows[0])


def end_cancelled(tenant: int, run: int, now: int) -> Program[str]:
    """End a run that is to be cancelled, after its children, if nothing of it or of them needs an undo.

    Return its status.
    """
    row = yield from _locked(tenant, run)
    if (row.status, row.request) != ("queued", "cancel") or (yield from needs_undo(tenant, row)):
        return row.status
    return (yield from _cancel(tenant, row, now, (yield from lasting_of(tenant, row))))


def _cancel(tenant: int, row: RunRow, now: int, lasting: str) -> Generator[Batch, list[Rows], str]:
    """End a run that no process executes, without its code. `lasting` names its effects that have no undo."""
    about = {"tenant": tenant, "run": row.run}
    yield Batch(
        _SET_STATUS(**about, status="cancelled", before=row.status, wake_at=0, request=None, now=now),
        ADD_VALUE(**about, kind="outcome", value=orjson.dumps({"lasting": lasting} if lasting else {})),
        *release_held(tenant, row.key),
        WAKE_PARENT(tenant=tenant, child=row.run),
        CLOSE_ASKS(**about),
    )
    return "cancelled"


def _stronger_request(request: str, before: str | None) -> str | None:
    """Return the request to store for a running run's owner. A resume withdraws a pause; nothing withdraws an end."""
    if request == "resume":
        return None if before == "pause" else before
    return before if request == "pause" and before is not None else request


def _after(request: str, row: RunRow) -> tuple[str | None, int, str | None]:
    """Return the status, wake time and request that a run which is not running gets. Status None: no change."""
    if request == "undo":
        undoable = row.status in ("queued", "waiting", "paused", "stuck", "done", "failed", "cancelled")
        if row.status in ("done", "failed", "cancelled") and is_swept(row):
            raise RunError(f"run {row.id!r} cannot be undone: {NOT_ON_RECORD}")
        return ("queued", 0, "undo") if undoable else (None, 0, None)
    if row.status in FINISHED:
        return None, 0, None
    if request in ("cancel", "end"):
        return "queued", 0, "cancel"
    if request == "pause":
        return (None, 0, None) if row.status == "stuck" else ("paused", NEVER, None)
    if request == "resume":
        wish = row.request if row.request in ENDS else None
        return ("queued", 0, wish) if row.status in ("paused", "stuck", "waiting") else (None, 0, None)
    raise ValueError(request)
