"""A wait for a person is never silent: `result()` warns once, with the command that ends the wait, and can give up."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

import perdure
from perdure import outcome
from perdure.cli import main

AGENT = """
import perdure

@perdure.step
def search(city):
    return [f"{city} 07:15"]

@perdure.effect
def book(flight, key: perdure.IdempotencyKey):
    return f"booked {flight}"

@perdure.durable
def travel(city):
    return book(search(city)[0])

print(perdure.open("agent.db").run(travel, "Lisbon", id="trip-42").result())
"""
KILLED = "    __import__('os').kill(__import__('os').getpid(), 9)\n"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def store_option(lab: Lab) -> str:
    """How the command names a store that is not the default: a URL, which may hold a password, is not shown."""
    path = lab.store._context.driver.capabilities.path
    return f" --store {path or 'URL'}"


def timed_out(lab: Lab, run: perdure.Run) -> str:
    """What `result()` says that has looked at the run once, and then gives up."""
    with pytest.raises(TimeoutError) as caught:
        asyncio.run(run.aresult(timeout_s=0)) if lab.is_async else run.result(timeout_s=0)
    return str(caught.value)


def test_a_run_whose_process_was_killed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is running until somebody claims it, and nobody may have started a worker."""
    killed = tmp_path / "killed.py"
    killed.write_text(AGENT.replace("def search(city):\n", f"def search(city):\n{KILLED}"))
    assert subprocess.run([sys.executable, killed], cwd=tmp_path, check=False).returncode == -9
    for command in (["runs"], ["run", "show", "trip-42"]):
        assert main([*command, "--store", str(tmp_path / "agent.db")]) == 0
        assert "a worker: its process has ended" in capsys.readouterr().out


def test_an_agent_killed_while_it_books_says_what_it_waits_for(tmp_path: Path) -> None:
    """Without any logging set up, on stderr. The command that it names ends the wait."""
    booked = '    return f"booked {flight}"\n'
    assert booked in AGENT
    killed, again = tmp_path / "killed.py", tmp_path / "again.py"
    killed.write_text(AGENT.replace(booked, KILLED + booked))
    again.write_text(AGENT)
    assert subprocess.run([sys.executable, killed], cwd=tmp_path, check=False).returncode == -9
    with subprocess.Popen([sys.executable, again], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        assert line.startswith("run trip-42 waits for a verdict: did book happen? (step 2, key pd_")
        command = re.findall(r"To continue: perdure (.*) or perdure (.*)$", line)
        [(done, not_done)] = command
        assert shlex.split(not_done) == ["run", "resolve", "trip-42", "2", "--not-done"]
        at = ["--store", str(tmp_path / "agent.db")]
        for pasted in (done, f"{done} or perdure {not_done}"):  # changes nothing
            assert main([*shlex.split(pasted), *at]) == 2
        assert main([*shlex.split(done.replace("<result as JSON>", '"found"')), *at]) == 0
        out, err = waiting.communicate(timeout=60)
    assert (out.splitlines()[0], err, waiting.returncode) == ("found", "", 0)


def test_a_question_is_said_once_for_each_wait(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    @lab.durable(name="visible.asks")
    async def agent() -> list[Any]:
        return [await lab(perdure.ask(question)) for question in ("Which flight?", "Window?")]

    run, at = lab.run(agent, id="trip 1"), store_option(lab)
    for question, step in (("Which flight?", 1), ("Window?", 2)):
        command = f"perdure answer 'trip 1' {step} '<answer>'{at}"
        expected = f"waits for an answer: {question} (step {step}). To continue: {command}"
        for _ in range(2):
            assert timed_out(lab, run) == f"run 'trip 1' has no result yet: it {expected}"
        assert warnings(caplog) == [f"run trip 1 {expected}"]
        caplog.clear()
        lab.store.answer(run, "yes")
        if step == 1:
            lab.run(agent, id="trip 1")
    assert run.result() == ["yes", "yes"]
    assert warnings(caplog) == []


def test_a_paused_run_says_how_to_resume_it(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """The same line again does not undo what an operator asked for."""

    @lab.durable(name="visible.paused")
    async def agent() -> Any:
        return await lab(perdure.ask("Which?"))

    lab.run(agent, id="held").pause()
    run = lab.run(agent, id="held")
    assert run.refresh().status == "paused"
    for _ in range(2):
        assert (
            timed_out(lab, run)
            == f"run 'held' has no result yet: it is paused. To continue: perdure run resume held{store_option(lab)}"
        )
    assert warnings(caplog) == [f"run held is paused. To continue: perdure run resume held{store_option(lab)}"]
    run.resume()
    lab.store.answer(run, 1)
    assert run.result() == 1


def test_what_a_child_waits_for_is_said_of_the_run_that_waits_for_it(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    @lab.durable(name="visible.child")
    async def child() -> Any:
        return await lab(perdure.ask("Which?"))

    @lab.durable(name="visible.parent")
    async def parent() -> Any:
        started = await lab(perdure.spawn(child, id="the-child"))
        return await lab(started.result())

    run = lab.run(parent, id="the-parent")
    assert timed_out(lab, run).endswith(f"To continue: perdure answer the-child 1 '<answer>'{store_option(lab)}")
    assert warnings(caplog) == [
        "run the-parent waits for run the-child, which waits for an answer: Which? (step 1). "
        f"To continue: perdure answer the-child 1 '<answer>'{store_option(lab)}"
    ]
    lab.store.answer("the-child", 3)
    assert run.result() == 3


def test_a_run_that_no_worker_has_taken_says_so(sync_lab: Lab) -> None:
    @sync_lab.durable(name="visible.queued")
    async def agent() -> None: ...

    with pytest.raises(TimeoutError, match="no result yet: it is queued, waiting for a worker"):
        sync_lab.store.start(agent, id="queued").result(timeout_s=0)


def test_why_reconcile_could_not_tell_is_shown(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """The newest reason: while a person is waited for, the same line asks the receiver again."""
    reasons: list[Any] = [
        outcome.Unknown("the airline is closed"),
        ConnectionError("no route"),
        outcome.Unknown(),
    ]

    def look(key: str, flight: str) -> Any:
        found = reasons.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    @lab.effect(name="visible.book", reconcile=look, timeout_s=0.01)
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        raise TimeoutError

    @lab.durable(name="visible.doubtful")
    async def agent() -> str:
        return str(await lab(book("LIS")))

    for reason in ("the airline is closed", "reconcile failed: ConnectionError: no route", None):
        run = lab.run(agent, id="doubt")  # the same line asks reconcile again
        [ask], [step] = lab.store.questions(), run.steps()
        assert (ask.reason, (step.note or {}).get("reason")) == (reason, reason)
        assert getattr(run.refresh().waiting_for, "reason", "") == (reason or "")
        assert (step.status, ask.status) == ("in doubt", "open")
        if reason:
            assert timed_out(lab, run).endswith(f"({reason})")
            assert reason not in caplog.text
    run.resolve(step, done="B-1")
    assert run.result() == "B-1"
