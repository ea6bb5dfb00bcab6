"""What a second attack on durable runs found, where runs begin anew, change their code, have children or are answered:
the smallest case of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_proxy import WriteProxy
from lab import Flaky, Lab, finished

import perdure
from perdure.errors import OutcomeUnknown
from perdure.log.cache import BaseCache
from perdure.runs.journal.families import PAGE
from perdure.storage.program import Driver
from perdure.storage.urls import open_driver
from perdure.threads.context import StoreContext
from perdure.values.registry import Codec

# --- the last commit of a run that begins anew


class Losing(WriteProxy):
    """A driver that loses the answer to a write, whether it was committed or not."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.loses: str | None = None

    def write(self, do: Callable[[], Any]) -> Any:
        if self.loses is None:
            return do()
        if self.loses == "committed":
            do()
        self.loses = None
        raise OutcomeUnknown("the connection broke during COMMIT")


@pytest.mark.parametrize("outcome", ["committed", "never arrived"])
def test_a_run_begins_anew_once_also_if_the_answer_is_lost(outcome: str) -> None:
    driver = Losing(open_driver(":memory:", durability="normal", timeout_s=5, create=True))

    @perdure.durable(name="attacked_again.anew")
    def agent(number: int) -> int:
        if number < 2:
            driver.loses = outcome if number == 0 else None
            perdure.continue_as_new(number + 1)
        return number

    with perdure.Store(StoreContext(driver, Codec(), BaseCache(1000), "default")) as store:
        assert store.run(agent, 0, id="a").result(timeout_s=60) == 2


def test_whoever_began_anew_is_not_taken_for_damaged(lab: Lab) -> None:
    @lab.step(name="seen")
    def seen(number: int) -> int:
        return number

    @lab.durable(name=f"attacked_again.renewed_{lab.is_async}")
    async def agent(number: int) -> Any:
        if number == 0:  # nothing is on record yet
            perdure.continue_as_new(1)
        await lab(seen(number))
        if number == 1:
            perdure.continue_as_new(2)
        return await lab(perdure.ask("Well?"))

    run = lab.run(agent, 0, id="a")
    lab.store.fork(run, at=1, id="b")
    fork = lab.run(agent, 2, id="b")
    for handle in (run, fork):
        lab.store.answer(handle, "yes")
        assert handle.result(timeout_s=60) == "yes"
    assert lab.run(agent, 0, id="a").result() == "yes"  # the same line again
    assert lab.run(agent, 2, id="b").result() == "yes"
    assert lab.store.ops.verify().problems == ()


# --- code that does not come as far as its branches


@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_code_that_ends_before_its_branches_is_another_way_and_nothing_is_undone(lab: Lab, ends: str) -> None:
    undone: list[Any] = []
    code = ["first"]

    @lab.effect(name="reserve", undo=lambda what: undone.append(what))
    def reserve(what: str) -> str:
        return what

    @lab.durable
    async def agent() -> Any:
        if code[0] == "raises":
            raise Flaky("the new code is broken")
        if code[0] == "first":
            if lab.is_async:
                return await perdure.gather(reserve("a"), perdure.ask("Go on?"))
            return perdure.gather(lambda: reserve("a"), lambda: perdure.ask("Go on?"))
        return None

    run = lab.run(agent, id="a")
    assert run.refresh().status == "waiting"
    code[0] = ends
    lab.store.answer(run, True)
    assert (lab.run(agent, id="a").status, undone) == ("stuck", [])
    code[0] = "first"
    assert lab.run(agent, id="a").result() == ["a", True]


def test_a_branch_that_fails_before_what_it_had_done_is_another_way(lab: Lab) -> None:
    undone: list[Any] = []
    code = ["first"]

    @lab.effect(name="reserve", undo=lambda what: undone.append(what))
    def reserve(what: str) -> str:
        return what

    async def branch(what: str) -> Any:
        if code[0] == "raises" and what == "a":
            raise Flaky("the new code is broken")
        await lab(reserve(what))
        return what if what == "a" else await lab(perdure.ask("Go on?"))

    @lab.durable
    async def agent() -> Any:
        if lab.is_async:
            return await perdure.map(branch, ["a", "b"])
        return perdure.map(lambda what: finished(branch(what)), ["a", "b"])

    run = lab.run(agent, id="a")
    code[0] = "raises"
    lab.store.answer(run, "b")
    assert (lab.run(agent, id="a").status, undone) == ("stuck", [])
    code[0] = "first"
    assert lab.run(agent, id="a").result() == ["a", "b"]


# --- what can be said at once is said at once


def test_options_of_an_approval_are_checked_where_they_are_written() -> None:
    def pay(cents: int, client: Any = None, *, key: perdure.IdempotencyKey) -> None: ...

    wrong: list[tuple[Any, str]] = [
        ({"quorun": 2}, "quorun"),
        ({"options": ["yes"]}, "True or False"),
        ({"quorum": 3, "approvers": ["ann"]}, "cannot be reached"),
        ({"timeout_s": "a day"}, "a day"),
        (["ann"], "a question as text"),
        ("Pay {cent}?", "quotes {cent}, which is not an argument of it: it has cents;"),
        ("Pay with {client}?", "quotes {client}"),
        ("Pay {}?", "quotes {}"),
        ("Pay {cents?", "a question"),
        ({"when": True}, "a function that returns whether to ask"),
        (lambda cent: cent > 3, "asks for 'cent', which is not there"),
        (lambda key: True, "asks for 'key', which is not there"),
    ]
    for approve, said in wrong:
        with pytest.raises(perdure.UsageError, match=re.escape(said)):
            perdure.effect(approve=approve, ignore=("client",), name="attacked_again.pay")(pay)


def test_a_run_is_not_its_own_child(lab: Lab) -> None:
    @lab.durable(name=f"attacked_again.ouroboros_{lab.is_async}")
    async def agent(number: int) -> Any:
        child = await lab(perdure.spawn(agent, number, id="a"))
        return await lab(child.result())

    run = lab.run(agent, 1, id="a")
    assert run.refresh().status == "failed"
    with pytest.raises(perdure.RunFailed, match="the run itself"):
        run.result()


def test_a_child_that_is_gone_is_not_waited_for(lab: Lab) -> None:
    @lab.durable(name=f"attacked_again.child_{lab.is_async}")
    async def child() -> str:
        return "child"

    @lab.durable
    async def parent() -> Any:
        spawned = await lab(perdure.spawn(child))
        await lab(perdure.ask("Go on?"))
        return await lab(spawned.result())

    origin = lab.run(parent, id="a")
    lab.run(child, id="a/1")
    lab.store.fork("a", at=1, id="b")
    origin.cancel()
    lab.store.delete_run("a/1")
    fork = lab.run(parent, id="b")
    lab.store.answer("b", True)
    with pytest.raises(perdure.RunStuck, match=r"'a/1'.*not in this store"):
        fork.result(timeout_s=60)


def test_whoever_answers_may_name_a_step_in_any_way(sync_lab: Lab) -> None:
    @sync_lab.durable
    async def agent() -> Any:
        return perdure.gather(*[lambda text=text: perdure.ask(text) for text in "abc"])

    run = sync_lab.run(agent, id="a")
    asked = sync_lab.named(run, "perdure.ask")
    sync_lab.store.answer(run, 1, step=asked[0])
    sync_lab.store.answer(run, 2, step=asked[1].number)
    with pytest.raises(perdure.NotFound, match="no step number 7"):
        sync_lab.store.answer(run, 3, step=7)
    sync_lab.store.answer(run, 3, step=asked[2].path)
    assert run.result(timeout_s=60) == [1, 2, 3]


def test_a_family_of_more_than_a_page_is_gone_on_with_and_cancelled(tmp_path: Path) -> None:
    @perdure.durable(name="attacked_again.waits")
    def child(number: int) -> Any:
        return perdure.receive()

    @perdure.durable(name="attacked_again.has_many")
    def parent(count: int) -> Any:
        children = [perdure.spawn(child, number) for number in range(count)]
        return [one.result() for one in children]

    with perdure.open(str(tmp_path / "runs.db"), durability="normal") as store:
        run = store.run(parent, PAGE + 3, id="a")
        assert [info.status for info in store.runs(limit=None)] == ["waiting"] * (PAGE + 4)
        run.cancel()
        assert [info.status for info in store.runs(limit=None)] == ["cancelled"] * (PAGE + 4)
