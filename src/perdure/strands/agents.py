"""`durability`: agents of Strands whose model responses and tools are steps of the run that they are in."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from strands import Agent
from strands.agent.state import AgentState
from strands.hooks import AfterInvocationEvent, BeforeInvocationEvent
from strands.interrupt import Interrupt, InterruptException
from strands.middleware import (
    ExecuteToolContext,
    ExecuteToolStage,
    InvokeModelContext,
    InvokeModelStage,
    ModelStopReason,
    ToolResultEvent,
    TypedEvent,
)
from strands.plugins import Plugin
from strands.tools.structured_output.structured_output_tool import StructuredOutputTool

import perdure
from perdure.adapters import (
    Scope,
    agent_branch,
    in_run,
    is_journaled,
    journaled,
    refuse_without_run,
    register_agents,
    remembering,
    tool_call,
    within,
)
from perdure.errors import UsageError

Options = Mapping[str, Any]
Next = Callable[[Any], AsyncGenerator[TypedEvent, None]]
_INTERRUPT = "tool_interrupt_event"
_durable: WeakSet[Agent] = WeakSet()
_members: WeakSet[Agent] = WeakSet()  # what they remember is in the states of a team's members


def durability(
    *, model: Options | None = None, effects: Mapping[str, Options] | None = None, stream: bool = False
) -> Plugin:
    """Return the plugin that makes an agent durable in the durable function that makes and calls it.

    Elsewhere the agent works as before. `model` has options of `@perdure.step` for model requests:
    `model={"retries": 3}`. `effects` names tools that act on the outside world, with options of `@perdure.effect`:
    `effects={"pay": {"timeout_s": 30}}`. With `stream`, pieces of the model's answer go to `run.stream()`.
    """
    return _Durability(model or {}, effects or {}, stream)


class _Durability(Plugin):
    name = "perdure"

    def __init__(self, model: Options, effects: Mapping[str, Options], stream: bool) -> None:
        super().__init__()
        self._model_options, self._effects, self._streams = model, effects, stream
        self._branches: WeakKeyDictionary[Any, Scope] = WeakKeyDictionary()  # of the agents that are called now

    def init_agent(self, agent: Agent) -> None:
        was_in_run = in_run()

        def begin(event: BeforeInvocationEvent) -> None:
            if in_run() and not was_in_run and agent not in _members:
                raise UsageError(
                    f"agent {agent.name!r} was made outside of the run, and remembers what else was said to it: make "
                    "it in the durable function that calls it"
                )
            if (branch := agent_branch(agent.name)) is not None:
                self._branches[agent] = branch

        def end(event: AfterInvocationEvent) -> None:
            if (branch := self._branches.pop(agent, None)) is not None:
                branch.end()

        _durable.add(agent)
        agent.add_hook(begin, BeforeInvocationEvent)
        agent.add_hook(end, AfterInvocationEvent)
        agent.add_middleware(InvokeModelStage, self._model)
        agent.add_middleware(ExecuteToolStage, self._tool)

    async def _model(self, context: InvokeModelContext, call_next: Next) -> AsyncGenerator[TypedEvent, None]:
        """Make a response of the model a step. Its pieces are not recorded, so the caller does not get them."""
        if not in_run():
            refuse_without_run(
                getattr(tool, "_tool_func", None) for tool in context.agent.tool_registry.registry.values()
            )
            async for event in call_next(context):
                yield event
            return
        if context.model.stateful:
            raise UsageError(
                "the model keeps the conversation on its server, where no run can resume it: stateful=False"
            )

        async def body() -> Any:
            stopped: Any = None
            async for event in call_next(context):
                if self._streams and "event" in event:
                    perdure.emit(event["event"])
                stopped = event["stop"] if isinstance(event, ModelStopReason) else stopped
            return list(stopped)

        key = {"messages": len(context.messages)}
        with within(self._branches.get(context.agent)):
            recorded = await journaled("step", f"{context.agent.name}.model", key, body, **self._model_options)
        yield ModelStopReason(*recorded)

    async def _tool(self, context: ExecuteToolContext, call_next: Next) -> AsyncGenerator[TypedEvent, None]:
        """Make a call of a tool a step or an effect. An interrupt of the tool asks a person."""
        if not in_run():
            async for event in call_next(context):
                yield event
            return
        id = str(context.tool_use["toolUseId"])
        with within(self._branches.get(context.agent)), tool_call(str(context.tool_use["name"]), id) as branch:
            if _is_inline(context.tool):
                events = [event async for event in call_next(context)]
                if branch is not None and branch.declined is not None:
                    events = [_result_event(id, str(branch.declined), "error")]
            else:
                events = [await self._answered(context, call_next)]
        for event in events:  # here, because the code of the caller must not run in the branch
            yield event

    async def _answered(self, context: ExecuteToolContext, call_next: Next) -> ToolResultEvent:
        """Call a tool until it does not interrupt. A person gives the answers that it asks for."""
        answers: dict[str, Any] = {}
        while True:
            recorded = await self._recorded(context, call_next, answers)
            if not isinstance(recorded, dict) or recorded.keys() != {_INTERRUPT}:
                return _restored(context, recorded)
            asked = Interrupt(**recorded[_INTERRUPT])
            answers[asked.id] = await perdure.ask(str(asked.reason or asked.name))

    async def _recorded(self, context: ExecuteToolContext, call_next: Next, answers: dict[str, Any]) -> Any:
        agent, use = context.agent, context.tool_use
        options = self._effects.get(use["name"])

        async def body() -> Any:
            before = agent.state.get()
            ended = await _ended(context, call_next, answers)
            if isinstance(ended, Interrupt):
                return {_INTERRUPT: ended.to_dict()}
            if options is not None and ended.exception is not None:
                raise ended.exception
            after = agent.state.get()
            changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
            return {"result": ended.tool_result, "state": changed, "removed": [*(before.keys() - after.keys())]}

        key = {**use["input"], "tool_call": use["toolUseId"]}
        kind: Any = "step" if options is None else "effect"
        return await journaled(kind, f"{agent.name}.{use['name']}", key, body, **(options or {}))


def _is_inline(tool: Any) -> bool:
    """Return whether a tool runs as a part of the run: it makes steps of its own, or none are needed."""
    nested = getattr(tool, "agent", None)  # of an agent as a tool
    is_durable = isinstance(nested, Agent) and nested in _durable
    return is_durable or isinstance(tool, StructuredOutputTool) or is_journaled(getattr(tool, "_tool_func", None))


async def _ended(context: ExecuteToolContext, call_next: Next, answers: dict[str, Any]) -> ToolResultEvent | Interrupt:
    """Call a tool until it has a result, or an interrupt without an answer."""
    while True:
        ended: ToolResultEvent | Interrupt | None = None
        try:
            async for event in call_next(context):
                if isinstance(event, ToolResultEvent):
                    ended = event
                elif _INTERRUPT in event:
                    [ended] = event[_INTERRUPT]["interrupts"]
        except InterruptException as raised:
            ended = raised.interrupt
        if not isinstance(ended, Interrupt) or ended.id not in answers:
            assert ended is not None
            return ended
        ended.response = answers[ended.id]  # the tool asks for it again, and gets it


def _restored(context: ExecuteToolContext, recorded: Any) -> ToolResultEvent:
    """Return the result of a tool as it was recorded, and set what it did to the state of the agent."""
    if not isinstance(recorded, dict) or recorded.keys() != {"result", "state", "removed"}:
        return _result_event(
            str(context.tool_use["toolUseId"]), str(recorded)
        )  # a person, or `reconcile`, gave the result
    for name, value in recorded["state"].items():
        context.agent.state.set(name, value)
    for name in recorded["removed"]:
        context.agent.state.delete(name)
    return ToolResultEvent(recorded["result"])


def _result_event(id: str, text: str, status: Any = "success") -> ToolResultEvent:
    return ToolResultEvent({"toolUseId": id, "status": status, "content": [{"text": text}]})


def _as_agent(agent: Agent) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return an agent as the handler of a team's member. The text of its result is the answer."""
    if agent not in _durable:
        raise UsageError("an agent in a team is durable: Agent(…, plugins=[durability()])")
    if agent._session_manager is not None:
        raise UsageError("the messages of an agent in a team are in the member's state: leave session_manager out")
    _members.add(agent)
    first = {"messages": list(agent.messages), "state": agent.state.get()}

    async def ask(message: str, history: Any) -> tuple[str, Any]:
        begun = copy.deepcopy(history or first)
        agent.messages, agent.state = begun["messages"], AgentState(begun["state"])
        answer = str(await agent.invoke_async(message)).strip()
        return answer, {"messages": list(agent.messages), "state": agent.state.get()}

    return remembering(ask)


register_agents("strands", _as_agent)
