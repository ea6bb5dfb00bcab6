"""Agents of the OpenAI Agents SDK in durable functions, and their sessions in a store.

The package ships no tests of sessions. docs/how-to/openai-agents.md says what the tests of its repository find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from agent_contract import AgentContract, SessionContract
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    Runner,
    RunResult,
    Session,
    ShellTool,
    UserError,
    function_tool,
    handoff,
)
from agents.memory import SessionSettings
from agents.testing import ScriptedModel, assistant_message, function_call

import perdure
from perdure.openai_agents import PerdureSession, durable, run


class TestContract(AgentContract, SessionContract):
    module = "openai_agents_shop"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("openai") / "store.db"), durability="normal") as opened:
        yield opened


def asked(store: perdure.Store, agent: Agent[Any], id: str, **options: Any) -> perdure.Run:
    @perdure.durable(name="openai.run")
    async def answer(task: str) -> Any:
        return (await run(agent, task, **options)).final_output

    return store.run(answer, "go", id=id)


def calling(name: str, *rest: Any) -> ScriptedModel:
    """A model that calls one tool, then says that it is done. Each answer is given once."""
    return ScriptedModel([[function_call(name, {"cents": 900}, call_id="c1")], *rest, [assistant_message("done")]])


def message(text: str) -> Any:
    return {"role": "user", "content": text}


def test_a_session_is_what_the_protocol_says(store: perdure.Store) -> None:
    async def used() -> None:
        session, other = PerdureSession("ann", store), PerdureSession("bob", store)
        assert isinstance(session, Session)
        assert (await session.get_items(), await session.pop_item()) == ([], None)
        await session.clear_session()
        await session.add_items([])
        items = [message(str(number)) for number in range(5)]
        await session.add_items(items[:2])
        await session.add_items(items[2:])
        await other.add_items([message("of bob")])
        assert await PerdureSession("ann", store).get_items() == items
        assert await session.get_items(limit=2) == items[3:], "the newest, in order"
        assert await session.get_items(limit=0) == []
        assert await session.get_items(limit=9) == items
        for settings in (SessionSettings(limit=1), {"limit": 1}):
            limited = PerdureSession("ann", store, settings)
            assert (await limited.get_items(), await limited.get_items(3)) == (items[4:], items[2:])
        with pytest.raises(TypeError, match="limitt"):
            PerdureSession("ann", store, {"limitt": 1})
        with pytest.raises(perdure.UsageError, match="an open store"):
            PerdureSession("ann", "agent.db")  # type: ignore[arg-type]
        assert await session.pop_item() == items[4]
        nested: Any = {"type": "message", "content": [{"type": "output_text", "text": "ü ☃ \x00"}], "n": 1.5}
        await session.add_items([nested])
        assert await session.get_items() == [*items[:4], nested]
        await session.clear_session()
        assert (await session.get_items(), await other.get_items()) == ([], [message("of bob")])
        await session.add_items(items[:2])
        assert await session.get_items() == items[:2], "a session goes on after it was cleared"
        popped = await asyncio.gather(*(PerdureSession("ann", store).pop_item() for _ in range(4)))
        assert sorted(map(str, popped)) == sorted(map(str, [*items[:2], None, None])), "each item is popped once"

    asyncio.run(used())
    assert store.thread("openai/ann").info().metadata == {"session": "ann"}
    assert store.ops.verify().ok


def test_in_a_run_a_session_sees_what_it_saw_and_keeps_each_item_once(store: perdure.Store) -> None:
    model = ScriptedModel([[assistant_message("first")], [assistant_message("second")]])
    agent, session = durable(Agent(name="talk", model=model)), PerdureSession("run", store)
    seen = []

    @perdure.durable(name="openai.talk")
    async def talk() -> Any:
        first = await run(agent, "one", session=session)
        await perdure.ask("Go on?")
        seen.append(len(await session.get_items()))
        popped = await session.pop_item()
        return [first.final_output, popped, (await run(agent, "two", session=session)).final_output]

    store.run(talk, id="talk")
    asyncio.run(PerdureSession("run", store).add_items([message("from elsewhere")]))
    store.answer("talk", "yes")
    assert store.run(talk, id="talk").result() == ["first", message("from elsewhere"), "second"]
    assert seen == [3]
    assert len(asyncio.run(session.get_items())) == 4
    assert model.last_call is not None
    assert len(model.last_call.input) == 3, "the model was shown the history once"


@pytest.mark.parametrize("agreed", [True, False])
def test_a_person_is_asked_about_a_tool_that_needs_approval(store: perdure.Store, agreed: bool) -> None:
    paid = []

    @function_tool(needs_approval=True)
    def pay(cents: int) -> str:
        paid.append(cents)
        return "paid"

    model, id = calling("pay"), f"approving-{agreed}"
    agent = durable(Agent(name="approving", model=model, tools=[pay]))
    asked(store, agent, id, session=PerdureSession(id, store))
    [question] = store.questions(id)
    assert question.text == "May pay(cents=900) run?"
    store.answer(id, agreed)
    assert asked(store, agent, id, session=PerdureSession(id, store)).result() == "done"
    assert paid == ([900] if agreed else [])
    [output] = [
        item["output"]  # type: ignore[typeddict-item]
        for item in asyncio.run(PerdureSession(id, store).get_items())
        if item.get("type") == "function_call_output"
    ]
    assert output == ("paid" if agreed else "Tool execution was not approved.")


def test_effects_are_named_and_hand_offs_go_in_circles(store: perdure.Store) -> None:
    keys = []

    @function_tool
    def pay(cents: int) -> str:
        keys.append(perdure.idempotency_key())
        return "paid"

    billing = Agent(name="Billing agent", model=calling("pay"), tools=[pay])
    triage = Agent(
        name="triage",
        model=ScriptedModel([[function_call("transfer_to_billing_agent", {}, call_id="h1")]]),
        handoffs=[handoff(billing)],
    )
    billing.handoffs.append(triage)
    run = asked(store, durable(triage, effects={"pay": {"timeout_s": 5}}), "circle")
    assert run.result() == "done"
    assert [(step.kind, step.name) for step in run.steps()] == [
        ("step", "triage.model"),
        ("step", "Billing agent.model"),
        ("effect", "Billing agent.pay"),
        ("step", "Billing agent.model"),
    ]
    assert len(keys) == 1


def test_guardrails_agents_as_tools_and_objects_are_recorded(store: perdure.Store) -> None:
    checks = []

    def check(context: Any, agent: Agent[Any], input: Any) -> GuardrailFunctionOutput:
        checks.append(input)
        return GuardrailFunctionOutput({"seen": 1}, tripwire_triggered=False)

    @function_tool
    def look(cents: int) -> set[int]:
        return {cents}

    helper = durable(Agent(name="helper", model=calling("look"), tools=[look]))
    agent = durable(
        Agent(
            name="main",
            model=ScriptedModel([[function_call("help", {"input": "look"}, call_id="t1")], [assistant_message("all")]]),
            tools=[helper.as_tool("help", "Helps.")],
            input_guardrails=[InputGuardrail(check)],
        )
    )

    @perdure.durable(name="openai.guarded")
    async def guarded() -> Any:
        result = await run(agent, "go")
        await perdure.ask("Go on?")
        return [result.final_output, result.input_guardrail_results[0].output.output_info]

    first = store.run(guarded, id="guarded")
    store.answer("guarded", "yes")
    assert store.run(guarded, id="guarded").result() == ["all", {"seen": 1}]
    assert len(checks) == 1
    names = sorted(step.name for step in first.steps())
    models = ["helper.model"] * 2 + ["main.model"] * 2
    assert names == sorted(["helper.look", "main.check", "perdure.ask", *models])


def test_a_streamed_answer_reaches_the_readers_of_the_run(store: perdure.Store) -> None:
    agent = durable(Agent(name="streaming", model=ScriptedModel([[assistant_message("It is sunny")]])))

    @perdure.durable(name="openai.streaming")
    async def answer() -> list[Any]:
        result = Runner.run_streamed(agent, "weather?")
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        await perdure.ask("Go on?")
        return [result.final_output, kinds]

    async def both() -> list[Any]:
        run = await store.astart(answer, id="streaming")
        worker = asyncio.create_task(store.arun(answer, id="streaming"))
        live = []
        async for event in run.astream():
            live += [event.value["type"]] if event.kind == "chunk" else []
            if live[-1:] == ["response.completed"]:
                break
        await worker
        return live

    assert "response.output_text.delta" in asyncio.run(both())
    store.answer("streaming", "yes")
    said, kinds = store.run(answer, id="streaming").result()
    assert said == "It is sunny"
    assert kinds[-1] == "response.completed"
    assert not [kind for kind in kinds if kind.endswith(".delta")]


def test_what_could_not_be_recorded_is_refused() -> None:
    with pytest.raises(perdure.UsageError, match="make it a function tool"):
        durable(Agent(name="shell", tools=[ShellTool(executor=lambda request: "")]))
    server: Any = object()
    with pytest.raises(perdure.UsageError, match="MCP servers"):
        durable(Agent(name="mcp", mcp_servers=[server]))


def test_outside_of_a_run_the_agent_is_as_it_was() -> None:
    @function_tool
    def pay(cents: int) -> str:
        return "paid"

    async def both() -> list[Any]:
        agent = durable(Agent(name="plain", model=calling("pay"), tools=[pay]))
        result: RunResult = await run(agent, "go")
        streamed = Runner.run_streamed(durable(Agent(name="plain", model=calling("pay"), tools=[pay])), "go")
        deltas = [event async for event in streamed.stream_events()]
        return [result.final_output, streamed.final_output, bool(deltas)]

    assert asyncio.run(both()) == ["done", "done", True]


def test_an_effect_without_a_run_is_refused_instead_of_told_to_the_model() -> None:
    @function_tool
    @perdure.effect
    async def pay(cents: int) -> str:
        return "paid"

    with pytest.raises(UserError, match="effect 'pay' was called outside of a durable run"):
        asyncio.run(run(durable(Agent(name="plain", model=calling("pay"), tools=[pay])), "go"))
