"""`durable` and `run`: agents of the OpenAI Agents SDK as parts of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from agents import (
    Agent,
    ApplyPatchTool,
    ComputerTool,
    CustomTool,
    FunctionTool,
    GuardrailFunctionOutput,
    Handoff,
    LocalShellTool,
    Model,
    ModelResponse,
    MultiProvider,
    Runner,
    RunResult,
    ShellTool,
    Tool,
    ToolApprovalItem,
)
from agents.items import TResponseStreamEvent
from agents.tool_context import ToolContext
from pydantic import BaseModel, TypeAdapter

import perdure
from perdure.adapters import (
    agent_call,
    in_run,
    is_journaled,
    journaled,
    refuse_without_run,
    register_agents,
    remembering,
    tool_call,
)
from perdure.errors import UsageError

Options = dict[str, Any]
G = TypeVar("G")
_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)
_EVENT: TypeAdapter[TResponseStreamEvent] = TypeAdapter(TResponseStreamEvent)
# They act in this process, and their calls could not be recorded. The other tools act where the model is.
_LOCAL = (ApplyPatchTool, ComputerTool, CustomTool, LocalShellTool, ShellTool)


async def run(agent: Agent[Any], input: Any, **options: Any) -> RunResult:
    """Run an agent as `Runner.run` does, with the same options. A person is asked about tools that need approval.

    In a durable function the run is parked until the answers are there: `perdure answer RUN true`. A call that is not
    approved does not run, and the model is told.
    """
    with agent_call(agent.name):
        result = await Runner.run(agent, input, **options)
        while result.interruptions and in_run():
            state = result.to_state()
            answers = await asyncio.gather(*[_asked(item) for item in result.interruptions])
            for item, agreed in zip(result.interruptions, answers, strict=True):
                (state.approve if agreed else state.reject)(item)
            result = await Runner.run(agent, state, **options)
        return result


def _asked(item: ToolApprovalItem) -> Any:
    shown = ", ".join(f"{name}={value!r}" for name, value in _arguments(item.arguments).items())
    with tool_call(item.name or "tool", item.call_id):
        return perdure.ask(f"May {item.name}({shown}) run?", options=[True, False])


def durable(agent: Agent[Any], *, model: Options | None = None, effects: Mapping[str, Options] | None = None) -> Any:
    """Return a copy of an agent whose model responses, function tools and guardrails are steps of the run it is in.

    Outside of a durable function it works as before. The agents that it hands off to are copied too. `model` has
    options of `@perdure.step` for its requests: `model={"retries": 3}`. `effects` names tools that act on the outside
    world, with options of `@perdure.effect`: `effects={"pay": {"timeout_s": 30}}`.
    """
    return _Copies(model or {}, effects or {}).agent(agent)


def _as_agent(agent: Agent[Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return an agent as the handler of a team's member. Its final output is the answer."""
    copy = durable(agent)

    async def ask(message: str, history: Any) -> tuple[Any, Any]:
        result = await run(copy, [*(history or []), {"role": "user", "content": message}])
        return _storable(result.final_output), _storable(result.to_input_list())

    return remembering(ask)


register_agents("agents", _as_agent)


class _Copies:
    """Copies of agents that hand off to each other, perhaps in circles: each is made once."""

    def __init__(self, model: Options, effects: Mapping[str, Options]) -> None:
        self._model, self._effects = model, effects
        self._copies: dict[int, Agent[Any]] = {}

    def agent(self, agent: Agent[Any]) -> Agent[Any]:
        if id(agent) in self._copies or isinstance(agent.model, _Model):
            return self._copies.get(id(agent), agent)
        if agent.mcp_servers:
            raise UsageError(
                f"agent {agent.name!r} has MCP servers, whose calls would not be recorded: give their tools to the "
                "agent as function tools that call the server"
            )
        copy = agent.clone(
            model=_Model(agent.name, agent.model, self._model),
            model_settings=agent.model_settings,
            tools=[self._tool(agent.name, tool) for tool in agent.tools],
            input_guardrails=[_guardrail(agent.name, each) for each in agent.input_guardrails],
            output_guardrails=[_guardrail(agent.name, each) for each in agent.output_guardrails],
        )
        self._copies[id(agent)] = copy
        copy.handoffs = [self._next(each) for each in agent.handoffs]
        return copy

    def _next(self, handoff: Agent[Any] | Handoff[Any, Any]) -> Agent[Any] | Handoff[Any, Any]:
        if isinstance(handoff, Agent):
            return self.agent(handoff)

        async def invoke(context: Any, arguments: str) -> Agent[Any]:
            return self.agent(await handoff.on_invoke_handoff(context, arguments))

        return dataclasses.replace(handoff, on_invoke_handoff=invoke)

    def _tool(self, agent: str, tool: Tool) -> Tool:
        if isinstance(tool, _LOCAL):
            raise UsageError(f"the calls of tool {tool.name!r} would not be recorded: make it a function tool")
        if not isinstance(tool, FunctionTool):
            return tool
        name, inner, options = f"{agent}.{tool.name}", tool.on_invoke_tool, self._effects.get(tool.name)
        nested = getattr(getattr(tool, "_agent_instance", None), "model", None)
        wrapped = getattr(tool, "__wrapped__", None)
        is_inline = is_journaled(wrapped) or isinstance(nested, _Model)

        async def invoke(context: ToolContext[Any], arguments: str) -> Any:
            async def body() -> Any:
                return _storable(await inner(context, arguments))

            refuse_without_run([wrapped])
            with tool_call(tool.name, context.tool_call_id) as branch:
                if is_inline or branch is None:
                    result = await inner(context, arguments)
                    return result if branch is None or branch.declined is None else str(branch.declined)
                key = {**_arguments(arguments), "tool_call": context.tool_call_id}
                kind: Any = "step" if options is None else "effect"
                return await journaled(kind, name, key, body, **(options or {}))

        # The SDK evaluates the annotations at every call. Texts would be compiled each time.
        invoke.__annotations__ = {"context": ToolContext, "arguments": str}
        return dataclasses.replace(tool, on_invoke_tool=invoke)


class _Model(Model):
    """A model whose responses are steps."""

    def __init__(self, agent: str, model: str | Model | None, options: Options) -> None:
        self._name, self._model, self._options = f"{agent}.model", model, options

    @property
    def _inner(self) -> Model:
        if not isinstance(self._model, Model):
            self._model = MultiProvider().get_model(self._model)
        return self._model

    async def close(self) -> None:
        await self._inner.close()

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        async def body() -> Any:
            response = await self._inner.get_response(system_instructions, input, *args, **kwargs)
            return _RESPONSE.dump_python(response, mode="json")

        if not in_run():
            return await self._inner.get_response(system_instructions, input, *args, **kwargs)
        return _RESPONSE.validate_python(await journaled("step", self._name, _seen(input), body, **self._options))

    async def stream_response(
        self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[TResponseStreamEvent]:
        """Stream a response. In a run its events go to `run.stream()` at once, and to the caller when it is recorded.

        Pieces of text (`….delta`) are not recorded, so the caller does not get them.
        """
        stream = self._inner.stream_response(system_instructions, input, *args, **kwargs)
        if not in_run():
            async for event in stream:
                yield event
            return

        async def body() -> list[Any]:
            whole = []
            async for event in stream:
                plain = event.model_dump(mode="json")
                perdure.emit(plain)
                if not event.type.endswith(".delta"):
                    whole.append(plain)
            return whole

        for plain in await journaled("step", self._name, _seen(input), body, **self._options):
            yield _EVENT.validate_python(plain)


def _seen(input: str | list[Any]) -> dict[str, Any]:
    return {"items": 1 if isinstance(input, str) else len(input)}


def _arguments(text: str | None) -> dict[str, Any]:
    """Return the arguments of a tool call by name. The tool itself refuses what is no JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        arguments = text
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def _guardrail(agent: str, guardrail: G) -> G:
    """Return a guardrail whose function is a step."""
    inner, name = guardrail.guardrail_function, guardrail.get_name()  # type: ignore[attr-defined]

    async def check(*args: Any) -> GuardrailFunctionOutput:
        async def body() -> Any:
            output = inner(*args)
            output = await output if inspect.isawaitable(output) else output
            return [_storable(output.output_info), output.tripwire_triggered]

        return GuardrailFunctionOutput(*await journaled("step", f"{agent}.{name}", {}, body))

    return dataclasses.replace(guardrail, guardrail_function=check, name=name)  # type: ignore[type-var]


def _storable(value: Any) -> Any:
    """Return a value as the journal can keep it: models as dicts, other objects as the text that a model would see."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    return value if isinstance(value, str | int | float | dict | None) else str(value)
