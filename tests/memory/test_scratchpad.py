"""A scratchpad never renders more than its budget; what it masks can be read again; in a run it survives a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure.errors import NoProgress, NotFound, UsageError
from perdure.memory import Scratchpad
from perdure.testing.processes import ForkServer

AGENT = Path(__file__).parent / "padding_agent.py"


def words(text: str) -> int:
    return len(text.split())


def pad_of(budget: int, summarize: Any = None) -> Scratchpad:
    return Scratchpad(budget, summarize, tokens=words)


def fill(pad: Scratchpad, kind: str) -> None:
    for n in range(50):
        pad.add(kind, f"{n} " + "x " * 10)


def test_old_observations_are_masked_and_the_placeholder_says_what_how_much_and_how_to_get_it_back() -> None:
    pad = pad_of(400)
    long = "FAILED test_login " + "trace " * 30
    pad.add("observation", long, source="pytest")
    pad.add("decision", "fix " * 20)
    for n in range(11):
        pad.add("observation", f"{n} " + "output " * 20, source="shell")
    lines = pad.render().splitlines()
    assert lines[0].startswith("[1] observation of pytest, masked: 'FAILED test_login trace")
    assert lines[0].endswith("36 tokens; pad.full(1)")
    assert lines[1] == "[2] decision: " + "fix " * 20
    assert [line.split(":")[0] for line in lines[2:4]] == [
        "[3] observation of shell, masked",
        "[4] observation of shell",
    ]
    assert (pad.full(1), pad.full(4)) == (long, "1 " + "output " * 20)
    assert words(pad.render()) == pad.tokens <= 400
    with pytest.raises(NotFound):
        pad.full(99)


def test_what_masking_leaves_too_long_is_summarized_and_decisions_stay() -> None:
    asked: list[str] = []

    def summarize(text: str) -> str:
        asked.append(text)
        return "they thought"

    pad = pad_of(200, summarize)
    for n in range(15):
        pad.add("decision" if n == 3 else "thought", f"number{n} " + "x " * 10)
    [text] = asked
    assert [line.split()[0] for line in text.splitlines()] == ["[1]", "[2]", "[3]", "[5]"]
    assert pad.render().splitlines()[:2] == [
        "[4] decision: number3 " + "x " * 10,
        "[16] summary of older entries, pad.full(n) has each: they thought",
    ]
    assert "number3" in pad.render()
    assert pad.full(2).startswith("number1")
    for n in range(20):
        pad.add("thought", f"more{n} " + "x " * 10)
    assert asked[1].startswith("[16] summary"), "the next summary contains the last"
    assert "number3" in pad.render()


def test_a_compaction_without_progress_is_an_error_and_adds_nothing() -> None:
    stubborn = pad_of(200, lambda text: text)
    with pytest.raises(NoProgress, match="saves less"):
        fill(stubborn, "thought")
    before = stubborn.render()
    with pytest.raises(NoProgress):
        stubborn.add("thought", "x " * 10)
    assert stubborn.render() == before
    decided = pad_of(100)
    with pytest.raises(NoProgress, match="budget is 100"):
        fill(decided, "decision")
    assert decided.tokens <= 100
    decided.add("thought", "short")


def test_an_observation_longer_than_the_budget_is_masked_at_once() -> None:
    pad = pad_of(50)
    pad.add("observation", "x " * 1000, source="cat")
    assert "1004 tokens" in pad.render()
    assert pad.full(1) == "x " * 1000
    pad = pad_of(1000, lambda text: text)
    for n in range(9):
        pad.add("observation", f"{n} " + "output " * 30)
    pad.add("observation", "output " * 5000)
    assert pad.render().count("masked") == 1, "the longest first"


def test_of_masked_texts_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.working_memory.scratchpad.ORIGINALS_CHARACTERS_MAX", 5000)
    pad = pad_of(400)
    numbers = [pad.add("observation", f"{n} " + "x " * 500) for n in range(20)]
    assert pad.full(numbers[-1]).startswith("19 ")
    with pytest.raises(NotFound, match="was dropped"):
        pad.full(1)
    assert pad.entries[0].text is None
    assert "summary of older entries" in pad.render(), "without summarize= old entries are left out at last"


@given(st.lists(st.tuples(st.sampled_from(["observation", "decision", "thought"]), st.integers(0, 60)), max_size=40))
def test_never_over_the_budget_and_no_decision_is_lost(entries: list[tuple[str, int]]) -> None:
    pad = pad_of(150, lambda text: "short")
    decisions = []
    for kind, length in entries:
        try:
            n = pad.add(kind, "x " * length)
        except NoProgress:
            continue
        decisions += [f"[{n}] decision: {'x ' * length}"] if kind == "decision" else []
        assert words(pad.render()) <= 150
    assert [line for line in pad.render().splitlines() if "decision" in line] == decisions


def test_exact_tokens_of_the_whole_are_within_the_sum() -> None:
    from perdure.agents.tokens import token_counter

    pad = Scratchpad(500)
    for n in range(30):
        pad.add("observation", f"def f{n}():\n    return {n}\n\n" * 10, source="cat")
        assert token_counter()(pad.render()) <= pad.tokens <= 500


def test_wrong_use_is_refused() -> None:
    async def later(text: str) -> str:
        return text

    number: Any = 7
    late = pad_of(200, later)
    for wrong in (lambda: Scratchpad(0), lambda: pad_of(9).add("thought", number), lambda: fill(late, "thought")):
        with pytest.raises(UsageError):
            wrong()


def test_killed_at_any_write_the_pad_is_the_same_and_ends_with_the_run(tmp_path: Path) -> None:
    with ForkServer("scripts:script") as fork_server:

        def run(path: Path, kill_at: int) -> list[str]:
            said = fork_server.start(str(AGENT), str(path), str(kill_at)).lines()
            return [line for line in said if line != "summarized"]

        whole = run(tmp_path / "whole.db", 0)
        *_, last = [run(tmp_path / "a.db", kill_at) for kill_at in (2, 9, 17, 23, 0)]
    assert whole == last != []
    with perdure.open(tmp_path / "a.db") as store:
        one = store.get_run("one")
        pad = one.state_at()["scratchpad"]
        assert {entry["trace_id"] for entry in pad} == {"one"}
        assert [entry["kind"] for entry in pad].count("observation") == 14
        assert "scratchpad.summarize" in [step.name for step in one.steps()]
        assert store.ops.verify().ok
        store.run(another, id="two").result()


@perdure.durable(name="pads.another")
def another() -> None:
    assert pad_of(100).entries == []


async def test_in_async_runs_and_branches(tmp_path: Path) -> None:
    outside = pad_of(30, None)
    outside.add("thought", "not of the run")
    summaries = []

    async def summarize(text: str) -> str:
        summaries.append(text)
        return "short"

    @perdure.durable(name="pads.async")
    async def thinking() -> Any:
        pad = pad_of(100, summarize)
        for n in range(15):
            await pad.aadd("thought", f"number{n} " + "x " * 5)
        await perdure.ask("Well?")

        async def branch() -> str:
            assert "not of the run" not in outside.render()
            with pytest.raises(UsageError, match="branch"):
                await pad.aadd("thought", "from a branch")
            return pad.render()

        [seen] = await perdure.gather(branch())
        return seen == pad.render()

    async with perdure.open(tmp_path / "a.db") as store:
        run = await store.arun(thinking, id="one")
        asked = len(summaries)
        await store.aanswer(run, "well")
        assert await run.aresult() is True
        assert len(summaries) == asked > 0
    assert outside.render() == "[1] thought: not of the run\n"
