"""The tags under which LangChain's messages are stored: `{"^msg.human":{"content":"hi","id":"1"}}`.

Importing this module registers them. `perdure` imports it when a store first saves or loads a message. LangChain itself
is imported when a message is read.
"""

from __future__ import annotations

from perdure.adapters import register_models

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
