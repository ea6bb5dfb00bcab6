"""Programs on the table of messages: put one into a box, read the next, end the turn of a member of a team.

A member is a run whose `turn` is not NULL. It handles one message at a time, and a turn ends in one transaction: the
message is taken, the state is saved, what the turn sends arrives, its journal goes, and the next message is read. Every
statement of that transaction names the fence, so an owner that lost the run writes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from perdure.log.append import GuardedHead
from perdure.runs.journal.rows import FINISHED, NEVER, FenceToken, untyped
from perdure.runs.tables import INTENT, MAIL_HEADER, MAIL_VALUE, OF_JOURNAL
from perdure.storage.prepared import NOTIFY as NOTIFY
from perdure.storage.program import Batch, Program, Rows, Sql, Statement
from perdure.threads.save_engine import Moved, PreparedSave

# The owner of the turn that ends: its row is as it was when the turn began.
_HELD = """tenant = :tenant AND run = :me AND fence = :fence AND status = 'running' AND turn = :turn - 1"""
# If the turn saved a state, in the same batch as all else, nothing happens unless that is now the head of its thread.
_SAVED = """(CAST(:saved AS bigint) IS NULL OR EXISTS (
    SELECT 1 FROM thread WHERE tenant = :tenant AND thread = :thread AND head = CAST(:saved AS bigint)))"""
_IF_HELD = f" AND EXISTS (SELECT 1 FROM run WHERE {_HELD}) AND {_SAVED}"
_SAVE = GuardedHead(
    f"""EXISTS (SELECT 1 FROM run WHERE {_HELD}) AND EXISTS (SELECT 1 FROM mail
        WHERE tenant = :tenant AND run = :me AND seq = :seq AND mail.state = 0)
    AND (SELECT count(*) FROM run WHERE tenant = :tenant AND run IN {{numbers:all}}) = :count"""
)
_OVER = ", ".join(f"'{status}'" for status in FINISHED)
IS_ANSWER = "topic LIKE 'call:%'"  # to a call of a turn
IS_TOPIC = f"topic <> '' AND NOT {IS_ANSWER}"


def _both(text: str, **columns: Any) -> Sql:
    return Sql(text, sqlite=untyped(text), **columns)


def _put(guard: str) -> Sql:
    """Return the statement that adds a message to a box. One that was withdrawn by a rewind is sent anew.

    It keeps its header, which may say that it was given up before (`MailRow.about`)."""
    return _both(
        f"""INSERT INTO mail (tenant, run, seq, topic, key, sender, sent_turn, state, header, value, at)
        SELECT t.tenant, t.run,
            (SELECT coalesce(max(m.seq), 0) + 1 FROM mail m WHERE m.tenant = t.tenant AND m.run = t.run),
            :topic::text, :key::text, :sender::text, :sent_turn::bigint,
            CASE WHEN t.turn IS NOT NULL AND t.status IN ({_OVER}) THEN 2
                WHEN t.turn <> :for_turn::bigint THEN 3 ELSE 0 END,
            :header::bytea, :value::bytea, {{now}}
        FROM run t WHERE t.tenant = :tenant AND t.run = :to{guard}
        ON CONFLICT (tenant, run, key) DO UPDATE SET seq = excluded.seq, state = excluded.state, at = excluded.at,
            sent_turn = excluded.sent_turn, taken_turn = NULL, record = NULL, value = excluded.value,
            header = coalesce(excluded.header, mail.header) WHERE mail.state = 3""",
        seals={"value": MAIL_VALUE.at("to", "key"), "header": MAIL_HEADER.at("to", "key")},
    )


def _wake(guard: str) -> Sql:
    """Return the statement that wakes the receiver of a message.

    A member in the middle of a turn waits for something else: only an answer to its call wakes it. Members are queued,
    because workers claim queued runs in order.
    """
    return Sql(
        f"""UPDATE run SET wakeup_pending = 1, wake_at = CASE WHEN status = 'waiting' THEN 0 ELSE wake_at END,
            status = CASE WHEN status = 'waiting' AND turn IS NOT NULL THEN 'queued' ELSE status END
        WHERE tenant = :tenant AND run = :to AND (turn IS NULL
            OR (status = 'waiting' AND (entries = 0 OR :topic <> '')) OR (status <> 'waiting' AND wakeup_pending = 0))
            {guard}"""
    )


_PUT, _WAKE = _put(""), _wake("")
_PUT_HELD, _WAKE_HELD = _put(_IF_HELD), _wake(_IF_HELD)
_LOCK = Sql(
    "SELECT run FROM run WHERE tenant = :tenant AND run IN {numbers:all} ORDER BY run {for_update}",
)
_NEXT = Sql(
    """SELECT seq, key, sender, header, value FROM mail
    WHERE tenant = :tenant AND run = :me AND topic = '' AND state = 0 ORDER BY seq LIMIT 1""",
    opens={3: MAIL_HEADER.at("me", 1), 4: MAIL_VALUE.at("me", 1)},
)
_TAKE = Sql(
    f"""UPDATE mail SET state = 1, taken_turn = :turn, record = :record
    WHERE tenant = :tenant AND run = :me AND seq = :seq AND state = 0{_IF_HELD} RETURNING seq"""
)
_BURY = Sql(
    f"""UPDATE mail SET state = 2, taken_turn = :turn, header = :header
    WHERE tenant = :tenant AND run = :me AND seq = :seq AND state = 0{_IF_HELD} RETURNING seq""",
    seals={"header": MAIL_HEADER.at("me", "key")},
)
# Messages of topics that a turn received, and which is given up, wait again. Answers to its calls do not.
_UNTAKE = Sql(
    f"""UPDATE mail SET state = 0, taken_turn = NULL
    WHERE tenant = :tenant AND run = :me AND taken_turn = :turn AND state = 1 AND {IS_TOPIC}{_IF_HELD}"""
)
# Intents stay, so that a rewind can say which effects the undone turns had. Rows that a fork shares stay too.
_DROP = [
    Sql(
        f"""DELETE FROM {table} WHERE tenant = :tenant AND run = :me{_IF_HELD}
        {f"AND kind <> {INTENT}" if table == "journal" else ""}
        {f"AND kind = '{OF_JOURNAL}'" if table == "run_external" else ""}
        AND NOT EXISTS (SELECT 1 FROM run f WHERE f.tenant = :tenant AND f.origin = :me)"""
    )
    for table in ("answer", "ask", "journal", "run_blob", "run_external")
]
# An answer that came after its call had ended: nothing waits for it any more.
_FORGET_ANSWERS = Sql(
    f"""UPDATE mail SET state = 3
    WHERE tenant = :tenant AND run = :me AND {IS_ANSWER} AND state = 0{_IF_HELD}"""
)
_MORE = "EXISTS (SELECT 1 FROM mail WHERE tenant = :tenant AND run = :me AND topic = '' AND state = 0)"
_STAYS = f"(:stay = 1 AND request IS NULL AND {_MORE})"
_END = Sql(
    f"""UPDATE run SET turn = :turn, crashes = 0, since = :since, seq = :since, entries = 0, digest = 0,
        wakeup_pending = 0, waiting = NULL, lease_until = {{now}} + :lease, changed_at = {{now}},
        owner = CASE WHEN {_STAYS} THEN owner END,
        status = CASE WHEN {_STAYS} THEN 'running' WHEN request IS NOT NULL OR {_MORE} THEN 'queued'
            ELSE 'waiting' END,
        wake_at = CASE WHEN request IS NOT NULL OR {_MORE} THEN 0 ELSE {NEVER} END
    WHERE {_HELD} AND {_SAVED} RETURNING status"""
)
_FAILED_AGAIN = Sql("UPDATE run SET crashes = crashes + 1 WHERE tenant = :tenant AND run = :run AND fence = :fence")
_FULL = Sql(
    """SELECT 1 FROM mail WHERE tenant = :tenant AND run = :to AND topic = '' AND state = 0
    ORDER BY seq LIMIT 1 OFFSET :capacity"""
)
LOCK_RUNS = Sql("SELECT run FROM run WHERE tenant = :tenant AND run IN {numbers:runs} ORDER BY run {for_update}")


def about_of(header: bytes | None) -> dict[str, Any]:
    """Return what a header says of its message; {} if there is none."""
    return orjson.loads(header) if header else {}


class MailRow(NamedTuple):
    """A message that a member is to handle."""

    seq: int
    key: str
    sender: str | None
    header: bytes | None
    value: bytes

    @property
    def about(self) -> dict[str, Any]:
        """The header.

        It has its call (reply, turn), how often it was given up, and the keys of the effects that were undone then
        (given_up, undone), why it is dead (error, at), and a nonce.
        """
        return about_of(self.header)


class Outgoing(NamedTuple):
    """A message on its way to a run. With `for_turn`, it is withdrawn unless the receiver is still in that turn."""

    to: int
    topic: str
    key: str
    value: bytes
    header: bytes | None = None
    for_turn: int | None = None
    capacity: int | None = None  # of the receiver's box


class TurnEnd(NamedTuple):
    """What the transaction that ends a turn writes. `turn` is the number of the turn, from 1."""

    turn: int
    mail: MailRow
    sends: Sequence[Outgoing]
    since: int
    record: int | None  # the checkpoint of the state after this turn
    buried: bytes | None  # the new header, if the message goes to the dead letters
    has_journal: bool
    stays: bool  # the owner keeps the run if a message waits
    lease: int
    now: int


class EndedTurn(NamedTuple):
    """The run's status after a turn, its next message, and whether a box that the turn sent to is full."""

    status: str
    next: MailRow | None
    is_full: bool = False


class TurnLost(Exception):
    """Another process has the run. Raised to roll back the transaction that would end its turn."""


class ReceiverGone(Exception):
    """A run that the turn sends to is not there any more."""


def put_statements(tenant: int, out: Outgoing, sender: str | None, sent_turn: int | None, now: int) -> list[Statement]:
    """Return the statements that add a message to a box whose run is locked, and wake its run."""
    about = {"tenant": tenant, "to": out.to, "topic": out.topic}
    fields = {"key": out.key, "value": out.value, "header": out.header, "for_turn": out.for_turn, "now": now}
    return [_PUT(**about, **fields, sender=sender, sent_turn=sent_turn), _WAKE(**about)]


def is_full(tenant: int, run: int, capacity: int) -> Generator[Batch, list[Rows], bool]:
    """Return whether `capacity` messages wait in a box."""
    [beyond] = yield Batch(_FULL(tenant=tenant, to=run, capacity=capacity - 1))
    return bool(beyond)


def next_mail(tenant: int, run: int) -> Generator[Batch, list[Rows], MailRow | None]:
    """Return the message that a member handles next."""
    [rows] = yield Batch(_NEXT(tenant=tenant, me=run))
    return MailRow._make(rows[0]) if rows else None


def failed_again(token: FenceToken) -> Statement:
    """Return the statement that counts a failed attempt at a message, in the transaction that gives the run back."""
    return _FAILED_AGAIN(**token._asdict())


def _changes(me: Mapping[str, Any], sender: str, end: TurnEnd) -> list[Statement]:
    """Return the statements that take the message, send what the turn sends, and drop the journal of the turn."""
    if end.buried is None:
        statements = [_TAKE(**me, seq=end.mail.seq, record=end.record)]
    else:
        statements = [_BURY(**me, seq=end.mail.seq, key=end.mail.key, header=end.buried), _UNTAKE(**me)]
    for out in end.sends:
        about = {**me, "to": out.to, "topic": out.topic}
        fields = {"key": out.key, "value": out.value, "header": out.header, "for_turn": out.for_turn}
        statements += [
            _PUT_HELD(**about, **fields, sender=sender, sent_turn=end.turn, now=end.now),
            _WAKE_HELD(**about),
        ]
    if end.has_journal:
        statements += [_FORGET_ANSWERS(**me), *(drop(**me) for drop in _DROP)]
    return statements


def end_turn(token: FenceToken, sender: str, end: TurnEnd, saving: PreparedSave | None) -> Program[EndedTurn]:
    """End a turn. Raises TurnLost, ReceiverGone, or Moved if another writer has changed the state's thread.

    If one statement can save the state, all else depends on it, so COMMIT goes along with the only batch.
    """
    tenant, run, fence = token
    receivers = {run, *(out.to for out in end.sends)}
    numbers = orjson.dumps(sorted(receivers)).decode()
    me: dict[str, Any] = {"tenant": tenant, "me": run, "fence": fence, "turn": end.turn, "saved": None, "thread": None}
    statements = [_LOCK(tenant=tenant, all=numbers)]
    base = None if saving is None or saving.warm is None else saving.draft.base
    if saving is not None and saving.warm is not None and base is not None:
        record = saving.warm.record
        held = {"me": run, "fence": fence, "turn": end.turn, "seq": end.mail.seq}
        statements.append(_SAVE(saving.draft, base, tenant, record, **held, all=numbers, count=len(receivers)))
        me |= {"saved": record.id, "thread": record.thread}
    elif saving is not None:
        yield from saving.program()
    limits = [_FULL(tenant=tenant, to=out.to, capacity=out.capacity) for out in end.sends if out.capacity is not None]
    last = [
        _END(**me, since=end.since, stay=int(end.stays), lease=end.lease, now=end.now),
        _NEXT(tenant=tenant, me=run),
        *limits,
    ]
    take = len(statements)
    answers = yield Batch(*statements, *_changes(me, sender, end), *last, last=base is not None)
    ended, rows, *full = answers[len(answers) - len(last) :]
    if len(answers[0]) != len(receivers):
        raise ReceiverGone
    if saving is not None and base is not None:
        if not answers[1]:  # then nothing else has happened either
            raise Moved(0)
        saving.note_appended()
    if not ended or not answers[take]:
        raise TurnLost
    return EndedTurn(ended[0][0], MailRow._make(rows[0]) if rows else None, any(full))
