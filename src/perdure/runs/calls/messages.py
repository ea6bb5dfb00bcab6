"""Messages to runs. `store.send` and `perdure.send` insert them; `perdure.receive` takes each out exactly once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson

from perdure.errors import MailboxFull, NotFound, RunFailed, UsageError
from perdure.runs.calls.failures import describe_error
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.scope import Scope
from perdure.runs.execution.turn import MailDraft, check_size, team_of
from perdure.runs.journal.entries import DONE, WAIT, Entry, compress, decompress, opening
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.mail import NOTIFY, Outgoing, is_full, put_statements
from perdure.runs.journal.rows import ARGS_OF, FINISHED, NOW, look_up, look_up_all
from perdure.runs.journal.values import OF_MAIL, refer
from perdure.runs.run_table import RunRow
from perdure.runs.tables import MAIL_VALUE
from perdure.storage.program import Batch, Program, Rows, Sql, read
from perdure.threads.checks import check_name
from perdure.values.codec import encode
from perdure.values.external import encode_noting, keys_of

RECEIVE = declare(CallKind("perdure.receive", waits_for="message"))
SEND = declare(CallKind("perdure.send", is_changeable=False, reaches_out=True))
NAME = RECEIVE.name
_NEXT = Sql(
    """SELECT seq, value, key FROM mail WHERE tenant = :tenant AND run = :run AND topic = :topic AND state = 0
    ORDER BY seq LIMIT 1""",
    opens={1: MAIL_VALUE.at("run", 2)},
)
_TAKE = Sql(
    """UPDATE mail SET state = 1, taken_turn = CAST(:turn AS bigint)
    WHERE tenant = :tenant AND run = :run AND seq = :seq AND state = 0 RETURNING seq"""
)
_LOCK_RUN = Sql("SELECT run, status FROM run WHERE tenant = :tenant AND run = :run {for_update}")


def check_topic(topic: object) -> str:
    """Return a topic that both databases can store; the empty one is the default. Raises UsageError."""
    if topic == "":
        return ""
    return check_name(topic, "topic")


def put_mail(
    tenant: int,
    run_id: str,
    topic: str,
    key: str,
    value: bytes,
    now: int,
    sender: RunRow | None = None,
    header: bytes | None = None,
    *,
    is_call: bool = False,
    keys: Sequence[bytes] = (),
) -> Generator[Batch, list[Rows], None]:
    """Insert a message to a run and wake the run, unless there is a message with the same key. Raises NotFound.

    A call of a member that has left its team raises NotFound too; another message becomes a dead letter there.
    Without a sender, raises MailboxFull if the receiver is a member of a team and its box is full. It is a program of
    its own, or part of another one. The message refers to the large values of `keys`; raises Retired.
    """
    row = yield from look_up(tenant, run_id)
    if row is None:
        raise NotFound(f"there is no run {run_id!r} to send to")
    # The lock on the run's row serializes its senders, so that the numbers have no gaps and no duplicates.
    [locked] = yield Batch(_LOCK_RUN(tenant=tenant, run=row.run))
    if not locked or locked[0][1] == "exported":
        raise NotFound(f"run {run_id!r} was exported: it continues in another store; send to it there")
    if row.turn is not None and locked[0][1] in FINISHED and is_call:
        raise NotFound(f"{run_id!r} has left the team, and cannot answer a call")
    if row.turn is not None and sender is None:
        check_size(decompress(value))
        if topic == "" and (capacity := (yield from capacity_of(tenant, row))) is not None:
            yield from _check_room(tenant, row, capacity)
    name, turn = (None, None) if sender is None else (sender.id, sender.turn)
    put = put_statements(
        tenant, Outgoing(row.run, topic, key, value, header), name, None if turn is None else turn + 1, now
    )
    yield Batch(*put, *((NOTIFY(),) if row.turn is not None else ()))
    if keys and row.turn is not None:
        raise UsageError(f"{run_id!r} is a member of a team: a message to it cannot have a perdure.External")
    yield from refer(tenant, row.run, OF_MAIL, keys, now)


def capacity_of(tenant: int, row: RunRow) -> Generator[Batch, list[Rows], int | None]:
    """Return how many messages may wait for a member; None if any number may."""
    [args] = yield Batch(ARGS_OF(tenant=tenant, run=row.run))
    return orjson.loads(decompress(args[0][0])).get("capacity") if args else None


def _check_room(tenant: int, row: RunRow, capacity: int) -> Generator[Batch, list[Rows], None]:
    if (yield from is_full(tenant, row.run, capacity)):
        raise MailboxFull(
            f"{capacity} messages wait for {row.id!r}, as many as its box may hold: nothing was sent. Send again later"
        )


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
    turn = None if execution.turn is None else execution.turn.number
    [taken] = yield Batch(_TAKE(tenant=execution.tenant, run=execution.row.run, seq=seq, turn=turn))
    if not taken:
        raise _Taken


def send_later(scope: Scope, target: str, value: Any, topic: str) -> None:
    """Keep a message until the turn of a team's member ends: it leaves in that transaction."""
    execution = scope.execution
    text = check_size(encode(value, execution.ctx.codec))
    execution.turn.sends.append(MailDraft(target, compress(text), topic))


def send_operation(
    scope: Scope, path: str, run_id: str, value: Any, topic: str, header: bytes | None = None
) -> Operation[None]:
    """Send a message from a run exactly once: it commits together with the journal entry."""
    execution = scope.execution
    _, ended = yield from recorded_call(scope, path, SEND.name)
    if ended is not None:
        yield from answer(execution, ended)
        return
    key = f"{execution.row.incarnation.hex()}/{path}"
    text, keys = yield from _encoded(execution, value)
    if execution.turn is not None:
        check_size(decompress(text))
        run_id = yield from receiver_id(execution, run_id)
    now = execution.ctx.clock_us()
    is_call = header is not None
    put = partial(put_mail, execution.tenant, run_id, topic, key, text, now, execution.row, header)
    put = partial(put, is_call=is_call, keys=keys)
    extra: dict[str, Any] = {"to": run_id, "topic": topic}
    try:
        yield from execution.journal.commit(put, (DONE, Entry(path, SEND.name, now, extra=extra)), other=run_id)
    except NotFound as error:  # recorded, because such a run may exist when this call is replayed
        extra["error"] = describe_error(error, execution.ctx.codec)
        yield from execution.journal.record((DONE, Entry(path, SEND.name, now, extra=extra)))
        raise


def _encoded(execution: Execution, value: Any) -> Operation[tuple[bytes, list[bytes]]]:
    """Encode a message, and store its large values. Those of members of teams have none."""
    if execution.turn is not None:
        return execution.encoded(value), []
    text, values = encode_noting(value, execution.ctx.codec)
    yield from keep(execution, values)
    return compress(text), keys_of(values)


def receiver_id(execution: Execution, target: str) -> Operation[str]:
    """Return the id of the run that a member sends to: a member of its own team, or else a run. Raises NotFound."""
    [(_, run_id)] = yield from receivers(execution, [target])
    return run_id


def receivers(execution: Execution, targets: Sequence[str]) -> Operation[list[tuple[Receiver, str]]]:
    """Return the runs that a member sends to, with their ids. Raises NotFound, and UsageError for another team's."""
    team, known = team_of(execution.row.id), execution.addresses
    names = {target: [f"{team}/{target}", target] for target in targets if target not in known}
    if names:
        ids = sorted({name for pair in names.values() for name in pair})
        rows = yield from read(partial(_find_all, execution.tenant, ids))
        for target, pair in names.items():
            receiver = next((rows[name] for name in pair if name in rows), None)
            if receiver is None:
                raise NotFound(f"there is no member {target!r} in team {team!r}, and no run of that id")
            if receiver.row.turn is not None and receiver.row.root != execution.row.root:
                raise UsageError(f"{target!r} is a member of another team: only its own team sends to it")
            known[target] = receiver, receiver.row.id
    return [known[target] for target in targets]


def runs_of_ids(execution: Execution, ids: Sequence[str]) -> Operation[dict[str, Receiver]]:
    """Return the runs with these ids that a member may answer, by id. Those that are gone are left out."""
    receivers = (yield from read(partial(_find_all, execution.tenant, sorted(set(ids))))) if ids else {}
    return {
        run_id: one for run_id, one in receivers.items() if one.row.turn is None or one.row.root == execution.row.root
    }


class Receiver(NamedTuple):
    """A run that a member sends to."""

    row: RunRow
    capacity: int | None


def _find_all(tenant: int, ids: list[str]) -> Program[dict[str, Receiver]]:
    receivers = {}
    for row in (yield from look_up_all(tenant, ids)).values():
        capacity = (yield from capacity_of(tenant, row)) if row.turn is not None else None
        receivers[row.id] = Receiver(row, capacity)
    return receivers


def call_operation(
    scope: Scope, paths: tuple[str, str], target: str, value: Any, timeout_s: float | None
) -> Operation[Any]:
    """Send a message and wait for what the receiver's handler returns. Raises TimeoutError, RunFailed."""
    execution = scope.execution
    topic = f"call:{execution.row.incarnation.hex()[:16]}/{paths[0]}"
    about = {"reply": topic} if execution.row.turn is None else {"reply": topic, "turn": execution.row.turn}
    yield from send_operation(scope, paths[0], target, value, "", orjson.dumps(about))
    reply = yield from receive_operation(scope, paths[1], topic, timeout_s, None)
    if reply is None:
        raise TimeoutError(f"{target!r} did not answer within {timeout_s:g} s")
    is_answer, value = reply
    if not is_answer:
        raise RunFailed(f"{target!r} could not answer: {value}", error=str(value))
    return value
