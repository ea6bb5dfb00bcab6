"""The turns of a team's member: begin one with the next message, end it in one transaction, give a message up.

A turn replays like any run: what it recorded stands, and its message is read again, because only the owner takes it.
What a turn sends is kept in memory until its end. Between turns the owner may keep the run (`KeptTurn`), so that a busy
member costs one commit for each message.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson

from perdure.errors import ValueProblem
from perdure.log.thread_table import try_thread
from perdure.runs.calls import saga
from perdure.runs.calls.failures import describe_error, error_text
from perdure.runs.calls.messages import receivers, runs_of_ids
from perdure.runs.calls.state import thread_name
from perdure.runs.engine.parking import give_back
from perdure.runs.engine.retrying import failed_calls
from perdure.runs.engine.runtime import MemberCache, runtime_of
from perdure.runs.execution import hooks
from perdure.runs.execution.execution import Execution, KeptTurn
from perdure.runs.execution.operation import Operation
from perdure.runs.execution.turn import ATTEMPTS, AgentOptions, AgentTurn, MailDraft, team_of, turn_incarnation
from perdure.runs.functions.specs import DurableSpec
from perdure.runs.journal import mail, rows, standing
from perdure.runs.journal.entries import DONE, FAILED, Entry, decompress
from perdure.runs.journal.journal import read_whole
from perdure.runs.journal.mail import EndedTurn, MailRow, Outgoing, TurnEnd
from perdure.runs.run_table import RunRow, Waiting
from perdure.storage.program import Batch, Program, Transaction, read
from perdure.threads import flows as threads
from perdure.threads.context import Cursor
from perdure.threads.save_engine import Moved, PreparedSave
from perdure.threads.saves import Save
from perdure.values.codec import decode, encode

KEPT_TURNS = 16  # that an owner does before other members get their turn
_FULL_PAUSE_US = 50_000  # how long a member waits whose message went into a full box
_BACKOFF_US, _BACKOFF_MAX_US = 1_000_000, 60_000_000  # before the next attempt at a message


def begin(execution: Execution) -> Operation[bool]:
    """Read a member's next message and its state. Return False if no message waits."""
    row, kept = execution.row, execution.kept
    if kept is not None and kept.mail is not None:
        execution.index.load((), rows.JournalSum(0, 0, row.seq))
        message, cursor, text = kept.mail, kept.cursor, kept.text
    else:
        journal, mail_row, head = yield from read(partial(_look, execution.tenant, row))
        execution.index.load(journal.entries, journal.own)
        if mail_row is None:
            return False
        message = mail_row
        cursor, text = yield from _state(execution, head)
    execution.turn = AgentTurn(row, message, cursor, text)
    execution.row = row._replace(incarnation=turn_incarnation(row.incarnation, message))
    return True


def decode_turn(execution: Execution) -> tuple[Any, Any]:
    """Return the state and the message, for the handler. Raises ValueProblem."""
    turn = execution.turn
    turn.state = decode(turn.text, execution.ctx.codec)
    turn.message = execution.decoded(decompress(turn.mail.value))
    return turn.state, turn.message


def _look(tenant: int, row: RunRow) -> Program[tuple[Any, MailRow | None, int | None]]:
    journal = yield from read_whole(tenant, row)
    message = yield from mail.next_mail(tenant, row.run)
    thread = yield from try_thread(tenant, thread_name(row.id))
    return journal, message, None if thread is None else thread.head


def _state(execution: Execution, head: int | None) -> Operation[tuple[Cursor, bytes]]:
    """Return the place and the text of a member's state, from this process's cache if it is still the newest."""
    ctx, cached = execution.ctx, runtime_of(execution.ctx).members.get(execution.token[:2])
    if cached is not None:
        execution.addresses = cached.addresses
        base = ctx.cache.get((execution.tenant, cached.cursor.tree, head or 0))
        if cached.cursor.record == head and base is not None:
            return cached.cursor, base.data
    cursor = Cursor(thread_name(execution.row.id))
    _, loaded, _ = yield from threads.load(ctx, cursor, strict=True)
    return cursor, loaded.data


def end(execution: Execution, result: Any) -> Operation[str]:
    """End a turn that succeeded. Return the run's status: "running" if this process keeps it for its next message."""
    turn: AgentTurn = execution.turn
    text = encode(turn.state, execution.ctx.codec)
    if saga.open_calls(execution):  # effects that were cancelled or abandoned: a turn with a doubt is not over
        yield from saga.settle_open(execution)
    about, drafts = turn.mail.about, list(turn.sends)
    if "reply" in about and turn.mail.sender is not None:
        drafts.append(_reply(execution, turn.mail, [True, result]))
    saving: PreparedSave | None = None
    if text != turn.text:
        save = Save(execution.ctx, turn.cursor, text=text)
        saving = save.prepare_warm() or (yield from save.prepare())
    return (yield from _commit(execution, drafts, text, saving, None))


def _reply(execution: Execution, message: MailRow, answer: list[Any]) -> MailDraft:
    about = message.about
    value, for_turn = execution.encoded(answer), about.get("turn")
    return MailDraft(str(message.sender), value, about["reply"], for_turn=for_turn, is_id=True)


def _commit(
    execution: Execution, drafts: list[MailDraft], text: bytes, saving: PreparedSave | None, buried: bytes | None
) -> Operation[str]:
    turn, row, ctx = execution.turn, execution.row, execution.ctx
    # A notice of a letter that is given up again is another one; what a turn sends is the same, whenever it succeeds.
    head = f"{turn.lineage.hex()}/m" if buried is None else f"{row.incarnation.hex()}/d"
    sends = yield from _addressed(execution, drafts, head)
    count = 1 if execution.kept is None else execution.kept.turns + 1
    since = max(1, execution.index.last)
    ending = TurnEnd(
        turn.number,
        turn.mail,
        sends,
        since,
        turn.cursor.record if saving is None else saving.record,
        buried,
        has_journal=execution.index.last > row.since or row.origin is not None,
        stays=count < KEPT_TURNS and execution.stop is None,
        lease=execution.lease_us,
        now=ctx.clock_us(),
    )
    if hooks.hook is not None:
        hooks.fault_point("turn", "", row.function, turn.number, "before")
    op = partial(mail.end_turn, sender=row.id, end=ending, saving=saving)
    try:
        ended: EndedTurn = yield from execution.journal.commit_with_retry(op, partial(_landed, execution))
    except mail.TurnLost:
        return "lost"
    except (Moved, mail.ReceiverGone) as moved:  # the state was changed by hand, or a receiver was replaced: once more
        if saving is not None:
            saving.drop(moved if isinstance(moved, Moved) else None)
        runtime_of(ctx).members.pop(execution.token[:2], None)
        return (yield from give_back(execution, "queued", 0, Waiting("worker", "a worker")))
    if hooks.hook is not None:
        hooks.fault_point("turn", "", row.function, turn.number, "after")
    if saving is not None and saving.done is not None:
        saving.settle()
    yield from _wake_workers(execution, bool(sends))
    return (yield from _after(execution, ended, since, text, count))


def _after(execution: Execution, ended: EndedTurn, since: int, text: bytes, count: int) -> Operation[str]:
    """Keep the member for its next message, or remember where its state is."""
    turn, runtime = execution.turn, runtime_of(execution.ctx)
    if ended.status != "running":
        runtime.remember(execution.token[:2], MemberCache(turn.cursor, execution.addresses))
        return ended.status
    row = turn.row._replace(turn=turn.number, crashes=0, since=since, seq=since, entries=0, digest=0)
    execution.kept = KeptTurn(row, ended.next, turn.cursor, text, count)
    if ended.is_full:
        execution.index.load((), rows.JournalSum(0, 0, since))
        execution.journal.pending.clear()  # of the turn that has ended: the next one would take it for its own
        later = execution.shared_clock_us() + _FULL_PAUSE_US
        return (yield from give_back(execution, "queued", later, Waiting("worker", "room in a full box")))
    return "running"


def _addressed(execution: Execution, drafts: list[MailDraft], head: str) -> Operation[list[Outgoing]]:
    """Return what a turn sends, with the receivers' numbers and keys after `head`. Raises NotFound, UsageError."""
    named = [draft.target for draft in drafts if not draft.is_id]
    members = dict(zip(named, (yield from receivers(execution, named)), strict=True))
    by_id = yield from runs_of_ids(execution, [draft.target for draft in drafts if draft.is_id])
    sends = list[Outgoing]()
    for number, draft in enumerate(drafts):
        to = by_id.get(draft.target) if draft.is_id else members[draft.target][0]
        if to is not None:
            about = draft.topic, f"{head}{number}", draft.value, draft.header, draft.for_turn, to.capacity
            sends.append(Outgoing(to.row.run, *about))
    return sends


def _landed(execution: Execution) -> Operation[EndedTurn | None]:
    """Return the end of a turn whose COMMIT had no answer; None if it was not written."""
    row = yield from read(partial(rows.numbered, execution.tenant, execution.row.run))
    if row is None or row.turn != execution.turn.number or row.fence != execution.token.fence:
        return None
    return EndedTurn(row.status, None)


def _wake_workers(execution: Execution, has_sent: bool) -> Operation[None]:
    """Let workers look for the members that got mail: those of this process, and seldom those of others."""
    if has_sent and runtime_of(execution.ctx).mail_sent() and execution.ctx.driver.dialect == "postgres":
        yield Transaction(_notify, write=True)


def _notify() -> Program[None]:
    yield Batch(mail.NOTIFY(), last=True)


# --- messages that fail


def options_of(spec: DurableSpec | None) -> AgentOptions:
    return spec.agent if spec is not None and spec.agent is not None else AgentOptions(ATTEMPTS)


def fail(execution: Execution, spec: DurableSpec | None, failure: Exception) -> Operation[str]:
    """Queue a member whose handler raised an error for another attempt, or give the message up."""
    options, failed = options_of(spec), execution.row.crashes + 1
    described = describe_error(failure, execution.ctx.codec)
    if failed >= options.attempts or options.policy == "dead_letter":
        return (yield from give_up(execution, spec, described))
    execution.stop = execution.root.stop = None
    ends = {row.entry.path: row.entry for row in execution.index.rows() if row.kind == DONE}
    at = execution.ctx.clock_us()
    for path in failed_calls(execution, failure):  # these run again
        entry = Entry(
            path, ends[path].name, at, ends[path].args_hash, ends[path].attempt, extra={"retried": True, "due": 0}
        )
        yield from execution.journal.record((FAILED, entry))
    pause = min(_BACKOFF_MAX_US, _BACKOFF_US * 2 ** (failed - 1))
    what = Waiting("retry", f"attempt {failed + 1} of {options.attempts}", text=described["text"])
    also = [mail.failed_again(execution.token)]
    return (yield from give_back(execution, "queued", execution.shared_clock_us() + pause, what, also))


def give_up(execution: Execution, spec: DurableSpec | None, described: dict[str, Any] | None) -> Operation[str]:
    """Undo the effects of a turn and put its message to the dead letters. Tell the caller and the supervisor.

    With the policy "stop" the member stays stuck instead, and its messages wait.
    """
    turn, options = execution.turn, options_of(spec)
    execution.stop = execution.root.stop = None
    reason = error_text(described) if described else f"its process died, {execution.row.crashes} times in a row"
    if options.policy == "stop":
        what = Waiting("help", reason, text=reason)
        return (yield from give_back(execution, "stuck", rows.NEVER, what))
    execution.undoing = True
    yield from saga.compensate(execution, "failed", described)
    about = turn.mail.about
    drafts = []
    if "reply" in about and turn.mail.sender is not None:
        drafts.append(_reply(execution, turn.mail, [False, reason]))
    if options.supervisor is not None and options.supervisor != execution.row.id.partition("/")[2]:
        notice = execution.encoded(_notice(execution, reason, options.policy))
        drafts.append(MailDraft(f"{team_of(execution.row.id)}/{options.supervisor}", notice, is_id=True))
    undone = [*turn.undone, *standing.undone_keys(execution.index.calls())]
    after = {
        "given_up": about.get("given_up", 0) + 1,
        "undone": undone,
        "error": reason,
        "at": execution.ctx.clock_us(),
    }
    header = orjson.dumps({**about, **after})
    return (yield from _commit(execution, drafts, turn.text, None, header))


def _notice(execution: Execution, reason: str, policy: str) -> dict[str, Any]:
    """Return what a supervisor is told: with the policy "escalate" it gets the message too, to handle it."""
    turn = execution.turn
    notice = {"failed": execution.row.id.partition("/")[2], "error": reason, "key": turn.mail.key}
    if policy == "escalate":
        try:
            notice["message"] = execution.decoded(decompress(turn.mail.value))
        except ValueProblem:
            pass  # it cannot be read here either: the dead letter has it
    return notice
