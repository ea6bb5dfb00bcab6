"""Agents of Pydantic AI in durable functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from agent_contract import AgentContract, weather
from pydantic_ai import Agent, FunctionToolset
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

import perdure
from perdure.pydantic_ai import PerdureDurability, emit_events


class TestContract(AgentContract):
    module = "pydantic_ai_shop"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("pydantic") / "store.db"), durability="normal") as opened:
        yield opened


def run(store: perdure.Store, agent: Agent[Any, Any], id: str, **options: Any) -> perdure.Run:
    @perdure.durable(name="pydantic.run")
    async def asked(task: str) -> Any:
        return (await agent.run(task, **options)).output

    return store.run(asked, "go", id=id)


def calling(name: str) -> FunctionModel:
    """A model that calls one tool, then repeats its result."""

    def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        last = messages[-1].parts[-1]
        if isinstance(last, ToolReturnPart):
            return ModelResponse([TextPart(str(last.content))])
        return ModelResponse([ToolCallPart(name, {"cents": 900}, "c1")])

    return FunctionModel(respond)


def test_metadata_makes_a_tool_an_effect_with_a_key_of_its_own(store: perdure.Store) -> None:
    agent = Agent(calling("pay"), name="effects", capabilities=[PerdureDurability()])
    keys = []

    @agent.tool_plain(metadata={"perdure": {"effect": True, "timeout_s": 0.1}})
    async def pay(cents: int) -> str:
        keys.append(perdure.idempotency_key())
        raise ConnectionError("the line is dead")

    first = run(store, agent, "effect")
    [question] = store.questions("effect")
    assert "Did effects.pay(cents=900, tool_call='c1') happen?" in question.text
    first.resolve(str(question.step), done="paid 900")
    assert run(store, agent, "effect").result() == "paid 900"
    assert len(keys) == 1


def test_a_tool_outside_of_steps_may_ask_and_sleep(store: perdure.Store) -> None:
    agent = Agent(calling("refund"), name="asking", capabilities=[PerdureDurability()])

    @agent.tool_plain(metadata={"perdure": False})
    async def refund(cents: int) -> str:
        await perdure.sleep(0)
        return str(await perdure.ask(f"Refund {cents}?", options=["yes", "no"]))

    assert run(store, agent, "asking").refresh().status == "waiting"
    store.answer("asking", "no")
    assert run(store, agent, "asking").result() == "no"


@pytest.mark.parametrize("agreed", [True, False])
def test_a_person_is_asked_about_a_tool_that_requires_approval(store: perdure.Store, agreed: bool) -> None:
    agent = Agent(calling("pay"), name="approving", capabilities=[PerdureDurability()])

    @agent.tool_plain(requires_approval=True)
    async def pay(cents: int) -> str:
        return f"paid {cents}"

    run(store, agent, f"approving-{agreed}")
    [question] = store.questions(f"approving-{agreed}")
    assert question.text == "May pay(cents=900) run?"
    store.answer(f"approving-{agreed}", agreed)
    said = run(store, agent, f"approving-{agreed}").result()
    assert said == ("paid 900" if agreed else "The tool call was denied.")


def test_the_events_of_an_agent_reach_the_readers_of_the_run(store: perdure.Store) -> None:
    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        for word in ("It ", "is ", "sunny"):
            yield word

    agent = Agent(
        FunctionModel(stream_function=stream),
        name="streaming",
        capabilities=[PerdureDurability(event_stream_handler=emit_events)],
    )

    @perdure.durable(name="pydantic.streaming")
    async def asked() -> str:
        return (await agent.run("weather?")).output

    async def both() -> list[Any]:
        run = await store.astart(asked, id="streaming")
        worker = asyncio.create_task(store.arun(asked, id="streaming"))
        events = [event.value async for event in run.astream() if event.kind == "chunk"]
        await worker
        return events

    events = asyncio.run(both())
    assert [event["delta"]["content_delta"] for event in events if event["event_kind"] == "part_delta"] == [
        "is ",
        "sunny",
    ]
    assert store.get_run("streaming").result() == "It is sunny"


def test_tools_that_would_not_be_recorded_are_refused(store: perdure.Store) -> None:
    agent = Agent(TestModel(), name="late", capabilities=[PerdureDurability()])
    late = FunctionToolset([weather], id="late")
    with pytest.raises(perdure.RunFailed) as failed:
        run(store, agent, "late", toolsets=[late]).result()
    assert isinstance(failed.value.__cause__, UserError)


def test_outside_of_a_run_the_agent_is_as_it_was() -> None:
    agent = Agent(TestModel(custom_output_text="hello"), name="plain", capabilities=[PerdureDurability()])
    assert asyncio.run(agent.run("hi")).output == "hello"
