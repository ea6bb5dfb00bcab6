"""Chat messages of LangChain, OpenAI and Anthropic as text: the role, what is said, one line each.

Pure functions over raw states (see `Thread.load`), where a message of LangChain is a dict with its class under
"<type>". They need none of the three.
"""

from __future__ import annotations

from typing import Any

from perdure.agents.formats import message_kind
from perdure.values.readable import readable, to_json

_ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "function"})


def role_of(value: Any) -> str | None:
    """Return the role of a chat message, or None if a raw value is no message.

    The role has the name that is stored: human, ai, tool … of LangChain; user, assistant, tool … of the APIs.
    """
    if not isinstance(value, dict):
        return None
    name, role = value.get("<type>"), value.get("role")
    if isinstance(name, str):
        return message_kind(name)
    return role if role in _ROLES and ("content" in value or "tool_calls" in value) else None


def are_messages(value: Any) -> bool:
    """Return whether a value is a list that holds chat messages only."""
    return isinstance(value, list | tuple) and bool(value) and all(map(role_of, value))


def text_of(message: Any) -> str:
    """Return what a message says, with its tool calls: `Let me see (tool calls: search(query="Oslo"))`."""
    content, stored = message.get("content"), message.get("tool_calls")
    blocks = content if isinstance(content, list | tuple) else [content]
    calls = list(stored) if isinstance(stored, list | tuple) else []
    # Anthropic's calls are blocks. LangChain keeps such blocks beside `tool_calls`.
    used = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_use"]
    if used and (not calls or "<type>" not in message):
        calls += used
        blocks = [block for block in blocks if not any(block is one for one in used)]
    text = " ".join(map(_block, blocks))
    return f"{text} (tool calls: {', '.join(map(_call, calls))})".lstrip() if calls else text


def as_line(message: Any) -> str:
    """Return a message with its role, and its name if it has one: `tool(search): 3 results`."""
    name, role = message.get("name"), role_of(message)
    return f"{role}({name}): {text_of(message)}" if name else f"{role}: {text_of(message)}"


def _block(block: Any) -> str:
    if not isinstance(block, dict):
        return block if isinstance(block, str) else "" if block is None else to_json(readable(block))
    if isinstance(block.get("text"), str):
        return str(block["text"])
    if block.get("type") == "tool_result":
        inner = block.get("content")
        return " ".join(map(_block, inner if isinstance(inner, list | tuple) else [inner]))
    return f"[{block.get('type', 'block')}]"


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):  # OpenAI's, whose arguments are JSON text
        return f"{function.get('name')}({function.get('arguments') or ''})"
    arguments = next((call[key] for key in ("args", "input") if key in call), None) if isinstance(call, dict) else None
    if not isinstance(arguments, dict):
        return to_json(readable(call))
    shown = (f"{name}={to_json(readable(value))}" for name, value in arguments.items())
    return f"{call.get('name')}({', '.join(shown)})"
