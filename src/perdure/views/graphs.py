"""LangGraph's checkpoints as plain data: values, next nodes, interrupts, pending writes, namespaces.

Works on raw states and needs neither LangGraph nor the graph. A state holds the values of the channels and, under the
key ENVELOPE, their versions and LangGraph's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perdure.errors import Damaged
from perdure.log.envelopes import ENVELOPE
from perdure.log.task_questions import ANSWERED
from perdure.values.codec import Codec, decode
from perdure.views.readable_values import readable

if TYPE_CHECKING:
    from perdure.log.pending import Write
    from perdure.threads.line_reads import LineInfo
    from perdure.threads.models import Checkpoint
    from perdure.threads.thread import Thread

_START, _INTERRUPT, _RESUME = "__start__", "__interrupt__", "__resume__"
_CONTROL = frozenset({_INTERRUPT, ANSWERED, _RESUME, "__error__", "__error_source_node__"})  # not the output of a task
_TASKS, _BRANCH, _JOIN = "__pregel_tasks", "branch:to:", "join:"
_BOOKKEEPING = ("branch:", _JOIN, "start:", _TASKS)
_PULL = "~__pregel_pull, "  # the path of a node's task begins with it
_OPAQUE = b"\x00"  # the first byte of a write that another serializer made


@dataclass(frozen=True, slots=True)
class GraphCheckpoint:
    """A checkpoint of LangGraph's without its values, as data that JSON can hold."""

    checkpoint_id: Any
    parent_id: Any
    namespace: str
    metadata: Any
    next: list[str]  # the nodes that run next, as `graph.get_state(…).next` names them
    # The graph waits at them: {"id", "value", "answer"}. An answer is {"value", "who", "at"} or None.
    interrupts: list[dict[str, Any]]
    pending_writes: list[dict[str, Any]]  # {"task", "node", "channel", "value"}; a functional task has no node
    namespaces: dict[str, str]  # of subgraphs, each with its newest checkpoint
    problem: str = ""  # why pending writes are left out


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


def describe(thread: Thread, checkpoint: Checkpoint) -> GraphCheckpoint:
    """Return everything about a LangGraph checkpoint except its values. Load it with `thread.load(raw=True)`."""
    lines = thread.lines(of=checkpoint)
    here, label = _place(checkpoint, lines)
    try:
        stored = thread.line(here.namespace).load(label)
        return _described(checkpoint, lines, here, stored.writes if stored is not None else ())
    except Damaged as error:
        return _described(checkpoint, lines, here, (), str(error))


async def adescribe(thread: Thread, checkpoint: Checkpoint) -> GraphCheckpoint:
    """`describe`, awaited."""
    lines = await thread.alines(of=checkpoint)
    here, label = _place(checkpoint, lines)
    try:
        stored = await thread.line(here.namespace).aload(label)
        return _described(checkpoint, lines, here, stored.writes if stored is not None else ())
    except Damaged as error:
        return _described(checkpoint, lines, here, (), str(error))


def _place(checkpoint: Checkpoint, lines: Sequence[LineInfo]) -> tuple[LineInfo, str]:
    """Return the line that a checkpoint is on, and its id there."""
    # If LangGraph put the same id again, the older record has no id of its own any more.
    here = next((line for line in lines if checkpoint.id in line.checkpoints.values()), lines[0])
    ids = (id_ for id_, record in here.checkpoints.items() if record == checkpoint.id)
    return here, next(ids, str(checkpoint.state[ENVELOPE].get("id")))


def _described(
    checkpoint: Checkpoint, lines: Sequence[LineInfo], here: LineInfo, stored: Sequence[Write], problem: str = ""
) -> GraphCheckpoint:
    state = checkpoint.state
    book, pushed = state[ENVELOPE], _pushed_nodes(state)
    writes = [_write_json(write, pushed) for write in stored]
    done = {write["task"] for write in writes if write["channel"] not in _CONTROL}
    is_newest = here.newest == checkpoint.id  # an older one is shown as it was before its nodes ran
    ran = {write.path for write in stored if write.task in done} if is_newest else set()
    return GraphCheckpoint(
        checkpoint_id=readable(book.get("id")),
        parent_id=readable(book.get("parent")),
        namespace=here.namespace,
        metadata=readable(book.get("metadata")),
        next=list(_next_nodes(state, book, ran)),
        interrupts=_open_interrupts(writes, done) if is_newest else [],
        pending_writes=[write for write in writes if not _is_shown_otherwise(write)],
        namespaces={line.namespace: line.newest for line in lines if line.namespace},
        problem=problem,
    )


def _is_shown_otherwise(write: dict[str, Any]) -> bool:
    """Return whether a write is shown with its interrupt, or is an answer to the graph that was cleared."""
    return write["channel"] in (_INTERRUPT, ANSWERED) or (write["channel"] == _RESUME and write["value"] is None)


def _pushed_nodes(state: dict[str, Any]) -> dict[str, str]:
    """Return the nodes that `Send` calls, by the path of their task."""
    sends = state.get(_TASKS)
    return {
        f"~__pregel_push, {position:010}, {False:010}": str(send.get("node"))
        for position, send in enumerate(sends if isinstance(sends, list | tuple) else ())
        if isinstance(send, dict)
    }


def _write_json(write: Write, pushed: dict[str, str]) -> dict[str, Any]:
    opaque = write.text[:1] == _OPAQUE  # only the serializer that made it can read it
    value = write.text[1:] if opaque else decode(write.text, Codec(), raw=True)
    node = write.path.removeprefix(_PULL) if write.path.startswith(_PULL) else pushed.get(write.path)
    return {"task": write.task, "node": node, "channel": write.key, "value": readable(value)}


def _open_interrupts(writes: list[dict[str, Any]], done: set[Any]) -> list[dict[str, Any]]:
    """Return the interrupts of tasks without output, each once: the caller of a task raises its interrupt again."""
    interrupts: dict[str, dict[str, Any]] = {}
    answers = {
        one["id"]: {name: one[name] for name in ("value", "who", "at")}
        for write in writes
        if write["channel"] == ANSWERED
        for one in write["value"]
    }
    for write in writes:
        if write["channel"] == _INTERRUPT and write["task"] not in done:
            for item in write["value"] if isinstance(write["value"], list) else [write["value"]]:
                raised = item if isinstance(item, dict) else {"value": item}
                shown = {"id": raised.get("id"), "value": raised.get("value"), "answer": answers.get(raised.get("id"))}
                interrupts.setdefault(str(raised.get("id")), shown)
    return list(interrupts.values())


def _next_nodes(state: dict[str, Any], book: dict[str, Any], ran: set[str]) -> Iterator[str]:
    """Yield the nodes whose trigger is newer than what they have seen, without those that have written their output."""
    versions, seen = (_mapping(book.get(name)) for name in ("channel_versions", "versions_seen"))
    for path, node in _pushed_nodes(state).items():
        if path not in ran:
            yield node
    for channel in sorted(map(str, state)):
        if channel == _START:
            node = _START
        elif channel.startswith(_BRANCH) and _is_ready(state[channel]):
            node = channel.removeprefix(_BRANCH)
        elif channel.startswith(_JOIN) and _is_complete(channel, state[channel]):
            node = channel.rpartition(":")[2]
        else:
            continue
        known: Any = _mapping(seen.get(node)).get(channel)
        version: Any = versions.get(channel)
        is_new = known is None or (type(known) is type(version) and bool(version > known))
        if is_new and f"{_PULL}{node}" not in ran:
            yield node


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_ready(value: Any) -> bool:
    """Return False for the trigger of a deferred node while others run: a pair whose second part is False."""
    return not (isinstance(value, list | tuple) and len(value) == 2 and value[1] is False)


def _is_complete(channel: str, value: Any) -> bool:
    """Return whether all nodes that a join waits for have ended. The channel is named `join:a+b:node`."""
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], bool):  # of a deferred node
        if not value[1]:
            return False
        value = value[0]
    awaited = channel.removeprefix(_JOIN).rpartition(":")[0]
    ended = [str(name) for name in value] if isinstance(value, list | tuple | set | frozenset) else []
    return sum(map(len, ended)) + len(ended) - 1 == len(awaited)
