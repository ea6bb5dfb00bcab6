"""Dead letters: messages that failed for good. They wait for a person, who looks at them, corrects and resends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import orjson

from perdure.errors import Conflict, NotFound
from perdure.runs.execution.turn import check_size
from perdure.runs.journal.entries import compress, decompress
from perdure.runs.journal.mail import NOTIFY
from perdure.runs.journal.rows import ADD_VALUE, BY_ID, CLOSE_ASKS, FINISHED, LOCK
from perdure.runs.run_table import RunRow
from perdure.runs.tables import MAIL_HEADER, MAIL_VALUE
from perdure.storage.program import Batch, Flow, Program, Sql, fetch, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.teams.members import find_team
from perdure.threads.context import Handle, StoreContext
from perdure.threads.models import moment
from perdure.values.codec import decode, encode

_DEAD = Sql(
    """SELECT m.value, m.header, m.run, m.key, r.id, m.sender, m.at FROM mail m
    JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.state = 2 AND (CAST(:id AS text) IS NULL OR r.id = :id)
    ORDER BY m.at, m.run, m.seq""",
    opens={0: MAIL_VALUE.at(2, 3), 1: MAIL_HEADER.at(2, 3)},
)
_SET = Sql(
    """UPDATE mail SET state = :state, header = :header, value = :value, taken_turn = NULL, record = NULL,
        seq = (SELECT max(m.seq) + 1 FROM mail m WHERE m.tenant = :tenant AND m.run = :run)
    WHERE tenant = :tenant AND run = :run AND key = :key AND state = :before RETURNING seq""",
    seals={"header": MAIL_HEADER, "value": MAIL_VALUE},
)
_WAKE = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END,
        status = CASE WHEN status = 'waiting' THEN 'queued' ELSE status END
    WHERE tenant = :tenant AND run = :run AND (status <> 'waiting' OR entries = 0)"""
)
_WAITING = Sql(
    "SELECT key, header, value FROM mail WHERE tenant = :tenant AND run = :run AND state = 0 ORDER BY seq",
    opens={1: MAIL_HEADER.at("run", 0), 2: MAIL_VALUE.at("run", 0)},
)
_JOURNALED = Sql("SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since LIMIT 1")
_LEFT = Sql(
    """UPDATE run SET status = 'done', fence = fence + 1, owner = NULL, waiting = NULL, changed_at = {now}
    WHERE tenant = :tenant AND run = :run"""
)
_PAUSE_S, _PATIENCE = 0.05, 200


@dataclass(frozen=True)
class DeadLetter(Handle):
    """A message that failed for good. Values of classes are plain data."""

    member: str
    key: str
    message: Any
    error: str
    """why: the error of the last attempt, or how often its process died"""
    sender: str | None
    sent_at: datetime
    died_at: datetime | None
    _context: StoreContext = field(repr=False, compare=False)
    _run_number: int = field(repr=False, compare=False)
    _stored: tuple[bytes, bytes | None] = field(repr=False, compare=False)

    @blocking
    def resend(self, message: Any = None) -> Flow[None]:
        """Put the message at the end of its member's box once more: as it was, or with another content.

        Its effects get new idempotency keys, because those of the failed attempts were undone. Raises NotFound if
        another process was first."""
        ctx, (value, header) = self._context, self._stored
        about = orjson.loads(header) if header else {}
        about = {name: one for name, one in about.items() if name not in ("error", "at")}
        about["resent"] = about.get("resent", 0) + 1
        if message is not None:
            value = compress(check_size(encode(message, ctx.codec)))
        tenant = (yield from ctx.tenant()) or 0
        yield from write(partial(_move, tenant, self, 0, value, orjson.dumps(about)))

    aresend = awaited(resend)

    @blocking
    def drop(self) -> Flow[None]:
        """Give the message up: it is no dead letter any more, and is not sent."""
        tenant = (yield from self._context.tenant()) or 0
        yield from write(partial(_move, tenant, self, 3, *self._stored))

    adrop = awaited(drop)


def _move(tenant: int, letter: DeadLetter, state: int, value: bytes, header: bytes | None) -> Program[None]:
    key = {"tenant": tenant, "run": letter._run_number}
    [locked] = yield Batch(LOCK(**key))
    if state == 0 and (not locked or RunRow._make(locked[0]).status in FINISHED):
        raise NotFound(f"{letter.member!r} has left the team: send the message to another member")
    [moved] = yield Batch(_SET(**key, key=letter.key, state=state, before=2, value=value, header=header))
    if not moved:
        raise NotFound(f"{letter.key!r} is no dead letter of {letter.member!r} any more")
    if state == 0:
        yield Batch(_WAKE(**key), NOTIFY())


def dead(ctx: StoreContext, team: str, name: str | None) -> Flow[list[DeadLetter]]:
    """Return the dead letters of a team, or of one member, the oldest first."""
    tenant, root = yield from find_team(ctx, team)
    run_id = None if name is None else f"{team}/{name}"
    found = yield from fetch(_DEAD, tenant=tenant, root=root.run, id=run_id)
    letters = []
    for value, header, run, key, receiver, sender, at in found:
        about = orjson.loads(header) if header else {}
        letters.append(
            DeadLetter(
                receiver.removeprefix(f"{team}/"),
                key,
                decode(decompress(value), ctx.codec, raw=True),
                about.get("error", "its receiver had left the team"),
                None if sender is None else sender.removeprefix(f"{team}/"),
                moment(at),
                moment(about["at"]) if "at" in about else None,
                ctx,
                run,
                (value, header),
            )
        )
    return letters


def leave(ctx: StoreContext, team: str, name: str) -> Flow[int]:
    """Remove a member from its team. Return how many of its messages became dead letters.

    Waits some seconds for the end of a turn. Raises NotFound, and Conflict if the turn does not end.
    """
    tenant, _ = yield from find_team(ctx, team)
    for _ in range(_PATIENCE):
        count = yield from write(partial(_leave, tenant, f"{team}/{name}", ctx.clock_us()))
        if count is not None:
            return count
        yield from sleep(_PAUSE_S)
    raise Conflict(f"member {name!r} is in the middle of a turn, and did not leave: try again when the turn has ended")


def _leave(tenant: int, run_id: str, now: int) -> Program[int | None]:
    [rows] = yield Batch(BY_ID(tenant=tenant, id=run_id))
    if not rows or RunRow._make(rows[0]).turn is None:
        raise NotFound(f"there is no member {run_id.partition('/')[2]!r} in team {run_id.partition('/')[0]!r}")
    key = {"tenant": tenant, "run": rows[0][0]}
    [locked] = yield Batch(LOCK(**key))
    row = RunRow._make(locked[0])
    if row.status in FINISHED:
        return 0
    journaled, waiting = yield Batch(_JOURNALED(**key, since=row.since), _WAITING(**key))
    if row.status == "running" or journaled:
        return None
    for mail_key, header, value in waiting:
        about = {**(orjson.loads(header) if header else {}), "error": "its receiver left the team", "at": now}
        yield Batch(_SET(**key, key=mail_key, state=2, before=0, value=value, header=orjson.dumps(about)))
    yield Batch(_LEFT(**key, now=now), ADD_VALUE(**key, kind="outcome", value=compress(b"null")), CLOSE_ASKS(**key))
    return len(waiting)
