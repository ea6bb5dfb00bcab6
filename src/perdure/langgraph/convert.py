"""Convert between stored checkpoints and LangGraph's types: tuples, pending writes, lists, delta histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple, DeltaChannelHistory, PendingWrite
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure.adapters import ANSWERED, Codec, LineCheckpoint, Write
from perdure.errors import Damaged, Unstorable
from perdure.langgraph.checkpoints import from_state, from_text, metadata_of, name_channel
from perdure.langgraph.configs import Address, address_of, stored_config
from perdure.langgraph.serde import value_from_text, value_to_text


def tuple_of(entry: LineCheckpoint, serde: SerializerProtocol, codec: Codec, state: Any = None) -> CheckpointTuple:
    """Return a checkpoint as LangGraph's tuple. It shares no object. `state`: the decoded text, if there is one."""
    parts = from_text(entry.text, serde, codec, entry.parts) if state is None else from_state(state, serde)
    if str(parts.checkpoint.get("id")) != entry.id:
        raise Damaged(
            f"thread {entry.thread!r}: the id {entry.id} points at another checkpoint; run `perdure store verify`"
        )
    address = Address(entry.thread, entry.namespace, None)
    return CheckpointTuple(
        stored_config(address, entry.id),
        parts.checkpoint,  # type: ignore[arg-type]
        parts.metadata,  # type: ignore[arg-type]
        stored_config(address, parts.parent) if parts.parent is not None and not entry.is_orphan else None,
        pending(entry.writes, serde, codec),
    )


def pending(writes: Sequence[Write], serde: SerializerProtocol, codec: Codec) -> list[PendingWrite]:
    return [
        (write.task, write.key, value_from_text(write.text, serde, codec)) for write in writes if write.key != ANSWERED
    ]


def kept_answers(writes: Sequence[Write], serde: SerializerProtocol, codec: Codec) -> dict[str, int]:
    """Return the tasks with an answer that the store was given and that they have not taken yet.

    Each is returned with the number of all its answers.
    """
    kept: dict[str, int] = {}
    for task in {write.task for write in writes if write.key == ANSWERED}:
        of_task = {write.key: value_from_text(write.text, serde, codec) for write in writes if write.task == task}
        asked = {question.id for question in of_task.get(INTERRUPT, ())}
        if any(one["id"] in asked for one in of_task[ANSWERED]):
            kept[task] = len(of_task.get(RESUME, ()))
    return kept


def writes_from(
    writes: Sequence[tuple[str, Any]], task_id: str, task_path: str, serde: SerializerProtocol
) -> list[Write]:
    """Encode a task's writes. Raises Unstorable, which names the channel."""
    packed: list[Write] = []
    for position, (channel, value) in enumerate(writes):
        if channel == ERROR and isinstance(value, BaseException):
            value = repr(value)  # as LangGraph's own savers do: an exception is not data
        try:
            text, values = value_to_text(value, serde)
        except Unstorable as error:
            path = f"state[{orjson.dumps(channel).decode()}]{error.path.removeprefix('state')}"
            named = Unstorable(str(error).replace(error.path, path, 1), path=path)
            raise name_channel(named, [channel]) from error
        packed.append(Write(task_id, WRITES_IDX_MAP.get(channel, position), channel, task_path, text, values))
    return packed


def history_filters(config: RunnableConfig | None, before: RunnableConfig | None) -> dict[str, Any]:
    """Return the filters of `Lines.history` for a `list`."""
    configurable = (config or {}).get("configurable", {})
    limit = (before or {}).get("configurable", {}).get("checkpoint_id")
    filters = {"namespace": configurable.get("checkpoint_ns"), "before": str(limit) if limit else None}
    if config is None or configurable.get("thread_id") is None:
        return filters
    address = address_of(config)
    return {"thread": address.thread, "id": address.id, **filters}


def matches(
    entry: LineCheckpoint, conditions: Mapping[str, Any] | None, serde: SerializerProtocol, codec: Codec
) -> bool:
    """Return whether a checkpoint's metadata meets all conditions. "a.b" also means the key `b` within `a`."""
    if not conditions:
        return True
    metadata = metadata_of(entry.text, serde, codec)
    return all(_value_at(metadata, key) == value for key, value in conditions.items())


def _value_at(metadata: Any, key: str) -> Any:
    if key in metadata:
        return metadata[key]
    for part in key.split("."):
        metadata = metadata.get(part) if isinstance(metadata, dict) else None
    return metadata


class DeltaWalk:
    """Collects the writes and starting values of delta channels, from a checkpoint back through its ancestors."""

    def __init__(self, channels: Sequence[str], serde: SerializerProtocol, codec: Codec) -> None:
        self._channels = list(channels)
        self._open = set(channels)
        self._writes: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
        self._seeds: dict[str, Any] = {}
        self._serde, self._codec = serde, codec
        self._next: str | None = None

    def begin(self, target: LineCheckpoint | None) -> None:
        """Start at the parent of `target`: the pending writes of `target` are not part of its state."""
        self._next = from_text(target.text, self._serde, self._codec).parent if target is not None else None

    def next_id(self) -> str | None:
        return self._next if self._open else None

    def take(self, entry: LineCheckpoint | None) -> None:
        """Take the next ancestor's writes, and its values of channels that have one."""
        if entry is None:
            self._next = None
            return
        parts = from_text(entry.text, self._serde, self._codec)
        of_open = [write for write in entry.writes if write.key in self._open]
        for write in reversed(pending(of_open, self._serde, self._codec)):
            self._writes[write[1]].append(write)
        values = parts.checkpoint["channel_values"]
        for channel in [channel for channel in self._open if channel in values]:
            self._seeds[channel] = values[channel]
            self._open.discard(channel)
        self._next = parts.parent

    def result(self) -> dict[str, DeltaChannelHistory]:
        histories: dict[str, DeltaChannelHistory] = {}
        for channel in self._channels:
            histories[channel] = {"writes": self._writes[channel][::-1]}
            if channel in self._seeds:
                histories[channel]["seed"] = self._seeds[channel]
        return histories
