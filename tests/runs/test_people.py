"""Waiting: for people, for time, for messages, for children; and what an operator may ask of a run meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from lab import Interrupt, Lab, Once, hooked

import perdure
from perdure.runs.execution.hooks import Point


@perdure.register
@dataclass
class Choice:
    """What a person may answer."""

    flight: str
    seats: int = 1


# --- questions


def test_a_question_parks_the_run_until_it_is_answered(lab: Lab) -> None:
    @lab.step()
    def search() -> list[str]:
        lab.ran.append("search")
        return ["LH400", "UA88"]

    @lab.durable
    async def agent() -> str:
        flights = await lab(search())
        choice = await lab(perdure.ask("Which flight?", options=flights))
        return f"booked {choice}"

    run = lab.run(agent, id="r")
    info = run.refresh()
    assert info.status == "waiting"
    assert info.waiting_for == perdure.Waiting(
        "question", "Which flight? (step 2)", "2", "Which flight?", settled_by="answer"
    )
    assert info.wake_at is None
    [ask] = lab.store.questions()
    assert (ask.run, ask.path, ask.kind, ask.text, ask.options, ask.status) == (
        "r", "2", "question", "Which flight?", ["LH400", "UA88"], "open",
    )  # fmt: skip
    assert lab.run(agent, id="r").status == "waiting"
    assert lab.store.answer("r", "UA88", who="bob").settled
    assert run.result() == "booked UA88"
    assert lab.ran == ["search"]
    assert lab.store.questions() == []


def test_who_answered_and_when_is_on_record(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Go?", options=[True, False], quorum=2, approvers=["ann", "bob", "cid"]))

    run = lab.run(agent, id="r")
    before = datetime.now(UTC) - timedelta(seconds=5)
    assert lab.store.answer("r", True, who="ann").missing == 1
    assert lab.store.answer("r", True, who="cid").settled
    assert run.result() is True
    [step] = run.steps()
    assert step.note is not None
    assert sorted(step.note["who"]) == ["ann", "cid"]
    assert before < step.note["answered_at"] < datetime.now(UTC) + timedelta(seconds=5)
    [ask] = lab.store.questions("r", all=True)
    assert sorted((who, value) for who, value, _ in ask.answers) == [("ann", True), ("cid", True)]
    assert all(before < at < datetime.now(UTC) + timedelta(seconds=5) for _, _, at in ask.answers)
    assert ask.status == "answered"


def test_an_answer_must_be_one_of_the_options(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Which?", options=["a", "b"]))

    run = lab.run(agent, id="r")
    for wrong in ("c", "A", 1, None, ["a"]):
        with pytest.raises(perdure.errors.AnswerRefused, match="one of"):
            lab.store.answer("r", wrong)
    assert run.refresh().status == "waiting"
    lab.store.answer("r", "a")
    assert run.result() == "a"
    with pytest.raises(perdure.UsageError, match="0 open questions"):
        lab.store.answer("r", "b")
    with pytest.raises(perdure.errors.AnswerRefused, match="answered already"):
        lab.store.answer("r", "b", step="1")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (int, 3, ["3", 3.5, True, None]),
        (Literal["yes", "no"], "no", ["maybe", 1]),
        (list[str], ["x"], ["x", [1]]),
        ({"type": "integer", "minimum": 5}, 7, [4, "7"]),
        (int | None, None, ["x"]),
    ],
)
def test_an_answer_must_fit_the_schema(lab: Lab, schema: Any, good: Any, bad: list[Any]) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("What?", schema=schema))

    run = lab.run(agent, id="r")
    assert lab.store.questions("r")[0].schema is not None
    for wrong in bad:
        with pytest.raises(perdure.errors.AnswerRefused, match="answer"):
            lab.store.answer("r", wrong)
    lab.store.answer("r", good)
    assert run.result() == good


def test_a_schema_may_be_a_class(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        choice = await lab(perdure.ask("What?", schema=Choice))
        return [type(choice).__name__, choice]

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.errors.AnswerRefused, match="flight"):
        lab.store.answer("r", {"seats": 2})
    with pytest.raises(perdure.errors.AnswerRefused, match="seats"):
        lab.store.answer("r", {"flight": "LH400", "seats": "two"})
    lab.store.answer("r", {"flight": "LH400", "seats": 2})
    kind, found = run.result()
    assert (kind, found) in [("dict", {"flight": "LH400", "seats": 2}), ("Choice", Choice("LH400", 2))]


def test_a_question_that_nobody_answers_in_time_raises(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent() -> str:
        try:
            await lab(perdure.ask("Anybody?", timeout_s=0.05))
        except TimeoutError as error:
            once.interrupt()
            return str(error)
        return ""

    with pytest.raises(Interrupt):
        lab.run(agent, id="r").result(timeout_s=20)
    run = lab.run(agent, id="r")
    assert "Anybody?" in run.result(timeout_s=20)
    assert lab.store.questions() == []
    with pytest.raises(perdure.errors.AnswerRefused):
        lab.store.answer("r", 1, step="1")


@pytest.mark.parametrize("on_timeout", ["no", None, KeyError])
def test_what_a_timeout_stands_for_can_be_said(lab: Lab, on_timeout: Any) -> None:
    @lab.durable
    async def agent() -> Any:
        try:
            return [await lab(perdure.ask("Anybody?", timeout_s=0.02, on_timeout=on_timeout))]
        except KeyError as error:
            return type(error).__name__

    found = lab.run(agent, id="r").result(timeout_s=20)
    assert found == ("KeyError" if on_timeout is KeyError else [on_timeout])
    assert lab.run(agent, id="r").result() == found


def test_an_answer_after_the_time_is_refused(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Anybody?", timeout_s=1.5, on_timeout="late"))

    run = lab.run(agent, id="r")
    info = run.refresh()
    assert info.wake_at is not None  # parked, and due when the time is over
    [ask] = lab.store.questions()
    assert ask.deadline is not None
    clock = lab.store._context.clock_us
    if lab.store._context.driver.dialect == "sqlite":
        lab.store._context.clock_us = lambda: clock() + 10_000_000
        try:
            with pytest.raises(perdure.errors.AnswerRefused, match="time is over"):
                lab.store.answer("r", "me")
            assert lab.run(agent, id="r").result() == "late"
        finally:
            lab.store._context.clock_us = clock
    else:
        assert run.result(timeout_s=20) == "late"


def test_only_approvers_may_answer_and_so_many_must_agree(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Deploy?", options=["yes", "no"], approvers=["ann", "bob", "cid"], quorum=2))

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.errors.AnswerRefused, match="ann, bob, cid"):
        lab.store.answer("r", "yes", who="eve")
    assert lab.store.answer("r", "yes", who="ann").missing == 1
    assert lab.store.answer("r", "yes", who="ann").missing == 1  # the same person twice is one
    assert lab.store.answer("r", "no", who="bob").missing == 1
    assert run.refresh().status == "waiting"
    assert lab.store.answer("r", "no", who="ann").settled  # changed her mind
    assert run.result() == "no"


def test_several_questions_at_once_are_told_apart(store: perdure.Store) -> None:
    lab = Lab(store, "async")
    import asyncio

    async def one(name: str) -> str:
        return f"{name}={await perdure.ask(f'{name}?')}"

    @perdure.durable
    async def agent() -> list[str]:
        return list(await asyncio.gather(one("a"), one("b")))

    run = lab.run(agent, id="r")
    assert getattr(run.refresh().waiting_for, "kind", None) == "all"
    asks = {ask.text: ask.path for ask in lab.store.questions("r")}
    with pytest.raises(perdure.UsageError, match="say which with step="):
        lab.store.answer("r", 1)
    lab.store.answer("r", 2, step=asks["b?"])
    assert lab.run(agent, id="r").status == "waiting"
    lab.store.answer("r", 1, step=asks["a?"])
    assert run.result() == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": []}, "nothing to choose"),
        ({"options": [1], "schema": int}, "not both"),
        ({"quorum": 0}, "quorum"),
        ({"quorum": 3, "approvers": ["a", "b"]}, "cannot be reached"),
    ],
)
def test_a_question_that_nobody_could_answer_is_refused(lab: Lab, options: dict[str, Any], said: str) -> None:
    @lab.durable
    async def agent() -> str:
        try:
            await lab(perdure.ask("What?", **options))
        except perdure.UsageError as error:
            return str(error)
        return ""

    assert said in lab.run(agent, id="r").result()


def test_an_answer_that_comes_while_the_run_is_about_to_park_wakes_it(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("Quick?"))

    def strike(point: Point) -> None:
        if (point.kind, point.when) == ("park", "before"):
            quick = threading.Thread(target=lambda: lab.store.answer("r", "very"))
            quick.start()
            quick.join(20)

    with hooked(strike):
        run = lab.run(agent, id="r")
    assert run.refresh().status == "done"
    assert run.result() == "very"
