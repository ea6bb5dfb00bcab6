"""`compact_history`: in a list of messages, old results of tools become short, and the newest stay whole.

It takes the messages of OpenAI (chat and Responses) and Anthropic, as dicts, and message objects that have a `type`,
a `content` and pydantic's `model_copy`. It returns a new list; a message that does not change is the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from perdure.agents.formats import parse, text_of
from perdure.agents.tokens import token_counter
from perdure.errors import UsageError
from perdure.memory.hooks import as_step, call
from perdure.storage.program import Flow, adrive, drive

KEEP_LAST = 10
SUMMARY_TOKENS = 100
_TOKENS_MIN = 30  # what a placeholder needs to say something
_NO_DRIVER: Any = None
M = TypeVar("M")


class Observation(NamedTuple):
    """A result of a tool in a list of messages: the number of its message, and of its block there, if it is one."""

    message: int
    block: int | None
    tool: str
    text: str


def compact_history(
    messages: Sequence[M],
    *,
    keep_last: int = KEEP_LAST,
    summarize: Callable[[str], Any] | None = None,
    max_tokens: int = SUMMARY_TOKENS,
    tokens: Callable[[str], int] | None = None,
) -> list[M]:
    """Return the messages with a placeholder of at most `max_tokens` for each old result of a tool.

    The newest `keep_last` results stay whole, and so does everything that people and the model said. A placeholder
    names the tool and has what `summarize(text)` returns, or how the result begins and ends. A result that is short
    enough stays, so masking the same list again changes nothing and calls `summarize` for no result twice. In a durable
    function `summarize` is a step. `tokens` counts the tokens of a text: see `token_counter`.
    """
    return drive(_NO_DRIVER, _compact(messages, keep_last, summarize, max_tokens, tokens))


async def acompact_history(
    messages: Sequence[M],
    *,
    keep_last: int = KEEP_LAST,
    summarize: Callable[[str], Any] | None = None,
    max_tokens: int = SUMMARY_TOKENS,
    tokens: Callable[[str], int] | None = None,
) -> list[M]:
    """`compact_history`, awaited. `summarize` may be async."""
    return await adrive(_NO_DRIVER, _compact(messages, keep_last, summarize, max_tokens, tokens))


def _compact(
    messages: Sequence[M],
    keep_last: int,
    summarize: Callable[[str], Any] | None,
    max_tokens: int,
    tokens: Callable[[str], int] | None,
) -> Flow[list[M]]:
    if type(keep_last) is not int or keep_last < 0:
        raise UsageError(f"keep_last={keep_last!r}: how many of the newest results stay whole, 0 or more")
    if type(max_tokens) is not int or max_tokens < _TOKENS_MIN:
        raise UsageError(f"max_tokens={max_tokens!r}: {_TOKENS_MIN} or more")
    hook, count = as_step("memory.summarize_observation", summarize), token_counter(tokens)
    results = observations(messages)
    masked = list(messages)
    for one in results[: len(results) - keep_last]:
        if count(one.text) > max_tokens:
            summary = one.text if hook is None else (yield from call(hook, str, one.text))
            mask(masked, one, summary, max_tokens, count)
    return masked


def observations(messages: Sequence[Any]) -> list[Observation]:
    """Return the results of tools in messages, the oldest first."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"a history is a list of messages, not a {type(messages).__name__}")
    tools: dict[str, str] = {}
    results = []
    for number, message in enumerate(messages):
        tools |= _calls(message)
        content = _get(message, "content")
        if _is_result(message):
            text = _get(message, "output") if _get(message, "type") == "function_call_output" else content
            results.append(Observation(number, None, _tool(message, tools), text_of_content(text)))
        else:
            for at, block in enumerate(content if isinstance(content, list) else ()):
                if _get(block, "type") == "tool_result":
                    text = text_of_content(_get(block, "content"))
                    results.append(Observation(number, at, _tool(block, tools), text))
    return results


def mask(messages: list[Any], one: Observation, summary: str, max_tokens: int, count: Callable[[str], int]) -> None:
    """Replace a result of a tool with a placeholder, in a copy of its message."""
    of = f" of {one.tool}" if one.tool else ""
    head = f"[masked: a result{of}, {count(one.text)} tokens] "
    text = head + _shortened(summary, max_tokens - count(head), count)
    message = messages[one.message]
    if one.block is not None:
        blocks = list(_get(message, "content"))
        blocks[one.block] = {**blocks[one.block], "content": text}
        messages[one.message] = _with(message, "content", blocks)
    else:
        is_item = _get(message, "type") == "function_call_output"
        messages[one.message] = _with(message, "output" if is_item else "content", text)


def message_text(message: Any) -> str:
    """Return what a model reads of a message: its texts, and its tool calls as JSON."""
    parts = [_get(message, name) for name in ("content", "output", "arguments", "tool_calls")]
    return "\n".join(text_of_content(part) for part in parts if part)


def text_of_content(content: Any) -> str:
    """Return the text of a message's content. An image or another part without text is named by its type."""
    if isinstance(content, str) or not isinstance(content, list):
        return "" if content is None else text_of(content)
    parts = []
    for block in content:
        text = block if isinstance(block, str) else _get(block, "text")
        kind = _get(block, "type")
        if isinstance(text, str):
            parts.append(text)
        elif kind == "tool_result":
            parts.append(text_of_content(_get(block, "content")))
        else:  # a call is read as it is; the bytes of an image are not text
            is_call = kind in ("tool_use", "function", "tool_call", None)
            parts.append(text_of(block) if is_call else f"({kind})")
    return "\n".join(parts)


def _is_result(message: Any) -> bool:
    return _get(message, "role") == "tool" or _get(message, "type") in ("tool", "function_call_output")


def _tool(result: Any, tools: Mapping[str, str]) -> str:
    """Return the name of the tool that a result is of, or "" if it is not known."""
    ids = (_get(result, name) for name in ("tool_call_id", "tool_use_id", "call_id"))
    name = _get(result, "name") or _get(result, "tool_name") or next((tools[id_] for id_ in ids if id_ in tools), "")
    return str(name)


def _calls(message: Any) -> dict[str, str]:
    """Return the names of the tools that a message calls, by the id of the call."""
    content, calls = _get(message, "content"), _get(message, "tool_calls")
    items: list[Any] = [message] if _get(message, "type") == "function_call" else []
    items += calls if isinstance(calls, list) else []
    items += [block for block in content if _get(block, "type") == "tool_use"] if isinstance(content, list) else []
    with suppress(UsageError):  # a call of an unknown form: its result has no name
        return {one.id: one.name for one in parse(items) if one.id is not None}
    return {}


def _with(message: Any, field: str, value: Any) -> Any:
    return {**message, field: value} if isinstance(message, Mapping) else message.model_copy(update={field: value})


def _get(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _shortened(text: str, most: int, count: Callable[[str], int]) -> str:
    """Return a text of at most `most` tokens: the whole, or its beginning and end. Errors stand at the end."""
    text = " ".join(text.split())
    size = len(text)
    if count(text) <= most:
        return text
    size = min(size, 6 * most)
    while size > 1:
        half = size // 2
        if count(short := f"{text[:half]} … {text[-half:]}") <= most:
            return short
        size = size * 4 // 5
    return ""


def total_tokens(messages: Iterable[Any], count: Callable[[str], int], of_message: int) -> int:
    """Return the tokens of messages, with those that a chat format adds to each."""
    return sum(count(message_text(message)) + of_message for message in messages)
