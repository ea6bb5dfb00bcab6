"""Type checkers know the results of runs and the arguments of steps and effects: right calls pass, wrong ones fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
from typing import Any, assert_type

import perdure

store = perdure.open("agent.db")


@perdure.durable
def travel(dest: str) -> int: ...


@perdure.durable(version="2")
async def atravel(dest: str) -> str: ...


@perdure.step
def search(site: str, *, page: int = 1) -> list[str]: ...


@perdure.step(retries=2)
async def asearch(site: str) -> list[str]: ...


@perdure.effect
def pay(cents: int, to: str) -> str: ...


@perdure.effect(timeout_s=2)
def book(flight: str, key: perdure.IdempotencyKey, seats: int = 1) -> str: ...


@perdure.effect
async def abook(flight: str, seats: int, *, key: perdure.IdempotencyKey) -> bytes: ...


@perdure.effect
def cancel(flight: str, reason: str = "", fee: int = 0) -> None: ...


class Agent:
    @perdure.step
    def look(self, what: str) -> bytes: ...

    @perdure.effect(approve=True)
    def send(self, to: str, key: perdure.IdempotencyKey) -> float: ...

    @perdure.durable
    def work(self, days: int) -> dict[str, int]: ...


def right(any_run: perdure.Run) -> None:
    assert_type(store.run(travel, "Oslo", id="a").result(), int)
    assert_type(store.start(atravel, "Oslo", tags={"a": 1}), perdure.Run[str])
    assert_type(store.run(Agent().work, 1), perdure.Run[dict[str, int]])
    assert_type(store.get_run("a").result(), Any)
    assert_type(travel("Oslo"), int)
    assert_type(search("a", page=2), list[str])
    assert_type(search.direct("a"), list[str])
    assert_type(Agent().look("x"), bytes)
    assert_type(pay(1, "x"), str)
    assert_type(pay(1, to="x"), str)
    assert_type(pay(to="x", cents=1), str)
    assert_type(book("x"), str)
    assert_type(book("x", seats=2), str)
    assert_type(book.direct("x", perdure.IdempotencyKey("k")), str)
    assert_type(Agent().send("x"), float)
    assert_type(Agent().send(to="x"), float)
    cancel("x")
    cancel("x", "ill", 3)
    right(store.run(travel, "Oslo"))


async def aright() -> None:
    assert_type(await store.arun(atravel, "Oslo"), perdure.Run[str])
    assert_type(await (await store.astart(travel, "Oslo")).aresult(), int)
    assert_type(await asearch("a"), list[str])
    assert_type(await search.on_thread("a"), list[str])
    assert_type(await abook("x", 2), bytes)


def wrong() -> None:
    travel(2)
    store.run(travel, "Oslo", id=3)
    text: str = store.run(travel, "Oslo").result()
    search(1)
    search("a", pages=2)
    search()
    Agent().look(2)
    pay("1", "x")
    book(1)
    Agent().send(2)
    cancel(2)
    assert_type(book("x"), int)


async def awrong() -> None:
    await asearch(1)
    run: perdure.Run[int] = await store.arun(atravel, "Oslo")
"""
WRONG = {
    number
    for block in re.finditer(r"def a?wrong\(\) -> None:\n((?:    .*\n)+)", CALLS)
    for number in range(CALLS.count("\n", 0, block.start(1)) + 1, CALLS.count("\n", 0, block.end(1)) + 1)
}


def mypy(file: Path) -> set[int]:
    options = ["--strict", "--cache-dir", str(file.parent), "--disable-error-code", "empty-body"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True)
    assert done.stderr == ""
    return {int(line) for line in re.findall(rf"^{re.escape(str(file))}:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(file: Path) -> set[int]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
    problems = json.loads(done.stdout)["generalDiagnostics"]
    return {problem["range"]["start"]["line"] + 1 for problem in problems if problem["rule"] != "reportReturnType"}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_calls_pass_and_wrong_ones_do_not(checker: object, tmp_path: Path) -> None:
    assert callable(checker)
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    assert checker(file) == WRONG
