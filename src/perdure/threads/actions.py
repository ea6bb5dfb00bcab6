"""The log of what operators did: who changed which run, thread, schedule, deployment or snapshot, and when.

A call that says `who=` is recorded in the transaction of its first write, so there is no record of a call that was
refused. A record holds no value of the user's: no answer, no message, no state. The newest 10,000 of a tenant stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import orjson

from perdure.errors import NotFound, UsageError
from perdure.log.ids import parse_id, show_id
from perdure.storage.program import Batch, Flow, Program, Sql, Statement, Transaction, as_subprogram, change, read
from perdure.storage.store_tables import ACTION_DETAILS
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import StoreContext
from perdure.threads.models import moment

T = TypeVar("T")
KEPT_MAX = 10_000
_ADD = Sql(
    """INSERT INTO operator_action (tenant, id, at, who, action, subject, details)
    VALUES (:tenant, :id, :at, :who, :action, :subject, :details) ON CONFLICT DO NOTHING""",
    seals={"details": ACTION_DETAILS},
)
_TRIM = Sql(
    """DELETE FROM operator_action WHERE tenant = :tenant AND id <= (
        SELECT id FROM operator_action WHERE tenant = :tenant ORDER BY id DESC LIMIT 1 OFFSET :kept)"""
)
_LIST = Sql(
    """SELECT id, at, who, action, subject, details FROM operator_action
    WHERE tenant = :tenant AND id < :before ORDER BY id DESC LIMIT :limit""",
    opens={5: ACTION_DETAILS.at(0)},
    tolerant=True,
)
_LIST_OF = Sql(
    """SELECT id, at, who, action, subject, details FROM operator_action
    WHERE tenant = :tenant AND subject = :subject AND id < :before ORDER BY id DESC LIMIT :limit""",
    opens={5: ACTION_DETAILS.at(0)},
    tolerant=True,
)
_FORGET = Sql("DELETE FROM operator_action WHERE tenant = :tenant AND subject = :subject")


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """Something that an operator did: a call with `who=`, or a command of the command line."""

    at: datetime
    who: str
    action: str  # cancel, pause, resume, retry, undo, resolve, answer, send, fork, rollback, deploy, restore, release …
    subject: str  # what it was done to: "run trip-42", "thread alice", "schedule nightly"; "runs": of `store.bulk`
    details: dict[str, Any]  # options of the call
    cursor: str  # its place in the list: `store.ops.actions(before=cursor)` continues after it


def noted(ctx: StoreContext, who: str | None, action: str, subject: str, flow: Flow[T], **details: Any) -> Flow[T]:
    """Run a flow, and record it if `who` is not None: in its first write transaction, or else after its end."""
    if who is None:
        return (yield from flow)
    check_name(who, "who")
    tenant = yield from ctx.tenant()
    statements = [] if tenant is None else _record(ctx, tenant, who, action, subject, details)
    is_recorded, answer, error = False, None, None
    while True:
        try:
            asked = flow.send(answer) if error is None else flow.throw(error)
        except StopIteration as stop:
            if not is_recorded and (tenant := (yield from ctx.tenant())) is not None:
                yield from change(*_record(ctx, tenant, who, action, subject, details))
            return stop.value  # type: ignore[no-any-return]
        joins = bool(statements) and not is_recorded and type(asked) is Transaction and asked.write
        if joins:
            asked = Transaction(partial(_with_record, asked.op, statements), True, asked.solo, asked.checks)
        answer, error = None, None
        try:
            answer = yield asked
            is_recorded = is_recorded or joins
        except GeneratorExit:
            flow.close()
            raise
        except BaseException as raised:  # the flow decides what becomes of it
            error = raised


def _with_record(op: Callable[[], Program[T]], statements: list[Statement]) -> Program[T]:
    result: T = yield from as_subprogram(op())
    yield Batch(*statements, last=True)
    return result


def _record(
    ctx: StoreContext, tenant: int, who: str, action: str, subject: str, details: dict[str, Any]
) -> list[Statement]:
    at = ctx.clock_us()
    said = {name: value for name, value in details.items() if value not in (None, (), {})}
    text = orjson.dumps(said, default=str, option=orjson.OPT_NON_STR_KEYS).decode() if said else None
    about = {"at": at, "who": who, "action": action, "subject": subject, "details": text}
    return [_ADD(tenant=tenant, id=_new_id(at, ctx.entropy(2)), **about), _TRIM(tenant=tenant, kept=KEPT_MAX)]


def _new_id(at: int, chance: bytes) -> int:
    """Return an id that orders actions by their microsecond, and tells two of the same one apart."""
    return at << 10 | int.from_bytes(chance, "little") & 1023


def actions(
    ctx: StoreContext, limit: int | None, before: str | None, subject: str | None
) -> Flow[list[OperatorAction]]:
    """Return what operators did, the newest first."""
    page = {"limit": 2**62 if check_limit(limit) is None else limit, "before": _position(before)}
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    asked = _LIST(tenant=tenant, **page) if subject is None else _LIST_OF(tenant=tenant, subject=subject, **page)

    def program() -> Program[list[OperatorAction]]:
        [rows] = yield Batch(asked, last=True)
        return [_action(*row) for row in rows]

    return (yield from read(program))


def _position(before: str | None) -> int:
    try:
        return 2**62 if before is None else parse_id(before)
    except (NotFound, AttributeError):
        raise UsageError(f"before={before!r}: the `cursor` of the last action of a page") from None


def _action(id_: int, at: int, who: str, action: str, subject: str, details: Any) -> OperatorAction:
    known = orjson.loads(details) if type(details) is str else {}
    return OperatorAction(moment(at), who, action, subject, known, show_id(id_))


def forget_actions(tenant: int, subjects: list[str]) -> Flow[None]:
    """Remove what was recorded about something that is erased."""
    for subject in subjects:
        yield from change(_FORGET(tenant=tenant, subject=subject))
