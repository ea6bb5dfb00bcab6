"""Messages to runs. `store.send` and `perdure.send` insert them; `perdure.receive` takes each out exactly once."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from perdure.errors import NotFound
from perdure.runs.calls.failures import describe_error
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.scope import Scope
from perdure.runs.journal.entries import DONE, WAIT, Entry, decompress, opening
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.rows import BY_ID, NOW, WAKE, untyped
from perdure.runs.run_table import RunRow
from perdure.runs.tables import MAIL_HEADER, MAIL_VALUE
from perdure.storage.program import Batch, Program, Rows, Sql, read
from perdure.threads.checks import check_name

RECEIVE = declare(CallKind("perdure.receive", waits_for="message"))
SEND = declare(CallKind("perdure.send", is_changeable=False, reaches_out=True))
NAME = RECEIVE.name
_NEXT = Sql(
    """SELECT seq, value, key FROM mail WHERE tenant = :tenant AND run = :run AND topic = :topic AND state = 0
    ORDER BY seq LIMIT 1""",
    opens={1: MAIL_VALUE.at("run", 2)},
)
_TAKE = Sql(
    "UPDATE mail SET state = 1 WHERE tenant = :tenant AND run = :run AND seq = :seq AND state = 0 RETURNING seq"
)
_PUT_MAIL = """INSERT INTO mail (tenant, run, seq, topic, key, sender, sent_turn, state, header, value, at)
    SELECT :tenant::bigint, :run::bigint, coalesce(max(seq), 0) + 1, :topic::text, :key::text, :sender::text,
        :sent_turn::bigint, 0, :header::bytea, :value::bytea, {now}
    FROM mail WHERE tenant = :tenant AND run = :run ON CONFLICT (tenant, run, key) DO NOTHING"""
_PUT = Sql(
    _PUT_MAIL,
    sqlite=untyped(_PUT_MAIL),
    seals={"value": MAIL_VALUE, "header": MAIL_HEADER},
)
_LOCK_RUN = Sql("SELECT run, status FROM run WHERE tenant = :tenant AND run = :run {for_update}")


def check_topic(topic: object) -> str:
    """Return a topic that both databases can store; the empty one is the default. Raises UsageError."""
    if topic == "":
        return ""
    return check_name(topic, "topic")


def put_mail(
    tenant: int, run_id: str, topic: str, key: str, value: bytes, now: int, sender: str | None = None
) -> Generator[Batch, list[Rows], None]:
    """Insert a message to a run and wake the run, unless there is a message with the same key. Raises NotFound.

    It is a program of its own, or part of another one.
    """
    [rows] = yield Batch(BY_ID(tenant=tenant, id=run_id))
    if not rows:
        raise NotFound(f"there is no run {run_id!r} to send to")
    run = RunRow._make(rows[0]).run
    # The lock on the run's row serializes its senders, so that the numbers have no gaps and no duplicates.
    [locked] = yield Batch(_LOCK_RUN(tenant=tenant, run=run))
    if not locked or locked[0][1] == "exported":
        raise NotFound(f"run {run_id!r} was exported: it continues in another store; send to it there")
    about = {"topic": topic, "key": key, "sender": sender, "sent_turn": None, "header": None}
    yield Batch(_PUT(tenant=tenant, run=run, value=value, now=now, **about), WAKE(tenant=tenant, run=run))


class _Taken(Exception):
    """The message was already received. Raised to roll back the transaction that would record it a second time."""


def receive_operation(scope: Scope, path: str, topic: str, timeout_s: float | None, default: Any) -> Operation[Any]:
    """Take the oldest message of a topic; wait if there is none. Return `default` if none comes in time."""
    execution = scope.execution
    recorded, ended = yield from recorded_call(scope, path, NAME)
    if ended is not None:
        return default if (ended.extra or {}).get("late") else (yield from answer(execution, ended))
    first = opening(recorded)
    deadline = None if first is None else (first.extra or {}).get("deadline")
    yield from execution.journal.flush()
    opened = first is not None
    while True:
        row, now = yield from read(partial(_look, execution.tenant, execution.row.run, topic, execution.ctx.clock_us()))
        at = execution.ctx.clock_us()
        if row is not None:
            entry = Entry(path, NAME, at, value=row[1], extra={"topic": topic})
            try:
                yield from execution.journal.commit(partial(_take, execution, row[0]), (DONE, entry))
            except _Taken:  # another branch of this run received it
                continue
            return execution.decoded(decompress(row[1]))
        if not opened:
            deadline = None if timeout_s is None else now + int(timeout_s * 1e6)
            entry = Entry(path, NAME, at, extra={"topic": topic, "deadline": deadline})
            yield from execution.journal.record((WAIT, entry))
            opened = True
        if deadline is not None and now >= deadline:
            yield from execution.journal.record((DONE, Entry(path, NAME, at, extra={"late": True})))
            return default
        shown = f"a message on {topic!r}" if topic else "a message"
        yield Wait(path, RECEIVE.waiting(path, shown, topic=topic), deadline, RECEIVE)


def _look(tenant: int, run: int, topic: str, now: int) -> Program[tuple[tuple[int, bytes] | None, int]]:
    rows, times = yield Batch(_NEXT(tenant=tenant, run=run, topic=topic, now=now), NOW(now=now), last=True)
    return ((rows[0][0], rows[0][1]) if rows else None), int(times[0][0])


def _take(execution: Execution, seq: int) -> Generator[Batch, list[Rows], None]:
    [taken] = yield Batch(_TAKE(tenant=execution.tenant, run=execution.row.run, seq=seq))
    if not taken:
        raise _Taken


def send_operation(scope: Scope, path: str, run_id: str, value: Any, topic: str) -> Operation[None]:
    """Send a message from a run exactly once: it commits together with the journal entry."""
    execution = scope.execution
    _, ended = yield from recorded_call(scope, path, SEND.name)
    if ended is not None:
        yield from answer(execution, ended)
        return
    key = f"{execution.row.incarnation.hex()}/{path}"
    text = execution.encoded(value)
    now = execution.ctx.clock_us()
    put = partial(put_mail, execution.tenant, run_id, topic, key, text, now, execution.row.id)
    extra: dict[str, Any] = {"to": run_id, "topic": topic}
    try:
        yield from execution.journal.commit(put, (DONE, Entry(path, SEND.name, now, extra=extra)), other=run_id)
    except NotFound as error:  # recorded, because such a run may exist when this call is replayed
        extra["error"] = describe_error(error, execution.ctx.codec)
        yield from execution.journal.record((DONE, Entry(path, SEND.name, now, extra=extra)))
        raise
