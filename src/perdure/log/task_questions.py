"""Questions that the tasks of a framework have attached to the newest checkpoint of a thread.

A task that stops to ask attaches its questions under QUESTIONS, each with an id, and the answers that it has had so far
under ANSWERS. Both are read as they are; there is no other copy of them that could be wrong. ANSWERED is Perdure's own:
the answers that were given here and that the task takes when it runs again. The framework does not see it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from perdure.errors import Damaged, Undecodable, UnknownType
from perdure.log.pending import QUESTIONS, Write, odd_bases, writes_of
from perdure.log.tables import WRITE_VALUE
from perdure.log.thread_table import ThreadRow
from perdure.storage.program import Batch, Program, Rows, Sql, Statement
from perdure.values.codec import decode
from perdure.values.registry import Codec

ANSWERS, ANSWERED = "__resume__", "__answered__"
ANSWERS_IDX, ANSWERED_IDX = -4, -5  # below 0: the last one stays
NO_TASK = "00000000-0000-0000-0000-000000000000"  # attaches the answer that a graph is resumed with
_PAGE = 200  # threads
_OPAQUE = b"\x00"  # the first byte of a value that another serializer made
_APPROVAL = {"question", "effect", "arguments", "run", "step"}  # what `tasks/approvals.py` asks

_WRITE = "w.space, w.id, w.task, w.idx, w.key, w.path, w.base, w.value"
_OPENS = {7: WRITE_VALUE.at(0, 1, 2, 3, 4, 5, 6)}
_OF_WRITE = "tenant = w.tenant AND {0}.thread = w.thread AND {0}.space = w.space AND {0}.id = w.id"
# Writes of tasks that have not ended: one that has ended has an output.
_OPEN = f"""w.key IN ('{QUESTIONS}', '{ANSWERS}', '{ANSWERED}') AND NOT EXISTS (SELECT 1 FROM write o
    WHERE o.{_OF_WRITE.format("o")} AND o.task = w.task AND o.idx >= 0 AND o.key <> '__error_source_node__')"""
# Not max(id): PostgreSQL has no max(bytea) before 18.
_NEWEST = (
    "(SELECT id FROM label l WHERE l.tenant = {0}.tenant AND l.thread = {0}.thread AND l.space = {1}"
    " ORDER BY id DESC LIMIT 1)"
)
_AT_HEAD = f"""JOIN label h ON h.tenant = t.tenant AND h.thread = t.thread AND h.space = 0 AND h.record = t.head
        AND h.id = {_NEWEST.format("t", 0)}
    JOIN write w ON w.tenant = h.tenant AND w.thread = h.thread AND w.space = 0 AND w.id = h.id"""
_THREADS = Sql(
    """SELECT thread, tree, name, asked_at FROM thread WHERE tenant = :tenant AND asked_at IS NOT NULL
    AND (asked_at, thread) > (:asked_at, :thread) ORDER BY asked_at, thread LIMIT :limit"""
)
_THREAD = Sql(
    "SELECT thread, tree, name, asked_at FROM thread WHERE tenant = :tenant AND name = :name AND asked_at IS NOT NULL"
)
_AT_HEADS = Sql(
    f"""SELECT {_WRITE}, t.thread FROM thread t {_AT_HEAD}
    WHERE t.tenant = :tenant AND t.thread IN {{numbers:threads}} AND {_OPEN} ORDER BY t.thread""",
    opens=_OPENS,
    tolerant=True,
)
# The newest checkpoint of each line of a thread. A subgraph has a line of its own.
_OF_THREAD = Sql(
    f"""SELECT {_WRITE}, coalesce(s.name, '') FROM write w
    LEFT JOIN space s ON s.tenant = w.tenant AND s.thread = w.thread AND s.space = w.space
    JOIN label h ON h.{_OF_WRITE.format("h")} AND h.record = CASE WHEN w.space = 0 THEN :head ELSE s.head END
    WHERE w.tenant = :tenant AND w.thread = :thread AND w.id = {_NEWEST.format("w", "w.space")} AND {_OPEN}""",
    opens=_OPENS,
)
_NOTE = Sql(
    f"""UPDATE thread SET asked_at = :at, asked_id = {_NEWEST.format("thread", 0)}
    WHERE tenant = :tenant AND thread = :thread AND EXISTS (
    SELECT 1 FROM thread t {_AT_HEAD} WHERE t.tenant = :tenant AND t.thread = :thread AND w.key = '{QUESTIONS}')"""
)


class TaskQuestion(NamedTuple):
    """A question of a task. `value` is what the framework shows to people, as plain data."""

    thread: str
    asked_at: int
    id: str
    value: Any
    schema: dict[str, Any] | None
    answer: dict[str, Any] | None  # the one that was given here: value, who, at; None if it is open


class AskingTask(NamedTuple):
    """The line and the checkpoint that a task of a thread belongs to, and what the task has attached there."""

    space: int
    namespace: str
    id: bytes
    writes: dict[str, Write]  # by key

    @property
    def task(self) -> str:
        return next(iter(self.writes.values())).task

    @property
    def path(self) -> str:
        return next(iter(self.writes.values())).path


def note_questions(tenant: int, thread: int, at: int) -> Statement:
    """Return the statement that marks a thread as asking if its newest checkpoint has a question."""
    return _NOTE(tenant=tenant, thread=thread, at=at)


def list_questions(tenant: int, name: str | None, limit: int, *, answered: bool) -> Program[list[TaskQuestion]]:
    """Return the open questions of the tasks of all threads, or of one, the oldest first; `answered` ones too."""
    if name is not None:
        [threads] = yield Batch(_THREAD(tenant=tenant, name=name))
        return (yield from _questions_in(tenant, threads, answered))[:limit]
    questions: list[TaskQuestion] = []
    asked_at = thread = -1
    while len(questions) < limit:
        [threads] = yield Batch(_THREADS(tenant=tenant, asked_at=asked_at, thread=thread, limit=_PAGE))
        if not threads:
            break
        questions += yield from _questions_in(tenant, threads, answered)
        thread, _, _, asked_at = threads[-1]
    return questions[:limit]


def _questions_in(tenant: int, threads: Rows, answered: bool) -> Generator[Batch, list[Rows], list[TaskQuestion]]:
    [rows] = yield Batch(_AT_HEADS(tenant=tenant, threads=f"[{','.join(str(row[0]) for row in threads)}]"))
    of_thread = {thread: [*group] for thread, group in groupby(rows, key=lambda row: row[-1])}
    questions: list[TaskQuestion] = []
    for thread, tree, name, asked_at in threads:
        tasks = yield from _tasks(tenant, tree, [(*row[:-1], "") for row in of_thread.get(thread, ())])
        raised = (one for task in tasks for one in _questions(name, asked_at, task))
        questions += [one for one in {one.id: one for one in raised}.values() if answered or one.answer is None]
    return questions


def tasks_of(tenant: int, row: ThreadRow) -> Program[list[AskingTask]]:
    """Return the tasks that have not ended, of the newest checkpoint of each line of a thread."""
    [rows] = yield Batch(_OF_THREAD(tenant=tenant, thread=row.thread, head=row.head))
    return (yield from _tasks(tenant, row.tree, rows))


def _tasks(tenant: int, tree: int, rows: Rows) -> Generator[Batch, list[Rows], list[AskingTask]]:
    texts = yield from odd_bases(tenant, tree, [row[1:] for row in rows], ())
    places = []
    for (space, id_, _task), group in groupby(sorted(rows, key=_of_task), key=_of_task):
        lines = [*group]
        writes = writes_of([row[1:8] for row in lines], texts)
        places.append(AskingTask(space, lines[0][-1], id_, {write.key: write for write in writes}))
    return places


def _of_task(row: tuple[Any, ...]) -> tuple[int, bytes, bytes]:
    return row[0], row[1], row[2]


def _questions(thread: str, asked_at: int, task: AskingTask) -> list[TaskQuestion]:
    answers = {one["id"]: one for one in answered_in(task)}
    return [
        TaskQuestion(thread, asked_at, str(one.get("id")), one.get("value"), _schema(one), answers.get(one.get("id")))
        for one in questions_in(task)
    ]


def _schema(question: dict[str, Any]) -> dict[str, Any] | None:
    schema = question.get("response_schema")
    return schema if isinstance(schema, dict) else None


def questions_in(task: AskingTask) -> list[dict[str, Any]]:
    """Return the questions that a task has attached. Those for approvals are left out: they have rows of their own."""
    raised = _decoded(task.writes.get(QUESTIONS))
    return [
        one
        for one in (raised if isinstance(raised, list | tuple) else [raised])
        if isinstance(one, dict) and not (isinstance(one.get("value"), dict) and one["value"].keys() == _APPROVAL)
    ]


def answered_in(task: AskingTask) -> list[dict[str, Any]]:
    """Return the answers that a task was given here, the oldest first."""
    answers = _decoded(task.writes.get(ANSWERED))
    return [one for one in answers if isinstance(one, dict)] if isinstance(answers, list) else []


def _decoded(write: Write | None) -> Any:
    """Return a value as plain data. One that only its serializer can read is a question without an id."""
    if write is None:
        return None
    if is_opaque(write):
        return [{"value": "the question is encoded by the graph's own serializer", "id": ""}]
    try:
        return decode(write.text, Codec(), raw=True)
    except (Undecodable, UnknownType) as error:
        raise Damaged(f"a question of task {write.task} cannot be read; run `perdure store verify`") from error


def is_opaque(write: Write) -> bool:
    """Return whether another serializer than the store's has encoded a value."""
    return write.text[:1] == _OPAQUE


def asking(tasks: Iterable[AskingTask], id_: str) -> Sequence[AskingTask]:
    """Return the tasks that have attached a question, the one that asked it last.

    The caller of a task, such as the node of a subgraph, attaches its questions again.
    """
    places = [task for task in tasks if any(one.get("id") == id_ for one in questions_in(task))]
    return sorted(places, key=lambda task: (bool(task.namespace), len(task.namespace), len(task.path)))
