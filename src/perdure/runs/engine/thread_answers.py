"""Answers to the questions of a thread's tasks (`log/task_questions.py`), given in any process.

An answer is stored where the task finds it when its framework runs it again. In the same transaction a run is made due
that stands for this resumption: a worker that knows the graph claims it (`tasks/resuming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from perdure.errors import AnswerRefused, NotFound
from perdure.log import task_questions
from perdure.log.pending import QUESTIONS, Write, write_statements
from perdure.log.task_questions import (
    ANSWERED,
    ANSWERED_IDX,
    ANSWERS,
    ANSWERS_IDX,
    NO_TASK,
    AskingTask,
    TaskQuestion,
    answered_in,
    asking,
    is_opaque,
    questions_in,
)
from perdure.log.thread_table import try_thread
from perdure.runs.calls.asks import AnswerReceipt
from perdure.runs.engine.models import Question
from perdure.runs.journal import rows
from perdure.runs.journal.rows import TASK, WAITS, NewRun
from perdure.runs.run_table import Waiting
from perdure.storage.program import Batch, Flow, Program, Sql, read, write
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.codec import encode
from perdure.values.registry import Codec
from perdure.values.safe_repr import shown

TASKS_QUEUE = "tasks"  # no worker serves it, and no queue limit counts its runs
RESUMPTION = f"{TASK}graph"
GRAPH = Waiting("graph", "its graph to be run again")
_ID_MAX = 400
_TEXT_MAX = 300
_WAKE = Sql(
    """UPDATE run SET wakeup_pending = 1, waiting = :waiting,
        status = CASE WHEN status = 'running' THEN status ELSE 'waiting' END,
        wake_at = CASE WHEN status = 'running' THEN wake_at ELSE 0 END, keep_until = NULL
    WHERE tenant = :tenant AND run = :run""",
    seals=WAITS,
)


def resumption_id(thread: str) -> str:
    """Return the id of the run that stands for the resumption of a thread."""
    plain = f"resume/{thread}"
    return plain if len(plain) <= _ID_MAX else f"resume/{blake2b(thread.encode(), digest_size=32).hexdigest()}"


def resumption(ctx: StoreContext, thread: str, number: int) -> NewRun:
    """Return the run that stands for the resumption of a thread, due at once."""
    incarnation = ctx.entropy(16)
    id_ = resumption_id(thread)
    return NewRun(id_, RESUMPTION, "any", b"{}", b"", incarnation, TASKS_QUEUE, root=number, status="waiting")


def list_questions(ctx: StoreContext, thread: str | None, everything: bool, limit: int) -> Flow[list[Question]]:
    """Return the questions that the tasks of all threads, or of one, have stopped for, the oldest first."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    op = partial(task_questions.list_questions, tenant, thread, limit, answered=everything)
    return [_question(one) for one in (yield from read(op))]


def _question(one: TaskQuestion) -> Question:
    answers = [] if one.answer is None else [(one.answer["who"], one.answer["value"], moment(one.answer["at"]))]
    return Question(
        run=one.thread,
        path=one.id,
        kind="question",
        text=_text(one.value),
        options=None,
        schema=one.schema,
        approvers=None,
        quorum=1,
        asked_at=moment(one.asked_at),
        deadline=None,
        status="open" if one.answer is None else "answered",
        answers=tuple(answers),
        arguments=dict(one.value) if isinstance(one.value, dict) else None,
        thread=one.thread,
    )


def _text(value: Any) -> str:
    """Return the text of a question: the value itself, or its `question`, or else all of it in short."""
    text = value.get("question") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else shown(value, _TEXT_MAX)


def check_asks(ctx: StoreContext, name: str, is_run: bool) -> Flow[None]:
    """Raise NotFound if there is neither a run nor a thread of this name."""
    tenant = yield from ctx.tenant()
    if not is_run and (tenant is None or (yield from read(partial(try_thread, tenant, name))) is None):
        raise NotFound(f"there is no run and no thread {name!r} in this store for this tenant; `perdure questions`")


def answer(ctx: StoreContext, thread: str, id_: str | int, value: Any, who: str) -> Flow[AnswerReceipt]:
    """Answer a question of a thread's task. Raises NotFound or AnswerRefused; then nothing is written."""
    check_name(who, "person")
    tenant = yield from ctx.ensure_tenant()
    return (yield from write(partial(_give, ctx, tenant, thread, str(id_), value, who, ctx.clock_us())))


def _give(
    ctx: StoreContext, tenant: int, name: str, id_: str, value: Any, who: str, now: int
) -> Program[AnswerReceipt]:
    row = yield from try_thread(tenant, name, lock=True)
    if row is None:
        raise NotFound(f"thread {name!r} was deleted")
    places = asking((yield from task_questions.tasks_of(tenant, row)), id_)
    if not places or places[0].namespace:
        raise AnswerRefused(
            f"thread {name!r} has no open question {id_!r}: its graph has continued since, or was resumed with an "
            f"answer; `perdure questions {name}` lists what is open"
        )
    if earlier := [one for one in answered_in(places[0]) if one["id"] == id_]:
        raise AnswerRefused(f"question {id_!r} of thread {name!r} is answered already, by {earlier[0]['who']}")
    for write_ in (places[-1].writes.get(key) for key in (QUESTIONS, ANSWERS)):
        if write_ is not None and is_opaque(write_):
            raise AnswerRefused(
                f"thread {name!r}: the graph has a serializer of its own, which this process does not have: resume the "
                "graph itself with Command(resume=…)"
            )
    checked = _checked(places[0], id_, value)
    yield Batch(*(
        statement
        for place, writes in _writes(places, {"id": id_, "value": checked, "who": who, "at": now}, ctx.codec)
        for statement in write_statements(tenant, row.thread, place.id, writes, None, place.space)
    ))  # fmt: skip
    new = resumption(ctx, name, row.thread)
    *_, [run] = yield Batch(*rows.insert_statements(tenant, new, now, None, 0), rows.BY_ID(tenant=tenant, id=new.id))
    yield Batch(_WAKE(tenant=tenant, run=run[0], waiting=GRAPH.as_text()), last=True)
    return AnswerReceipt(True, 0)


def _checked(place: AskingTask, id_: str, value: Any) -> Any:
    schema = next(one.get("response_schema") for one in questions_in(place) if one.get("id") == id_)
    if not isinstance(schema, dict):
        return value
    from perdure.runs.functions.schemas import check_answer  # late: few questions have a schema

    return check_answer(value, schema)


def _writes(
    places: Sequence[AskingTask], answer_: dict[str, Any], codec: Codec
) -> list[tuple[AskingTask, list[Write]]]:
    """Return what is attached to the tasks that have attached a question. The one that asked it gets the answer.

    What the graph was resumed with before is cleared: the framework would give it to the task's next question.
    """
    stored = []
    for place in places:
        text = encode([*answered_in(place), answer_], codec)
        stored.append((place, [Write(place.task, ANSWERED_IDX, ANSWERED, place.path, text)]))
    asked = places[-1]
    before = asked.writes.get(ANSWERS)
    one = encode(answer_["value"], codec)
    text = b"[%b]" % one if before is None else _appended(before.text, one)
    stored.append((asked, [Write(asked.task, ANSWERS_IDX, ANSWERS, asked.path, text)]))
    stored.append((places[0], [Write(NO_TASK, ANSWERS_IDX, ANSWERS, "", b"null")]))
    return stored


def _appended(texts: bytes, one: bytes) -> bytes:
    """Return the text of a list with one more value, or of a list of two if the first text is no list."""
    if not (texts.startswith(b"[") and texts.endswith(b"]")):
        return b"[%b,%b]" % (texts, one)
    return b"[%b]" % one if texts == b"[]" else b"%b,%b]" % (texts[:-1], one)
