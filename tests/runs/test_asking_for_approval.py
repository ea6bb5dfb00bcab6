"""Approvals: what people are shown of the call, and a function that decides whether to ask them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from lab import Interrupt, Lab

import perdure


@perdure.register
@dataclass
class Card:
    """A value with a secret in it."""

    owner: str
    token: str


CALL = "May refund(cents=900, customer='ann', card=Card(owner='ann', token=***)) run?"


def refunding(lab: Lab, approve: Any, *, stops: Callable[[], None] = lambda: None) -> Any:
    @lab.effect(approve=approve, on_doubt="retry", timeout_s=0.01)
    def refund(cents: int, customer: str, card: Any = None, reason: str = "none") -> str:
        lab.ran.append(cents)
        stops()
        return f"refunded {cents}"

    @lab.durable
    async def agent(cents: int, customer: str, *card: Any) -> Any:
        try:
            return await lab(refund(cents, customer, *card))
        except perdure.errors.NotApproved as no:
            return str(no)

    return agent


@pytest.mark.parametrize(
    ("approve", "text"),
    [
        (True, CALL),
        (
            "Refund {cents:,} cents to {customer}, {card.owner} {card.token}? {reason}",
            "Refund 900 cents to ann, ann ***? none",
        ),
        ({"question": "Refund {cents:%Y}?"}, CALL),
    ],
)
def test_a_question_carries_the_call_without_its_secrets(lab: Lab, approve: Any, text: str) -> None:
    agent = refunding(lab, approve)
    run = lab.run(agent, 900, "ann", Card("ann", "s3cret-4711"), id="r")
    [asked] = lab.store.questions("r")
    assert asked.text == text
    assert asked.effect == "refund"
    card = {"<type>": f"{Card.__module__}.Card", "owner": "ann", "token": "***"}
    assert asked.arguments == {"cents": 900, "customer": "ann", "card": card}
    lab.store.answer("r", False)
    assert "4711" not in str(run.result())
    assert lab.ran == []


@pytest.mark.parametrize(
    "approve",
    [
        "Refund {cents:{reason}}?",  # the caller, often a model, would choose how much memory it takes
        "Refund {cents:999999999}?",
        "Refund {cents:.999999999f}?",
        "Refund {cents.__class__}?",
        "Refund {card[__dict__]}?",
        "Refund {0}?",
        "Refund {nobody}?",
        "Refund {cents?",
        "",  # it would not ask at all
        0,
        {"question": ""},
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_when_the_effect_is_decorated(lab: Lab, approve: Any) -> None:
    with pytest.raises(perdure.UsageError):
        refunding(lab, approve)


def test_long_arguments_are_shown_shortened(lab: Lab) -> None:
    before_s = time.process_time()
    lab.run(refunding(lab, "Refund {cents} to {customer}?"), 900, "ann\0" + "a word " * 150_000, id="r")
    assert time.process_time() - before_s < 0.8, "all of it was masked"
    [asked] = lab.store.questions("r")
    assert asked.arguments is not None
    assert len(asked.arguments["customer"]) == 200
    assert len(asked.text) <= 10_000


def test_a_doubt_carries_the_call_too(lab: Lab) -> None:
    @lab.effect()
    def pay(cents: int, password: str) -> None:
        raise ConnectionError

    @lab.durable
    async def agent() -> None:
        await lab(pay(5, "hunter2"))

    lab.run(agent, id="r")
    [asked] = lab.store.questions("r")
    assert (asked.kind, asked.effect, asked.arguments) == ("doubt", "pay", {"cents": 5, "password": "***"})
    assert "Did pay(cents=5, password=***) happen?" in asked.text


def test_a_function_decides_whether_to_ask(lab: Lab) -> None:
    agent = refunding(lab, lambda cents, **_: cents > 1000)
    assert lab.run(agent, 900, "ann", id="small").result() == "refunded 900"
    large = lab.run(agent, 5000, "bob", id="large")
    assert lab.ran == [900]
    [asked] = lab.store.questions()
    assert asked.arguments == {"cents": 5000, "customer": "bob"}
    lab.store.answer(large, True)
    assert large.result() == "refunded 5000"


def test_a_decision_is_not_made_again_in_a_replay(lab: Lab) -> None:
    decisions, stops = iter([True, False]), iter([Interrupt()])

    def stop() -> None:
        for interrupt in stops:
            raise interrupt

    agent = refunding(lab, {"when": lambda: next(decisions), "question": "Refund {cents}?"}, stops=stop)
    asked = lab.run(agent, 900, "ann", id="asked")
    assert lab.run(agent, 900, "ann", id="asked").status == "waiting"
    with pytest.raises(Interrupt):
        lab.run(agent, 700, "ann", id="not asked")
    assert lab.run(agent, 700, "ann", id="not asked").result() == "refunded 700"
    lab.store.answer(asked, True)
    assert asked.result() == "refunded 900"
    assert lab.ran == [700, 700, 900]
    assert next(decisions, None) is None


def test_an_effect_does_not_run_if_the_decision_fails(lab: Lab) -> None:
    failed = lab.run(refunding(lab, lambda: 1 / 0), 900, "ann", id="failed")
    with pytest.raises(perdure.RunFailed, match="division by zero"):
        failed.result()
    stuck = lab.run(refunding(lab, lambda: None), 900, "ann", id="stuck")
    with pytest.raises(perdure.RunStuck, match="returned None: True to ask a person, or False"):
        stuck.result()
    assert lab.ran == []
