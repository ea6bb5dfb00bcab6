"""The formats of tool calls and of their results: OpenAI's (chat and Responses), Anthropic's, and a plain one.

A tool call may be a dict or an object of an SDK. A plain call is {"id", "name", "arguments" or "args"}. Nothing here
runs a tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import msgspec
from blake3 import blake3

from perdure.errors import UsageError
from perdure.values.model_tags import tag_of
from perdure.values.safe_repr import shown

ERROR_CHARACTERS_MAX: Final = 2000
_ID: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"


class ToolCall(NamedTuple):
    """A tool call of a model. `arguments` are as the model wrote them: JSON text or a dict."""

    style: str
    id: str | None
    name: str
    arguments: Any


class ToolResult(NamedTuple):
    """The text that the model gets back for a tool call."""

    text: str
    is_error: bool = False


def message_kind(name: str) -> str | None:
    """Return the kind of a stored message (human, ai, tool …) by the name of its class, or None for other classes."""
    tag = tag_of(name) or ""
    return tag.removeprefix("^msg.").removesuffix("_chunk") if tag.startswith("^msg.") else None


# --- tool calls


def parse(tool_calls: Any) -> list[ToolCall]:
    """Return the tool calls of a model's answer. Skip its other items (text, reasoning, calls of server-side tools)."""
    if tool_calls is None:
        return []
    if isinstance(tool_calls, str | bytes | Mapping) or not isinstance(tool_calls, Iterable):
        raise UsageError(
            f"tools.call() takes the list of tool calls, such as message.tool_calls, not a {type(tool_calls).__name__}"
        )
    parsed = [_parsed(item) for item in tool_calls]
    return [call for call in parsed if call is not None]


def _parsed(item: Any) -> ToolCall | None:
    kind, function, name = _get(item, "type"), _get(item, "function"), _get(item, "name")
    if function is not None:
        return _tool_call("openai", _get(item, "id"), _get(function, "name"), _get(function, "arguments"))
    if kind == "function_call":
        return _tool_call("responses", _get(item, "call_id") or _get(item, "id"), name, _get(item, "arguments"))
    if kind == "tool_use":
        return _tool_call("anthropic", _get(item, "id"), name, _get(item, "input"))
    if isinstance(name, str) and kind in (None, "tool_call", "invalid_tool_call", "function"):
        arguments = _get(item, "args")
        return _tool_call("plain", _get(item, "id"), name, _get(item, "arguments") if arguments is None else arguments)
    if isinstance(kind, str):
        return None
    raise UsageError(
        f"this is no tool call of a known form: {shown(item, 200)}; give it as "
        '{"id": …, "name": …, "arguments": {…}}, or in the format of OpenAI or Anthropic'
    )


def _get(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _tool_call(style: str, call_id: Any, name: Any, arguments: Any) -> ToolCall:
    known = None if call_id is None or call_id == "" else str(call_id)
    return ToolCall(style, known, name if isinstance(name, str) else "", arguments)


def label(call: ToolCall, position: int) -> str:
    """Return a tool call's part of a path: its id with unfit characters replaced, or `_` and its position.

    The two never collide, because no id gives a label that begins with `_`."""
    if call.id is None:
        return f"_{position}"
    if re.fullmatch(_ID, call.id):
        return call.id
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", call.id)[:32].lstrip("_-")
    return f"{readable or 'id'}-{blake3(call.id.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def arguments_of(call: ToolCall) -> Any:
    """Return the arguments as data. Raise ValueError, with a text for the model, if they are not JSON."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        return {} if arguments is None else dict(arguments) if isinstance(arguments, Mapping) else arguments
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from error


# --- results


def messages(calls: Iterable[tuple[ToolCall, ToolResult]]) -> list[dict[str, Any]]:
    """Return the messages for the model, in the order of its calls. Anthropic's results share one message."""
    replies: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    for call, outcome in calls:
        if call.style != "anthropic":
            replies.append(_message(call, outcome))
            continue
        if not blocks:
            replies.append({"role": "user", "content": blocks})
        block = {"type": "tool_result", "tool_use_id": call.id, "content": outcome.text}
        blocks.append({**block, "is_error": True} if outcome.is_error else block)
    return replies


def _message(call: ToolCall, outcome: ToolResult) -> dict[str, Any]:
    text = outcome.text
    if call.style == "responses":
        return {"type": "function_call_output", "call_id": call.id, "output": text}
    if call.style == "openai" and call.id is None:  # Ollama's calls have no ids
        return {"role": "tool", "tool_name": call.name, "content": text}
    message = {"role": "tool", "tool_call_id": call.id, "content": text}
    if call.style == "plain":
        return {**message, "name": call.name, "status": "error" if outcome.is_error else "success"}
    return message


def schema(style: str, name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a tool in a provider's format. Raises UsageError for an unknown style."""
    about = {"name": name, **({"description": description} if description else {})}
    forms: dict[str, dict[str, Any]] = {
        "openai": {"type": "function", "function": {**about, "parameters": parameters}},
        # The API defaults to strict, which does not allow optional parameters.
        "responses": {"type": "function", **about, "parameters": parameters, "strict": False},
        "anthropic": {**about, "input_schema": parameters},
        "plain": {**about, "parameters": parameters},
    }
    if style not in forms:
        raise UsageError(f"style={style!r}: one of {', '.join(forms)}")
    return forms[style]


# --- values as text


def error_text(name: str, text: str) -> str:
    """Return the text about an error for a model, of at most ERROR_CHARACTERS_MAX characters."""
    whole = f"Error: {name}: {text}" if text else f"Error: {name}"
    clean = whole.encode("utf-8", "replace").decode().replace("\0", "�")
    return clean if len(clean) <= ERROR_CHARACTERS_MAX else clean[: ERROR_CHARACTERS_MAX - 1] + "…"


def text_of(value: Any) -> str:
    """Return a result as text for a model: a str unchanged, other values as JSON."""
    if isinstance(value, str):
        return str.__str__(value).encode("utf-8", "replace").decode()
    try:
        # Deterministic, because the order of a set differs between processes and a replay needs the same text.
        return msgspec.json.encode(value, enc_hook=_readable, order="deterministic").decode()
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not allow, lone surrogates, too deep
        return f"({type(value).__qualname__})"


def _readable(value: Any) -> Any:
    """Convert a value without a JSON form: a pydantic model to its fields, a path to text, others to their class."""
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    return str(value) if isinstance(value, PurePath | complex | range) else f"({type(value).__qualname__})"
