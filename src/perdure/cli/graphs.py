"""The lines that `perdure show` prints of a LangGraph checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.cli.text import plural, readable, shorten, to_json
from perdure.views import GraphCheckpoint, are_messages, as_line, role_of, values_of

MESSAGES_SHOWN = 20


def show_lines(state: dict[str, Any], described: GraphCheckpoint, width: int) -> Iterator[str]:
    """Yield the values, with a line per message, and everything else of the checkpoint."""
    for channel, value in values_of(state).items():
        yield from _channel_lines(str(channel), value, width)
    if described.next:
        yield f"next: {', '.join(described.next)}"
    for one in described.interrupts:
        answer = one["answer"]
        name = "open interrupt" if answer is None else f"interrupt answered by {answer['who']}"
        yield f"{name} {one['id']}: {shorten(to_json(one['value']), width)}"
    for write in described.pending_writes:
        by = "" if write["node"] is None else f" of {write['node']}"
        yield from _channel_lines(f"pending write {write['channel']}{by}", write["value"], width)
    for name, newest in described.namespaces.items():
        yield f"namespace {name}: newest checkpoint {newest}"
    yield f"checkpoint_id: {described.checkpoint_id}"


def one_line(value: Any) -> str:
    """Return a value as one line: messages as people read them, other values as JSON."""
    if are_messages(value):
        return f"[{', '.join(map(as_line, value))}]"
    return as_line(value) if role_of(value) else to_json(readable(value))


def _channel_lines(name: str, value: Any, width: int) -> Iterator[str]:
    if not are_messages(value):
        yield f"{name}: {shorten(one_line(value), width)}"
        return
    yield f"{name}:"
    if (hidden := len(value) - MESSAGES_SHOWN) > 0:
        yield f"  … {plural(hidden, 'earlier message')}: --json shows them"
    for message in value[-MESSAGES_SHOWN:]:
        yield f"  {shorten(as_line(message), width)}"
