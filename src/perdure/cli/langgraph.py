"""Print a LangGraph checkpoint: its values and messages, open interrupts, pending writes, namespaces.

Works on raw states and needs neither LangGraph nor the graph. A state holds the values of the channels and, under the
key ENVELOPE, their versions and LangGraph's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perdure.cli.langchain_messages import are_messages, as_line, kind_of
from perdure.cli.text import plural, readable, shorten, to_json
from perdure.errors import Damaged
from perdure.log.envelopes import ENVELOPE
from perdure.values.codec import Codec, decode

if TYPE_CHECKING:
    from perdure import Checkpoint, Thread
    from perdure.cli.base import Invocation
    from perdure.log.pending import Write

MESSAGES_SHOWN = 20
_START, _INTERRUPT = "__start__", "__interrupt__"
_CONTROL = frozenset({_INTERRUPT, "__resume__", "__error__", "__error_source_node__"})  # not the output of a task
_BOOKKEEPING = ("branch:", "join:", "start:", "__pregel_tasks")
_OPAQUE = b"\x00"  # the first byte of a write that another serializer made


def is_checkpoint(state: Any) -> bool:
    """Return whether LangGraph stored a raw state."""
    return type(state) is dict and type(state.get(ENVELOPE)) is dict


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the channels, without LangGraph's bookkeeping and the input of a run that has not begun."""
    return {
        channel: value
        for channel, value in state.items()
        if channel not in (ENVELOPE, _START) and not str(channel).startswith(_BOOKKEEPING)
    }


def describe(thread: Thread, checkpoint: Checkpoint, cli: Invocation) -> dict[str, Any]:
    """Return everything about a LangGraph checkpoint except its values, as data for JSON."""
    book, lines = checkpoint.state[ENVELOPE], thread.lines()
    # If LangGraph put the same id again, the older record has no id of its own any more.
    here = next((line for line in lines if checkpoint.id in line.checkpoints.values()), lines[0])
    ids = [id_ for id_, record in here.checkpoints.items() if record == checkpoint.id] or [str(book.get("id"))]
    try:
        stored = thread.line(here.namespace).load(ids[0])
        writes = [_write_json(write) for write in (stored.writes if stored is not None else ())]
    except Damaged as error:
        cli.message(f"pending writes are left out: {error}")
        writes = []
    return {
        "checkpoint_id": readable(book.get("id")),
        "parent_id": readable(book.get("parent")),
        "namespace": here.namespace,
        "metadata": readable(book.get("metadata")),
        "interrupts": _open_interrupts(writes) if here.newest == checkpoint.id else [],
        "pending_writes": [write for write in writes if write["channel"] != _INTERRUPT],
        "namespaces": {line.namespace: line.newest for line in lines if line.namespace},
    }


def _write_json(write: Write) -> dict[str, Any]:
    opaque = write.text[:1] == _OPAQUE  # only the serializer that made it can read it
    value = write.text[1:] if opaque else decode(write.text, Codec(), raw=True)
    return {"task": write.task, "channel": write.key, "value": readable(value)}


def _open_interrupts(writes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the interrupts of tasks without output, each once: the caller of a task raises its interrupt again."""
    done = {write["task"] for write in writes if write["channel"] not in _CONTROL}
    interrupts: dict[str, dict[str, Any]] = {}
    for write in writes:
        if write["channel"] == _INTERRUPT and write["task"] not in done:
            for item in write["value"] if isinstance(write["value"], list) else [write["value"]]:
                raised = item if isinstance(item, dict) else {"value": item}
                interrupts.setdefault(str(raised.get("id")), {name: raised.get(name) for name in ("id", "value")})
    return list(interrupts.values())


def show_lines(state: dict[str, Any], description: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines that `perdure show` prints: the values, with a line per message, and the result of `describe`."""
    for channel, value in values_of(state).items():
        yield from _channel_lines(str(channel), value, width)
    for one in description["interrupts"]:
        yield f"open interrupt {one['id']}: {shorten(to_json(one['value']), width)}"
    for write in description["pending_writes"]:
        yield from _channel_lines(f"pending write {write['channel']}", write["value"], width)
    for name, newest in description["namespaces"].items():
        yield f"namespace {name}: newest checkpoint {newest}"
    yield f"checkpoint_id: {description['checkpoint_id']}"


def _channel_lines(name: str, value: Any, width: int) -> Iterator[str]:
    if not are_messages(value):
        yield f"{name}: {shorten(as_line(value) if kind_of(value) else to_json(readable(value)), width)}"
        return
    yield f"{name}:"
    if (hidden := len(value) - MESSAGES_SHOWN) > 0:
        yield f"  … {plural(hidden, 'earlier message')}: --json shows them"
    for message in value[-MESSAGES_SHOWN:]:
        yield f"  {shorten(as_line(message), width)}"
