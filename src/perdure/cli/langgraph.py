"""A LangGraph checkpoint for people: its values and messages, open interrupts, pending writes, namespaces.

Works on raw states and needs neither LangGraph nor the graph. LangGraph stores the values of its channels and, under
the key ENVELOPE, their versions and its metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from perdure.cli.langchain_messages import are_messages, as_line, kind_of
from perdure.cli.text import plural, readable, shorten, to_json
from perdure.errors import Damaged, NotFound
from perdure.log.envelopes import ENVELOPE
from perdure.values.codec import Codec, decode

if TYPE_CHECKING:
    from perdure import Checkpoint, Thread
    from perdure.cli.base import Invocation
    from perdure.log.pending import Write

MESSAGES_SHOWN = 20
NAMESPACES_SHOWN = 20
_START, _INTERRUPT = "__start__", "__interrupt__"
_CONTROL = frozenset({_INTERRUPT, "__resume__", "__error__", "__error_source_node__"})  # no output of a task
_BOOKKEEPING = ("branch:", "join:", "start:", "__pregel_tasks")
_OPAQUE = b"\x00"  # how a write begins that another serializer made


def is_checkpoint(state: Any) -> bool:
    """Whether a raw state was stored by LangGraph."""
    return type(state) is dict and type(state.get(ENVELOPE)) is dict


def values_of(state: dict[str, Any], *, with_input: bool = True) -> dict[str, Any]:
    """The values alone; perhaps without the input of a run that is about to begin."""
    return {
        channel: value
        for channel, value in state.items()
        if not (channel == ENVELOPE or str(channel).startswith(_BOOKKEEPING)) and (with_input or channel != _START)
    }


def newest_in(thread: Thread, name: str) -> Checkpoint:
    """The newest checkpoint of a namespace, which may be named by a unique beginning. Raises NotFound."""
    lines = thread.lines()
    fitting = [line for line in lines if line.namespace == name]
    fitting = fitting or [line for line in lines if line.namespace.startswith(name)]
    if len(fitting) == 1:
        return next(thread.history(start=fitting[0].newest, limit=1))
    some = ", ".join(line.namespace or '""' for line in (fitting or lines)[:3])
    if not fitting:
        raise NotFound(f"thread {thread.name!r} has no namespace {name!r}; it has {some}")
    raise NotFound(f"{name!r} begins {len(fitting)} namespaces: {some}; write more of it")


# --- as data


def describe(thread: Thread, checkpoint: Checkpoint, cli: Invocation) -> dict[str, Any]:
    """All that is known of a LangGraph checkpoint but its values, as data for JSON."""
    book = checkpoint.state[ENVELOPE]
    lines = thread.lines()
    # A record whose id was put again has none of its own any more.
    here = next((line for line in lines if checkpoint.id in line.checkpoints.values()), lines[0])
    ids = [id_ for id_, record in here.checkpoints.items() if record == checkpoint.id] or [str(book.get("id"))]
    try:
        stored = thread.line(here.namespace).load(ids[0])
        writes = [_write_json(write) for write in (stored.writes if stored is not None else ())]
    except Damaged as error:
        cli.message(f"pending writes are left out: {error}")
        writes = []
    is_newest = here.newest == checkpoint.id
    metadata = book.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return {
        "checkpoint_id": readable(book.get("id")),
        "parent_id": readable(book.get("parent")),
        "namespace": here.namespace,
        "is_newest": is_newest,
        "step": readable(metadata.get("step")),
        "source": readable(metadata.get("source")),
        "created_at": readable(book.get("ts")),
        "metadata": readable(metadata),
        "serializer": bool(book.get("serde")),
        "interrupts": list(_interrupts(writes, is_newest=is_newest)),
        "pending_writes": [write for write in writes if write["channel"] != _INTERRUPT],
        "namespaces": [
            {"name": line.namespace, "newest": line.newest, "checkpoints": len(line.checkpoints)}
            for line in lines
            if line.namespace
        ],
    }


def _write_json(write: Write) -> dict[str, Any]:
    return {"task": write.task, "channel": write.key, "value": readable(_value_of(write.text))}


def _value_of(text: bytes) -> Any:
    """A pending write's value. What another serializer made is named, not read."""
    if text[:1] != _OPAQUE:
        return decode(text, Codec(), raw=True)
    kind, _, data = text[1:].partition(_OPAQUE)
    return {"<serializer>": kind.decode(errors="replace"), "<value>": data}


def _interrupts(writes: Iterable[dict[str, Any]], *, is_newest: bool) -> Iterator[dict[str, Any]]:
    """Those that tasks have raised, each once: what a call raises, its caller raises too. An interrupt is open until
    its task has an output, or another checkpoint follows."""
    done = {write["task"] for write in writes if write["channel"] not in _CONTROL}
    known: set[str] = set()
    for write in writes:
        if write["channel"] != _INTERRUPT:
            continue
        raised = write["value"] if isinstance(write["value"], list) else [write["value"]]
        for item in raised:
            found = item if isinstance(item, dict) else {"value": item}
            if str(found.get("id")) not in known:
                known.add(str(found.get("id")))
                is_open = is_newest and write["task"] not in done
                yield {"id": found.get("id"), "value": found.get("value"), "task": write["task"], "open": is_open}


# --- as lines


def value_lines(state: dict[str, Any], width: int) -> Iterator[str]:
    """The values, messages as messages."""
    for channel, value in values_of(state).items():
        yield from _channel_lines(str(channel), value, width, "")


def _channel_lines(channel: str, value: Any, width: int, indent: str) -> Iterator[str]:
    if kind_of(value):
        yield f"{indent}{channel}: {shorten(as_line(value), width)}"
    elif are_messages(value):
        yield f"{indent}{channel}:"
        if (hidden := len(value) - MESSAGES_SHOWN) > 0:
            yield f"{indent}  … {plural(hidden, 'earlier message')}: --all shows them"
        for message in value[-MESSAGES_SHOWN:]:
            yield f"{indent}  {shorten(as_line(message), width)}"
    elif isinstance(value, dict) and any(map(are_messages, value.values())):
        yield f"{indent}{channel}:"
        for key, item in value.items():
            yield from _channel_lines(str(key), item, width, f"{indent}  ")
    else:
        yield f"{indent}{channel}: {shorten(to_json(readable(value)), width)}"


def status_lines(found: dict[str, Any], width: int) -> Iterator[str]:
    """What `describe` found, for people."""
    if found["serializer"]:
        yield "values are stored by a serializer that was assigned to the saver: only that can read them"
    if waiting := [one for one in found["interrupts"] if one["open"]]:
        yield "open interrupts:"
        for one in waiting:
            yield f"  {one['id']}  {shorten(to_json(one['value']), width)}"
    if writes := found["pending_writes"]:
        yield "pending writes:"
        for write in writes:
            yield from _channel_lines(write["channel"], write["value"], width, "  ")
    yield f"checkpoint: {found['checkpoint_id']} (step {found['step']}, {found['source']})"
    yield f"parent: {found['parent_id'] or '-'}"
    if found["namespace"]:
        yield f"namespace: {found['namespace']}"
    spaces = found["namespaces"]
    if spaces:
        yield "namespaces:"
        for space in spaces[:NAMESPACES_SHOWN]:
            yield f"  {space['name']}  {plural(space['checkpoints'], 'checkpoint')}"
        if (hidden := len(spaces) - NAMESPACES_SHOWN) > 0:
            yield f"  … {hidden} more: --json lists them"
