"""Steps: recorded once, answered from the journal from then on; retries, deadlines, caches, streams."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Flaky, Interrupt, Lab, Once, again, hooked

import perdure
from perdure.runs.execution.hooks import Point
from perdure.runs.journal.blobs import BLOB_MIN_BYTES


class OutOfPaper(Exception):
    """An error with an attribute of its own."""

    def __init__(self, printer: str, left: int) -> None:
        super().__init__(printer, left)
        self.printer = printer
        self.left = left


# --- the record


def test_a_step_is_recorded_once_and_answered_from_then_on(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def double(number: int) -> int:
        lab.ran.append(number)
        return number * 2

    @lab.durable
    async def agent(number: int) -> list[int]:
        found = [await lab(double(number)), await lab(double(number + 1))]
        once.interrupt()
        return [*found, await lab(double(number + 2))]

    run = again(lab, agent, 3, id="r")
    assert run.result() == [6, 8, 10]
    assert lab.ran == [3, 4, 5]
    assert [(step.path, step.name, step.kind, step.status, step.result) for step in run.steps()] == [
        ("1", "double", "step", "done", 6),
        ("2", "double", "step", "done", 8),
        ("3", "double", "step", "done", 10),
    ]
    assert lab.run(agent, 3, id="r").result() == [6, 8, 10]  # finished: its handle
    assert lab.ran == [3, 4, 5]
    assert run.refresh().attempts == 2


def test_a_run_without_an_id_is_a_new_one_each_time(lab: Lab) -> None:
    @lab.durable
    async def agent() -> int:
        return 1

    first, second = lab.run(agent), lab.run(agent)
    assert first.id != second.id
    assert {info.id for info in lab.store.runs(function="agent")} == {first.id, second.id}


def test_an_error_is_recorded_and_raised_again_with_its_class(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def printed() -> None:
        lab.ran.append("printed")
        try:
            raise KeyError("tray 2")
        except KeyError as error:
            raise OutOfPaper("lobby", 3) from error

    @lab.durable
    async def agent() -> list[Any]:
        try:
            await lab(printed())
        except OutOfPaper as error:
            once.interrupt()
            return [error.printer, error.left, list(error.args), repr(error.__cause__), str(error)]
        return []

    assert again(lab, agent, id="r").result() == ["lobby", 3, ["lobby", 3], "KeyError('tray 2')", "('lobby', 3)"]
    assert lab.count("printed") == 1
    [step] = lab.store.get_run("r").steps()
    assert step.status == "failed"
    assert step.error == "OutOfPaper: ('lobby', 3)"


def test_an_error_that_nobody_catches_fails_the_run(lab: Lab) -> None:
    @lab.step()
    def printed() -> None:
        lab.ran.append("printed")
        raise OutOfPaper("lobby", 3)

    @lab.durable
    async def agent() -> None:
        await lab(printed())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    for handle in (run, lab.run(agent, id="r"), lab.store.get_run("r")):
        with pytest.raises(perdure.RunFailed, match="OutOfPaper") as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, OutOfPaper)
        assert caught.value.__cause__.printer == "lobby"
    assert lab.count("printed") == 1


def test_an_error_whose_class_is_gone_leaves_the_run_stuck_whatever_the_code_catches(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def broken() -> None:
        class Local(Exception):
            """No process can find this class again."""

        raise Local("sprocket")

    @lab.durable
    async def agent() -> str:
        try:
            await lab(broken())
        except Exception:
            once.interrupt()
        return ""

    run = again(lab, agent, id="r")
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match=r"step 1 \(broken\) of run 'r' failed with .*Local: sprocket"):
        run.result()


def test_large_results_are_kept_once_beside_the_journal(lab: Lab) -> None:
    once = Once()
    large = random.Random(1).randbytes(BLOB_MIN_BYTES * 2).hex()  # twice as long, and half of that compressed

    @lab.step()
    def page(number: int) -> str:
        lab.ran.append(number)
        return large

    @lab.durable
    async def agent() -> list[bool]:
        found = [await lab(page(1)) == large, await lab(page(2)) == large]
        once.interrupt()
        return found

    run = again(lab, agent, id="r")
    assert run.result() == [True, True]
    assert lab.ran == [1, 2]
    assert len(run.steps()) == 2


def test_a_run_of_thousands_of_steps(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def count(number: int) -> int:
        lab.ran.append(number)
        return number

    @lab.durable
    async def agent(steps: int) -> int:
        total = 0
        for number in range(steps):
            total += await lab(count(number))
            if number == steps - 2:
                once.interrupt()
        return total

    steps = 2000
    run = again(lab, agent, steps, id="r")
    assert run.result() == sum(range(steps))
    assert lab.ran == list(range(steps))
    assert len(run.steps()) == steps


def test_recursion_and_loops_are_numbered_by_the_call_tree(lab: Lab) -> None:
    @lab.step()
    def leaf(depth: int) -> int:
        lab.ran.append(depth)
        return depth

    async def tree(depth: int) -> int:
        found = await lab(leaf(depth))
        if depth:
            return int(found) + await tree(depth - 1) + await tree(depth - 1)
        return int(found)

    once = Once()

    @lab.durable
    async def agent() -> int:
        found = await tree(3)
        once.interrupt()
        return found

    assert again(lab, agent, id="r").result() == 11
    assert len(lab.ran) == 15


# --- generators and what a run says


def test_a_generator_streams_its_chunks_and_is_recorded_once(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def tokens(count: int) -> Iterator[str]:
        for number in range(count):
            lab.ran.append(number)
            yield f"t{number}"

    @lab.durable
    async def agent() -> Any:
        found = await lab(tokens(3))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    heard: list[perdure.Event] = []
    ready = threading.Event()

    def listen() -> None:
        stream = lab.store.get_run("r").stream()
        ready.set()
        heard.extend(stream)

    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait(60)
    assert lab.run(agent, id="r").result() == ["t0", "t1", "t2"]
    listener.join(30)
    assert lab.ran == [0, 1, 2]
    ends = [(event.kind, event.value) for event in heard if event.kind != "chunk"]
    assert ends == [("done", ["t0", "t1", "t2"]), ("status", "done")]


def test_chunks_are_heard_while_the_step_runs(lab: Lab) -> None:
    heard: list[tuple[str, Any]] = []
    first, ended = threading.Event(), threading.Event()

    def tokens() -> Iterator[str]:
        yield "one"
        assert first.wait(30)  # the listener has it before the step ends
        yield "two"

    def atokens() -> Any:
        async def chunks() -> Any:
            yield "one"
            assert await asyncio.to_thread(first.wait, 30)
            yield "two"

        return chunks

    step = perdure.step(atokens()) if lab.is_async else perdure.step(tokens)
    begun = threading.Event()

    @lab.durable
    async def agent() -> Any:
        begun.set()
        assert ended.wait(30) or True
        return await lab(step())

    def listen() -> None:
        for event in lab.store.get_run("r").stream():
            heard.append((event.kind, event.value))
            if event.value == "one":
                first.set()

    runner = threading.Thread(target=lambda: lab.run(agent, id="r"))
    runner.start()
    assert begun.wait(30)
    listener = threading.Thread(target=listen)
    listener.start()
    ended.set()
    runner.join(30)
    listener.join(30)
    assert heard == [("chunk", "one"), ("chunk", "two"), ("done", ["one", "two"]), ("status", "done")]


def test_what_a_run_emits_is_recorded_and_never_read_by_it(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work() -> int:
        perdure.emit({"half": True})  # only for those who read now
        return 1

    @lab.durable
    async def agent() -> Any:
        perdure.emit("begun")
        found = await lab(work())
        perdure.emit("done")
        once.interrupt()
        perdure.emit("after")
        return found

    run = again(lab, agent, id="r")
    assert run.result() == 1
    said = [event.value for event in run.stream() if event.kind == "emit"]
    assert said == ["begun", "done", "after"]
    assert [(step.path, step.kind) for step in run.steps() if step.kind != "emit"] == [("2", "step")]


# --- methods, direct calls, what is no input


class Printer:
    """Something with methods that are steps."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name

    @perdure.step
    def prints(self, text: str) -> str:
        """What a page says."""
        self.lab.ran.append((self.name, text))
        return f"{self.name}: {text}"

    @perdure.step
    async def aprints(self, text: str) -> str:
        self.lab.ran.append((self.name, text))
        return f"{self.name}: {text}"

    def do(self, text: str) -> Any:
        return self.aprints(text) if self.lab.is_async else self.prints(text)


def test_methods_are_steps_and_self_is_no_input(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent() -> str:
        found: str = await lab(Printer(lab, "first" if not once.reached else "second").do("a"))
        once.interrupt()
        return found

    assert again(lab, agent, id="r").result() == "first: a"
    assert lab.ran == [("first", "a")]
    assert Printer.prints.__doc__ == "What a page says."
    assert asyncio.iscoroutinefunction(Printer.aprints)


def test_ignored_arguments_are_no_input_and_need_not_be_storable(lab: Lab) -> None:
    once = Once()

    @lab.step(ignore=("client",))
    def fetch(url: str, client: Any) -> str:
        lab.ran.append(url)
        assert isinstance(client, threading.Event)
        return url.upper()

    @lab.durable
    async def agent() -> Any:
        found = await lab(fetch("a", threading.Event()))
        once.interrupt()
        return found

    assert again(lab, agent, id="r").result() == "A"
    assert lab.ran == ["a"]


def test_defaults_are_no_input(lab: Lab) -> None:
    once = Once()

    def fetch(url: str, tries: int = 1) -> list[Any]:
        lab.ran.append((url, tries))
        return [url, tries]

    def changed(url: str, tries: int = 5) -> list[Any]:
        return fetch(url, tries)

    old, new = lab.step(name="fetch")(fetch), lab.step(name="fetch")(changed)

    @lab.durable
    async def agent() -> Any:
        step = old if not once.reached else new
        found = [await lab(step("a"))]
        once.interrupt()
        return [*found, await lab(step(url="b"))]

    assert again(lab, agent, id="r").result() == [["a", 1], ["b", 5]]


def test_a_step_is_a_plain_call_where_there_is_no_run_and_inside_a_step(lab: Lab) -> None:
    @lab.step()
    def inner(number: int) -> int:
        lab.ran.append(number)
        return number * 10

    def outer_body(number: int) -> int:
        return int(inner(number)) + 1

    async def aouter_body(number: int) -> int:
        return int(await inner(number)) + 1

    outer = perdure.step(name="outer")(aouter_body if lab.is_async else outer_body)

    @lab.durable
    async def agent() -> list[int]:
        return [await lab(outer(1)), await lab(inner.direct(2))]

    run = lab.run(agent, id="r")
    assert run.result() == [11, 20]
    assert [step.name for step in run.steps()] == ["outer"]
    if lab.is_async:
        assert asyncio.run(inner(3)) == asyncio.run(inner.direct(3)) == 30
    else:
        assert inner(3) == inner.direct(3) == 30


def test_the_durable_function_called_directly_is_itself(lab: Lab) -> None:
    @lab.durable
    async def agent(number: int) -> int:
        return number + 1

    assert (asyncio.run(agent(1)) if lab.is_async else agent(1)) == 2


# --- the points


def test_the_points_of_a_step(lab: Lab) -> None:
    heard: list[str] = []

    @lab.step(retries=1, backoff_s=0)
    def work() -> int:
        lab.ran.append("work")
        if lab.count("work") == 1:
            raise Flaky("once")
        return 1

    @lab.durable
    async def agent() -> Any:
        return await lab(work())

    def hear(point: Point) -> None:
        heard.append(f"{point.when} {point.kind} {point.attempt}")

    with hooked(hear):
        lab.run(agent, id="r")
    assert heard == [
        "after claim 1",
        "before body 1",
        "after body 1",
        "before failed 1",
        "after failed 1",
        "before body 2",
        "after body 2",
        "before done 2",
        "after done 2",
        "before finish 1",
        "after finish 1",
    ]
