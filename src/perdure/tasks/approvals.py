"""Approvals of effects in a task whose framework asks people by ending the task and running it again with the answers.

The framework returns its answers in order, to whichever question comes first. The order of parallel calls is not fixed,
so the journal records to which question an answer belongs. A question also has a row and may be answered there instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from threading import RLock
from typing import Any, Protocol

import msgspec

from perdure.errors import AnswerRefused
from perdure.runs.calls import asks
from perdure.runs.calls.asks import APPROVE, CheckedQuestion
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation
from perdure.runs.execution.scope import Scope
from perdure.runs.journal.entries import DONE, WAIT, Entry, completion, opening
from perdure.runs.run_table import Waiting
from perdure.storage.program import Flow


class Questions(Protocol):
    """How the framework of a task asks people."""

    def ask(self, question: dict[str, Any]) -> tuple[Any, str]:
        """Return the next answer of this task and who gave it. If there is none, raise the error that ends the task."""

    def forget(self) -> Flow[None]:
        """Delete the answer that the task was run again with, so that no later run returns it again."""


class Approvals:
    """The approvals of one execution of a task. `ends` are the errors with which the framework ends the task."""

    def __init__(self, questions: Questions, ends: tuple[type[BaseException], ...]) -> None:
        self._questions, self._ends = questions, ends
        self._lock = RLock()  # calls run in parallel
        self._taken = 0  # answers that the framework has returned so far
        self._due = 0  # answers that the approvals called so far have used
        self._counted: set[str] = set()  # open questions that are part of `_due`
        self.asks_for: Waiting | None = None  # the question that has ended the task

    def passed(self, execution: Execution, path: str) -> Operation[None]:
        """Take the answers of a recorded approval again, because the framework counts the answers that it returns."""
        ended = completion(execution.index.at(path))
        if ended is None or not (used := (ended.extra or {}).get("used", 0)):
            return
        if lost := self._use(used):
            value, now = (yield from execution.value(ended)), execution.ctx.clock_us()
            extra = {**(ended.extra or {}), "used": used - lost}
            entry = Entry(path, APPROVE.name, now, value=execution.encoded(value), extra=extra)
            yield from execution.journal.record((DONE, entry))

    def approval(self, scope: Scope, path: str, asked: CheckedQuestion) -> Operation[Any]:
        """Return the answer to a question. If there is none yet, ask, and raise the error that ends the task."""
        execution = scope.execution
        recorded, ended = yield from recorded_call(scope, path, APPROVE.name)
        if ended is not None:
            return (yield from asks.recorded_answer(execution, ended, asked))
        state = yield from asks.look(execution, path)
        if state is None or state.status != "answered":
            yield from self._answer_open_question(execution)
        first = opening(recorded)
        if first is None:
            yield from self._ask(execution, path, asked)
        assert first is not None  # `_ask` raises
        used = _placed(execution, path)["used"]
        if path not in self._counted:  # answered in its row, or in an execution that crashed
            self._use(used)
        return (yield from asks.take_answer(execution, first, asked, asks.APPROVE, used=used))

    def _ask(self, execution: Execution, path: str, asked: CheckedQuestion) -> Operation[None]:
        """Open a question and raise the error that ends the task. Remaining answers are not for this question."""
        question, number = _shown(execution, path, asked.text, asked.terms), self._taken
        end: BaseException | None = None
        while end is None:
            try:
                self._next(question)
            except self._ends as error:
                end = error
        yield from self._questions.forget()
        placed = {"number": number, "used": self._taken - number}
        yield from asks.ask_people(execution, path, asked, asks.APPROVE, **placed)
        self.asks_for = asks.waiting_for_answer(asks.APPROVE, path, asked.text)
        raise end

    def _answer_open_question(self, execution: Execution) -> Operation[None]:
        """Give the answers that the task was run again with to its open questions, whichever call comes first."""
        for path, placed in list(_open_questions(execution)):
            refused = None
            while (state := (yield from asks.look(execution, path))) is not None and state.status == "open":
                if state.deadline is not None and state.now >= state.deadline:
                    break
                if path not in self._counted:
                    self._counted.add(path)
                    self._due += placed["used"]
                    if self._take(placed["number"] + placed["used"]):
                        placed = {**placed, "number": self._taken, "used": 0}
                        yield from execution.journal.record(_asked_again(execution, path, placed))
                        self._due = self._taken
                terms = msgspec.json.decode(state.terms, type=asks.AskSpec)
                try:
                    value, who = self._next(_shown(execution, path, placed["question"], terms))
                except self._ends as end:
                    self.asks_for = asks.waiting_for_answer(asks.APPROVE, path, placed["question"])
                    raise refused or end from None
                self._due += 1
                placed = {**placed, "used": placed["used"] + 1}
                now, codec = execution.ctx.clock_us(), execution.ctx.codec
                entry = _asked_again(execution, path, placed)
                giving = partial(asks.give, execution.tenant, execution.row.id, path, value, who, codec, now)
                try:
                    yield from execution.journal.commit(giving, entry)
                    refused = None
                except AnswerRefused as error:
                    yield from execution.journal.record(entry)
                    refused = error
                yield from self._questions.forget()

    def _use(self, count: int) -> int:
        """Take the answers of one more approval again. Return how many were lost in a crash."""
        with self._lock:
            lost = self._take(self._due + count)
            self._due += count - lost
            return lost

    def _take(self, number: int) -> int:
        """Take answers from the framework until `number` are taken. Return how many it has lost in a crash."""
        with self._lock:
            while self._taken < number:
                try:
                    self._next({})
                except self._ends:
                    return number - self._taken
            return 0

    def _next(self, question: dict[str, Any]) -> tuple[Any, str]:
        with self._lock:
            answer = self._questions.ask(question)
            self._taken += 1
            return answer


def _open_questions(execution: Execution) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, recorded in execution.index.calls():
        first = opening(recorded)
        if first is not None and first.name == APPROVE.name and completion(recorded) is None:
            yield path, _placed(execution, path)


def _asked_again(execution: Execution, path: str, placed: dict[str, Any]) -> tuple[int, Entry]:
    return WAIT, Entry(path, APPROVE.name, execution.ctx.clock_us(), extra=placed)


def _placed(execution: Execution, path: str) -> dict[str, Any]:
    """Return a question's text and its place among the answers: `number` came before it, `used` are its own so far."""
    extras = [one.entry.extra for one in execution.index.at(path) if one.kind == WAIT]
    return extras[-1] or {}


def _shown(execution: Execution, path: str, text: str, terms: asks.AskSpec) -> dict[str, Any]:
    """Return what the framework shows to people."""
    arguments = asks.arguments_in(terms, execution.ctx.codec)
    return {"question": text, "effect": terms.effect, "arguments": arguments, "run": execution.row.id, "step": path}
