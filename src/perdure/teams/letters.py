"""Dead letters: messages that failed for good. They wait for a person, who looks at them, corrects and resends them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import orjson

from perdure.errors import Conflict, NotFound
from perdure.runs.execution.turn import check_size
from perdure.runs.journal.entries import compress, decompress
from perdure.runs.journal.mail import LOCK_RUNS, NOTIFY, Outgoing, about_of, put_statements
from perdure.runs.journal.rows import ADD_VALUE, CLOSE_ASKS, FINISHED, LOCK, look_up, look_up_all
from perdure.runs.run_table import RunRow
from perdure.runs.tables import MAIL_HEADER, MAIL_VALUE
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, fetch, sleep, write
from perdure.storage.twins import awaited, blocking
from perdure.teams.members import find_team
from perdure.threads.actions import noted
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
_LETTER = Sql(
    "SELECT header, value FROM mail WHERE tenant = :tenant AND run = :run AND key = :key AND state = 2",
    opens={0: MAIL_HEADER, 1: MAIL_VALUE},
)
_RESEND = Sql(
    """UPDATE mail SET state = 0, header = :header, value = :value, taken_turn = NULL, record = NULL,
        seq = (SELECT max(m.seq) + 1 FROM mail m WHERE m.tenant = :tenant AND m.run = :run)
    WHERE tenant = :tenant AND run = :run AND key = :key""",
    seals={"header": MAIL_HEADER, "value": MAIL_VALUE},
)
_DROP = Sql(
    "UPDATE mail SET state = 4 WHERE tenant = :tenant AND run = :run AND key = :key AND state = 2 RETURNING seq"
)
_BURY = Sql(
    "UPDATE mail SET state = 2, header = :header WHERE tenant = :tenant AND run = :run AND key = :key AND state = 0",
    seals={"header": MAIL_HEADER},
)
_WAKE = Sql(
    """UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END,
        status = CASE WHEN status = 'waiting' THEN 'queued' ELSE status END
    WHERE tenant = :tenant AND run = :run AND (status <> 'waiting' OR entries = 0)"""
)
_WAITING = Sql(
    "SELECT key, header, sender FROM mail WHERE tenant = :tenant AND run = :run AND state = 0 ORDER BY seq",
    opens={1: MAIL_HEADER.at("run", 0)},
)
_JOURNALED = Sql("SELECT 1 FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since LIMIT 1")
_LEFT = Sql(
    """UPDATE run SET status = 'done', fence = fence + 1, owner = NULL, waiting = NULL, changed_at = {now}
    WHERE tenant = :tenant AND run = :run"""
)
_LEFT_TEAM = "its receiver left the team"
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
    _receiver: tuple[int, str] = field(repr=False, compare=False)

    @blocking
    def resend(self, message: Any = None, *, who: str | None = None) -> Flow[None]:
        """Put the message at the end of its member's box once more: as it was, or with another content.

        Effects that were undone when it was given up get new idempotency keys; those that stand keep theirs. Raises
        NotFound if another process was first. `who` is recorded in `store.ops.actions()`."""
        ctx = self._context
        value = None if message is None else compress(check_size(encode(message, ctx.codec)))
        tenant = (yield from ctx.tenant()) or 0
        resending = write(partial(_resend, tenant, self, value))
        yield from noted(ctx, who, "resend", f"member {self._receiver[1]}", resending, key=self.key)

    aresend = awaited(resend)

    @blocking
    def drop(self, *, who: str | None = None) -> Flow[None]:
        """Give the message up: it is no dead letter any more, and is not sent.

        Its key stays used: a message that is sent with the same key is a duplicate of it. `who` is recorded in
        `store.ops.actions()`."""
        tenant = (yield from self._context.tenant()) or 0
        dropping = write(partial(_drop, tenant, self))
        yield from noted(self._context, who, "drop", f"member {self._receiver[1]}", dropping, key=self.key)

    adrop = awaited(drop)

    def _gone(self) -> NotFound:
        return NotFound(f"{self.key!r} is no dead letter of {self.member!r} any more")


def sent_again(header: bytes | None) -> bytes:
    """Return the header of a dead letter that is handled again."""
    about = about_of(header)
    return orjson.dumps({name: one for name, one in about.items() if name not in ("error", "at")})


def _resend(tenant: int, letter: DeadLetter, value: bytes | None) -> Program[None]:
    key = {"tenant": tenant, "run": letter._receiver[0]}
    [locked] = yield Batch(LOCK(**key))
    if not locked or RunRow._make(locked[0]).status in FINISHED:
        raise NotFound(f"{letter.member!r} has left the team: send the message to another member")
    [stored] = yield Batch(_LETTER(**key, key=letter.key))
    if not stored:
        raise letter._gone()
    header, old = stored[0]
    new = old if value is None else value
    yield Batch(_RESEND(**key, key=letter.key, value=new, header=sent_again(header)), _WAKE(**key), NOTIFY())


def _drop(tenant: int, letter: DeadLetter) -> Program[None]:
    [dropped] = yield Batch(_DROP(tenant=tenant, run=letter._receiver[0], key=letter.key))
    if not dropped:
        raise letter._gone()


def dead(ctx: StoreContext, team: str, name: str | None) -> Flow[list[DeadLetter]]:
    """Return the dead letters of a team, or of one member, the oldest first."""
    tenant, root = yield from find_team(ctx, team)
    run_id = None if name is None else f"{team}/{name}"
    rows = yield from fetch(_DEAD, tenant=tenant, root=root.run, id=run_id)
    letters = []
    for value, header, run, key, receiver, sender, at in rows:
        about = about_of(header)
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
                (run, receiver),
            )
        )
    return letters


def leave(ctx: StoreContext, team: str, name: str) -> Flow[int]:
    """Remove a member from its team. Return how many of its messages became dead letters.

    Waits some seconds for the end of a turn. Raises NotFound, and Conflict if the turn does not end.
    """
    tenant, _ = yield from find_team(ctx, team)
    answer = compress(encode([False, _LEFT_TEAM], ctx.codec))
    for _ in range(_PATIENCE):
        count = yield from write(partial(_leave, tenant, f"{team}/{name}", answer, ctx.clock_us()))
        if count is not None:
            return count
        yield from sleep(_PAUSE_S)
    raise Conflict(f"member {name!r} is in the middle of a turn, and did not leave: try again when the turn has ended")


def _leave(tenant: int, run_id: str, answer: bytes, now: int) -> Program[int | None]:
    """Remove a member, and answer the calls that wait for it. Return None if it must be tried again."""
    member = yield from look_up(tenant, run_id)
    if member is None or member.turn is None:
        raise NotFound(f"there is no member {run_id.partition('/')[2]!r} in team {run_id.partition('/')[0]!r}")
    key = {"tenant": tenant, "run": member.run}
    [waiting] = yield Batch(_WAITING(**key))
    callers = yield from _callers(tenant, waiting)
    numbers = sorted({*callers.values(), key["run"]})
    _, locked = yield Batch(LOCK_RUNS(tenant=tenant, runs=orjson.dumps(numbers).decode()), LOCK(**key))
    row = RunRow._make(locked[0])
    if row.status in FINISHED:
        return 0
    journaled, waiting = yield Batch(_JOURNALED(**key, since=row.since), _WAITING(**key))
    if row.status == "running" or journaled or callers.keys() != (yield from _callers(tenant, waiting)).keys():
        return None
    for mail_key, header, sender in waiting:
        about = about_of(header)
        if "reply" in about and sender in callers:
            out = Outgoing(callers[sender], about["reply"], f"{mail_key}/left", answer, for_turn=about.get("turn"))
            yield Batch(*put_statements(tenant, out, run_id, None, now), NOTIFY())
        dead = orjson.dumps({**about, "error": _LEFT_TEAM, "at": now})
        yield Batch(_BURY(**key, key=mail_key, header=dead))
    yield Batch(_LEFT(**key, now=now), ADD_VALUE(**key, kind="outcome", value=compress(b"null")), CLOSE_ASKS(**key))
    return len(waiting)


def _callers(tenant: int, waiting: Rows) -> Generator[Batch, list[Rows], dict[str, int]]:
    """Return the runs that wait for the answers to these messages, by their ids."""
    ids = sorted({sender for _, header, sender in waiting if sender and "reply" in about_of(header)})
    return {row.id: row.run for row in (yield from look_up_all(tenant, ids)).values()}
