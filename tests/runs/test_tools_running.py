"""Running a model's tool calls: replayed, with steps of their own, several at a time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, unhashed
from tools_kit import SoldOut, chat, said, search

import perdure


@pytest.fixture
def async_lab(store: perdure.Store) -> Lab:
    return Lab(store, "async")


# --- running


def test_calls_are_run_as_steps_of_their_own_scope_and_once(lab: Lab) -> None:
    once = Once()

    def price(city: str) -> int:
        lab.ran.append(city)
        return len(city)

    tools = perdure.tools([lab.body(price)])
    calls = [chat("call_a", "price", city="Rome"), chat("call_b", "price", city="Oslo!")]

    @lab.durable
    async def agent() -> list[str]:
        found = await lab(tools.call(calls if not once.reached else calls[::-1]))
        once.interrupt()
        return said(sorted(found, key=lambda message: str(message["tool_call_id"])))

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")  # the calls come in another order now
    assert run.result() == ["4", "5"]
    assert sorted(lab.ran) == ["Oslo!", "Rome"]
    assert sorted(step.path for step in run.steps()) == ["1.call_a.1", "1.call_b.1"]


def test_answers_come_in_the_order_of_the_calls(lab: Lab) -> None:
    tools = perdure.tools([lab.body(search)])

    @lab.durable
    async def agent() -> list[Any]:
        found = await lab(tools.call([chat(str(n), "search", city=str(n)) for n in (3, 1, 2)]))
        return [(message["tool_call_id"], message["content"]) for message in found]

    assert lab.run(agent).result() == [("3", '["3 1"]'), ("1", '["1 1"]'), ("2", '["2 1"]')]


def test_calls_without_ids_have_their_position_and_the_same_id_may_come_again_later(lab: Lab) -> None:
    tools = perdure.tools([lab.body(search)])

    @lab.durable
    async def agent() -> int:
        await lab(tools.call([chat(None, "search", city="a"), chat("", "search", city="b")]))
        await lab(tools.call([chat("x", "search", city="c")]))
        await lab(tools.call([]))
        await lab(tools.call([chat("x", "search", city="d"), chat("odd id.1", "search", city="e")]))
        await lab(tools.call([chat("y", "search", city="f"), chat("y", "search", city="g")]))
        return 1

    run = lab.run(agent)
    assert run.result() == 1
    paths = sorted(step.path for step in run.steps())
    assert paths[:4] == ["1._1.1", "1._2.1", "2.x.1", "3.odd-id-1-" + paths[3][11:27] + ".1"]
    assert paths[4:] == ["3.x.1", "4._2.1", "4.y.1"]


def test_effects_get_their_keys_and_methods_their_objects(lab: Lab) -> None:
    keys: list[str] = []

    class Desk:
        name = "desk"

        @lab.effect()
        def book(self, room: str, *, key: perdure.IdempotencyKey) -> str:
            keys.append(key)
            return f"{self.name}: {room}"

        @lab.step()
        def look(self, room: str = "any") -> str:
            return f"{self.name} has {room}"

    desk = Desk()
    tools = perdure.tools([desk.book, desk.look])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat("a", "book", room="7"), chat("b", "look")])))

    run = lab.run(agent)
    assert run.result() == ["desk: 7", "desk has any"]
    assert keys == [step.key for step in run.steps() if step.kind == "effect"]


def test_a_replay_runs_no_tool(lab: Lab) -> None:
    def price(city: str) -> int:
        lab.ran.append(city)
        if city == "Oslo":
            raise SoldOut(city)
        return len(city)

    tools = perdure.tools([lab.body(price)])
    calls = [chat("a", "price", city="Rome"), chat("b", "price", city="Oslo"), chat("c", "weather")]

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call(calls)))

    run = lab.run(agent)
    found = lab.store.replay(run)
    assert (found.status, found.result, len(lab.ran)) == ("complete", run.result(), 2)


# --- tools with steps of their own


def test_a_durable_tool_asks_and_has_steps(lab: Lab) -> None:
    @lab.step()
    def note(text: str) -> None:
        lab.ran.append(text)

    @lab.durable
    async def ask_user(question: str) -> str:
        """Ask the user."""
        answer = await lab(perdure.ask(question))
        await lab(note(answer))
        return str(answer)

    tools = perdure.tools([ask_user])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat(one, "ask_user", question=f"{one}?") for one in ("a", "b")])))

    run = lab.run(agent, id="r")
    assert sorted(ask.path for ask in lab.store.questions("r")) == ["1.a.1", "1.b.1"]
    lab.store.answer("r", "this", step="1.a.1")
    lab.store.answer("r", "that", step="1.b.1")
    assert run.result() == ["this", "that"]
    assert sorted(lab.ran) == ["that", "this"]


def test_tools_and_runs_of_different_kinds_are_refused(sync_lab: Lab, async_lab: Lab) -> None:
    async def later() -> None: ...

    @perdure.durable
    def now() -> None: ...

    @perdure.durable
    def blocking() -> None:
        perdure.tools([later]).call([chat("a", "later")])

    @perdure.durable
    async def awaiting() -> None:
        await perdure.tools([now]).call([chat("a", "now")])

    for agent, reason in ((blocking, "'later' is async"), (awaiting, "'now' is sync")):
        with pytest.raises(perdure.RunStuck, match=reason):
            sync_lab.run(agent).result()


def test_calls_belong_in_a_run_and_not_in_a_step(lab: Lab) -> None:
    tools = perdure.tools([search])
    with pytest.raises(perdure.NotInRun, match=r"tools\.call"):
        tools.call([chat("a", "search", city="x")])

    @lab.step()
    def body() -> None:
        tools.call([chat("a", "search", city="x")])

    @lab.durable
    async def agent() -> None:
        await lab(body())

    with pytest.raises(perdure.RunStuck, match="inside step 'body'"):
        lab.run(agent).result()


# --- at the same time


def test_async_tools_run_at_the_same_time(async_lab: Lab) -> None:
    async def meet(me: str) -> str:
        here.append(me)
        if len(here) == 2:
            both.set()
        await both.wait()  # alone it would wait for ever
        return me

    here: list[str] = []
    both = asyncio.Event()
    tools = perdure.tools([meet])

    @perdure.durable
    async def agent() -> list[str]:
        return said(await tools.call([chat("a", "meet", me="a"), chat("b", "meet", me="b")]))

    assert async_lab.run(agent).result() == ["a", "b"]


def test_sync_tools_run_at_the_same_time_on_threads(lab: Lab) -> None:
    barrier = threading.Barrier(3, timeout=30)

    def meet(me: str) -> str:
        barrier.wait()
        return me

    @perdure.effect
    def meet_outside(me: str) -> str:
        return meet(me)

    @perdure.step(timeout_s=60)
    def meet_in_time(me: str) -> str:
        return meet(me)

    tools = perdure.tools([meet, meet_outside, meet_in_time])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat(name, name, me=name) for name in tools.names])))

    assert lab.run(agent).result() == tools.names


def test_tools_run_one_after_the_other_if_they_must(lab: Lab) -> None:
    threads: list[int] = []
    at_once: list[int] = []

    def alone(me: str) -> str:
        at_once.append(1)
        lab.ran.append((me, len(at_once)))
        threads.append(threading.get_ident())
        at_once.pop()
        if me == "b":
            raise SoldOut
        return me

    tools = perdure.tools([lab.body(alone)])

    @lab.durable
    async def agent() -> list[str]:
        threads.append(threading.get_ident())
        found = await lab(tools.call([chat(one, "alone", me=one) for one in "abc"], concurrency=1))
        return said(found)

    assert lab.run(agent).result() == ["a", "Error: SoldOut", "c"]
    assert lab.ran == [("a", 1), ("b", 1), ("c", 1)]
    assert len(set(threads)) == 1
    with pytest.raises(perdure.UsageError, match="at least 1"):
        tools.call([], concurrency=0)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_what_ends_a_run_is_raised_when_all_calls_have_ended(lab: Lab, concurrency: int | None) -> None:
    @lab.effect(on_doubt="fail")
    def book() -> None:
        raise TimeoutError("no answer")

    @lab.effect(approve=True)
    def pay() -> str:
        return "paid"

    def look() -> str:
        lab.ran.append("look")
        return "seen"

    tools = perdure.tools([book, pay, lab.body(look)])

    @lab.durable
    async def agent() -> list[str]:
        calls = [chat(name, name) for name in tools.names]
        return said(await lab(tools.call(calls, concurrency=concurrency)))

    run = lab.run(agent, id=f"r-{concurrency}")
    assert (run.refresh().status, lab.ran) == ("waiting", ["look"])
    lab.store.answer(run.id, True)
    with pytest.raises(perdure.RunFailed) as failed:
        run.result()
    assert isinstance(failed.value.__cause__, perdure.InDoubt)
    assert [step.status for step in run.steps() if step.name == "pay"] == ["done"]


def test_several_batches_may_run_at_the_same_time(async_lab: Lab) -> None:
    tools = perdure.tools([search])
    once = Once()

    @perdure.durable
    async def agent() -> list[list[str]]:
        found = await asyncio.gather(*(tools.call([chat("x", "search", city=city)]) for city in ("a", "b")))
        once.interrupt()
        return [said(messages) for messages in found]

    with pytest.raises(Interrupt):
        async_lab.run(agent, id="r")
    run = async_lab.run(agent, id="r")
    assert run.result() == [['["a 1"]'], ['["b 1"]']]
    assert [unhashed(step.path) for step in run.steps()] == ["1@_acall.1.x.1"] * 2
