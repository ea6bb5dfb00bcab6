"""Agents of other frameworks: what `durable` adds to 100 tool calls. `adapter_sessions.py` has their sessions.

An agent asks its model 21 times. Each of the first 20 answers has five tool calls, which run in parallel and end at
once. The framework alone keeps its session in memory and writes nothing. The durable agent commits each answer of the
model, and each group of parallel calls, with an fsync. The floor is the framework alone, and as many bare commits.

With a model that answers at once, a framework needs less time than these commits, so that row has no bar. It prints
the ratio, and how near the floor is. The bar of 1.3 is judged with a model that answers in 20 ms, which is faster than
any that is sold, and in 200 ms, which is fast.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from statistics import median
from typing import Any

import perdure
from bench.adapter_sessions import SESSIONS
from bench.measure import BareTable, Row, Run, in_turns

TURNS, PARALLEL = 20, 5  # 100 tool calls
ENTRY = bytes(200)  # about the size of a journal's entry
MODELS_S = {"at once": 0.0, "in 20 ms": 0.02, "in 200 ms": 0.2}
ITEMS = 1000
OVERHEAD_BAR = 1.3
Ask = Callable[[str], Awaitable[Any]]
_numbers = itertools.count()


def adapters(run: Run) -> list[Row]:
    rows = []
    turns = run.count(TURNS, 2)
    commits = 2 * turns + 3  # each answer, each group of tool calls, the begin and the end of the run
    bare = BareTable(run.folder / "bare.db")

    def commit() -> None:
        for _ in range(commits):
            bare.insert(ENTRY)

    with perdure.open(str(run.folder / "runs.db")) as store:
        for when, model_s in MODELS_S.items():
            rounds = run.count(3 if model_s > 0.1 else 9, 1)
            for name, make in FRAMEWORKS.items():
                agents = make(turns, model_s)
                rows.append(
                    _overhead(f"{name}: model {when}", store, *agents, commit, rounds=rounds, judged=model_s > 0)
                )
    bare.close()
    return rows + [row for session in SESSIONS for row in session(run.folder, run.count(ITEMS, 20))]


def _overhead(
    name: str,
    store: perdure.Store,
    plain: Ask,
    durable: Ask,
    commit: Callable[[], None],
    *,
    rounds: int,
    judged: bool,
) -> Row:
    """Compare an agent alone with the same agent in a durable function."""

    @perdure.durable(name=f"bench.{next(_numbers)}")
    async def agent() -> None:
        await durable("go")

    async def started() -> None:
        run = await store.arun(agent, id=f"bench-{next(_numbers)}")
        assert (await run.arefresh()).status == "done"

    loop = asyncio.new_event_loop()
    try:
        ours, alone, commits = in_turns(
            rounds,
            lambda: loop.run_until_complete(started()),
            lambda: loop.run_until_complete(plain("go")),
            commit,
            warm_up=1,
        )
    finally:
        loop.close()
    floor = median(alone) + median(commits)
    return Row(
        name,
        median(ours) * 1000,
        "ms",
        peer=median(alone) * 1000,
        floor=floor * 1000,
        ratio=median(ours) / median(alone),
        bar=OVERHEAD_BAR if judged else None,
        note=f"100 tool calls; {median(ours) / floor:.2f} of the floor",
    )


def _pydantic_ai(turns: int, model_s: float) -> tuple[Ask, Ask]:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from perdure.pydantic_ai import PerdureDurability

    async def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        await asyncio.sleep(model_s)
        turn = len(messages) // 2
        if turn == turns:
            return ModelResponse([TextPart("done")])
        return ModelResponse([ToolCallPart("look", {"number": n}, f"c{turn}-{n}") for n in range(PARALLEL)])

    async def look(number: int) -> str:
        return f"found {number}"

    plain = Agent(FunctionModel(respond), name="plain", tools=[look])
    durable = Agent(FunctionModel(respond), name="durable", tools=[look], capabilities=[PerdureDurability()])
    return plain.run, durable.run


def _openai_agents(turns: int, model_s: float) -> tuple[Ask, Ask]:
    from agents import Agent, Model, ModelResponse, Runner, SQLiteSession, Usage, function_tool, set_tracing_disabled
    from agents.testing import assistant_message, function_call

    from perdure.openai_agents import durable, run

    set_tracing_disabled(True)

    class Deciding(Model):
        async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
            await asyncio.sleep(model_s)
            turn = sum(item.get("type") == "function_call_output" for item in input) // PARALLEL
            if turn == turns:
                return ModelResponse([assistant_message("done")], Usage(), None)
            calls = [function_call("look", {"number": n}, call_id=f"c{turn}-{n}") for n in range(PARALLEL)]
            return ModelResponse(list(calls), Usage(), None)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    @function_tool
    async def look(number: int) -> str:
        return f"found {number}"

    plain = Agent(name="plain", model=Deciding(), tools=[look])

    async def alone(task: str) -> Any:
        return await Runner.run(plain, task, session=SQLiteSession(f"s{next(_numbers)}"), max_turns=TURNS + 2)

    copy = durable(plain)

    async def ours(task: str) -> Any:
        return await run(copy, task, session=SQLiteSession(f"s{next(_numbers)}"), max_turns=TURNS + 2)

    return alone, ours


def _adk(turns: int, model_s: float) -> tuple[Ask, Ask]:
    from google.adk.agents import LlmAgent
    from google.adk.models.base_llm import BaseLlm
    from google.adk.models.llm_response import LlmResponse
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    from perdure.adk import durable

    logging.getLogger("google_adk").setLevel(logging.ERROR)  # it warns of every answer that counts no tokens

    class Deciding(BaseLlm):
        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(model_s)
            parts = [part for content in llm_request.contents for part in content.parts]
            turn = sum(part.function_response is not None for part in parts) // PARALLEL
            said = [types.Part(text="done")]
            if turn < turns:
                calls = [
                    types.FunctionCall(name="look", args={"number": n}, id=f"c{turn}-{n}") for n in range(PARALLEL)
                ]
                said = [types.Part(function_call=call) for call in calls]
            yield LlmResponse(content=types.Content(role="model", parts=said))

    async def look(number: int) -> str:
        return f"found {number}"

    def asked(agent: LlmAgent) -> Ask:
        async def ask(task: str) -> None:
            runner = InMemoryRunner(agent=agent, app_name="bench")
            session = await runner.session_service.create_session(app_name="bench", user_id="ann")
            message = types.UserContent(task)
            async for _ in runner.run_async(user_id="ann", session_id=session.id, new_message=message):
                pass

        return ask

    plain, ours = (LlmAgent(name="bench", model=Deciding(model="deciding"), tools=[look]) for _ in range(2))
    return asked(plain), asked(durable(ours))


def _agent_framework(turns: int, model_s: float) -> tuple[Ask, Ask]:
    from agent_framework import Agent, BaseChatClient, ChatResponse, Content, Message, tool
    from agent_framework._middleware import ChatMiddlewareLayer
    from agent_framework._tools import FunctionInvocationLayer

    from perdure.agent_framework import durability

    class Deciding(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
        def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Awaitable[Any]:
            async def respond() -> ChatResponse:
                await asyncio.sleep(model_s)
                contents = [content for message in messages for content in message.contents]
                turn = sum(content.type == "function_result" for content in contents) // PARALLEL
                said = [Content.from_text("done")]
                if turn < turns:
                    ids = [f"c{turn}-{n}" for n in range(PARALLEL)]
                    said = [Content.from_function_call(id, "look", arguments={"number": n}) for n, id in enumerate(ids)]
                return ChatResponse(messages=[Message(role="assistant", contents=said)], response_id="r")

            return respond()

    async def look(number: int) -> str:
        return f"found {number}"

    tools = [tool(look, approval_mode="never_require")]
    plain = Agent(Deciding(), name="plain", tools=tools)
    ours = Agent(Deciding(), name="ours", tools=tools, middleware=durability())
    return plain.run, ours.run


def _strands(turns: int, model_s: float) -> tuple[Ask, Ask]:
    from strands import Agent, tool
    from strands.models import Model

    from perdure.strands import durability

    class Deciding(Model):
        def update_config(self, **config: Any) -> None: ...

        def get_config(self) -> dict[str, Any]:
            return {}

        def structured_output(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(model_s)
            turn = len(messages) // 2
            yield {"messageStart": {"role": "assistant"}}
            for number in range(PARALLEL if turn < turns else 0):
                start = {"toolUse": {"toolUseId": f"c{turn}-{number}", "name": "look"}}
                yield {"contentBlockStart": {"start": start}}
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": f'{{"number": {number}}}'}}}}
                yield {"contentBlockStop": {}}
            if turn == turns:
                yield {"contentBlockDelta": {"delta": {"text": "done"}}}
                yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use" if turn < turns else "end_turn"}}

    @tool
    async def look(number: int) -> str:
        return f"found {number}"

    def asked(*plugins: Any) -> Ask:
        async def ask(task: str) -> Any:
            agent = Agent(Deciding(), tools=[look], plugins=[*plugins], callback_handler=None)
            return await agent.invoke_async(task)

        return ask

    return asked(), asked(durability())


FRAMEWORKS: dict[str, Callable[[int, float], tuple[Ask, Ask]]] = {
    "Pydantic AI": _pydantic_ai,
    "OpenAI Agents": _openai_agents,
    "Google ADK": _adk,
    "Agent Framework": _agent_framework,
    "Strands": _strands,
}
