"""perdure.timeout: a deadline that calls keep and waits are woken by, recorded; and bodies that outlive their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, finished

import perdure
from perdure.runs.execution.execution import Execution

PATIENCE_S = 30.0


def again(lab: Lab, agent: Callable[..., Any], id: str = "r") -> perdure.Run:
    with pytest.raises(Interrupt):
        lab.run(agent, id=id)
    return lab.run(agent, id=id)


def noting(lab: Lab, clock: Any = None) -> Any:
    @lab.step()
    def note(what: Any) -> Any:
        lab.ran.append(what)
        return what

    return note


def test_a_call_after_the_deadline_raises_and_does_so_again_on_replay(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, note = Once(), noting(lab)

    @lab.durable
    async def agent() -> Any:
        found = []
        try:
            with perdure.timeout(60):
                found.append(await lab(note("in time")))
                if not once.reached:
                    monkeypatch.setattr(Execution, "ahead_us", 61_000_000)
                found.append(await lab(note("late")))
        except TimeoutError:
            found.append(await lab(note("after")))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    monkeypatch.setattr(Execution, "ahead_us", 0)  # what was recorded counts, not the clock
    assert lab.run(agent, id="r").result() == ["in time", "after"]
    assert lab.ran == ["in time", "after"]


def test_in_time_nothing_happens_also_on_replay(lab: Lab) -> None:
    once, note = Once(), noting(lab)
    seconds = [3600.0]

    @lab.durable
    async def agent() -> Any:
        with perdure.timeout(seconds[0]):
            found = [await lab(note("a")), await lab(note("b"))]
        found.append(await lab(note("c")))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    seconds[0] = 0
    run = lab.run(agent, id="r")
    assert run.result() == lab.ran == ["a", "b", "c"]
    assert lab.step_at(run, "1").kind == "timeout"


def waits(lab: Lab) -> dict[str, Callable[[], Any]]:
    @lab.durable(name=f"child-{id(lab)}")
    async def child() -> None:
        await lab(perdure.ask("Child?"))

    async def result() -> Any:
        return await lab((await lab(perdure.spawn(child))).result())

    @lab.step(retries=5, backoff_s=3600)
    def flaky() -> None:
        raise LookupError

    @lab.effect(approve=True)
    def book(key: perdure.IdempotencyKey) -> str:
        lab.ran.append("booked")
        return "booked"

    def first() -> Any:
        if lab.is_async:
            return perdure.first(perdure.ask("Which?"), perdure.sleep(3600))
        return perdure.first(lambda: perdure.ask("Which?"), lambda: perdure.sleep(3600))

    return {
        "ask": lambda: perdure.ask("Which?"),
        "sleep": lambda: perdure.sleep(3600),
        "receive": lambda: perdure.receive(),
        "result": lambda: result() if lab.is_async else finished(result()),
        "retry": flaky,
        "approval": book,
        "first": first,
        "gather": lambda: (
            perdure.gather(perdure.sleep(3600)) if lab.is_async else perdure.gather(lambda: perdure.sleep(3600))
        ),
    }


@pytest.mark.parametrize(
    "kind", ["ask", "sleep", "receive", "result", "retry", "approval", "first", "gather", "nothing"]
)
def test_a_wait_is_woken_by_the_deadline_and_raises_on_replay_too(lab: Lab, kind: str) -> None:
    once, note = Once(), noting(lab)
    call = waits(lab).get(kind)

    @lab.durable
    async def agent() -> Any:
        try:
            async with perdure.timeout(1.3):
                if call is not None:
                    await lab(call())
            found = "in time"
        except TimeoutError:
            found = "too late"
        await lab(note(found))
        once.interrupt()
        return found

    if kind == "nothing":
        assert again(lab, agent).result() == "in time"
        return
    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    wake_at = run.refresh().wake_at
    assert wake_at is not None
    assert wake_at.timestamp() < time.time() + 2
    with pytest.raises(Interrupt):
        run.result(timeout_s=PATIENCE_S)
    assert lab.run(agent, id="r").result() == "too late"
    assert lab.ran == ["too late"]
    if kind in ("ask", "approval"):
        assert lab.store.questions("r") == []
    if kind in ("ask", "sleep", "receive", "retry"):
        [step] = [step for step in run.steps() if step.path == "2"]
        assert step.status == "failed"
        assert step.error is not None
        assert step.error.startswith("TimedOut")


def test_a_short_deadline_is_waited_for_here(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        try:
            with perdure.timeout(0.05):
                return await lab(perdure.ask("Which?"))
        except TimeoutError:
            return "too late"

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == "too late"


def test_an_answer_in_time_counts(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        with perdure.timeout(3600):
            return await lab(perdure.ask("Which?"))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    lab.store.answer("r", "this")
    assert run.result() == "this"


def test_the_nearest_of_nested_deadlines_counts_and_the_outer_one_goes_on_counting(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        found = []
        try:
            with perdure.timeout(0.15):
                try:
                    with perdure.timeout(0.05):
                        await lab(perdure.sleep(3600))
                except TimeoutError:
                    found.append("inner")
                await lab(perdure.sleep(3600))
        except TimeoutError:
            found.append("outer")
        await lab(perdure.sleep(0))
        return found

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == ["inner", "outer"]


def test_an_effect_in_doubt_is_not_given_up(lab: Lab) -> None:
    """Nobody may guess what became of it: the person who is asked may take longer than the deadline."""

    @lab.effect(timeout_s=0.01)
    def book(key: perdure.IdempotencyKey) -> str:
        lab.ran.append(key)
        raise ConnectionError("did it arrive?")

    @lab.durable
    async def agent() -> Any:
        try:
            with perdure.timeout(0.05):
                return await lab(book())
        except TimeoutError:
            return "too late"

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert getattr(run.refresh().waiting_for, "kind", None) == "doubt"
    assert run.refresh().wake_at is None
    run.resolve("2", done="it did")
    assert run.result(timeout_s=PATIENCE_S) == "it did"


def test_branches_have_the_deadline_of_their_maker(lab: Lab) -> None:
    async def sleeps() -> str:
        try:
            await lab(perdure.sleep(3600))
        except TimeoutError:
            return "too late"
        return "slept"

    @lab.durable
    async def agent() -> Any:
        calls: Any = [sleeps() if lab.is_async else lambda: finished(sleeps()) for _ in range(3)]
        with perdure.timeout(0.05):
            return await lab(perdure.gather(*calls))

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == ["too late"] * 3


def test_a_timeout_wants_a_number_and_a_run(lab: Lab) -> None:
    for wrong in (-1, float("nan"), "5"):
        with pytest.raises(perdure.UsageError):
            perdure.timeout(wrong)  # type: ignore[arg-type]
    with pytest.raises(perdure.NotInRun), perdure.timeout(1):
        pass
    del lab


# --- bodies that outlive their own time


def test_a_body_that_outlives_its_time_has_no_part_in_the_run_any_more(store: perdure.Store) -> None:
    """It goes on on its thread, where nothing can stop it; what it says is not heard."""
    lab = Lab(store, "sync")
    late, said = threading.Event(), list[BaseException]()
    ended = threading.Event()

    @perdure.step(timeout_s=0.02)
    def slow() -> None:
        perdure.emit("in time")
        late.wait(PATIENCE_S)
        try:
            perdure.emit("too late")
        except BaseException as error:
            said.append(error)
        ended.set()

    @perdure.step
    def waits_for_it() -> None:
        late.set()
        assert ended.wait(PATIENCE_S)

    @perdure.durable
    def agent() -> str:
        try:
            slow()
        except TimeoutError:
            waits_for_it()
            return "on"
        return "slow"

    run = lab.run(agent, id="r")
    assert run.result() == "on"
    assert len(said) == 1
    assert "too late" not in [event.value for event in run.stream()]


def test_a_generator_has_its_time_too(lab: Lab) -> None:
    ends = threading.Event()

    def chunks() -> Iterator[int]:
        yield 1
        ends.wait(PATIENCE_S)
        yield 2

    async def achunks() -> Any:
        import asyncio

        yield 1
        await asyncio.sleep(3600)
        yield 2

    body: Any = achunks if lab.is_async else chunks
    step = perdure.step(name="chunks", timeout_s=0.02)(body)

    @lab.durable
    async def agent() -> Any:
        try:
            return await lab(step())
        except TimeoutError as error:
            return str(error)

    found = lab.run(agent, id="r").result(timeout_s=PATIENCE_S)
    ends.set()
    assert "chunks did not end within timeout_s=0.02" in found
