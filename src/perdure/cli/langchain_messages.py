"""Print LangChain's messages, a line each.

Pure functions over raw states (see `Thread.load`), where a message is a dict with its class under "<type>". They do not
need LangChain.
"""

from __future__ import annotations

from typing import Any

from perdure.agents.formats import message_kind
from perdure.cli.text import readable, to_json


def kind_of(value: Any) -> str | None:
    """Return the kind of a message: human, ai, tool …; None if a raw value is no message."""
    name = value.get("<type>") if isinstance(value, dict) else None
    return message_kind(name) if isinstance(name, str) else None


def are_messages(value: Any) -> bool:
    """Return whether a value is a list that holds messages only."""
    return isinstance(value, list | tuple) and bool(value) and all(map(kind_of, value))


def as_line(message: Any) -> str:
    """Return a message in one line: `ai: Let me see (tool calls: search(query="Oslo"))`."""
    name, content, calls = message.get("name"), message.get("content"), message.get("tool_calls")
    text = " ".join(map(_block, content if isinstance(content, list | tuple) else [content]))
    if isinstance(calls, list) and calls:
        text = f"{text} (tool calls: {', '.join(map(_call, calls))})".lstrip()
    return f"{kind_of(message)}({name}): {text}" if name else f"{kind_of(message)}: {text}"


def _block(block: Any) -> str:
    if isinstance(block, dict):
        return block["text"] if isinstance(block.get("text"), str) else f"[{block.get('type', 'block')}]"
    return block if isinstance(block, str) else "" if block is None else to_json(readable(block))


def _call(call: Any) -> str:
    if not isinstance(call, dict) or not isinstance(call.get("args"), dict):
        return to_json(readable(call))
    arguments = (f"{name}={to_json(readable(value))}" for name, value in call["args"].items())
    return f"{call.get('name')}({', '.join(arguments)})"
