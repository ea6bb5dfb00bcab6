"""A thread of LangGraph's as people read it: its values, which nodes come next, tasks, open interrupts, namespaces.

Works on raw states and needs neither LangGraph nor the graph. LangGraph keeps the values of its channels and, under the
key ENVELOPE, their versions and what each node has seen of them; names of channels tell what they trigger. What is said
here of tasks and interrupts is what `graph.get_state` says. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.cli.messages import are_messages, as_line, kind_of
from perdure.cli.readable import plural, readable, shorten, to_json
from perdure.cli.render import Cell
from perdure.log.envelopes import ENVELOPE
from perdure.log.label_ids import unpack_id
from perdure.log.pending import Write
from perdure.threads.labelled import Beside, Space
from perdure.values.codec import Codec, decode

MESSAGES_SHOWN = 20
SPACES_SHOWN = 20
_START, _SENDS, _RETURN, _NOTHING = "__start__", "__pregel_tasks", "__return__", "__no_writes__"
_INTERRUPT, _RESUME, _ERROR = "__interrupt__", "__resume__", "__error__"
_CONTROL = frozenset({_INTERRUPT, _RESUME, _ERROR, "__error_source_node__"})
_NO_NODES = frozenset({"__input__", _INTERRUPT, "__snapshot_bumps__"})  # keys of versions_seen that name no node
_EDGES = ("branch:", "join:", "start:")
_NO_TASK = "00000000-0000-0000-0000-000000000000"  # whose writes are a run's input
_OPAQUE = b"\x00"  # how a write begins that an assigned serializer made
_DELTAS = "counters_since_delta_snapshot"

_PULL = re.compile(r"~__pregel_pull, (.+)", re.DOTALL)
_SEND = re.compile(r"~__pregel_push, (\d{10})(?:, \d{10})?")
_CALL = re.compile(r"~__pregel_push, (~.+), (\d{10}), \d{10}", re.DOTALL)


@dataclass
class Task:
    """A task of the step that goes on from a checkpoint: planned, under way or done."""

    node: str
    what: str = ""  # `send 2`, `call 0`
    path: str = ""
    id: str | None = None
    planned: bool = True  # not a call that another task has made
    writes: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.node} ({self.what})" if self.what else self.node

    @property
    def output(self) -> list[tuple[str, Any]]:
        return [(channel, value) for channel, value in self.writes if channel not in _CONTROL]

    def of(self, channel: str) -> list[Any]:
        return [value for written, value in self.writes if written == channel]

    @property
    def interrupts(self) -> list[Any]:
        return [
            item for value in self.of(_INTERRUPT) for item in (value if isinstance(value, list | tuple) else [value])
        ]

    @property
    def status(self) -> str:
        if self.output:
            return "done"
        return "failed" if self.of(_ERROR) else "interrupted" if self.interrupts else "to run"


def is_checkpoint(state: Any) -> bool:
    """Whether a raw state was stored by LangGraph."""
    return type(state) is dict and type(state.get(ENVELOPE)) is dict


def is_bookkeeping(channel: Any) -> bool:
    """Whether a key of the state says what comes next, and nothing of the matter."""
    return channel in (ENVELOPE, _SENDS) or (isinstance(channel, str) and channel.startswith(_EDGES))


def values_of(state: dict[str, Any], *, with_input: bool = True) -> dict[str, Any]:
    """The values alone; perhaps without the input of a run that is about to begin."""
    return {
        channel: value
        for channel, value in state.items()
        if not is_bookkeeping(channel) and (with_input or channel != _START)
    }


def value_of(text: bytes) -> Any:
    """A pending write's value. What an assigned serializer made is named, not read."""
    if text[:1] != _OPAQUE:
        return decode(text, Codec(), raw=True)
    kind, _, data = text[1:].partition(_OPAQUE)
    return {"<serializer>": kind.decode(errors="replace"), "<value>": data}


# --- what comes next


def tasks_of(state: dict[str, Any], writes: Iterable[Write]) -> list[Task]:
    """The tasks of the step after this checkpoint: Sends in their order, nodes by name, calls of tasks, input."""
    tasks = {task.path: task for task in _sends(state)}
    found: dict[tuple[str, str], Task] = {}
    for write in writes:
        id_ = unpack_id(write.task)
        task = found.setdefault((id_, write.path), _task_at(write.path, id_, state))
        task.writes.append((write.channel, value_of(write.text)))
    pulled = {task.node for task in found.values() if _PULL.fullmatch(task.path)}
    for node in sorted(_triggered(state, pulled) | pulled):
        task = Task(node, path=f"~__pregel_pull, {node}")
        tasks[task.path] = task
    for task in found.values():
        planned = tasks.get(task.path)
        if planned is not None and planned.id is None:
            planned.id, planned.writes = task.id, task.writes
        else:
            task.planned = False
            tasks[f"{task.path} {task.id}"] = task
    return list(tasks.values())


def _task_at(path: str, id_: str, state: dict[str, Any]) -> Task:
    if id_ == _NO_TASK:
        return Task("(input)", path=path, id=id_)
    return Task(*_name_at(path, state), path=path, id=id_)


def _name_at(path: str, state: dict[str, Any]) -> tuple[str, str]:
    if found := _PULL.fullmatch(path):
        return found[1], ""
    if found := _SEND.fullmatch(path):
        return _send_path_name(int(found[1]), state)
    if found := _CALL.fullmatch(path):
        node, what = _name_at(found[1], state)
        return node, f"{what}, call {int(found[2])}".removeprefix(", ")
    return path or "(update)", ""


def _send_path_name(number: int, state: dict[str, Any]) -> tuple[str, str]:
    sends = _listed_sends(state)
    return (sends[number] if number < len(sends) else "?"), f"send {number}"


def _listed_sends(state: dict[str, Any]) -> list[str]:
    listed = state.get(_SENDS)
    if not isinstance(listed, list | tuple):
        return []
    return [str(send["node"]) for send in listed if isinstance(send, dict) and "node" in send]


def _sends(state: dict[str, Any]) -> Iterator[Task]:
    for number, node in enumerate(_listed_sends(state)):
        yield Task(node, f"send {number}", f"~__pregel_push, {number:010d}, {0:010d}")


def _triggered(state: dict[str, Any], running: set[str]) -> set[str]:
    """The nodes of which a channel that triggers them has a value that they have not seen."""
    versions = _mapping(state[ENVELOPE].get("channel_versions"))
    seen = _mapping(state[ENVELOPE].get("versions_seen"))
    triggers: dict[str, set[str]] = {}
    for node, channels in seen.items():
        if node not in _NO_NODES:
            triggers.setdefault(node, set()).update(_mapping(channels))
    for channel in versions:
        if channel.startswith(_EDGES):
            triggers.setdefault(channel.rsplit(":", 1)[1], set()).add(channel)
    if not running and not any(_START in channels for channels in triggers.values()):
        triggers.setdefault(_START, set()).add(_START)  # a first run; in a functional graph the node has another name
    return {
        node
        for node, channels in triggers.items()
        if any(
            _is_available(channel, state)
            and (node not in seen or _is_newer(versions.get(channel), _mapping(seen[node]).get(channel)))
            for channel in channels
        )
    }


def _is_available(channel: str, state: dict[str, Any]) -> bool:
    if channel not in state:
        return False
    value = state[channel]
    if channel.startswith(_EDGES) and isinstance(value, list | tuple) and len(value) == 2 and type(value[1]) is bool:
        if not value[1]:  # of a deferred node: nobody else is left to run, or not yet
            return False
        value = value[0]
    if not channel.startswith("join:"):
        return True
    if not isinstance(value, set | frozenset | list | tuple):
        return False
    # All that it waits for are joined by + in its name; what has come is some of them.
    awaited = channel.removeprefix("join:").rsplit(":", 1)[0]
    return len("+".join(map(str, value))) == len(awaited)


def _is_newer(version: Any, seen: Any) -> bool:
    if version is None or seen is None:
        return version is not None
    try:
        return bool(version > seen)
    except TypeError:  # an imported thread went on with versions of another type
        return bool(version != seen)


def _mapping(value: Any) -> Mapping[str, Any]:
    """A dict with names as keys, whatever is there."""
    return {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


# --- as data


def describe(state: dict[str, Any], beside: Beside, tasks: Sequence[Task]) -> dict[str, Any]:
    """All that is known of a checkpoint of LangGraph's but its values, as data for JSON."""
    book = state[ENVELOPE]
    metadata = _mapping(book.get("metadata"))
    return {
        "checkpoint_id": readable(book.get("id")),
        "parent_id": readable(book.get("parent")),
        "namespace": beside.space,
        "is_newest": beside.is_newest,
        "step": readable(metadata.get("step")),
        "source": readable(metadata.get("source")),
        "created_at": readable(book.get("ts")),
        "metadata": readable(book.get("metadata")),
        "serializer": bool(book.get("serde")),
        "deltas": _deltas(state),
        "next": [task.node for task in tasks if task.planned and not (beside.is_newest and task.output)],
        "tasks": [_task_json(task) for task in tasks],
        "interrupts": list(_interrupts(tasks, is_newest=beside.is_newest)),
        "pending_writes": [
            {"task": task.id, "path": task.path, "channel": channel, "value": readable(value)}
            for task in tasks
            for channel, value in task.writes
        ],
        "namespaces": [_space_json(space) for space in beside.spaces if space.name],
    }


def _task_json(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "node": task.node,
        "id": task.id,
        "path": task.path,
        "status": task.status,
        "error": readable(next(iter(task.of(_ERROR)), None)),
        "answers": [readable(value) for value in task.of(_RESUME)],
        "writes": [{"channel": channel, "value": readable(value)} for channel, value in task.output],
    }


def _interrupts(tasks: Sequence[Task], *, is_newest: bool) -> Iterator[dict[str, Any]]:
    """Those that tasks have raised, each once: what a call raises, its caller raises too. Open: the task is not done,
    and nothing has come after the checkpoint."""
    known: set[str] = set()
    for task in sorted(tasks, key=lambda task: not task.planned):
        for item in task.interrupts:
            raised = item if isinstance(item, dict) else {"value": item}
            id_ = str(raised.get("id"))
            if id_ in known:
                continue
            known.add(id_)
            yield {
                "id": readable(raised.get("id")),
                "value": readable(raised.get("value")),
                "task": task.name,
                "open": is_newest and not task.output,
            }


def _space_json(space: Space) -> dict[str, Any]:
    return {"name": space.name, "newest": space.newest, "checkpoints": space.checkpoints}


def _deltas(state: dict[str, Any]) -> list[str]:
    """Channels that LangGraph keeps as differences, and that have no value of their own here."""
    return [
        channel for channel in _mapping(_mapping(state[ENVELOPE].get("metadata")).get(_DELTAS)) if channel not in state
    ]


# --- as lines


def value_lines(state: dict[str, Any], width: int) -> Iterator[Cell]:
    """The values, messages as messages."""
    for channel, value in values_of(state).items():
        yield from _channel_lines(str(channel), _of_snapshot(value), width, "")
    for channel in _deltas(state):
        yield f"{channel}: kept as differences by LangGraph (a DeltaChannel); graph.get_state puts them together", "dim"


def _of_snapshot(value: Any) -> Any:
    """What a DeltaChannel holds."""
    is_snapshot = isinstance(value, dict) and str(value.get("<type>")).endswith("._DeltaSnapshot")
    return value.get("value") if is_snapshot else value


def _channel_lines(channel: str, value: Any, width: int, indent: str) -> Iterator[Cell]:
    if kind_of(value):
        yield f"{indent}{channel}: {shorten(as_line(value), width)}", ""
    elif are_messages(value):
        yield f"{indent}{channel}:", "bold"
        if (hidden := len(value) - MESSAGES_SHOWN) > 0:
            yield f"{indent}  … {plural(hidden, 'earlier message')}: --all shows them", "dim"
        for message in value[-MESSAGES_SHOWN:]:
            yield f"{indent}  {shorten(as_line(message), width)}", ""
    elif isinstance(value, dict) and any(map(are_messages, value.values())):
        yield f"{indent}{channel}:", "bold"
        for key, item in value.items():
            yield from _channel_lines(str(key), item, width, f"{indent}  ")
    else:
        yield f"{indent}{channel}: {shorten(to_json(readable(value)), width)}", ""


def status_lines(found: dict[str, Any], tasks: Sequence[Task], width: int) -> Iterator[Cell]:
    """What `describe` found, for people."""
    if found["serializer"]:
        yield "values are kept by a serializer that was assigned to the saver: only that can read them", "yellow"
    ended = (
        "(all tasks of this step are done: the run goes on from here)"
        if found["tasks"]
        else "(nothing: the run has ended)"
    )
    yield f"next: {', '.join(found['next']) or ended}", "bold"
    if tasks:
        yield "tasks:", "bold"
        for task in tasks:
            yield from _task_lines(task, width)
    yield f"pending writes: {len(found['pending_writes'])}", ""
    if waiting := [one for one in found["interrupts"] if one["open"]]:
        yield "open interrupts:", "bold"
        for one in waiting:
            yield f"  {one['id']}  {one['task']}: {shorten(to_json(one['value']), width)}", "yellow"
    yield f"checkpoint: {found['checkpoint_id']} (step {found['step']}, {found['source']})", ""
    yield f"parent: {found['parent_id'] or '-'}", ""
    if found["namespace"]:
        yield f"namespace: {found['namespace']}", ""
    spaces = found["namespaces"]
    if spaces:
        yield "namespaces:", "bold"
        for space in spaces[:SPACES_SHOWN]:
            yield f"  {space['name']}  {plural(space['checkpoints'], 'checkpoint')}", ""
        if (hidden := len(spaces) - SPACES_SHOWN) > 0:
            yield f"  … {hidden} more: --json lists them", "dim"


_STYLES = {"done": "green", "failed": "red", "interrupted": "yellow", "to run": ""}


def _task_lines(task: Task, width: int) -> Iterator[Cell]:
    if task.id == _NO_TASK:
        yield f"  {task.name}", "dim"
        for channel, value in task.writes:
            yield from _channel_lines(channel, value, width, "    ")
        return
    error = next(iter(task.of(_ERROR)), None)
    because = f": {shorten(str(readable(error)), width)}" if error is not None and task.status == "failed" else ""
    yield f"  {task.name}: {task.status}{because}", _STYLES[task.status]
    goes_to: list[str] = []
    for channel, value in task.output:
        if channel.startswith(_EDGES):
            goes_to.append(channel.rsplit(":", 1)[1])
        elif channel == _SENDS and isinstance(value, dict):
            goes_to.append(f"{value.get('node')} (a Send)")
        elif channel != _NOTHING:
            yield from _channel_lines("returned" if channel == _RETURN else channel, value, width, "    ")
    if goes_to:
        yield f"    -> {', '.join(goes_to)}", ""
