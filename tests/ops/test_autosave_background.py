"""Autosave in the background: nothing is torn, nothing waits, nothing is lost, and what goes wrong is said."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure


class Fault(Exception):
    """What the hook raises."""


class Gate:
    """A hook of the driver that lets writers through, holds them up or fails them, at BEGIN."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.faults = 0

    def __call__(self, point: str) -> None:
        if point != "statement:0" or threading.current_thread().name != "perdure-autosave":
            return
        self.reached.set()
        assert self.open.wait(60)
        if self.faults:
            self.faults -= 1
            raise Fault("injected")


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something that another thread does has happened."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.001)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, gate: Gate) -> Iterator[perdure.Store]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "a.db")
    with perdure.open(url, hook=gate) as made:
        made.thread("other").save({})  # the tenant is there
        yield made


def saved(store: perdure.Store, name: str = "a") -> list[Any]:
    thread = store.thread(name)
    return [] if thread.get_head() is None else [checkpoint.state for checkpoint in thread.history()][::-1]


def test_nobody_waits_and_only_the_newest_of_those_that_wait_is_written(store: perdure.Store, gate: Gate) -> None:
    gate.open.clear()
    with store.thread("a").autosave(perdure.autosave.every(1), background=True) as state:
        state["n"] = 0
        gate.reached.wait(60)
        for number in range(1, 10):
            state["n"] = number
        assert state.unsaved.changes == 10
        gate.open.set()
    assert saved(store) == [{"n": 0}, {"n": 9}]


def test_what_is_saved_is_the_state_at_the_call_whatever_is_done_to_it_afterwards(
    store: perdure.Store, gate: Gate
) -> None:
    gate.open.clear()
    with store.thread("a").autosave(perdure.autosave.every(1), background=True) as state:
        log = [1]
        state["log"] = log
        gate.reached.wait(60)
        log.append(2)
        gate.open.set()
        wait_for(lambda: len(saved(store)) == 1)
        assert saved(store) == [{"log": [1]}]
    assert saved(store) == [{"log": [1]}, {"log": [1, 2]}]


def test_save_waits_until_all_is_durable(store: perdure.Store) -> None:
    with store.thread("a").autosave(perdure.autosave.every(100), background=True) as state:
        state["n"] = 1
        state.save()
        assert (saved(store), state.unsaved.changes) == ([{"n": 1}], 0)


def test_an_error_is_raised_at_the_next_change_and_the_one_after_it_saves(store: perdure.Store, gate: Gate) -> None:
    gate.faults = 1
    with store.thread("a").autosave(perdure.autosave.every(1), background=True) as state:
        state["n"] = 1
        wait_for(lambda: state._error is not None)
        assert state.unsaved.changes == 1
        with pytest.raises(Fault):
            state["n"] = 2
        assert state.unsaved.changes == 2
        state["n"] = 3
        state.save()
        assert state.unsaved.changes == 0
    assert saved(store) == [{"n": 3}]


def test_an_error_that_nobody_saw_is_made_good_at_the_end(store: perdure.Store, gate: Gate) -> None:
    gate.faults = 1
    with store.thread("a").autosave(perdure.autosave.every(1), background=True) as state:
        state["n"] = 1
        wait_for(lambda: state._error is not None)
    assert saved(store) == [{"n": 1}]


def test_an_error_at_the_end_is_raised(store: perdure.Store, gate: Gate) -> None:
    gate.faults = 5
    with pytest.raises(Fault), store.thread("a").autosave(perdure.autosave.every(100), background=True) as state:
        state["n"] = 1
    assert saved(store) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "perdure-autosave"]


def test_the_error_of_the_body_is_not_hidden_by_one_of_the_background(store: perdure.Store, gate: Gate) -> None:
    gate.faults = 5
    with (
        pytest.raises(KeyError) as caught,
        store.thread("a").autosave(perdure.autosave.every(100), background=True, initial={"n": 1}) as state,
    ):
        state["m"]
    assert caught.value.__notes__ == ["and the last autosave of thread 'a' failed: Fault"]


@pytest.mark.parametrize(
    "policy", [perdure.autosave.every(1), perdure.autosave.periodic(0.001), perdure.autosave.adaptive(min_s=0)]
)
def test_no_saved_state_is_torn_while_threads_change_it(store: perdure.Store, policy: Any) -> None:
    """Each of three threads changes two keys as one."""
    steps = 400

    def pairs(name: str) -> None:
        chance = random.Random(name)
        for number in range(steps):
            state.update({f"{name}.left": number, f"{name}.right": [number] * chance.randint(1, 50)})

    with store.thread("a").autosave(policy, background=True, initial={"log": [], "n": -1}) as state:
        threads = [threading.Thread(target=pairs, args=(name,)) for name in ("x", "y")]
        for thread in threads:
            thread.start()
        for number in range(steps):
            state.update(log=[*state["log"], number], n=number)
        for thread in threads:
            thread.join()
    states = saved(store)
    for each in states:
        assert each["log"] == [*range(each["n"] + 1)]
        for name in ("x", "y"):
            assert {*each.get(f"{name}.right", [])} <= {each.get(f"{name}.left")}
    assert states[-1]["n"] == steps - 1
    assert [each["n"] for each in states] == sorted(each["n"] for each in states)
    assert store.ops.verify().ok


def test_every_saved_state_is_one_that_was_there_at_a_call(store: perdure.Store) -> None:
    """One thread, values inside values: at every use of the state, `n` and the ends of the lists agree."""
    with store.thread("a").autosave(
        perdure.autosave.every(1), background=True, initial={"a": [], "b": {"c": []}}
    ) as state:
        for number in range(300):
            state["a"].append(number)
            state["b"]["c"].append(number)
            state["n"] = number
    for each in saved(store):
        first, second, n = len(each["a"]), len(each["b"]["c"]), each.get("n", -1) + 1
        assert n <= second <= first <= n + 1
        assert each["a"][:second] == each["b"]["c"]


async def test_async_errors_are_raised_at_the_next_change_and_made_good(tmp_path: Path) -> None:
    faults = 1

    def hook(point: str) -> None:
        nonlocal faults
        if point == "commit" and faults > 0 and armed:
            faults -= 1
            raise Fault("injected")

    armed = False
    async with perdure.open(str(tmp_path / "a.db"), hook=hook) as store, asyncio.timeout(60):
        await store.thread("other").asave({})
        armed = True
        async with store.thread("a").autosave(perdure.autosave.every(1)) as state:
            state["n"] = 1
            while state._error is None:
                await asyncio.sleep(0)
            with pytest.raises(Fault):
                state["n"] = 2
            state["n"] = 3
            await state.asave()
            assert (await store.thread("a").aload()).state == {"n": 3}
        faults = 5
        with pytest.raises(Fault):
            async with store.thread("b").autosave(perdure.autosave.every(100)) as state:
                state["n"] = 1


async def test_async_only_the_newest_of_those_that_wait_is_written(tmp_path: Path) -> None:
    async with perdure.open(str(tmp_path / "a.db")) as store:
        async with store.thread("a").autosave(perdure.autosave.every(1)) as state:
            for number in range(10):  # without awaiting: the task that writes has no turn
                state["n"] = number
        assert len([each async for each in store.thread("a").ahistory()]) == 1
        assert (await store.thread("a").aload()).state == {"n": 9}
