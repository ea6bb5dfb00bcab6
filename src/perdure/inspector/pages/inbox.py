"""The inbox: what waits for a person, and what went wrong last. People answer, approve and resolve here."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Question, RunInfo
from perdure.errors import NotFound, PerdureError, UsageError
from perdure.inspector.actions import Action, Confirmation, Fields, value_in
from perdure.inspector.questions import answer_in, card
from perdure.inspector.view import PageView
from perdure.views import readable, to_json

_CARDS_MAX, _STUCK_MAX, _FAILED_MAX = 100, 20, 8
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
    waits = info.waiting_for
    why = "" if waits is None or info.status != "stuck" else f"{waits.name}: {waits.text}".removeprefix(": ")
    return {"id": info.id, "function": info.function, "changed_at": info.changed_at, "why": why}


# --- actions


async def _question(view: PageView, run: str, path: str) -> Question:
    for question in await view.store.aquestions(run):
        if question.path == path:
            return question
    raise NotFound(f"the question of run {run!r} at step {path} is not open any more")


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value_in(value) == value else to_json(readable(value))


async def _ask_answer(view: PageView, fields: Fields) -> Confirmation:
    question = await _question(view, fields["run"], fields["path"])
    answer = _text(answer_in(question, fields))
    command = view.command("answer", question.run, question.path, answer, who=view.who)
    text = f"Run {question.run}, step {question.path}: {question.text} The answer is recorded as {view.who}'s."
    return Confirmation(f"Answer {answer}?", text, "Answer", (command,))


async def _answer(view: PageView, fields: Fields) -> str:
    question = await _question(view, fields["run"], fields["path"])
    return await _give(view, question, answer_in(question, fields))


async def _give(view: PageView, question: Question, value: Any) -> str:
    receipt = await view.store.aanswer(question.run, value, step=question.path, who=view.who)
    if receipt.settled:
        return f"Answered. A worker will resume {question.run}."
    return f"Noted. {receipt.missing} more of the same kind needed for {question.run}."


def _verdict(fields: Fields) -> dict[str, Any]:
    """Return what the form says of an effect in doubt, as the options of `run.resolve`."""
    verdict = fields["verdict"]
    if verdict == "not_done":
        return {"not_done": True}
    if verdict != "done":
        raise UsageError("say whether it happened")
    if not fields.get("result").strip():
        raise UsageError("it happened: write what it returned, as JSON; null if it returned nothing")
    return {"done": value_in(fields["result"])}


async def _ask_resolve(view: PageView, fields: Fields) -> Confirmation:
    run, step, verdict = fields["run"], fields["step"], _verdict(fields)
    options = {"done": _text(verdict["done"])} if "done" in verdict else verdict
    command = view.command("run resolve", run, step, who=view.who, **options)
    if "done" in verdict:
        text = f"Step {step} counts as done, and the run continues with the result {options['done']}."
        return Confirmation(f"It happened in {run}?", text, "It happened", (command,))
    text = f"Step {step} counts as not done: a worker performs the effect. The receiver must not know its key."
    return Confirmation(f"It did not happen in {run}?", text, "It did not happen", (command,), is_danger=True)


async def _resolve(view: PageView, fields: Fields) -> str:
    verdict, run = _verdict(fields), await view.store.aget_run(fields["run"])
    await run.aresolve(fields["step"], who=view.who, **verdict)
    counts = "as done" if "done" in verdict else "as not done: a worker will perform it"
    return f"Step {fields['step']} of {run.id} counts {counts}."


# --- several at once


async def _chosen(view: PageView, fields: Fields) -> list[Question]:
    if fields["verb"] not in _SEVERAL:
        raise UsageError(f"{fields['verb']!r} is nothing that can be done with questions")
    names = []
    for text in fields.all("question"):
        name = value_in(text)
        if not isinstance(name, list) or len(name) != 2 or not all(isinstance(part, str) for part in name):
            raise UsageError("a question is chosen by its run and its step: reload the page")
        names.append(name)
    if not names:
        raise UsageError("choose questions first")
    return [await _question(view, run, path) for run, path in names]


async def _ask_several(view: PageView, fields: Fields) -> Confirmation:
    questions, verb = await _chosen(view, fields), fields["verb"]
    commands = tuple(_command(view, verb, one, fields) for one in questions)
    title = f"{_SEVERAL[verb]}: {len(questions)} {'question' if len(questions) == 1 else 'questions'}?"
    text = f"Each is recorded as {view.who}'s. One that is refused stops no other."
    return Confirmation(title, text, _SEVERAL[verb], commands, is_danger=verb in ("decline", "not_done"))


def _command(view: PageView, verb: str, question: Question, fields: Fields) -> str:
    if (question.kind == "doubt") != (verb == "not_done"):
        raise UsageError(f"{question.run}, step {question.path}: that does not fit a {question.kind}; choose it alone")
    if verb == "not_done":
        step = question.step or question.path
        return view.command("run resolve", question.run, step, not_done=True, who=view.who)
    return view.command("answer", question.run, question.path, _text(_same_answer(verb, fields)), who=view.who)


def _same_answer(verb: str, fields: Fields) -> Any:
    return value_in(fields["value"]) if verb == "answer" else verb == "approve"


async def _several(view: PageView, fields: Fields) -> str:
    questions, verb = await _chosen(view, fields), fields["verb"]
    refused = []
    for question in questions:
        try:
            if verb == "not_done":
                run = await view.store.aget_run(question.run)
                await run.aresolve(question.step or question.path, not_done=True, who=view.who)
            else:
                await _give(view, question, _same_answer(verb, fields))
        except PerdureError as error:
            refused.append(f"{question.run}: {error}")
    text = f"{len(questions) - len(refused)} of {len(questions)} settled or noted."
    text = " ".join([text, *refused[:5], *([f"… and {len(refused) - 5} more"] if len(refused) > 5 else [])])
    if len(refused) == len(questions):
        raise UsageError(text)
    return text


ACTIONS = (
    Action("answer", _ask_answer, _answer),
    Action("resolve", _ask_resolve, _resolve),
    Action("several", _ask_several, _several),
)
