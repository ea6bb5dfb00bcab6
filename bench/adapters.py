"""Agents of other frameworks: what `durable` adds to 100 tool calls, and sessions of 1,000 items.

The model answers in 50 ms, which is ten times faster than those that are sold, and the tools at once. The framework
alone keeps its session in memory. What remains is the overhead of the framework, and that of the run around it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import perdure
from bench.measure import KB, Row, Run, file_bytes, in_turns, seconds
from bench.workload import Writer

TURNS, PARALLEL = 20, 5  # 100 tool calls
MODEL_S = 0.05
ITEMS = 1000
OVERHEAD_BAR, APPEND_BAR, FLAT_BAR, SIZE_BAR = 1.3, 3.0, 1.5, 1.0
Ask = Callable[[str], Awaitable[Any]]
_numbers = itertools.count()


def adapters(run: Run) -> list[Row]:
    turns = run.count(TURNS, 2)
    rows = []
    with perdure.open(str(run.folder / "runs.db")) as store:
        for name, make in FRAMEWORKS.items():
            rows.append(_overhead(name, store, *make(turns), rounds=run.count(9, 1)))
    return rows + _sessions(run.folder, run.count(ITEMS, 20))


def _overhead(name: str, store: perdure.Store, plain: Ask, durable: Ask, *, rounds: int) -> Row:
    """Compare an agent alone with the same agent in a durable function."""

    @perdure.durable(name=f"bench.{name}")
    async def agent() -> None:
        await durable("go")

    async def started() -> None:
        run = await store.arun(agent, id=f"{name}-{next(_numbers)}")
        assert (await run.arefresh()).status == "done"

    loop = asyncio.new_event_loop()
    try:
        ours, alone = in_turns(
            rounds, lambda: loop.run_until_complete(started()), lambda: loop.run_until_complete(plain("go")), warm_up=2
        )
    finally:
        loop.close()
    ratio = median(ours) / median(alone)
    return Row(
        f"{name}: an agent, 100 tool calls",
        median(ours) * 1000,
        "ms",
        peer=median(alone) * 1000,
        ratio=ratio,
        bar=OVERHEAD_BAR,
        note="peer: the framework alone, sessions in memory",
    )


def _pydantic_ai(turns: int) -> tuple[Ask, Ask]:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from perdure.pydantic_ai import PerdureDurability

    async def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        await asyncio.sleep(MODEL_S)
        turn = len(messages) // 2
        if turn == turns:
            return ModelResponse([TextPart("done")])
        return ModelResponse([ToolCallPart("look", {"number": n}, f"c{turn}-{n}") for n in range(PARALLEL)])

    async def look(number: int) -> str:
        return f"found {number}"

    plain = Agent(FunctionModel(respond), name="plain", tools=[look])
    durable = Agent(FunctionModel(respond), name="durable", tools=[look], capabilities=[PerdureDurability()])
    return plain.run, durable.run


def _openai_agents(turns: int) -> tuple[Ask, Ask]:
    from agents import Agent, Model, ModelResponse, Runner, SQLiteSession, Usage, function_tool, set_tracing_disabled
    from agents.testing import assistant_message, function_call

    from perdure.openai_agents import durable, run

    set_tracing_disabled(True)

    class Deciding(Model):
        async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
            await asyncio.sleep(MODEL_S)
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


def _adk(turns: int) -> tuple[Ask, Ask]:
    from google.adk.agents import LlmAgent
    from google.adk.models.base_llm import BaseLlm
    from google.adk.models.llm_response import LlmResponse
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    from perdure.adk import durable

    logging.getLogger("google_adk").setLevel(logging.ERROR)  # it warns of every answer that counts no tokens

    class Deciding(BaseLlm):
        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(MODEL_S)
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


def _agent_framework(turns: int) -> tuple[Ask, Ask]:
    from agent_framework import Agent, BaseChatClient, ChatResponse, Content, Message, tool
    from agent_framework._middleware import ChatMiddlewareLayer
    from agent_framework._tools import FunctionInvocationLayer

    from perdure.agent_framework import durability

    class Deciding(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
        def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Awaitable[Any]:
            async def respond() -> ChatResponse:
                await asyncio.sleep(MODEL_S)
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


FRAMEWORKS: dict[str, Callable[[int], tuple[Ask, Ask]]] = {
    "Pydantic AI": _pydantic_ai,
    "OpenAI Agents": _openai_agents,
    "Google ADK": _adk,
    "Agent Framework": _agent_framework,
}


# --- sessions


def _sessions(folder: Path, count: int) -> list[Row]:
    """Append to a session of the OpenAI Agents SDK, item by item, beside the two SQL sessions that ship with it."""
    from agents import SQLiteSession
    from agents.extensions.memory import SQLAlchemySession

    from perdure.openai_agents import PerdureSession

    items = _items(count)
    sqlite = SQLiteSession("chat", folder / "sqlite.db")
    url = f"sqlite+aiosqlite:///{folder / 'alchemy.db'}"
    alchemy = SQLAlchemySession.from_url("chat", url=url, create_tables=True)
    store = perdure.open(str(folder / "ours.db"))
    session = PerdureSession("chat", store)
    loop = asyncio.new_event_loop()
    times: list[list[float]] = [[], [], []]
    names = ("ours", "alchemy", "sqlite")

    def add(which: Any, batch: list[Any]) -> None:
        loop.run_until_complete(which.add_items(batch))

    try:
        for which in (session, alchemy, sqlite):  # the tables are made
            loop.run_until_complete(which.get_items())
        empty = [_used(folder / f"{name}.db") for name in names]
        for batch in _batches(items):
            for number, each in enumerate((session, alchemy, sqlite)):
                times[number].append(seconds(partial(add, each, batch)))
        assert loop.run_until_complete(session.get_items()) == loop.run_until_complete(alchemy.get_items()) == items
        loop.run_until_complete(alchemy.engine.dispose())
    finally:
        loop.close()
        sqlite.close()
        store.close()
    tenth = max(1, len(times[0]) // 10)
    first, last = median(times[0][:tenth]), median(times[0][-tenth:])
    bytes_ = [file_bytes(folder / f"{name}.db") - before for name, before in zip(names, empty, strict=True)]
    ours, theirs, others = (median(each) * 1000 for each in times)
    name = "a session of 1,000 items: append"
    return [
        Row(
            name,
            ours,
            "ms",
            peer=theirs,
            ratio=theirs / ours,
            bar=APPEND_BAR,
            sense="at least",
            note="peer: SQLAlchemySession",
        ),
        Row(name, ours, "ms", peer=others, ratio=others / ours, note="peer: SQLiteSession"),
        Row(
            "  the last tenth beside the first", last * 1000, "ms", floor=first * 1000, ratio=last / first, bar=FLAT_BAR
        ),
        Row(
            "  its size",
            bytes_[0] / KB,
            "KB",
            peer=min(bytes_[1:]) / KB,
            ratio=min(bytes_[1:]) / bytes_[0],
            bar=SIZE_BAR,
            sense="at least",
            note="in the file, beside an empty one; ours has every state",
        ),
    ]


def _used(path: Path) -> int:
    """The bytes of a store that is open."""
    with closing(sqlite3.connect(path)) as connection:
        [[pages], [size]] = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)


def _batches(items: list[Any]) -> list[list[Any]]:
    """Split items into what an agent adds at once: the question; a tool call and its result; the answer."""
    sizes = itertools.cycle((1, 2, 1))
    left, made = list(items), []
    while left:
        size = next(sizes)
        made.append(left[:size])
        del left[:size]
    return made


def _items(count: int) -> list[Any]:
    """Return items as the SDK adds them: a question, a tool call, its result, an answer, and so on."""
    writer = Writer(7)
    made: list[Any] = []
    for turn in range(0, count, 4):
        call = f"call_{writer.random.getrandbits(96):024x}"
        text = {"type": "output_text", "text": writer.prose(400), "annotations": [], "logprobs": []}
        made += [
            {"role": "user", "content": writer.prose(120)},
            {"type": "function_call", "name": "look", "call_id": call, "arguments": f'{{"number": {turn}}}',
             "id": f"fc_{writer.random.getrandbits(96):024x}", "status": "completed"},
            {"type": "function_call_output", "call_id": call, "output": writer.prose(200)},
            {"type": "message", "id": f"msg_{writer.random.getrandbits(96):024x}", "role": "assistant",
             "status": "completed", "content": [text]},
        ]  # fmt: skip
    return made[:count]
