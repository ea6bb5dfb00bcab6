"""Effects: an intent before, a completion after, one key; in between a doubt that somebody who knows must settle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from effects_kit import Receiver, booking
from lab import Interrupt, Lab, Once, hooked

import perdure

# --- the two commits and the key


def test_an_effect_has_an_intent_and_a_completion_and_one_key(lab: Lab) -> None:
    receiver, seen = Receiver(), []

    @lab.effect()
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        [step] = lab.store.get_run("r").steps()
        seen.append((step.status, step.key, step.result))  # the intent is there before the body runs
        assert perdure.idempotency_key() == key
        return receiver.act(key, flight)

    @lab.durable
    async def agent() -> Any:
        return await lab(book("LH400"))

    run = lab.run(agent, id="r")
    assert run.result() == "done: LH400"
    [step] = run.steps()
    [(key, _)] = receiver.done
    assert seen == [("in doubt", key, None)]
    assert (step.kind, step.status, step.key, step.result) == ("effect", "done", key, "done: LH400")
    assert key.startswith("pd_")
    assert lab.run(agent, id="r").result() == "done: LH400"
    assert len(receiver.done) == 1


def test_keys_differ_by_call_run_and_tenant_and_stay_across_attempts(lab: Lab) -> None:
    keys: list[str] = []

    @lab.effect(retries=2, backoff_s=0, definite=(ValueError,))
    def book(flight: str) -> None:
        keys.append(perdure.idempotency_key())
        if len(keys) in (1, 2):
            raise ValueError("try again")

    @lab.durable
    async def agent() -> None:
        await lab(book("a"))
        await lab(book("a"))
        await lab(book("b"))

    lab.run(agent, id="r").result()
    assert keys[0] == keys[1] == keys[2]  # attempts of one call
    lab.run(agent, id="s").result()
    Lab(lab.store, "sync").store.run(agent, id="r").result()
    assert len(set(keys)) == 9
    assert len(keys) == 11


def test_a_failed_effect_is_recorded_and_not_tried_again(lab: Lab) -> None:
    @lab.effect(definite=(ValueError,))
    def book(flight: str) -> None:
        lab.ran.append(flight)
        raise ValueError("sold out")

    once = Once()

    @lab.durable
    async def agent() -> str:
        try:
            await lab(book("a"))
        except ValueError as error:
            once.interrupt()
            return str(error)
        return ""

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.run(agent, id="r").result() == "sold out"
    assert lab.ran == ["a"]


def test_each_attempt_of_a_retried_effect_has_an_intent_of_its_own(lab: Lab) -> None:
    heard: list[str] = []

    @lab.effect(retries=2, backoff_s=0.001, retry_on=(ValueError,), definite=ValueError)
    def book() -> str:
        lab.ran.append("book")
        if len(lab.ran) < 3:
            raise ValueError("busy")
        return "ok"

    @lab.durable
    async def agent() -> Any:
        return await lab(book())

    with hooked(lambda point: heard.append(f"{point.when} {point.kind} {point.attempt}")):
        run = lab.run(agent, id="r")
    assert run.result() == "ok"
    [step] = run.steps()
    assert step.attempts == 3
    assert [said for said in heard if said.startswith("before")] == [
        "before intent 1",
        "before body 1",
        "before failed 1",  # with the next intent, in one commit
        "before body 2",
        "before failed 2",
        "before body 3",
        "before done 3",
        "before finish 1",
    ]


def test_an_effect_that_waits_for_its_next_attempt_is_not_in_doubt(lab: Lab) -> None:
    @lab.effect(retries=1, backoff_s=3600, definite=(ValueError,))
    def book() -> None:
        lab.ran.append("book")
        raise ValueError("busy")

    @lab.durable
    async def agent() -> None:
        await lab(book())

    for _ in range(2):
        run = lab.run(agent, id="r")
        assert run.refresh().status == "waiting"
        assert getattr(run.refresh().waiting_for, "kind", None) == "retry"
        run.resume()
    assert lab.store.questions() == []
    assert lab.ran == ["book"]
    [step] = run.steps()
    assert step.status == "retrying"


def test_methods_are_effects_with_a_key(lab: Lab) -> None:
    class Airline:
        def __init__(self, name: str) -> None:
            self.name = name

        @perdure.effect
        def book(self, flight: str, key: perdure.IdempotencyKey) -> list[str]:
            return [self.name, flight, key]

        @perdure.effect
        async def abook(self, flight: str, *, key: perdure.IdempotencyKey) -> list[str]:
            return [self.name, flight, key]

    @lab.durable
    async def agent() -> Any:
        airline = Airline("LH")
        return await lab(airline.abook("400") if lab.is_async else airline.book("400"))

    run = lab.run(agent, id="r")
    name, flight, key = run.result()
    assert (name, flight) == ("LH", "400")
    assert run.steps()[0].key == key


def test_direct_means_it(lab: Lab) -> None:
    receiver = Receiver()

    @lab.effect()
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        return receiver.act(key, flight)

    found = book.direct("LH400", key="mine")
    assert (asyncio.run(found) if lab.is_async else found) == "done: LH400"
    assert receiver.done == [("mine", "LH400")]


def test_a_key_that_the_caller_gives_is_used(lab: Lab) -> None:
    receiver = Receiver()

    @lab.effect()
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        return receiver.act(key, flight)

    @lab.durable
    async def agent() -> Any:
        return await lab(book("LH400", key=perdure.IdempotencyKey("order-7")))

    lab.run(agent, id="r").result()
    assert receiver.done == [("order-7", "LH400")]


# --- approval


def test_an_effect_runs_only_if_a_person_agrees(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, approve=True)
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "waiting"
    assert receiver.done == []
    [ask] = lab.store.questions("r")
    assert (ask.kind, ask.options) == ("approval", [True, False])
    assert "book" in ask.text
    assert "LH400" in ask.text
    with pytest.raises(perdure.errors.AnswerRefused):
        lab.store.answer("r", "maybe")
    lab.store.answer("r", True, who="ann")
    assert run.result() == "done: LH400"
    [approval] = lab.named(run, "perdure.approve")
    assert (approval.note or {})["who"] == ["ann"]


def test_an_effect_that_is_not_approved_does_not_run(lab: Lab) -> None:
    receiver = Receiver()
    terms = {"question": "Spend 400 EUR?", "approvers": ["ann", "bob"], "quorum": 2}
    agent = booking(lab, receiver, approve=terms)
    run = lab.run(agent, "LH400", id="r")
    [ask] = lab.store.questions("r")
    assert (ask.text, ask.approvers, ask.quorum) == ("Spend 400 EUR?", ["ann", "bob"], 2)
    with pytest.raises(perdure.errors.AnswerRefused, match="ann"):
        lab.store.answer("r", True, who="eve")
    assert lab.store.answer("r", False, who="ann").missing == 1
    assert lab.run(agent, "LH400", id="r").status == "waiting"
    assert lab.store.answer("r", False, who="bob").settled
    for _ in range(2):
        with pytest.raises(perdure.RunFailed) as caught:
            run.result()
        assert isinstance(caught.value.__cause__, perdure.errors.NotApproved)
    assert receiver.done == []


def test_an_approval_may_be_a_question_of_its_own(lab: Lab) -> None:
    agent = booking(lab, Receiver(), approve="Really?")
    lab.run(agent, "LH400", id="r")
    [ask] = lab.store.questions("r")
    assert ask.text == "Really?"
