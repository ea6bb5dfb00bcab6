"""Old results of tools in a list of messages become short, whatever API the messages are for; the newest stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

import perdure
from perdure.errors import NoProgress, UsageError
from perdure.memory import Context, acompact_history, compact_history, token_counter

LONG = "collected 900 items " + "tests/test_login.py::test_it PASSED " * 400 + "1 failed: test_logout"
IMAGE = {"type": "image", "source": {"data": "A" * 9000}}


def openai(results: list[Any]) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": "fix it"}]
    for n, text in enumerate(results):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "pytest", "arguments": "{}"}}
        said += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        said += [{"role": "tool", "tool_call_id": f"c{n}", "content": text}]
    return said


def responses(results: list[Any]) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": "fix it"}]
    for n, text in enumerate(results):
        said += [{"type": "function_call", "call_id": f"c{n}", "name": "pytest", "arguments": "{}"}]
        said += [{"type": "function_call_output", "call_id": f"c{n}", "output": text}]
    return said


def anthropic(results: list[Any]) -> list[Any]:
    said: list[Any] = [{"role": "user", "content": "fix it"}]
    for n, text in enumerate(results):
        said += [{"role": "assistant", "content": [{"type": "tool_use", "id": f"c{n}", "name": "pytest", "input": {}}]}]
        block = {"type": "tool_result", "tool_use_id": f"c{n}", "content": [{"type": "text", "text": text}, IMAGE]}
        said += [{"role": "user", "content": [block, {"type": "text", "text": "go on"}]}]
    return said


def langchain(results: list[Any]) -> list[Any]:
    said: list[Any] = [HumanMessage("fix it")]
    for n, text in enumerate(results):
        said += [AIMessage("", tool_calls=[{"name": "pytest", "args": {}, "id": f"c{n}"}])]
        said += [ToolMessage(text, tool_call_id=f"c{n}", id=f"m{n}")]
    return said


def result_in(message: Any) -> str:
    if isinstance(message, ToolMessage):
        return str(message.content)
    content = message.get("output", message.get("content"))
    return str(content[0]["content"] if isinstance(content, list) else content)


@pytest.mark.parametrize("style", [openai, responses, anthropic, langchain])
def test_old_results_are_masked_and_everything_else_stays(style: Any) -> None:
    said = style([f"{n} {LONG}" for n in range(4)] + ["short"])
    short = compact_history(said, keep_last=2)
    assert [new is old for old, new in zip(said, short, strict=True)] == [n not in (2, 4, 6) for n in range(11)]
    text = result_in(short[2])
    assert text.startswith("[masked: a result of pytest, ")
    assert "0 collected 900 items" in text
    assert "1 failed: test_logout" in text.replace("(image)", "")
    assert token_counter()(text) <= 100
    assert compact_history(short, keep_last=2) == short
    assert compact_history(short, keep_last=0)[8] != short[8]
    assert compact_history(short, keep_last=0)[10] is short[10], "it is short"
    if style is langchain:
        assert (short[2].id, short[2].tool_call_id, said[2].content) == ("m0", "c0", f"0 {LONG}")


async def test_a_function_summarizes_each_result_once_and_within_the_limit() -> None:
    calls: list[str] = []

    async def summarize(text: str) -> str:
        calls.append(text)
        return "one test fails. " * 90

    said = openai([LONG, LONG, "short", LONG])
    short = await acompact_history(said, keep_last=1, summarize=summarize)
    assert len(calls) == 2
    assert "one test fails." in short[2]["content"]
    assert token_counter()(short[2]["content"]) <= 100
    assert await acompact_history(short, keep_last=1, summarize=summarize) == short
    assert len(calls) == 2
    with pytest.raises(UsageError, match="async"):
        compact_history(said, keep_last=0, summarize=summarize)


def test_in_a_run_the_summary_is_a_step_that_a_replay_does_not_repeat(tmp_path: Path) -> None:
    calls: list[str] = []

    def summarize(text: str) -> str:
        calls.append(text)
        return "it failed"

    @perdure.durable(name="history.agent")
    def agent() -> list[Any]:
        return compact_history(openai([LONG]), keep_last=0, summarize=summarize)

    with perdure.open(str(tmp_path / "a.db")) as store:
        run = store.run(agent, id="a")
        assert "it failed" in run.result()[2]["content"]
        assert store.replay(run).result == run.result()
        assert len(calls) == 1
        assert run.steps()[0].name == "memory.summarize_observation"


def test_a_context_masks_only_what_its_budget_requires() -> None:
    said = openai([f"{n} {LONG}" for n in range(5)])
    whole = token_counter()(LONG)
    assert Context(6 * whole).fit(said) == said
    some = Context(3 * whole).fit(said, keep_last=2)
    assert [result_in(one).startswith("[masked") for one in some[2::2]] == [True, True, True, False, False]
    few = Context(whole).fit(said, keep_last=2)
    assert [result_in(one).startswith("[masked") for one in few[2::2]] == [True] * 5
    with pytest.raises(NoProgress, match="budget is 100"):
        Context(100).fit(said)


@pytest.mark.parametrize("wrong", [{"keep_last": -1}, {"keep_last": True}, {"max_tokens": 5}])
def test_wrong_limits_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        compact_history([], **wrong)
    with pytest.raises(UsageError, match="list of messages"):
        compact_history("text")
