"""perdure.progress: a record that is merged, kept with the journal, and written to a file."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, hooked

import perdure
from perdure.agents import progress_file
from perdure.runs.execution.hooks import Point


def dies_before_the_commit(number: int) -> Any:
    """A hook that ends the code after the body of the so-manieth perdure.progress, before it is recorded."""
    seen = []

    def hook(point: Point) -> None:
        if point.name == "perdure.progress" and (point.kind, point.when) == ("body", "after"):
            seen.append(point)
            if len(seen) == number:
                raise Interrupt

    return hook


# --- the record


def test_the_record_is_merged_over_the_calls_and_kept_with_the_run(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        await lab(perdure.progress(goal="Book a flight", next="Search", context={"from": "SFO"}))
        await lab(perdure.progress(done="Search", blocked="sold out"))
        return await lab(
            perdure.progress(done=["Ask", "Search"], blocked=None, next="Book", context={"to": ("NYC", 1)})
        )

    run = lab.run(agent, id="r")
    expected = perdure.agents.Progress(
        "Book a flight", ["Search", "Ask"], [], "Book", {"from": "SFO", "to": ("NYC", 1)}
    )
    assert run.result() == expected
    assert perdure.progress.latest(lab.store, "r") == expected
    assert asyncio.run(perdure.progress.alatest(lab.store, "r")) == expected
    assert [(step.kind, step.result["done"]) for step in run.steps()] == [
        ("progress", []),
        ("progress", ["Search"]),
        ("progress", ["Search", "Ask"]),
    ]


def test_a_replay_says_nothing_twice(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent() -> Any:
        first = await lab(perdure.progress(done="one" if not once.reached else "reworded"))
        first.done.append("the caller's own")
        once.interrupt()
        return await lab(perdure.progress(done="two"))

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")
    assert run.result().done == ["one", "two"]
    assert len(run.steps()) == 2


def test_a_branch_reports_nothing(lab: Lab) -> None:
    def report(done: str) -> Any:
        return perdure.progress(done=done)

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.map(report, ["one", "two"]))

    with pytest.raises(perdure.RunStuck, match="parallel branch"):
        lab.run(agent).result()


def test_a_fork_has_the_record_of_where_it_begins_and_goes_on_from_it(lab: Lab) -> None:
    once = Once()

    @lab.durable
    async def agent(size: int) -> Any:
        await lab(perdure.progress(goal="g", context={"random": os.urandom(size)}))
        await lab(perdure.progress(done="one"))
        await lab(perdure.progress(done="two" if not once.reached else "another"))

    for size in (10, 100_000):  # with its value in the journal, and beside it
        once.reached = 0
        lab.run(agent, size, id=f"{size}").result()
        once.reached = 1
        fork = lab.store.fork(f"{size}", at="2", id=f"fork-{size}")
        before = perdure.progress.latest(lab.store, fork.id)
        assert before is not None
        assert (before.goal, before.done) == ("g", ["one"])
        lab.run(agent, size, id=fork.id).result()
        after, source = perdure.progress.latest(lab.store, fork.id), perdure.progress.latest(lab.store, f"{size}")
        assert after is not None
        assert source is not None
        assert (after.done, source.done) == (["one", "another"], ["one", "two"])


def test_runs_that_said_nothing_or_do_not_exist(lab: Lab) -> None:
    @lab.durable
    async def agent() -> Any:
        return None

    lab.run(agent, id="silent").result()
    assert perdure.progress.latest(lab.store, "silent") is None
    with pytest.raises(perdure.NotFound):
        perdure.progress.latest(lab.store, "nobody")


def test_what_cannot_be_said_is_refused_and_the_rest_goes_on(lab: Lab) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"done": 3}, "done is a text"),
        ({"goal": ["a"]}, "goal is a text"),
        ({"blocked": [1]}, "blocked is a text or a list"),
        ({"context": 3}, "context is a text"),
        ({"git": True}, "name it with file="),
    ]

    @lab.durable
    async def agent() -> list[str]:
        reasons = []
        for change, _ in wrong:
            try:
                await lab(perdure.progress(**change))
            except perdure.UsageError as error:
                reasons.append(str(error))
        await lab(perdure.progress(done="fine"))
        return reasons

    reasons = lab.run(agent, id="r").result()
    assert all(expected in reason for (_, expected), reason in zip(wrong, reasons, strict=True))
    found = perdure.progress.latest(lab.store, "r")
    assert found is not None
    assert found.done == ["fine"]
    with pytest.raises(perdure.NotInRun):
        perdure.progress(done="outside")


# --- the file


def test_the_file_says_what_the_record_says_and_is_remembered(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "notes" / "PROGRESS.md"

    @lab.durable
    async def agent() -> None:
        await lab(perdure.progress(goal="Fly", file=str(file)))
        await lab(perdure.progress(done="Packed", context={"bags": 2}))

    lab.run(agent, id="r").result()
    assert (
        perdure.progress.read(file)
        == perdure.progress.latest(lab.store, "r")
        == perdure.agents.Progress("Fly", ["Packed"], context={"bags": 2})
    )
    assert "1. [x] Packed" in file.read_text()
    assert [one.name for one in file.parent.iterdir()] == ["PROGRESS.md"]


def test_a_replay_writes_no_file(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "P.md"

    @lab.durable
    async def agent() -> Any:
        await lab(perdure.progress(done="one", file=file))
        return (await lab(perdure.progress())).done

    run = lab.run(agent)
    run.result()
    file.unlink()
    assert lab.store.replay(run).result == ["one"]
    assert not file.exists()


def test_a_run_goes_on_from_a_file_that_somebody_else_began(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "P.md"
    began = perdure.agents.Progress("Ship it", ["Design"], [], "Build", {"language": "Python"})

    @lab.durable
    async def worker(goal: str | None) -> Any:
        return await lab(perdure.progress(goal=goal, done="Build", file=file))

    for goal, done in ((None, ["Design", "Build"]), ("Ship it", ["Design", "Build"]), ("Another", ["Build"])):
        progress_file.write(file, began)
        found = lab.run(worker, goal, id=f"w-{goal}").result()
        assert (found.done, found.goal) == (done, goal or "Ship it")
        assert progress_file.read(file) == found


def test_what_a_person_adds_to_the_file_survives_the_next_reports(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "P.md"
    by_hand = {
        "Completed Steps": "- called Bob",
        "Context": "- the hotel has stairs",
        "Next Action": "Ask Bob again",
        "Questions": "- who pays?",
    }

    @lab.durable
    async def agent() -> Any:
        await lab(perdure.progress(goal="Fly", done="Search", file=file))
        text = file.read_text()
        for heading, line in by_hand.items():
            section = f"## {heading}\n\n"
            text = text.replace(f"{section}_None_", section) if section in text else f"{text}\n{section}"
            text = text.replace(section, f"{section}{line}\n")
        file.write_text(text)
        await lab(perdure.progress(context={"to": "NYC"}))
        return await lab(perdure.progress(done="Packed"))

    found = lab.run(agent).result()
    assert found.done == ["Search", "called Bob", "Packed"]
    assert (found.next, found.context) == ("Ask Bob again", {"to": "NYC"})
    assert found.notes == {"Context": "- the hotel has stairs", "Questions": "- who pays?"}
    assert progress_file.read(file) == found


BY_HAND = """# Progress: Fly

## Current Goal

Fly to NYC tomorrow

## Completed Steps

1. [x] Searched flights

## Current Blocker

- the 8am flight is sold out
- no answer from Bob

## Next Action

Offer the 9am flight

## Context

- User prefers aisle seats
- Departure: SFO
"""


def test_bullets_survive_a_read_and_a_write_and_several_things_may_block(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "P.md"
    file.write_text(BY_HAND)
    read = perdure.progress.read(file)
    assert read.blocked == ["the 8am flight is sold out", "no answer from Bob"]
    progress_file.write(file, read)
    assert file.read_text() == BY_HAND.replace("Progress: Fly", "Progress: Fly to NYC tomorrow")

    @lab.durable
    async def agent() -> Any:
        await lab(perdure.progress(blocked=["sold out", "no answer"], context="User pays by card", file=file))
        return await lab(perdure.progress(context=["User pays by card", "Departure: SFO"]))

    found = lab.run(agent).result()
    assert found.blocked == ["sold out", "no answer"]
    assert found.notes["Context"].splitlines() == [
        "- User prefers aisle seats",
        "- Departure: SFO",
        "- User pays by card",
    ]
    assert progress_file.read(file) == found
    assert "- sold out\n- no answer\n" in file.read_text()


def test_a_file_that_cannot_be_written_does_not_fail_the_run(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.progress(done="one", file=tmp_path))  # a folder

    with caplog.at_level(logging.WARNING, "perdure"):
        assert lab.run(agent, id="r").result().done == ["one"]
    assert "could not be written" in caplog.text
    assert perdure.progress.latest(lab.store, "r") == perdure.agents.Progress(done=["one"])


# --- git


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_every_call_is_one_commit_also_if_the_process_dies_before_it_is_recorded(lab: Lab, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    file = tmp_path / "PROGRESS.md"

    @lab.durable
    async def agent() -> None:
        await lab(perdure.progress(goal="Fly", next="Pack", file=file, git=True))
        await lab(perdure.progress(done=["Pack", "Lock"]))
        await lab(perdure.progress(blocked="x" * 200))

    with hooked(dies_before_the_commit(2)), pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert git(tmp_path, "log", "--format=%s").splitlines() == ["Done: Pack; Lock", "Goal: Fly"]
    lab.run(agent, id="r").result()
    assert git(tmp_path, "log", "--format=%s").splitlines() == [
        f"Blocked: {'x' * 99}…",
        "Done: Pack; Lock",
        "Goal: Fly",
    ]
    assert git(tmp_path, "status", "--porcelain") == ""


# --- reading


def test_what_was_read_is_recorded(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "P.md"
    once = Once()

    @lab.step()
    def use(found: list[perdure.agents.Progress | None]) -> list[Any]:
        return [None if one is None else one.done for one in found]

    @lab.durable
    async def agent() -> Any:
        found = [await lab(perdure.progress.read(file)), await lab(perdure.progress.read(tmp_path / "none"))]
        used = await lab(use(found))
        once.interrupt()
        return used, found

    progress_file.write(file, perdure.agents.Progress(done=["in the file"]))
    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    file.unlink()
    used, found = lab.run(agent, id="r").result()
    assert used == [["in the file"], None]
    assert [one and one.done for one in found] == used


def test_a_file_is_read_outside_of_a_run_and_in_a_body_too(lab: Lab, tmp_path: Path) -> None:
    assert perdure.progress.read(tmp_path / "none.md") is None

    @lab.step()
    def body() -> Any:
        return perdure.progress.read(tmp_path / "none.md")

    @lab.durable
    async def agent() -> Any:
        return await lab(body())

    assert lab.run(agent).result() is None
