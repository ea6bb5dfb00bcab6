"""The inbox: what waits for a person, and what went wrong last. People answer, approve and resolve here."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Question, RunInfo
from perdure.errors import NotFound, PerdureError, UsageError
from perdure.inspector.actions import Confirmation, Fields, count, value_in
from perdure.inspector.pages.runs import why_stuck
from perdure.inspector.questions import answer_in, card
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.views import readable, to_json

_CARDS_MAX, _STUCK_MAX, _FAILED_MAX, _REFUSED_MAX = 100, 20, 8, 5
_ORDER = {"doubt": 0, "approval": 1, "question": 2}
_SEVERAL = {"approve": "Approve", "decline": "Decline", "not_done": "Resolve as not happened", "answer": "Answer"}


async def inbox(view: PageView) -> dict[str, Any]:
    """Return the open questions, the stuck runs, the last failures and the number of runs by status."""
    store = view.store
    questions, stuck, failed, counts = await asyncio.gather(
        store.aquestions(limit=_CARDS_MAX + 1),
        store.aruns(statuses="stuck", limit=_STUCK_MAX),
        store.aruns(statuses="failed", limit=_FAILED_MAX),
        store.acount_runs(),
    )
    cards = sorted((card(view, one) for one in questions[:_CARDS_MAX]), key=lambda one: _ORDER.get(one["kind"], 3))
    return {
        "cards": cards,
        "has_more": len(questions) > _CARDS_MAX,
        "stuck": [_row(one) for one in stuck],
        "failed": [_row(one) for one in failed],
        "counts": dict(counts),
    }


def _row(info: RunInfo) -> dict[str, Any]:
    return pick(info, "id function changed_at") | {"why": why_stuck(info)}


# --- actions


async def answer(view: PageView, fields: Fields) -> Confirmation:
    """Answer a question."""
    question = await _question(view, fields["run"], fields["path"])
    value = answer_in(question, fields)
    where = f"Run {question.run}, step {question.path}" if question.thread is None else f"Thread {question.thread}"
    text = f"{where}: {question.text} The answer is recorded as {view.who}'s."
    command = view.signed("answer", question.run, question.path, _text(value))
    return Confirmation(f"Answer {_text(value)}?", text, "Answer", (command,), lambda: _give(view, question, value))


async def resolve(view: PageView, fields: Fields) -> Confirmation:
    """Settle an effect in doubt: it happened, or it did not."""
    run, step = fields["run"], fields["step"]
    handle = await view.store.aget_run(run)

    if fields["verdict"] == "not_done":

        async def run_again() -> str:
            await handle.aresolve(step, not_done=True, who=view.who)
            return f"Step {step} of {run} counts as not done: a worker will perform it."

        text = f"Step {step} counts as not done: a worker performs the effect. The receiver must not know its key."
        command = view.signed("run resolve", run, step, not_done=True)
        return Confirmation(
            f"It did not happen in {run}?", text, "It did not happen", (command,), run_again, is_danger=True
        )

    if not fields.get("result"):
        raise UsageError("it happened: write what it returned, as JSON; null if it returned nothing")
    result = value_in(fields["result"])

    async def record() -> str:
        await handle.aresolve(step, done=result, who=view.who)
        return f"Step {step} of {run} counts as done."

    text = f"Step {step} counts as done, and the run continues with the result {_text(result)}."
    command = view.signed("run resolve", run, step, done=_text(result))
    return Confirmation(f"It happened in {run}?", text, "It happened", (command,), record)


async def several(view: PageView, fields: Fields) -> Confirmation:
    """Settle the chosen questions in the same way. One that is refused stops no other."""
    verb = fields.one_of("verb", _SEVERAL, "question")
    questions = [await _question(view, *_place(text)) for text in fields.all("question")]
    if not questions:
        raise UsageError("choose questions first")
    value = value_in(fields["value"]) if verb == "answer" else verb == "approve"
    commands = tuple(_command(view, verb, one, value) for one in questions)

    async def do() -> str:
        refused = []
        for question in questions:
            try:
                if verb == "not_done":
                    run = await view.store.aget_run(question.run)
                    await run.aresolve(question.step or question.path, not_done=True, who=view.who)
                else:
                    await _give(view, question, value)
            except PerdureError as error:
                refused.append(f"{question.run}: {error}")
        more = [f"… and {len(refused) - _REFUSED_MAX} more"] if len(refused) > _REFUSED_MAX else []
        settled = f"{len(questions) - len(refused)} of {len(questions)} settled or noted."
        text = " ".join([settled, *refused[:_REFUSED_MAX], *more])
        if len(refused) == len(questions):
            raise UsageError(text)
        return text

    title = f"{_SEVERAL[verb]}: {count(len(questions), 'question')}?"
    text = f"Each is recorded as {view.who}'s. One that is refused stops no other."
    return Confirmation(title, text, _SEVERAL[verb], commands, do, is_danger=verb in ("decline", "not_done"))


async def _question(view: PageView, run: str, path: str) -> Question:
    for question in await view.store.aquestions(run):
        if question.path == path:
            return question
    raise NotFound(f"the question of run {run!r} at step {path} is not open any more")


async def _give(view: PageView, question: Question, value: Any) -> str:
    receipt = await view.store.aanswer(question.run, value, step=question.path, who=view.who)
    if receipt.settled and question.thread is not None:
        return f"Answered. A worker that was given the graph resumes {question.thread}, or invoke it again."
    if receipt.settled:
        return f"Answered. A worker resumes {question.run}, or the line that started it."
    return f"Noted. {receipt.missing} more of the same kind needed for {question.run}."


def _place(text: str) -> tuple[str, str]:
    """Return the run and the step of a chosen question."""
    match value_in(text):
        case [str(run), str(path)]:
            return run, path
    raise UsageError("a question is chosen by its run and its step: reload the page")


def _command(view: PageView, verb: str, question: Question, value: Any) -> str:
    if (question.kind == "doubt") != (verb == "not_done"):
        raise UsageError(f"{question.run}, step {question.path}: that does not fit a {question.kind}; choose it alone")
    if verb == "not_done":
        return view.signed("run resolve", question.run, question.step or question.path, not_done=True)
    return view.signed("answer", question.run, question.path, _text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value_in(value) == value else to_json(readable(value))


ACTIONS = (answer, resolve, several)
