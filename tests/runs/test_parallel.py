"""gather, map, first: what parallel branches did is recorded once, and replayed the way it went."""

from __future__ import annotations

import time
import traceback
from typing import Any

import pytest
from lab import Interrupt, Lab, Once
from parallel_kit import Order, again, branch, ordered, paths

import perdure

# --- gather


def test_gather_gives_the_results_in_order_and_records_each_step_once(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def double(number: int) -> int:
        lab.ran.append(number)
        return number * 2

    async def twice(number: int) -> int:
        return int(await lab(double(await lab(double(number)))))

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.gather(*(branch(lab, twice, number) for number in (1, 2, 3))))
        once.interrupt()
        return [found, await lab(double(100))]

    run = again(lab, agent, id="r")
    assert run.result() == [[4, 8, 12], 200]
    assert sorted(lab.ran) == [1, 2, 2, 3, 4, 6, 100]
    assert paths(run) == [(path, "double") for path in ("1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "4")]


def test_gather_of_nothing_is_nothing(lab: Lab) -> None:
    @perdure.durable
    def agent() -> Any:
        return [perdure.gather(), perdure.map(str, [])]

    @perdure.durable
    async def aagent() -> Any:
        results: Any = perdure.gather(), perdure.map(str, [])
        return [await results[0], await results[1]]

    assert lab.run(aagent if lab.is_async else agent, id="r").result() == [[], []]


def test_numbers_do_not_depend_on_who_runs_first(lab: Lab) -> None:
    once, order = Once(), Order("c", "b", "a")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        return await lab(work(name))

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.gather(*(branch(lab, go, name) for name in "abc")))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.ran == ["c", "b", "a"]
    assert lab.run(agent, id="r").result() == ["A", "B", "C"]
    assert lab.ran == ["c", "b", "a"]


def test_all_branches_come_to_their_end_before_the_first_error_by_position_is_raised(lab: Lab) -> None:
    once, order = Once(), Order("c", "b", "a")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        await lab(work(name))
        if name != "c":
            raise LookupError(name)
        return name

    @lab.durable
    async def agent() -> Any:
        try:
            await lab(perdure.gather(*(branch(lab, go, name) for name in "abc")))
        except LookupError as error:
            once.interrupt()
            return [str(error), len(lab.ran)]

    run = again(lab, agent, id="r")
    assert run.result() == ["a", 3]
    assert lab.ran == ["c", "b", "a"]


def test_an_error_keeps_the_traceback_of_its_branch(lab: Lab) -> None:
    found: list[str] = []

    async def fails_deep_inside() -> None:
        raise ValueError("here")

    @lab.durable
    async def agent() -> None:
        try:
            await lab(perdure.gather(branch(lab, fails_deep_inside)))
        except ValueError as error:
            found.append("".join(traceback.format_exception(error)))

    assert lab.run(agent, id="r").status == "done"
    assert "fails_deep_inside" in found[0]


def test_gather_in_gather(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def note(text: str) -> str:
        lab.ran.append(text)
        return text

    async def inner(text: str) -> Any:
        return await lab(note(text))

    async def outer(text: str) -> Any:
        return await lab(perdure.gather(branch(lab, inner, text + "1"), branch(lab, inner, text + "2")))

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.gather(branch(lab, outer, "a"), branch(lab, outer, "b")))
        once.interrupt()
        return found

    run = again(lab, agent, id="r")
    assert run.result() == [["a1", "a2"], ["b1", "b2"]]
    assert sorted(lab.ran) == ["a1", "a2", "b1", "b2"]
    assert [path for path, _ in paths(run)] == ["1.1.1", "1.2.1", "2.1.1", "2.2.1"]


def test_branches_have_the_callers_context_variables(lab: Lab) -> None:
    from contextvars import ContextVar

    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def go() -> str:
        found = who.get()
        who.set("changed")
        return found

    @lab.durable
    async def agent() -> Any:
        who.set("ann")
        return [*await lab(perdure.gather(branch(lab, go), branch(lab, go))), who.get()]

    assert lab.run(agent, id="r").result() == ["ann", "ann", "ann"]


# --- waiting


def test_a_branch_that_asks_lets_the_others_finish_and_then_the_run_parks(lab: Lab) -> None:
    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    async def asks() -> Any:
        return await lab(perdure.ask("Which?"))

    async def works() -> Any:
        return [await lab(work(number)) for number in (1, 2, 3)]

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(branch(lab, asks), branch(lab, works)))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert lab.ran == [1, 2, 3]
    lab.store.answer("r", "that one")
    assert run.result() == ["that one", [1, 2, 3]]
    assert lab.ran == [1, 2, 3]


def test_when_all_branches_wait_the_run_waits_for_whatever_comes_first(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(perdure.ask("Which?"))

    async def sleeps() -> Any:
        await lab(perdure.sleep(3600))

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(branch(lab, asks), branch(lab, sleeps)))

    run = lab.run(agent, id="r")
    info = run.refresh()
    assert run.refresh().status == "waiting"
    assert info.waiting_for is not None
    assert sorted(what.kind for what in info.waiting_for.parts) == ["question", "sleep"]
    assert info.wake_at is not None
    assert 3500 < info.wake_at.timestamp() - time.time() < 3700
    lab.store.answer("r", 1)
    assert lab.run(agent, id="r").status == "waiting"  # now for the sleep alone
    assert getattr(run.refresh().waiting_for, "kind", None) == "sleep"


def test_a_wait_comes_before_an_error_which_is_raised_when_all_have_ended(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(perdure.ask("Which?"))

    async def fails() -> None:
        raise LookupError("no")

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(branch(lab, fails), branch(lab, asks)))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    lab.store.answer("r", 1)
    with pytest.raises(perdure.RunFailed, match="no"):
        run.result()


def test_a_branch_that_catches_everything_parks_all_the_same(lab: Lab) -> None:
    @lab.step()
    def work() -> None:
        lab.ran.append("worked on")

    async def asks() -> Any:
        try:
            return await lab(perdure.ask("Which?"))
        except BaseException:
            return "never mind"

    @lab.durable
    async def agent() -> Any:
        try:
            found = await lab(perdure.gather(branch(lab, asks)))
        except BaseException:
            found = ["never mind"]
        await lab(work())
        return found

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    assert lab.ran == []
    lab.store.answer("r", 1)
    assert run.result() == [1]


def test_an_undo_in_one_branch_ends_the_others_and_undoes_what_they_did(lab: Lab) -> None:
    def cancel(what: str) -> None:
        lab.ran.append(f"-{what}")

    @lab.effect(undo=lab.body(cancel))
    def book(what: str) -> None:
        lab.ran.append(f"+{what}")

    async def books() -> None:
        await lab(book("flight"))

    async def regrets() -> None:
        perdure.undo("no")

    @lab.durable
    async def agent() -> None:
        await lab(perdure.gather(branch(lab, books)))
        await lab(perdure.gather(branch(lab, regrets), branch(lab, books)))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "undone"
    assert lab.ran.count("+flight") == lab.ran.count("-flight")
