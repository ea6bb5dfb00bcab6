"""The ports of `perdure.adapters` for agents of other frameworks, without any framework."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import MODES, PLACES, open_at

import perdure
from perdure.adapters import (
    aamend,
    aextend,
    amend,
    arecall,
    extend,
    in_run,
    io_only_in_units,
    journaled,
    recall,
    tool_call,
)
from perdure.errors import RunFailed, UsageError
from perdure.runs.execution import hooks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("ports") / "store.db"), durability="normal") as opened:
        yield opened


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_writers_amend_one_state_and_no_change_is_lost(
    place: str, mode: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for store in open_at(place, request, tmp_path_factory):
        ann, bob = (store.thread("notes", metadata={"of": "shop"}) for _ in range(2))
        if mode == "sync":
            assert recall(ann) is None
            assert amend(ann, lambda state: state) is None, "nothing to save"
            extend(ann, ["a"])
            extend(bob, ["b"])
            extend(ann, ["c", {"d": (1, 2)}])
            amend(bob, lambda state: state[1:])
            assert extend(ann, []) is None
            states = [found.state for handle in (ann, bob) if (found := recall(handle))]
        else:
            states = asyncio.run(_amended(ann, bob))
        assert states == [["b", "c", {"d": (1, 2)}]] * 2
        assert ann.info().metadata == {"of": "shop"}
        assert [checkpoint.is_head for checkpoint in ann.branches()] == [True]


async def _amended(ann: perdure.Thread, bob: perdure.Thread) -> list[Any]:
    assert await arecall(ann) is None
    assert await aamend(ann, lambda state: state) is None
    await asyncio.gather(aextend(ann, ["a"]), aextend(bob, ["a"]))  # each finds nothing, and both are first
    await aextend(ann, ["b", "c", {"d": (1, 2)}])
    await aamend(bob, lambda state: state[2:])
    return [found.state for handle in (ann, bob) if (found := await arecall(handle))]


def test_a_state_that_is_no_list_is_not_extended(store: perdure.Store) -> None:
    store.thread("dict").save({"a": []})
    with pytest.raises(UsageError, match="is no list"):
        extend(store.thread("dict"), [1])


def test_in_a_run_a_state_is_amended_once_and_read_as_it_was(store: perdure.Store) -> None:
    @perdure.durable(name="ports.amending")
    async def amending() -> list[Any]:
        thread = store.thread("in-run")
        before = await arecall(thread)
        saved = await aextend(thread, ["ours"])
        unchanged = await aamend(thread, lambda state: None if "theirs" not in state else ["wrong"])
        await perdure.ask("Go on?")
        after = await arecall(thread)
        return [before, saved is not None and saved.id, unchanged, after and after.state]

    run = store.run(amending, id="amending")
    assert run.refresh().status == "waiting"
    extend(store.thread("in-run"), ["theirs"])
    store.answer("amending", "yes")
    first = store.thread("in-run").at_step(0).id
    assert store.run(amending, id="amending").result() == [None, first, None, ["ours", "theirs"]]


def test_a_unit_is_recorded_in_a_run_and_a_plain_call_elsewhere(store: perdure.Store) -> None:
    calls = []

    async def body() -> str:
        calls.append(in_run())
        return "answer"

    @perdure.durable(name="ports.units")
    async def units() -> list[str]:
        answers = [await journaled("step", "shop.model", {"messages": n}, body, retries=1) for n in (1, 2)]
        await perdure.ask("Go on?")
        return answers

    assert asyncio.run(journaled("effect", "shop.pay", {}, body)) == "answer"
    run = store.run(units, id="units")
    store.answer("units", "yes")
    assert store.run(units, id="units").result() == ["answer", "answer"]
    assert [step.name for step in run.steps()] == ["shop.model", "shop.model", "perdure.ask"]
    assert calls == [False] * 3
    with pytest.raises(perdure.RunStuck, match="has no option 'reconcile'"):
        store.run(_wrong, id="wrong").result()


@perdure.durable(name="ports.wrong")
async def _wrong() -> None:
    await journaled("step", "shop.wrong", {}, lambda: asyncio.sleep(0), reconcile=print)


@pytest.mark.parametrize("says", [True, False])
def test_a_run_whose_tasks_wait_for_each_other_parks_if_its_io_is_in_units(
    store: perdure.Store, tmp_path: Path, says: bool
) -> None:
    @perdure.durable(name="ports.waiting")
    async def waiting() -> str:
        if says:
            io_only_in_units()
        queue: asyncio.Queue[str] = asyncio.Queue()  # asyncio does not show who will put something into it

        async def asking() -> None:
            with tool_call("ask", "c1"):
                await queue.put(await perdure.ask("Which one?"))

        task = asyncio.create_task(asking())
        answer = await queue.get()
        await task
        return answer

    async def both() -> str:
        running = asyncio.create_task(store.arun(waiting, id=f"waiting-{says}"))
        if says:
            return (await running).refresh().status
        while not store.questions(f"waiting-{says}"):
            await asyncio.sleep(0.01)
        assert not running.done()
        await store.aanswer(f"waiting-{says}", "this")
        return (await running).refresh().status

    assert asyncio.run(both()) == ("waiting" if says else "done")


def test_an_error_of_the_run_ends_it_although_the_code_around_a_tool_catches_it(store: perdure.Store) -> None:
    told = []

    @perdure.effect(name="ports.pay", on_doubt="fail", timeout_s=0.1)
    async def pay() -> None:
        raise ConnectionError("the line is dead")

    @perdure.durable(name="ports.holding")
    async def holding(in_tool: bool) -> str:
        try:
            if in_tool:
                with tool_call("pay", "c1"):
                    await pay()
            await pay()
        except Exception as error:
            told.append(type(error).__name__)
        await perdure.sleep(0)
        return "the model was told"

    assert store.run(holding, False, id="caught").result() == "the model was told"
    with pytest.raises(RunFailed, match="it is unknown whether"):
        store.run(holding, True, id="held").result()
    assert told == ["InDoubt"] * 2


def test_what_a_tools_body_must_not_call_ends_the_run_although_the_framework_makes_a_result_of_the_error(
    store: perdure.Store,
) -> None:
    told = []

    async def body() -> str:
        try:
            return str(await perdure.ask("Which one?"))
        except Exception:
            return "An error occurred. Please try again."

    async def tool() -> str:
        try:
            with tool_call("look", "c1"):
                return await journaled("step", "shop.look", {}, body)
        except asyncio.CancelledError:
            await asyncio.Event().wait()  # a framework cleans up, and waits for a task that was cancelled too
            raise

    @perdure.durable(name="ports.refusing")
    async def refusing() -> None:
        told.append(await asyncio.create_task(tool()))

    with pytest.raises(perdure.RunStuck, match="was called inside step"):
        store.run(refusing, id="refusing").result()
    assert told == []


def test_an_error_of_the_store_in_a_session_is_the_runs_own_although_a_framework_wraps_it(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(point: hooks.Point) -> None:
        if point.name == "thread.save":
            raise perdure.errors.DiskFull("the disk is full")

    @perdure.durable(name="ports.session")
    async def session() -> str:
        try:
            await aextend(store.thread("full"), ["a"])
        except Exception as error:
            raise ValueError("the framework failed") from error
        return "saved"

    monkeypatch.setattr(hooks, "hook", is_full)
    assert store.run(session, id="session").refresh().status == "queued", "it is tried again, and has not failed"
