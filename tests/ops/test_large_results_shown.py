"""Large results of steps, which are kept apart from the journal, are shown for what they are: never as nothing."""

from __future__ import annotations

import json

import pytest
from keeping_kit import PLACES, place, stored_rows

import perdure
from perdure.cli import main

LARGE = {"words": [f"word {number * number}" for number in range(20_000)]}


@perdure.step(name="large_shown.step")
def many_words() -> dict[str, list[str]]:
    return LARGE


@perdure.step(name="large_shown.small")
def few_words() -> str:
    return "few"


@perdure.durable(name="large_shown.agent")
def agent() -> int:
    few_words()
    return len(many_words()["words"])


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest) -> str:
    return place(request, request.param)


def test_steps_and_events_hold_the_value_itself(url: str) -> None:
    with perdure.open(url) as store:
        run = store.run(agent, id="r")
        assert run.result() == 20_000
        small, large = run.steps()
        assert (small.result, small.result_bytes) == ("few", None)
        assert large.result == LARGE
        assert large.note is None
        [(length,)] = stored_rows(store, "SELECT length(body) FROM blob")
        assert large.result_bytes == length
        left_out = run.steps(values="small")
        assert [step.result for step in left_out] == ["few", None]
        assert [step.result_bytes for step in left_out] == [None, length]
        assert [event.value for event in run.stream() if event.name == "large_shown.step"] == [LARGE]


async def test_the_async_twins_too(url: str) -> None:
    async with perdure.open(url) as store:
        run = await store.astart(agent, id="r")
        await store.arun(agent, id="r")
        assert [step.result for step in await run.asteps()] == ["few", LARGE]
        assert [step.result for step in await run.asteps(values="small")] == ["few", None]
        assert [event.value async for event in run.astream() if event.name == "large_shown.step"] == [LARGE]


def test_a_fork_shows_what_it_shares(url: str) -> None:
    with perdure.open(url) as store:
        run = store.run(agent, id="r")
        fork = store.fork(run)
        assert [step.result for step in fork.steps()][:2] == ["few", LARGE]


def test_the_command_line_says_how_large_it_is(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with perdure.open(url) as store:
        store.run(agent, id="r").result()
    assert main(["steps", "r", "--store", url]) == 0
    shown = capsys.readouterr().out
    assert "KB: --json shows it)" in shown
    assert "null" not in shown
    assert main(["steps", "r", "--store", url, "--json"]) == 0
    small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (small["result"], small["result_bytes"], large["result"]) == ("few", None, LARGE)
    assert main(["run", "tail", "r", "--store", url]) == 0
    assert '"word 1"' in capsys.readouterr().out
    assert main(["run", "show", "r", "--store", url]) == 0
