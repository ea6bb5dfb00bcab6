"""LangChain's messages: the tags under which they are stored, and a middleware that masks old results of tools.

A message is stored as `{"^msg.human":{"content":"hi","id":"1"}}`. Importing this module registers the tags. `perdure`
imports it when a store first saves or loads a message. LangChain itself is imported when a message is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.adapters import register_models
from perdure.errors import UsageError

register_models(
    "langchain_core.messages.",
    "langchain-core",
    {
        "^msg.human": "human.HumanMessage",
        "^msg.ai": "ai.AIMessage",
        "^msg.system": "system.SystemMessage",
        "^msg.tool": "tool.ToolMessage",
        "^msg.function": "function.FunctionMessage",
        "^msg.chat": "chat.ChatMessage",
        "^msg.remove": "modifier.RemoveMessage",
        "^msg.human_chunk": "human.HumanMessageChunk",
        "^msg.ai_chunk": "ai.AIMessageChunk",
        "^msg.system_chunk": "system.SystemMessageChunk",
        "^msg.tool_chunk": "tool.ToolMessageChunk",
        "^msg.function_chunk": "function.FunctionMessageChunk",
        "^msg.chat_chunk": "chat.ChatMessageChunk",
    },
)


def mask_observations(
    *, keep_last: int = 10, summarize: Callable[[str], Any] | None = None, max_tokens: int = 100
) -> Any:
    """Return a middleware for `create_agent` that masks old results of tools in the agent's state.

    It calls `perdure.memory.compact_history` before each call of the model, with the same options. The whole results
    stay in the thread's history. `summarize` is called once per result; it may be async if the agent is.
    """
    try:
        from langchain.agents.middleware import AgentMiddleware
    except ModuleNotFoundError as error:
        raise UsageError("mask_observations() is a middleware of LangChain: pip install langchain") from error
    import perdure

    compact_history, acompact_history = perdure.memory.compact_history, perdure.memory.acompact_history
    compact_history([], keep_last=keep_last, max_tokens=max_tokens)  # refuses wrong options before an agent runs

    class MaskObservations(AgentMiddleware):
        def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
            said = state["messages"]
            short = compact_history(said, keep_last=keep_last, summarize=summarize, max_tokens=max_tokens)
            return _changed(said, short)

        async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
            said = state["messages"]
            short = await acompact_history(said, keep_last=keep_last, summarize=summarize, max_tokens=max_tokens)
            return _changed(said, short)

    return MaskObservations()


def _changed(before: list[Any], after: list[Any]) -> dict[str, Any] | None:
    """Return the update of a state: LangGraph replaces a message that comes again with its id."""
    changed = [new for old, new in zip(before, after, strict=True) if new is not old]
    return {"messages": changed} if changed else None
