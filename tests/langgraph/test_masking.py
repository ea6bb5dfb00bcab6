"""The middleware masks old results of tools in an agent's state; the thread's history keeps them whole."""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import MODES, Runner, at
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from perdure.errors import UsageError
from perdure.langchain import mask_observations
from perdure.langgraph import PerdureSaver

WHOLE = "line of a log " * 300


class Model(FakeMessagesListChatModel):
    def bind_tools(self, *_: Any, **__: Any) -> Any:
        return self


@tool
def read_log(n: int) -> str:
    """Read a log."""
    return f"{n} {WHOLE}"


@pytest.mark.parametrize("mode", MODES)
async def test_old_results_in_an_agents_state_are_masked_and_its_history_has_them(
    saver: PerdureSaver, mode: str
) -> None:
    from langchain.agents import create_agent  # slow to import: not in each process that collects

    calls: Any = [[{"name": "read_log", "args": {"n": n}, "id": f"c{n}", "type": "tool_call"}] for n in range(3)]
    model = Model(responses=[*(AIMessage("", tool_calls=one) for one in calls), AIMessage("done")])
    agent = create_agent(model, [read_log], checkpointer=saver, middleware=[mask_observations(keep_last=1)])
    graph = Runner(agent, mode)
    result = await graph.invoke({"messages": [("user", "read")]}, at("t"))
    results = [message.content for message in result["messages"] if message.type == "tool"]
    assert [len(text) > 1000 for text in results] == [False, False, True]
    assert results[0].startswith("[masked: a result of read_log")
    stored = [one.values["messages"] for one in await graph.history(at("t"))]
    assert any(
        len(message.content) > 1000 and message.tool_call_id == "c0"
        for said in stored
        for message in said
        if message.type == "tool"
    )
    assert saver.store.ops.verify().ok


@pytest.mark.parametrize("wrong", [{"keep_last": -1}, {"max_tokens": 3}])
def test_wrong_options_are_refused_before_an_agent_runs(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="or more"):
        mask_observations(**wrong)
