"""Agents of the Microsoft Agent Framework in durable functions, and their histories in a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
from agent_contract import AgentContract, SessionContract
from agent_framework import Agent, BaseChatClient, ChatResponse, Content, Message, tool
from agent_framework._middleware import ChatMiddlewareLayer
from agent_framework._tools import FunctionInvocationLayer

import perdure
from perdure.agent_framework import PerdureHistoryProvider, durability


class TestContract(AgentContract, SessionContract):
    module = "agent_framework_shop"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("maf") / "store.db"), durability="normal") as opened:
        yield opened


class Calling(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A model that calls the tool `pay`, then says what came back."""

    def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Awaitable[Any]:
        async def respond() -> ChatResponse:
            results = [
                each.result for message in messages for each in message.contents if each.type == "function_result"
            ]
            said = Content.from_function_call("c1", "pay", arguments={"cents": 900})
            if results:
                said = Content.from_text(str(results[-1]))
            return ChatResponse(messages=[Message(role="assistant", contents=[said])], response_id="r")

        return respond()


def paying(keys: list[Any], **options: Any) -> Agent[Any]:
    def pay(cents: int) -> str:
        keys.append(cents)
        if "effects" in options:
            raise ConnectionError("the line is dead")
        return "paid"

    tools = [tool(pay, approval_mode="never_require")]
    return Agent(Calling(), name="Paying agent", tools=tools, middleware=durability(**options))


def test_a_named_effect_is_asked_about_and_a_persons_word_is_its_result(store: perdure.Store) -> None:
    keys: list[Any] = []
    agent = paying(keys, effects={"pay": {"timeout_s": 0.1}})

    @perdure.durable(name="maf.effect")
    async def asked() -> str:
        return (await agent.run("go")).text

    run = store.run(asked, id="effect")
    [question] = store.questions("effect")
    assert "Did Paying agent.pay(cents=900, tool_call='c1') happen?" in question.text
    run.resolve(str(question.step), done="paid 900")
    assert store.run(asked, id="effect").result() == "paid 900"
    assert keys == [900]
    assert [step.name for step in run.steps()] == ["Paying agent.model", "Paying agent.pay", "Paying agent.model"]


def test_a_history_is_what_was_said_in_each_session(store: perdure.Store) -> None:
    async def used() -> None:
        history = PerdureHistoryProvider(store)
        assert await history.get_messages("ann") == []
        call = Content.from_function_call("c1", "pay", arguments={"cents": 900})
        said = [Message(role="user", contents=["hi"]), Message(role="assistant", contents=[call])]
        await history.save_messages("ann", said)
        await history.save_messages("ann", [])
        await history.save_messages("bob", said[:1])
        again = await PerdureHistoryProvider(store).get_messages("ann")
        assert [message.to_dict() for message in again] == [message.to_dict() for message in said]
        assert len(await history.get_messages("bob")) == 1
        with pytest.raises(perdure.UsageError, match="needs a session"):
            await history.get_messages(None)

    asyncio.run(used())


def test_a_run_does_not_stream(store: perdure.Store) -> None:
    @perdure.durable(name="maf.streaming")
    async def streaming() -> None:
        async for _ in paying([]).run("go", stream=True):
            pass

    with pytest.raises(perdure.RunStuck, match="does not stream"):
        store.run(streaming, id="streaming").result()


def test_outside_of_a_run_the_agent_is_as_it_was() -> None:
    keys: list[Any] = []
    assert asyncio.run(_text(paying(keys))) == "paid"
    assert keys == [900]


def test_an_effect_without_a_run_is_refused_instead_of_told_to_the_model() -> None:
    @tool(approval_mode="never_require")
    @perdure.effect
    async def pay(cents: int) -> str:
        return "paid"

    with pytest.raises(perdure.NotInRun, match="effect 'pay'"):
        asyncio.run(_text(Agent(Calling(), name="Paying agent", tools=[pay], middleware=durability())))


async def _text(agent: Agent[Any]) -> str:
    return (await agent.run("go")).text
