"""LangChain's messages as people read them: a line each.

Pure functions over raw states (see `Thread.load`), where a message is a dict with its class under "<type>". LangChain
is not needed. Also OpenAI's calls of tools, blocks of content and chunks; whatever a message lacks is left out.
"""

from __future__ import annotations

from typing import Any

from perdure.cli.text import readable, to_json
from perdure.values.langchain_messages import NAMES

_KINDS = {name: tag.removeprefix("^msg.").removesuffix("_chunk") for tag, name in NAMES.items()}


def kind_of(value: Any) -> str | None:
    """What sort of message a raw value is: human, ai, tool …; None: it is none."""
    name = value.get("<type>") if isinstance(value, dict) else None
    return _KINDS.get(name) if isinstance(name, str) else None


def are_messages(value: Any) -> bool:
    """Whether this is a list of messages, and of nothing else."""
    return isinstance(value, list | tuple) and bool(value) and all(map(kind_of, value))


def as_line(message: Any) -> str:
    """A message in one line: `ai: Let me see (tool calls: search(query="Oslo"))`."""
    return f"{_speaker(message)}: {_said(message)}"


def _speaker(message: Any) -> str:
    kind = kind_of(message) or ""
    marks = [message.get("name") or (message.get("role") if kind == "chat" else None)]
    if message.get("status") == "error":
        marks.append("error")
    named = ", ".join(str(mark) for mark in marks if mark)
    return f"{kind}({named})" if named else kind


def _said(message: Any) -> str:
    if kind_of(message) == "remove":
        return str(message.get("id"))
    text = _text(message.get("content"))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return f"{text} (tool calls: {', '.join(map(_call, calls))})".lstrip()
    return text


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return "" if content is None else to_json(readable(content))
    return " ".join(_block(block) for block in content)


def _block(block: Any) -> str:
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        return to_json(readable(block))
    return block["text"] if isinstance(block.get("text"), str) else f"[{block.get('type', 'block')}]"


def _call(call: Any) -> str:
    if not isinstance(call, dict):
        return to_json(readable(call))
    given = call.get("args")
    if isinstance(given, dict):
        shown = ", ".join(f"{name}={to_json(readable(value))}" for name, value in given.items())
    else:
        shown = "" if given is None else to_json(readable(given))
    return f"{call.get('name')}({shown})"
