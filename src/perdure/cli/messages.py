"""LangChain's messages as people read them: a line each, in lists and in comparisons.

Pure functions over raw states (see `Thread.load`), where a message is a dict with its class under "<type>". LangChain
is not needed. Also OpenAI's calls of tools, blocks of content and chunks; whatever a message lacks is left out.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from perdure import Change
from perdure.cli.text import readable, shorten, to_json
from perdure.threads.compare import DEPTH_MAX, compare
from perdure.values.messages import NAMES

USUAL_PATH = "messages"
_CONTEXT = 20  # characters before a difference that stands far behind in two long texts
_KINDS = {name: tag.removeprefix("^msg.").removesuffix("_chunk") for tag, name in NAMES.items()}


class Message(UserDict[str, Any]):
    """A message in a state that is being compared. No dict: it is compared as a whole."""


class Messages(deque[Any]):
    """A list of nothing but messages in such a state. No list, for the same reason."""


def kind_of(value: Any) -> str | None:
    """What sort of message a raw value is: human, ai, tool …; None: it is none."""
    name = value.get("<type>") if isinstance(value, dict | Message) else None
    return _KINDS.get(name) if isinstance(name, str) else None


def are_messages(value: Any) -> bool:
    """Whether this is a list of messages, and of nothing else."""
    return isinstance(value, list | tuple | Messages) and bool(value) and all(map(kind_of, value))


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


# --- comparing


def compare_states(before: Any, after: Any) -> list[Change]:
    """What changed from one raw state to another, path by path; a message that changed is one change, and lists of
    messages are compared by the ids of these."""
    return [one for change in compare(_marked(before), _marked(after)) for one in _one_by_one(change)]


def _marked(value: Any, depth: int = 0) -> Any:
    """The same state with its messages, and lists of them, as something that is compared as a whole."""
    if depth > DEPTH_MAX:
        return value
    if kind_of(value):
        return Message(value)
    if are_messages(value):
        return Messages(map(Message, value))
    if type(value) is dict:
        return {key: _marked(item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_marked(item, depth + 1) for item in value)
    return value


def _one_by_one(change: Change) -> Iterable[Change]:
    before = change.before if change.kind != "added" else ()
    after = change.after if change.kind != "removed" else ()
    if any(isinstance(value, Messages) for value in (before, after)) and _is_talk(before) and _is_talk(after):
        return _message_changes(change.path, list(before), list(after))
    return [change]


def _is_talk(value: Any) -> bool:
    return isinstance(value, Messages) or (isinstance(value, list | tuple) and not value)


def _message_changes(path: tuple[Any, ...], old: list[Any], new: list[Any]) -> Iterator[Change]:
    head = _common(old, new)
    matcher = SequenceMatcher(None, _keys(old[head:]), _keys(new[head:]), autojunk=False)
    for kind, low, high, new_low, new_high in matcher.get_opcodes():
        if kind == "equal":
            for was, at in zip(range(head + low, head + high), range(head + new_low, head + new_high), strict=True):
                if not _equal(old[was], new[at]):
                    yield Change((*path, at), "changed", old[was], new[at])
            continue
        for at in range(head + low, head + high):
            yield Change((*path, at), "removed", before=old[at])
        for at in range(head + new_low, head + new_high):
            yield Change((*path, at), "added", after=new[at])


def _keys(messages: Sequence[Any]) -> list[str]:
    """What tells messages apart: their ids, or all that they say."""
    return [
        f"id {message['id']}" if isinstance(message.get("id"), str) else to_json(readable(message))
        for message in messages
    ]


def change_line(change: Change, where: str, width: int) -> str:
    """A message that was added, removed or changed. `where`: its path, left out where everybody expects messages."""
    usual = len(change.path) == 2 and change.path[0] == USUAL_PATH
    place = "" if usual else f"{where} = "
    match change.kind:
        case "added":
            return f"+ {place}{shorten(as_line(change.after), width)}"
        case "removed":
            return f"- {place}{shorten(as_line(change.before), width)}"
    before, after = as_line(change.before), as_line(change.after)
    if before == after:
        fields = [name for name in {**change.before, **change.after} if _differ(change, name)]
        return f"~ {place}{shorten(after, width)} (changed: {', '.join(fields)})"
    start = _common(before, after)
    if _speaker(change.before) == _speaker(change.after):
        after = _said(change.after)
    if start > width - _CONTEXT:  # what is cut off must not be all that differs
        speaker = _speaker(change.before)
        at = start - len(speaker) - 2 - _CONTEXT
        before, after = f"{speaker}: …{_said(change.before)[at:]}", f"…{_said(change.after)[at:]}"
    return f"~ {place}{shorten(before, width)} -> {shorten(after, width)}"


def _differ(change: Change, name: str) -> bool:
    missing = object()
    return not _equal(change.before.get(name, missing), change.after.get(name, missing))


def _common(before: Sequence[Any], after: Sequence[Any]) -> int:
    """How many of the first ones are equal."""
    return sum(1 for _ in takewhile(lambda pair: _equal(*pair), zip(before, after, strict=False)))


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:  # arrays in a message: == gives an array
        return bool(readable(before) == readable(after))
