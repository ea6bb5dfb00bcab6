"""perdure.map, branches that share a state, replays that run nothing, and what a branch has put off."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, finished, hooked
from parallel_kit import Order, again, branch, ordered, paths

import perdure
from perdure.runs.execution.hooks import Point


def plain(lab: Lab, fn: Callable[..., Any]) -> Any:
    """The same for perdure.map."""
    return fn if lab.is_async else lambda item: finished(fn(item))


# --- map


def test_map_calls_steps_effects_and_functions_that_call_them(lab: Lab) -> None:
    @lab.step()
    def double(number: int) -> int:
        return number * 2

    @lab.effect()
    def send(number: int) -> int:
        lab.ran.append(number)
        return -number

    async def both(number: int) -> Any:
        return [await lab(double(number)), await lab(send(number))]

    @lab.durable
    async def agent() -> Any:
        return [
            await lab(perdure.map(double, [1, 2])),
            await lab(perdure.map(send, (number for number in (3, 4)))),
            await lab(perdure.map(plain(lab, both), range(5, 7))),
        ]

    assert lab.run(agent, id="r").result() == [[2, 4], [-3, -4], [[10, -5], [12, -6]]]
    assert sorted(lab.ran) == [3, 4, 5, 6]


def test_a_limit_is_kept_and_changes_no_numbers(lab: Lab) -> None:
    once, limit = Once(), [2]
    working, most = [0], [0]
    lock = threading.Lock()

    def enter() -> None:
        with lock:
            working[0] += 1
            most[0] = max(most[0], working[0])

    def leave() -> None:
        with lock:
            working[0] -= 1

    def work(number: int) -> int:
        enter()
        time.sleep(0.002)
        leave()
        lab.ran.append(number)
        return number

    async def awork(number: int) -> int:
        enter()
        await asyncio.sleep(0.002)
        leave()
        lab.ran.append(number)
        return number

    body: Any = awork if lab.is_async else work
    step = perdure.step(name="work")(body)

    @lab.durable
    async def agent() -> Any:
        found = await lab(perdure.map(step, range(10), concurrency=limit[0]))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert most == [2]
    limit[0] = 7
    run = lab.run(agent, id="r")
    assert run.result() == list(range(10))
    assert sorted(lab.ran) == list(range(10))
    assert {path for path, _ in paths(run)} == {f"{number}.1" for number in range(1, 11)}


def test_a_branch_that_waits_takes_no_place_from_the_others(lab: Lab) -> None:
    """Ten questions, two at a time: all are asked before the run parks."""

    async def asks(number: int) -> Any:
        return await lab(perdure.ask(f"{number}?"))

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.map(plain(lab, asks), range(10), concurrency=2))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    asks_open = lab.store.questions("r")
    assert len(asks_open) == 10
    for ask in asks_open:
        lab.store.answer("r", ask.text, step=ask.path)
    assert run.result() == [f"{number}?" for number in range(10)]


def test_a_thousand_branches(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    async def go(number: int) -> Any:
        return await lab(work(number))

    @lab.durable
    async def agent() -> int:
        mapped = await lab(perdure.map(work, range(1000)))
        gathered = await lab(perdure.gather(*(branch(lab, go, number) for number in range(1000, 1300))))
        once.interrupt()
        return sum([*mapped, *gathered])

    before = threading.active_count()
    run = again(lab, agent, id="r")
    assert run.result() == sum(range(1300))
    assert sorted(lab.ran) == list(range(1300))
    assert threading.active_count() <= before + 32 + 8  # those of the store, which wait for more work


def test_map_uses_at_most_32_threads_in_a_sync_run(store: perdure.Store) -> None:
    lab, most = Lab(store, "sync"), [0]

    def work(number: int) -> int:
        most[0] = max(most[0], sum(thread.name.startswith("perdure-r-") for thread in threading.enumerate()))
        return number

    @perdure.durable
    def agent() -> Any:
        return perdure.map(work, range(200))

    assert lab.run(agent, id="r").result() == list(range(200))
    assert 1 <= most[0] <= 32


# --- the state, and replays without running


def test_a_record_of_branches_can_be_replayed_without_running_anything(lab: Lab) -> None:
    order = Order("a", "b", "c", "x", "y")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        return await lab(work(name))

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent() -> Any:
        found = [await lab(perdure.gather(*(branch(lab, go, name) for name in "abc")))]
        order.free()
        found.append(await lab(perdure.first(branch(lab, go, "x"), branch(lab, go, "y"))))
        return [*found, await lab(perdure.gather(branch(lab, go, "z"), branch(lab, asks)))]

    async def asks() -> Any:
        return await lab(perdure.ask("Which?"))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    ran = list(lab.ran)
    found = lab.store.replay(run)
    assert (found.name, found.is_complete) == ("perdure.ask", False)
    lab.store.answer("r", 1)
    result = run.result()
    found = lab.store.replay(run)
    assert found.is_complete
    assert found.result == result
    assert lab.ran == ran


# --- what was put off


def test_no_body_runs_before_what_its_code_has_drawn_is_recorded(lab: Lab) -> None:
    """Also if it is another branch that is writing it down right now."""
    happened: list[str] = []
    lock = threading.Lock()

    def hook(point: Point) -> None:
        if point.kind == "value" and point.when == "before":
            time.sleep(0.05)  # whoever writes it is slow
        if point.kind in ("value", "body"):
            with lock:
                happened.append(f"{point.when} {point.kind}")

    @lab.step()
    def send(number: str) -> None: ...

    async def go(number: str) -> None:
        await lab(send(number))

    @lab.durable
    async def agent() -> None:
        number = str(perdure.uuid())
        await lab(perdure.gather(*(branch(lab, go, number) for _ in range(5))))

    with hooked(hook):
        assert lab.run(agent, id="r").status == "done"
    assert happened[:2] == ["before value", "after value"]
    assert happened.count("before value") == 1


def test_what_was_drawn_is_kept_if_what_goes_with_it_is_refused(lab: Lab) -> None:
    once = Once()
    drawn: list[Any] = []

    @lab.step()
    def note() -> None: ...

    @lab.durable
    async def agent() -> None:
        drawn.append(perdure.random())
        try:
            await lab(perdure.send("nobody", "hello"))
        except perdure.NotFound:
            pass
        await lab(note())
        once.interrupt()

    again(lab, agent, id="r")
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_what_was_put_off_until_the_end_is_written_with_it_however_large(lab: Lab) -> None:
    large = "".join(str(hash((number, "a"))) for number in range(20_000))

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent() -> None:
        perdure.emit(large)

    run = lab.run(agent, id="r")
    assert [event.value for event in run.stream() if event.kind == "emit"] == [large]
