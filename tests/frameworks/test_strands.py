"""Agents of Strands in durable functions, and their sessions in a store.

The package ships no tests. The 51 of its repository's `test_repository_session_manager.py` pass with this repository.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from agent_contract import AgentContract, SessionContract, ToolCall
from pydantic import BaseModel
from strands import Agent, ToolContext, tool
from strands.types.exceptions import SessionException
from strands.types.session import SessionMessage
from strands_shop import Scripted

import perdure
from perdure.strands import PerdureSessionManager, durability


class TestContract(AgentContract, SessionContract):
    module = "strands_shop"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("strands") / "store.db"), durability="normal") as opened:
        yield opened


def calling(name: str, arguments: dict[str, Any]) -> Callable[[str, Sequence[str]], Any]:
    """A model that calls one tool, then says what came back."""
    return lambda task, results: "|".join(results) if results else [ToolCall(name, arguments, "c1")]


def made(decided: Any, *tools: Any, name: str = "shop", session: Any = None, **options: Any) -> Agent:
    plugins = [durability(**options)]
    return Agent(
        Scripted(decided), name=name, tools=[*tools], plugins=plugins, session_manager=session, callback_handler=None
    )


def names(run: perdure.Run) -> list[str]:
    return [step.name for step in run.steps() if step.kind != "save" and step.name != "thread.head"]


def test_a_named_effect_is_asked_about_and_a_persons_word_is_its_result(store: perdure.Store) -> None:
    @tool
    def pay(cents: int) -> str:
        raise ConnectionError("the line is dead")

    @perdure.durable(name="strands.effect")
    async def asked() -> str:
        agent = made(calling("pay", {"cents": 900}), pay, effects={"pay": {"timeout_s": 0.1}})
        return str(await agent.invoke_async("go"))

    run = store.run(asked, id="effect")
    [question] = store.questions("effect")
    assert "Did shop.pay(cents=900, tool_call='c1') happen?" in question.text
    run.resolve(str(question.step), done="paid 900")
    assert store.run(asked, id="effect").result() == "paid 900\n"
    assert names(run) == ["shop.model", "shop.pay", "shop.model"]


def test_an_interrupt_of_a_tool_asks_a_person(store: perdure.Store) -> None:
    @tool(context=True)
    def pay(cents: int, tool_context: ToolContext[Any]) -> str:
        agreed = tool_context.interrupt("agreed", reason=f"Pay {cents} cents?")
        return f"{agreed}, {tool_context.interrupt('sure')}"

    @perdure.durable(name="strands.interrupt")
    async def asked() -> str:
        return str(await made(calling("pay", {"cents": 900}), pay).invoke_async("go"))

    for question, answer in (("Pay 900 cents?", "yes"), ("sure", "very")):
        store.run(asked, id="interrupt")
        assert [each.text for each in store.questions("interrupt")] == [question]
        store.answer("interrupt", answer)
    assert store.run(asked, id="interrupt").result() == "yes, very\n"


def test_what_a_tool_does_to_the_state_of_its_agent_is_recorded(store: perdure.Store) -> None:
    calls = []

    @tool(context=True)
    def remember(tool_context: ToolContext[Any]) -> str:
        calls.append(1)
        tool_context.agent.state.set("city", "Lisbon")
        tool_context.agent.state.delete("task")
        return "noted"

    @perdure.durable(name="strands.state")
    async def asked(first: bool) -> Any:
        agent = made(calling("remember", {}), remember, session=PerdureSessionManager("state", store))
        if first:
            agent.state.set("task", "find a room")
            await agent.invoke_async("go")
        await perdure.ask("Go on?")
        return [agent.state.get(), len(agent.messages)]

    for id, first in (("state", True), ("state again", False)):
        store.run(asked, first, id=id)
        store.answer(id, "yes")
        assert store.run(asked, first, id=id).result() == [{"city": "Lisbon"}, 4]
    assert len(calls) == 1


def test_agents_as_tools_and_structured_answers_are_recorded(store: perdure.Store) -> None:
    class Room(BaseModel):
        price: int

    @tool
    def look() -> str:
        return "seen"

    def main(task: str, results: Sequence[str]) -> list[ToolCall]:
        return [ToolCall("Room", {"price": 90}, "c2")] if results else [ToolCall("helper", {"input": "look"}, "c1")]

    @perdure.durable(name="strands.nested")
    async def asked() -> Any:
        helper = made(calling("look", {}), look, name="helper")
        result = await made(main, helper, name="main").invoke_async("go", structured_output_model=Room)
        await perdure.ask("Go on?")
        return result.structured_output.price  # type: ignore[union-attr]

    run = store.run(asked, id="nested")
    store.answer("nested", "yes")
    assert store.run(asked, id="nested").result() == 90
    assert names(run) == ["main.model", "helper.model", "helper.look", "helper.model", "main.model", "perdure.ask"]


def test_pieces_of_an_answer_reach_the_readers_of_the_run(store: perdure.Store) -> None:
    @perdure.durable(name="strands.streaming")
    async def asked() -> str:
        return str(await made(lambda task, results: "sunny", stream=True).invoke_async("go"))

    run = store.run(asked, id="streaming")
    pieces = [event.value for event in run.stream() if event.kind == "chunk"]
    assert {"contentBlockDelta": {"delta": {"text": "sunny"}}} in pieces


def test_what_could_not_be_resumed_is_refused(store: perdure.Store) -> None:
    class Stateful(Scripted):
        stateful = True

    outside = made(lambda task, results: "hi")

    @perdure.durable(name="strands.refused")
    async def asked(how: str) -> str:
        if how == "outside":
            return str(await outside.invoke_async("go"))
        if how == "blocking":
            return str(made(lambda task, results: "hi")("go"))
        return str(await Agent(Stateful(None), plugins=[durability()], callback_handler=None).invoke_async("go"))

    refusals = {"outside": "made outside of the run", "blocking": "await the agent instead", "server": "on its server"}
    for how, why in refusals.items():
        with pytest.raises(perdure.RunStuck, match=why):
            store.run(asked, how, id=how).result()
    assert str(outside("go")) == "hi\n", "elsewhere the agent is as it was"


def test_a_session_redacts_the_right_message_and_is_deleted(store: perdure.Store) -> None:
    ann, bob = (PerdureSessionManager("redacted", store) for _ in range(2))
    for manager, text in ((ann, "secret"), (bob, "harmless")):
        message = SessionMessage({"role": "user", "content": [{"text": text}], "tracking_id": text}, message_id=0)
        manager.create_message("redacted", "a", message)
    redacted = ann.list_messages("redacted", "a")[0]
    redacted.redact_message = {"role": "user", "content": [{"text": "…"}]}
    ann.update_message("redacted", "a", redacted)
    shown = [each.to_message()["content"][0]["text"] for each in bob.list_messages("redacted", "a")]
    assert shown == ["…", "harmless"]
    ann.delete_session("redacted")
    assert (ann.read_session("redacted"), ann.list_messages("redacted", "a")) == (None, [])
    with pytest.raises(SessionException):
        ann.delete_session("redacted")


def test_outside_of_a_run_the_agent_is_as_it_was() -> None:
    @tool
    def pay(cents: int) -> str:
        return "paid"

    answer = asyncio.run(made(calling("pay", {"cents": 900}), pay, effects={"pay": {}}).invoke_async("go"))
    assert str(answer) == "paid\n"


def test_an_effect_without_a_run_is_refused_instead_of_told_to_the_model() -> None:
    @tool
    @perdure.effect
    async def pay(cents: int) -> str:
        return "paid"

    with pytest.raises(perdure.NotInRun, match="effect 'pay'"):
        asyncio.run(made(calling("pay", {"cents": 900}), pay).invoke_async("go"))
