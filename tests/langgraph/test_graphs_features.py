"""What else LangGraph does with a saver: DeltaChannel, the functional API, the task cache, agents, encryption, the
allowlist of strict mode. Where it makes sense, compared with LangGraph's own in-memory saver.
"""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import (
    MODES,
    AnyGraph,
    AnySaver,
    Count,
    Runner,
    Scenario,
    at,
    human,
    long_talking,
    on_both,
    texts,
)
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, RemoveMessage
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import CachePolicy, Command, interrupt
from langgraph.warnings import LangGraphDeprecatedSinceV10

from perdure.langgraph import PerdureSaver


async def delta_channels_are_rebuilt(saver: AnySaver, mode: str) -> Any:
    graph = Runner(long_talking(saver), mode)
    for number in range(5):
        await graph.invoke({"messages": [human(f"m{number}")]}, at("t"))
    history = await graph.history(at("t"))
    assert [len(snapshot.values.get("messages", [])) for snapshot in history] == [
        *(10, 9, 8, 8, 7, 6, 6, 5, 4, 4, 3, 2, 2, 1, 0),
    ]
    assert texts(history[0].values)[-2:] == ["m4", "Echo: m4"]
    return history


async def delta_channels_of_branches_keep_apart(saver: AnySaver, mode: str) -> Any:
    graph = Runner(long_talking(saver), mode)
    for text in ("one", "two", "three"):
        await graph.invoke({"messages": [human(text)]}, at("t"))
    history = await graph.history(at("t"))
    after_one = [snapshot for snapshot in history if snapshot.next == ()][-1]
    other = await graph.invoke({"messages": [human("other")]}, after_one.config)
    assert texts(other) == ["one", "Echo: one", "other", "Echo: other"]
    old_end = await graph.state(history[0].config)
    assert texts(old_end.values) == ["one", "Echo: one", "two", "Echo: two", "three", "Echo: three"]
    more = await graph.invoke({"messages": [human("more")]}, at("t"))
    assert texts(more)[-4:] == ["other", "Echo: other", "more", "Echo: more"]
    return [history, other, old_end, more, await graph.history(at("t"))]


async def delta_channels_are_updated_by_hand(saver: AnySaver, mode: str) -> Any:
    graph = Runner(long_talking(saver, interrupt_before=["echo"]), mode)
    await graph.invoke({"messages": [human("one")]}, at("t"))
    await graph.update(at("t"), {"messages": [human("changed", "human one"), human("added")]}, START)
    await graph.invoke(None, at("t"))
    state = await graph.state(at("t"))
    assert texts(state.values) == ["changed", "added", "Echo: added"]
    await graph.update(at("t"), {"messages": [RemoveMessage(id="human added")]}, "echo")
    state = await graph.state(at("t"))
    assert texts(state.values) == ["changed", "Echo: added"]
    return await graph.history(at("t"))


def workflow(saver: AnySaver, mode: str, ran: list[str], fails: list[bool]) -> AnyGraph:
    """A flow of two tasks and a question, which fails in between if it is told to, and remembers its last result."""

    @task
    def double(number: int) -> int:
        ran.append(f"double {number}")
        return number * 2

    def after(doubled: list[int], previous: int | None) -> entrypoint.final[dict[str, Any], int]:
        if fails and fails.pop():
            raise RuntimeError("after the tasks")
        said = interrupt(f"is {sum(doubled)} right?")
        return entrypoint.final(value={"said": said, "before": previous}, save=sum(doubled))

    if mode == "sync":

        @entrypoint(checkpointer=saver)
        def blocking(number: int, *, previous: int | None = None) -> entrypoint.final[dict[str, Any], int]:
            futures = [double(number), double(number + 1)]
            return after([future.result() for future in futures], previous)

        return blocking

    @entrypoint(checkpointer=saver)
    async def awaited(number: int, *, previous: int | None = None) -> entrypoint.final[dict[str, Any], int]:
        return after([await double(number), await double(number + 1)], previous)

    return awaited


async def tasks_of_a_workflow_run_once(saver: AnySaver, mode: str) -> Any:
    ran: list[str] = []
    graph = Runner(workflow(saver, mode, ran, [True]), mode)
    with pytest.raises(RuntimeError, match="after the tasks"):
        await graph.invoke(1, at("t"))
    stopped = await graph.invoke(None, at("t"))
    assert [item.value for item in stopped["__interrupt__"]] == ["is 6 right?"]
    assert sorted(ran) == ["double 1", "double 2"]
    first = await graph.invoke(Command(resume="yes"), at("t"))
    assert first == {"said": "yes", "before": None}
    await graph.invoke(10, at("t"))
    second = await graph.invoke(Command(resume="sure"), at("t"))
    assert second == {"said": "sure", "before": 6}
    assert sorted(ran) == ["double 1", "double 10", "double 11", "double 2"]
    return [first, second, await graph.state(at("t")), await graph.history(at("t"))]


async def cached_tasks_are_kept_as_if_they_had_run(saver: AnySaver, mode: str) -> Any:
    ran: list[int] = []

    def costly(state: Count) -> dict[str, Any]:
        ran.append(state["total"])
        return {"total": 1, "log": ["costly"]}

    builder = StateGraph(Count)
    builder.add_node("costly", costly, cache_policy=CachePolicy(ttl=1000))
    builder.add_edge(START, "costly")
    graph = Runner(builder.compile(checkpointer=saver, cache=InMemoryCache()), mode)
    for name in ("t1", "t2"):
        assert (await graph.invoke({"total": 5, "log": []}, at(name))) == {"total": 6, "log": ["costly"]}
    assert ran == [5]
    assert (await graph.state(at("t2"))).values == {"total": 6, "log": ["costly"]}
    return [await graph.history(at(name)) for name in ("t1", "t2")]


class ScriptedModel(GenericFakeChatModel):
    """Says what it was given to say; tools may be bound to it."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def agent(saver: AnySaver, script: list[AIMessage], **options: Any) -> AnyGraph:
    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    with pytest.warns(LangGraphDeprecatedSinceV10):
        made: AnyGraph = create_react_agent(
            ScriptedModel(messages=iter(script)), [weather], checkpointer=saver, **options
        )
    return made


def call(number: int, *cities: str) -> AIMessage:
    calls = [
        {"name": "weather", "args": {"city": city}, "id": f"call {number} {city}", "type": "tool_call"}
        for city in cities
    ]
    return AIMessage("", id=f"ai {number}", tool_calls=calls)


async def an_agent_with_tools_goes_on_where_it_was(saver: AnySaver, mode: str) -> Any:
    script = [
        call(1, "Rome", "Oslo"),
        AIMessage("both sunny", id="ai 2"),
        call(3, "Kyiv"),
        AIMessage("sunny too", id="ai 4"),
    ]
    first = Runner(agent(saver, script[:3], interrupt_before=["tools"]), mode)
    await first.invoke({"messages": [human("weather?")]}, at("t"))
    waiting = await first.state(at("t"))
    assert waiting.next == ("tools", "tools")
    done = await first.invoke(None, at("t"))
    assert [message.type for message in done["messages"]] == ["human", "ai", "tool", "tool", "ai"]
    assert texts(done)[2:] == ["sunny in Rome", "sunny in Oslo", "both sunny"]
    await first.invoke({"messages": [human("and Kyiv?")]}, at("t"))
    second = Runner(agent(saver, script[3:]), mode)
    result = await second.invoke(None, at("t"))
    assert texts(result)[-2:] == ["sunny in Kyiv", "sunny too"]
    # A tool's message gets its id in place, in another thread than the one that keeps the write: not compared.
    return [waiting, texts(done), texts(result), [snapshot.next for snapshot in await second.history(at("t"))]]


SCENARIOS: list[Scenario] = [
    delta_channels_are_rebuilt,
    delta_channels_of_branches_keep_apart,
    delta_channels_are_updated_by_hand,
    tasks_of_a_workflow_run_once,
    cached_tasks_are_kept_as_if_they_had_run,
    an_agent_with_tools_goes_on_where_it_was,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_features_work_as_on_the_saver_in_memory(scenario: Scenario, saver: PerdureSaver, mode: str) -> None:
    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs
