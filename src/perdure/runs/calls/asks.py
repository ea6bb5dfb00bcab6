"""Questions to people: opened with a journal entry, answered from any process, recorded when the run resumes.

The row in `ask` carries an answer to the run; the entry that the run then writes is what counts. Who may answer, how
many must agree and what an answer may be are checked when it is given, so a refused answer never reaches a run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import orjson

from perdure.errors import AnswerRefused, NotFound, UsageError
from perdure.runs.calls.steps import answer as replayed
from perdure.runs.calls.timeouts import check_seconds, recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation, Wait
from perdure.runs.execution.scope import Scope
from perdure.runs.journal.entries import DONE, WAIT, Entry, decompress, opening
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.rows import LOCK, WAKE
from perdure.runs.run_table import Waiting
from perdure.runs.tables import ANSWER_VALUE, ASK_ANSWER, QUESTION, TERMS
from perdure.storage.program import Batch, Program, Rows, Sql, fetch
from perdure.threads.checks import check_name, check_text
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec
from perdure.values.safe_repr import shown

ASK = declare(CallKind("perdure.ask", "ask", "question", "answer"))
APPROVE = declare(CallKind("perdure.approve", "ask", "approval", "answer"))
_OPEN = Sql(
    """INSERT INTO ask (tenant, run, path, kind, question, terms, asked_at, deadline, status, answer)
    VALUES (:tenant, :run, :path, :kind, :question, :terms, {now}, :deadline, 'open', NULL)
    ON CONFLICT (tenant, run, path) DO UPDATE SET status = 'open', terms = excluded.terms,
        asked_at = CASE WHEN ask.status = 'closed' THEN excluded.asked_at ELSE ask.asked_at END
    WHERE ask.status <> 'answered'""",  # a cancelled run that is undone asks again; a reason may be new
    seals={"question": QUESTION, "terms": TERMS},
)
_LOOK = Sql(
    "SELECT status, answer, deadline, {now}, terms FROM ask WHERE tenant = :tenant AND run = :run AND path = :path",
    opens={1: ASK_ANSWER, 4: TERMS},
)
_FOR_ANSWER = Sql(
    """SELECT a.run, a.kind, a.question, a.terms, a.status, a.deadline, r.owner, {now} FROM ask a
    JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND r.id = :id AND a.path = :path""",
    opens={2: QUESTION.at(0, "path"), 3: TERMS.at(0, "path")},
)
_ANSWERS = Sql(
    "SELECT who, value, at FROM answer WHERE tenant = :tenant AND run = :run AND path = :path ORDER BY at",
    opens={1: ANSWER_VALUE.at("run", "path", 0)},
)
_ADD = Sql(
    """INSERT INTO answer (tenant, run, path, who, value, at) VALUES (:tenant, :run, :path, :who, :value, {now})
    ON CONFLICT (tenant, run, path, who) DO UPDATE SET value = excluded.value, at = excluded.at""",
    seals={"value": ANSWER_VALUE},
)
_SETTLE = Sql(
    """UPDATE ask SET status = 'answered', answer = :answer
    WHERE tenant = :tenant AND run = :run AND path = :path AND status = 'open' RETURNING run""",
    seals={"answer": ASK_ANSWER},
)
_LOCK = Sql("SELECT status FROM ask WHERE tenant = :tenant AND run = :run AND path = :path {for_update}")
_CLOSE = Sql(
    "UPDATE ask SET status = 'closed' WHERE tenant = :tenant AND run = :run AND path = :path AND status = 'open'"
)
_LISTED = """FROM ask a JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND (a.status = 'open' OR :all = 1) AND (CAST(:id AS text) IS NULL OR r.id = :id)
    ORDER BY a.asked_at, a.run, a.path LIMIT :limit"""
_LIST = Sql(
    f"SELECT r.id, a.path, a.kind, a.question, a.terms, a.asked_at, a.deadline, a.status, a.answer, r.run {_LISTED}",
    opens={3: QUESTION.at(9, 1), 4: TERMS.at(9, 1), 8: ASK_ANSWER.at(9, 1)},
)
_LIST_ANSWERS = Sql(
    f"""SELECT run, path, who, value, at FROM answer
    WHERE tenant = :tenant AND (run, path) IN (SELECT a.run, a.path {_LISTED}) ORDER BY at""",
    opens={3: ANSWER_VALUE.at(0, 1, 2)},
)
_DOUBT = Sql(
    """SELECT a.path FROM ask a JOIN run r ON r.tenant = a.tenant AND r.run = a.run
    WHERE a.tenant = :tenant AND r.id = :id AND a.kind = 'doubt' AND a.status = 'open'
    AND (a.path = :path OR substr(a.path, 1, length(:path) + 1) = :path || '#')"""
)


class AskSpec(msgspec.Struct, omit_defaults=True):
    """What an answer must be, and who may give it."""

    options: list[Any] | None = None
    schema: dict[str, Any] | None = None
    approvers: list[str] | None = None
    quorum: int = 1
    step: str | None = None  # the step of an effect in doubt
    key: str | None = None
    reason: str | None = None  # why `reconcile` returned no verdict
    effect: str | None = None
    arguments: str | None = None  # of the effect: encoded, secrets masked


def arguments_in(terms: AskSpec, codec: Codec) -> dict[str, Any] | None:
    """Return the masked arguments of the effect that a question is about, as plain data; None if it has none."""
    arguments: dict[str, Any] | None = (
        None if terms.arguments is None else decode(terms.arguments.encode(), codec, raw=True)
    )
    return arguments


class AskState(msgspec.Struct, frozen=True):
    status: str
    answer: bytes | None
    deadline: int | None
    now: int
    terms: str


def open_ask(
    execution: Execution, path: str, kind: str, question: str, terms: AskSpec, deadline: int | None
) -> Generator[Batch, list[Rows], None]:
    """Write the row of a question, in the transaction that records it."""
    yield Batch(
        _OPEN(
            tenant=execution.tenant,
            run=execution.row.run,
            path=path,
            kind=kind,
            question=question,
            terms=msgspec.json.encode(terms).decode(),
            deadline=deadline,
            now=execution.ctx.clock_us(),
        )
    )


def look(execution: Execution, path: str) -> Operation[AskState | None]:
    """Return the state of a question; None if it was never opened, or if the execution only replays."""
    if execution.replay:
        return None
    key = {"tenant": execution.tenant, "run": execution.row.run, "path": path}
    rows = yield from fetch(_LOOK, **key, now=execution.ctx.clock_us())
    return AskState(*rows[0]) if rows else None


def await_answer(
    execution: Execution, path: str, kind: CallKind, waiting: Waiting, wake_at: int | None
) -> Operation[dict[str, Any]]:
    """Wait until a question is answered. Return the answer's parts: `value`, or `done`/`not_done` for a doubt.

    Return an empty dict if no answer came before `wake_at`.
    """
    while True:
        state = yield from look(execution, path)
        if state is not None and state.status == "answered" and state.answer is not None:
            answer = decode(decompress(state.answer), execution.ctx.codec)
            assert isinstance(answer, dict)
            return answer
        if wake_at is not None and state is not None and state.now >= wake_at:
            return {}
        yield Wait(path, waiting, wake_at, kind)


class CheckedQuestion(NamedTuple):
    """A question with checked options. `terms` is the part that the answering process needs."""

    text: str
    terms: AskSpec
    timeout_s: float | None
    on_timeout: Any  # raised if it is an exception class, else the answer
    when: Callable[..., Any] | None = None  # of an approval: decides whether to ask


def question_at(scope: Scope, path: str, asked: CheckedQuestion, kind: CallKind = ASK) -> Operation[Any]:
    execution = scope.execution
    recorded, ended = yield from recorded_call(scope, path, kind.name)
    if ended is not None:
        return (yield from recorded_answer(execution, ended, asked))
    first = opening(recorded)
    if first is None:
        first = yield from ask_people(execution, path, asked, kind)
    return (yield from take_answer(execution, first, asked, kind))


def recorded_answer(execution: Execution, ended: Entry, asked: CheckedQuestion) -> Operation[Any]:
    """Return the recorded answer to a question. If it timed out, return or raise `on_timeout`."""
    return _late(asked) if (ended.extra or {}).get("late") else (yield from replayed(execution, ended))


def ask_people(
    execution: Execution, path: str, asked: CheckedQuestion, kind: CallKind, **extra: Any
) -> Operation[Entry]:
    """Record a question and open its row in the same transaction. Return the entry, which contains `extra`."""
    deadline = None if asked.timeout_s is None else execution.shared_clock_us() + int(asked.timeout_s * 1e6)
    extra |= {"question": asked.text, "deadline": deadline}
    entry = Entry(path, kind.name, execution.ctx.clock_us(), extra=extra)
    opened = partial(open_ask, execution, path, kind.waits_for, asked.text, asked.terms, deadline)
    yield from execution.journal.commit(opened, (WAIT, entry))
    return entry


def waiting_for_answer(kind: CallKind, path: str, text: str) -> Waiting:
    """Describe the wait of a run for the answer to a question."""
    return kind.waiting(path, f"{text} (step {path})", text=text)


def take_answer(
    execution: Execution, first: Entry, asked: CheckedQuestion, kind: CallKind, **extra: Any
) -> Operation[Any]:
    """Wait for the answer to a question, and record it with `extra`. If it times out, return or raise `on_timeout`."""
    path, name = first.path, first.name
    deadline, waiting = (first.extra or {}).get("deadline"), waiting_for_answer(kind, path, asked.text)
    while not (answered := (yield from await_answer(execution, path, kind, waiting, deadline))):
        late = Entry(path, name, execution.ctx.clock_us(), extra={"late": True, **extra})
        try:
            yield from execution.journal.commit(partial(give_up_ask, execution, path), (DONE, late))
        except Answered:
            continue
        return _late(asked)
    value, now = answered["value"], execution.ctx.clock_us()
    extra |= {"who": answered.get("who"), "answered_at": answered.get("at")}
    yield from execution.journal.record((DONE, Entry(path, name, now, value=execution.encoded(value), extra=extra)))
    return value


def close_ask(execution: Execution, path: str) -> Generator[Batch, list[Rows], None]:
    yield Batch(_CLOSE(tenant=execution.tenant, run=execution.row.run, path=path))


class Answered(Exception):
    """A question that was about to be closed has an answer.

    Raised to roll back the closing: the receipt has confirmed that the answer counts.
    """


def give_up_ask(execution: Execution, path: str) -> Generator[Batch, list[Rows], None]:
    """Close a question whose time is over. Raises Answered if it was answered."""
    yield from close_ask(execution, path)
    [asks] = yield Batch(_LOCK(tenant=execution.tenant, run=execution.row.run, path=path))
    if asks and asks[0][0] == "answered":
        raise Answered


def _late(asked: CheckedQuestion) -> Any:
    if isinstance(asked.on_timeout, type) and issubclass(asked.on_timeout, BaseException):
        raise asked.on_timeout(f"no answer came in time: {asked.text}")
    return asked.on_timeout


def question(
    question: str,
    *,
    options: list[Any] | None = None,
    schema: Any = None,
    timeout_s: float | None = None,
    on_timeout: Any = TimeoutError,
    approvers: list[str] | None = None,
    quorum: int = 1,
) -> CheckedQuestion:
    """Return a question after checking its options. Raises UsageError."""
    if not isinstance(question, str) or not question:
        raise UsageError(f"perdure.ask() wants a question as text, not {shown(question)}")
    check_text(question, "the question of perdure.ask()")
    if options is not None and schema is not None:
        raise UsageError("perdure.ask(): give options= or schema=, not both")
    if not isinstance(quorum, int) or isinstance(quorum, bool) or quorum < 1:
        raise UsageError(f"perdure.ask(quorum={shown(quorum)}): how many must agree, 1 or more")
    if isinstance(approvers, str):
        raise UsageError(f"perdure.ask(approvers={approvers!r}): a list of names, such as approvers=[{approvers!r}]")
    for name in approvers or ():
        check_name(name, "approver")
    if approvers is not None and quorum > len(set(approvers)):
        raise UsageError(f"perdure.ask(): quorum={quorum} cannot be reached with {len(set(approvers))} approvers")
    shape = None if schema is None else _schema_of(schema)
    listed = None if options is None else list(options)
    if listed is not None:
        _check_options(listed)
    if timeout_s is not None:
        check_seconds(timeout_s, "perdure.ask(timeout_s=…)")
    terms = AskSpec(listed, shape, None if approvers is None else list(approvers), quorum)
    return CheckedQuestion(question, terms, timeout_s, on_timeout)


def _check_options(options: list[Any]) -> None:
    if not options:
        raise UsageError("perdure.ask(options=[]): there is nothing to choose from")
    for option in options:
        if isinstance(option, str):
            check_text(option, "an option of perdure.ask()")
        try:
            msgspec.json.encode(option)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"perdure.ask(options=…): {type(option).__name__} cannot be shown as JSON: {error}"
            ) from error


def _schema_of(schema: Any) -> dict[str, Any]:
    from perdure.runs.functions.schemas import schema_of  # late: few questions have a schema

    return schema_of(schema)


# --- answering, in any process


class AnswerReceipt(msgspec.Struct, frozen=True):
    """The effect of an answer: it settled the question, or `missing` more people must agree."""

    settled: bool
    missing: int


def give(
    tenant: int, run_id: str, path: str, value: Any, who: str, codec: Codec, now: int, *, verdict: bool = False
) -> Program[AnswerReceipt]:
    """Write an answer to a question. Raises NotFound or AnswerRefused; then nothing is written."""
    [rows] = yield Batch(_FOR_ANSWER(tenant=tenant, id=run_id, path=path, now=now))
    if not rows:
        raise NotFound(f"run {run_id!r} has no question {path!r}; `perdure questions` lists the open ones")
    run, kind, _question, terms_text, _status, deadline, _owner, db_now = rows[0]
    # The run's row is locked first, as by every other writer, to avoid deadlocks.
    _, [(status,)] = yield Batch(LOCK(tenant=tenant, run=run), _LOCK(tenant=tenant, run=run, path=path))
    if status != "open":
        raise AnswerRefused(f"question {path!r} of run {run_id!r} is {status} already")
    if deadline is not None and db_now >= deadline:
        raise AnswerRefused(f"question {path!r} of run {run_id!r}: its time is over")
    if (kind == "doubt") != verdict:
        raise AnswerRefused(
            f"step {path!r} of run {run_id!r} is "
            + ("in doubt: settle it with `perdure run resolve`" if kind == "doubt" else "a question")
        )
    terms = msgspec.json.decode(terms_text, type=AskSpec)
    checked = value if verdict else _allowed(terms, value, who, codec)
    stored = encode(checked, codec)
    yield Batch(_ADD(tenant=tenant, run=run, path=path, who=who, value=stored, now=now))
    [answers] = yield Batch(_ANSWERS(tenant=tenant, run=run, path=path))
    agreeing = [(name, at) for name, answer, at in answers if answer == stored]
    if len(agreeing) < terms.quorum:
        return AnswerReceipt(False, terms.quorum - len(agreeing))
    parts = checked if verdict else {"value": checked}
    parts = {**parts, "who": [name for name, _ in agreeing], "at": max(at for _, at in agreeing)}
    yield Batch(
        _SETTLE(tenant=tenant, run=run, path=path, answer=encode(parts, codec)),
        WAKE(tenant=tenant, run=run),
    )
    return AnswerReceipt(True, 0)


def _allowed(terms: AskSpec, value: Any, who: str, codec: Codec) -> Any:
    if terms.approvers is not None and who not in terms.approvers:
        raise AnswerRefused(f"{who!r} may not answer this; it is for {', '.join(terms.approvers)}")
    if terms.options is not None:
        text = encode(value, codec)
        for option in terms.options:
            if encode(option, codec) == text or (_is_number(value) and _is_number(option) and value == option):
                return option
        raise AnswerRefused(f"answer: must be one of {orjson.dumps(terms.options).decode()}, not {shown(value)}")
    if terms.schema is None:
        return value
    from perdure.runs.functions.schemas import check_answer  # late: few questions have a schema

    return check_answer(value, terms.schema)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number. True is none: JSON writes 2.0 as 2, but never True as 1."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_asks(tenant: int, run_id: str | None, *, everything: bool, limit: int) -> Program[list[tuple[Any, ...]]]:
    """Return questions, oldest first: run id, path, kind, question, terms, times, status, answer, and all answers."""
    params = {"tenant": tenant, "id": run_id, "all": int(everything), "limit": limit}
    asks, answers = yield Batch(_LIST(**params), _LIST_ANSWERS(**params), last=True)
    answers_of: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    for run, path, *answer in answers:
        answers_of.setdefault((run, path), []).append(tuple(answer))
    return [(*row[:9], answers_of.get((row[9], row[1]), [])) for row in asks]


def doubt_at(tenant: int, run_id: str, path: str) -> Program[str | None]:
    """Return the path of the open question whether the effect at a step happened; None if there is none."""
    [rows] = yield Batch(_DOUBT(tenant=tenant, id=run_id, path=path), last=True)
    return rows[0][0] if rows else None
