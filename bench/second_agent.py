"""What a second agent costs: the same task by one agent, by one with a subtask, and by a team of three.

The task: read one page or ten, then write a text in five drafts. The model is a stand-in that counts the tokens of its
prompts, which a real model would be paid for; each call sends the whole context again, as chat APIs do. Time and commits
are Perdure's own, because the stand-in answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import perdure
from bench.measure import Row, Run

DRAFTS = 5
# Tokens. A page is what a tool returns; notes are what a reader hands on; a review is a reviewer's answer.
SYSTEM, PAGE, DRAFT, NOTES, REVIEW = 800, 1000, 400, 500, 150


class Bill(NamedTuple):
    """What a task took: calls of the model, tokens of its prompts, and Perdure's milliseconds."""

    calls: int
    tokens: int
    ms: float


_bill: list[int] = []


@perdure.step(name="bench.model")
def model(prompt_tokens: int) -> int:
    """Stand for a call of a model: note the size of its prompt."""
    _bill.append(prompt_tokens)
    return prompt_tokens


def read_pages(pages: int, context: int = SYSTEM) -> int:
    for _ in range(pages):
        model(context)
        context += PAGE
    return context


def write_drafts(context: int) -> int:
    for _ in range(DRAFTS):
        model(context)
        context += DRAFT
    return context


@perdure.durable(name="bench.one_agent")
def one_agent(pages: int) -> int:
    return write_drafts(read_pages(pages))


@perdure.durable(name="bench.reader")
def reader(pages: int) -> int:
    model(read_pages(pages))  # writes the notes
    return NOTES


@perdure.durable(name="bench.with_subtask")
def with_subtask(pages: int) -> int:
    model(SYSTEM)  # decides to hand the reading on
    return write_drafts(SYSTEM + int(perdure.subtask(reader, pages)))


def second_agent(run: Run) -> list[Row]:
    rounds = run.count(30, 2)
    rows = []
    for pages in (1, 10):
        with perdure.open(run.folder / f"agents-{pages}.db") as store:
            one = _measure(
                rounds, lambda n, store=store, pages=pages: store.run(one_agent, pages, id=f"one-{n}").result()
            )
            two = _measure(
                rounds, lambda n, store=store, pages=pages: store.run(with_subtask, pages, id=f"two-{n}").result()
            )
            team = _measure(rounds, _team(store, pages))
        for name, bill in (("one agent", one), ("with a subtask", two), ("a team of three", team)):
            note = f"{bill.calls} calls of the model; Perdure takes {bill.ms:.1f} ms, {bill.ms / one.ms:.1f} times one agent"
            what = f"{name}, {pages} page{'s' if pages > 1 else ''}: prompts of a task"
            rows.append(Row(what, bill.tokens, "tokens", ratio=bill.tokens / one.tokens, note=note))
    return rows


def _measure(rounds: int, task: Callable[..., Any]) -> Bill:
    times = []
    for number in range(rounds):
        _bill.clear()
        began = time.perf_counter()
        task(number)
        times.append(time.perf_counter() - began)
    return Bill(len(_bill), sum(_bill), median(times) * 1000)


def _team(store: perdure.Store, pages: int) -> Callable[..., Any]:
    """A researcher reads, a writer drafts, a reviewer answers each draft but the last."""

    def task(number: int) -> None:
        team = store.team(f"bench-{number}")

        @team.agent
        def researcher(state: Any, message: Any) -> None:
            model(read_pages(pages))
            perdure.send("writer", NOTES)

        @team.agent
        def writer(state: Any, message: int) -> None:
            state["context"] = state.get("context", SYSTEM) + message
            state["drafts"] = state.get("drafts", 0) + 1
            model(state["context"])
            state["context"] += DRAFT
            if state["drafts"] < DRAFTS:
                perdure.send("reviewer", DRAFT)

        @team.agent
        def reviewer(state: Any, message: int) -> None:
            model(SYSTEM + message)
            perdure.send("writer", REVIEW)

        team.send("researcher", "go")
        team.work(until_idle=True)

    return task
