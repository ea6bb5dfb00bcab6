"""Parallel branches that are interrupted, and those that were written wrong."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from lab import Interrupt, Lab, Once
from parallel_kit import PATIENCE_S, branch

import perdure

# --- interrupts


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_branches_work_gives_the_run_back(store: perdure.Store) -> None:
    """The branches end at their next journal call, and write nothing for a run that is another's."""
    lab = Lab(store, "sync")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @perdure.step
    def slow() -> str:
        if not lab.ran:
            lab.ran.append("slow")
            begun.set()
            go_on.wait(PATIENCE_S)
        return "slow"

    def watched() -> str:
        try:
            return slow()
        finally:
            ended.set()

    @perdure.durable
    def agent() -> Any:
        return perdure.gather(watched, slow)

    def press() -> None:
        assert begun.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        lab.run(agent, id="r")
    presser.join()
    assert lab.store.get_run("r").status == "queued"
    assert lab.run(agent, id="r").result() == ["slow", "slow"]
    go_on.set()
    assert ended.wait(PATIENCE_S)
    assert len(lab.store.get_run("r").steps()) == 2


def test_an_interrupt_in_one_branch_ends_the_others_at_their_next_call(lab: Lab) -> None:
    once = Once()
    both = threading.Barrier(2)

    @lab.step()
    def work(number: int) -> int:
        if not lab.is_async and number == 1 and once.reached == 0:
            both.wait(PATIENCE_S)
        return number

    async def interrupted() -> None:
        if not lab.is_async and once.reached == 0:
            both.wait(PATIENCE_S)
        once.interrupt()

    async def works() -> Any:
        for number in range(1, 1000):
            await lab(work(number))
        return "all"

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(branch(lab, works), branch(lab, interrupted)))

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert len(lab.store.get_run("r").steps()) < 999
    assert lab.run(agent, id="r").result() == ["all", None]


# --- mistakes


def test_a_call_that_does_not_fit_the_run_is_explained(lab: Lab) -> None:
    @perdure.step
    def sync_step() -> int:
        return 1

    @perdure.step
    async def async_step() -> int:
        return 1

    told: list[str] = []

    def tell(call: Callable[[], Any]) -> None:
        with pytest.raises(perdure.UsageError) as caught:
            call()
        told.append(str(caught.value))

    @perdure.durable
    def agent() -> None:
        tell(lambda: perdure.gather(async_step(), async_step()))
        tell(lambda: perdure.gather(sync_step()))  # type: ignore[call-overload]
        tell(lambda: perdure.gather(async_step))

    @perdure.durable
    async def aagent() -> None:
        tell(lambda: perdure.gather(lambda: async_step()))
        tell(lambda: perdure.first(sync_step(), async_step()))  # type: ignore[call-overload]
        tell(lambda: perdure.first())

    @lab.durable
    async def both() -> None:
        tell(lambda: perdure.map(str, {1, 2}))
        tell(lambda: perdure.map(str, [1], concurrency=0))

    assert lab.run(aagent if lab.is_async else agent, id="r").status == "done"
    assert lab.run(both, id="b").status == "done"
    words = ("leave out the lambda", "make the step async", "at least one") if lab.is_async else (
        "async steps need an async durable function",
        "lambda: search",
        "async steps need an async durable function",
    )  # fmt: skip
    for text, word in zip(told, (*words, "Sort it", "at least 1"), strict=True):
        assert word in text


def test_outside_of_a_run_and_inside_of_a_step_it_is_an_error(lab: Lab) -> None:
    with pytest.raises(perdure.NotInRun):
        perdure.gather(lambda: 1)

    @perdure.step
    def step() -> Any:
        return perdure.gather(lambda: 1)

    @perdure.durable
    def agent() -> Any:
        return step()

    with pytest.raises(perdure.RunStuck, match="inside step"):
        lab.run(agent, id="r").result()


def test_fewer_branches_than_were_recorded_is_another_way(lab: Lab) -> None:
    once, count = Once(), [3]

    async def wins() -> int:
        return 1

    async def fails() -> int:
        raise LookupError

    @lab.durable
    async def agent() -> Any:
        losers = [branch(lab, fails) for _ in range(count[0] - 1)]
        found = await lab(perdure.first(*losers, branch(lab, wins)))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    count[0] = 2
    run = lab.run(agent, id="r")
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match="NonDeterministic"):
        run.result()
