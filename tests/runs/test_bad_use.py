"""What goes wrong in the use of runs gets an error that says what happened and what to do. Nothing is guessed."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from bad_use_kit import changed, stuck_reason
from lab import Interrupt, Lab, Once

import perdure

# --- values


def test_an_argument_of_a_run_that_cannot_be_stored(lab: Lab) -> None:
    @lab.durable
    async def agent(lock: Any) -> None:
        lab.ran.append("agent")

    with pytest.raises(perdure.Unstorable, match=r"agent\(lock=…\)"):
        lab.run(agent, threading.Lock(), id="r")
    assert lab.ran == []
    assert lab.store.runs() == []  # nothing was begun


@pytest.mark.parametrize("kind", ["step", "effect"])
def test_an_argument_of_a_step_that_cannot_be_stored(lab: Lab, kind: str) -> None:
    def body(client: Any, number: int) -> None:
        lab.ran.append("work")

    work = (lab.step if kind == "step" else lab.effect)(name="work")(body)

    @lab.durable
    async def agent() -> None:
        await lab(work(threading.Lock(), 1))

    said = stuck_reason(lab.run(agent, id="r"))
    assert "work(client=…)" in said
    assert 'ignore=("client",)' in said  # what to do
    assert lab.ran == []


def test_a_result_of_a_step_that_cannot_be_stored(lab: Lab) -> None:
    """Stuck, resumable, nothing undone; and whoever catches everything cannot go on past it."""
    good = Once()
    undone: list[str] = []

    @lab.effect(undo=lab.body(lambda: undone.append("undone")))
    def book() -> str:
        return "B"

    @lab.step()
    def work() -> Any:
        lab.ran.append("work")
        return "fine" if good.reached else {"lock": threading.Lock()}

    @lab.step()
    def after() -> None:
        lab.ran.append("after")

    @lab.durable
    async def agent() -> Any:
        await lab(book())
        found = None
        try:
            found = await lab(work())
        except Exception:  # an agent loop
            pass
        await lab(after())
        return found

    run = lab.run(agent, id="r")
    said = stuck_reason(run)
    assert '["lock"]' in said
    assert "make it again after loading" in said
    assert lab.ran == ["work"]
    assert undone == []
    good.reached = 1
    assert lab.run(agent, id="r").result() == "fine"
    assert lab.ran == ["work", "work", "after"]


def test_a_result_of_a_run_that_cannot_be_stored(lab: Lab) -> None:
    good = Once()

    @lab.durable
    async def agent() -> Any:
        return 1 if good.reached else threading.Lock()

    run = lab.run(agent, id="r")
    assert "cannot be saved" in stuck_reason(run)
    good.reached = 1
    assert run.resume() == "queued"
    assert run.result() == 1


def test_an_answer_of_the_wrong_type(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.ask("How many?", schema=int))

    lab.run(agent, id="r")
    with pytest.raises(perdure.errors.AnswerRefused, match="integer"):
        lab.store.answer("r", "three")
    with pytest.raises(perdure.Unstorable):
        lab.store.send("r", threading.Lock())


# --- another way than before


@pytest.mark.parametrize("sticky", [True, False], ids=["caught", "raised"])
def test_an_order_that_depends_on_time(lab: Lab, sticky: bool) -> None:
    once = Once()

    @lab.step()
    def left() -> str:
        lab.ran.append("left")
        return "left"

    @lab.step()
    def right() -> str:
        lab.ran.append("right")
        return "right"

    @lab.durable
    async def agent() -> Any:
        before = once.reached == 0  # stands for: time.time() % 2
        found = None
        try:
            found = await lab(left() if before else right())
        except Exception:
            if not sticky:
                raise
        await lab(right())
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.ran == ["left", "right"]
    run = lab.run(agent, id="r")
    said = stuck_reason(run)
    assert "left()" in said
    assert "right()" in said
    assert "perdure.patched()" in said
    assert "perdure.now()" in said
    assert lab.ran == ["left", "right"]  # no body ran on the wrong way


def test_other_arguments_than_before(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work(at: float) -> float:
        lab.ran.append(at)
        return at

    @lab.durable
    async def agent() -> None:
        await lab(work(time.time()))
        once.interrupt()

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    said = stuck_reason(lab.run(agent, id="r"))
    assert "work()" in said
    assert "arguments" in said
    assert len(lab.ran) == 1


def test_code_that_was_changed_in_the_middle(lab: Lab) -> None:
    assert "step 2" in stuck_reason(changed(lab, ["a", "b"], ["a", "new", "b"]))
    assert lab.ran == ["a", "b"]


def test_code_that_has_fewer_steps_than_were_recorded(lab: Lab) -> None:
    """A step that happened cannot be forgotten by returning before it."""
    said = stuck_reason(changed(lab, ["a", "b", "c"], ["a"]))
    assert "work()" in said
    assert "perdure.patched()" in said


def test_code_that_goes_on_where_the_old_one_ended_is_fine(lab: Lab) -> None:
    assert changed(lab, ["a"], ["a", "b"]).result() == ["a", "b"]


@pytest.mark.parametrize(
    ("decorator", "option", "said"),
    [
        (
            "durable",
            "retries",
            "@perdure.durable has no option 'retries'; steps and effects have it; it has name, version",
        ),
        ("step", "undo", "@perdure.step has no option 'undo'; it has name, retries,"),
        ("effect", "version", "@perdure.effect has no option 'version'; it has name, retries,"),
    ],
)
def test_an_option_that_a_decorator_does_not_have(decorator: str, option: str, said: str) -> None:
    with pytest.raises(perdure.UsageError, match=re.escape(said)):
        getattr(perdure, decorator)(**{option: 3})(lambda: None)
