"""A call of Perdure's that cannot be right is a mistake in the code: the run waits for a correction, and nothing that
it did is undone for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure

done: list[str] = []
is_right = threading.Event()


@perdure.effect(undo=lambda: done.append("undone"), name="wrong_calls.book")
def book() -> None:
    done.append("booked")


def ask() -> str:
    return str(perdure.ask("Which?", options=["a"] if is_right.is_set() else []))


@perdure.durable(name="wrong_calls.asks")
def asks() -> str:
    book()
    return ask()


@perdure.durable(name="wrong_calls.in_a_task")
async def in_a_task() -> str:
    async def branch() -> str:
        return str(await perdure.ask("Which?", options=["a"] if is_right.is_set() else []))

    await asyncio.to_thread(lambda: None)
    book()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(branch())
    return task.result()


@perdure.durable(name="wrong_calls.on_a_thread")
def on_a_thread() -> str:
    book()
    if is_right.is_set():
        return ask()
    found: list[BaseException] = []

    def body() -> None:
        try:
            perdure.ask("Which?")
        except perdure.NotInRun as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    raise found[0]


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    done.clear()
    is_right.clear()
    with perdure.open(str(tmp_path / "agent.db")) as opened:
        yield opened


@pytest.mark.parametrize("agent", [asks, in_a_task, on_a_thread])
def test_the_run_is_stuck_and_resumes_with_corrected_code(store: perdure.Store, agent: Callable[..., Any]) -> None:
    assert store.run(agent, id="r").status == "stuck"
    is_right.set()
    assert store.run(agent, id="r").status == "waiting"
    store.answer("r", "a")
    assert store.run(agent, id="r").result() == "a"
    assert done == ["booked"]


def test_also_if_it_is_made_in_a_step_whose_error_is_recorded(store: perdure.Store) -> None:
    @perdure.step
    def look() -> None:
        store.runs(limit=-1)

    @perdure.durable(name="wrong_calls.in_a_step")
    def agent() -> str:
        book()
        look()
        return "done"

    assert store.run(agent, id="r").status == "stuck"
    with pytest.raises(perdure.RunStuck, match="UsageError"):
        store.get_run("r").result()
    assert done == ["booked"]


def test_code_may_catch_it(store: perdure.Store) -> None:
    @perdure.durable(name="wrong_calls.catches")
    def agent() -> str:
        book()
        try:
            return ask()
        except perdure.UsageError as error:
            return str(error)

    assert "options" in store.run(agent, id="r").result()
