"""Between what is stored and what LangGraph hands over and expects: tuples, pending writes, lists, delta histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple, DeltaChannelHistory, PendingWrite
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import ERROR

from perdure.adapters import Codec, Entry, Wanted, Write, check_text, pack_id, unpack_id
from perdure.errors import Damaged, Unstorable
from perdure.langgraph.checkpoints import from_text, metadata_of, name_channel
from perdure.langgraph.configs import Address, address_of, stored_config
from perdure.langgraph.serde import value_from_text, value_to_text


def tuple_of(entry: Entry, serde: SerializerProtocol, codec: Codec) -> CheckpointTuple:
    """A checkpoint as LangGraph wants it. Nothing in it is shared."""
    parts = from_text(entry.text, serde, codec)
    if pack_id(str(parts.checkpoint.get("id"))) != entry.id:
        shown = unpack_id(entry.id)
        raise Damaged(
            f"thread {entry.thread!r}: the id {shown} points at another checkpoint; run `perdure store verify`"
        )
    address = Address(entry.thread, entry.namespace, None)
    return CheckpointTuple(
        stored_config(address, unpack_id(entry.id)),
        parts.checkpoint,  # type: ignore[arg-type]
        parts.metadata,  # type: ignore[arg-type]
        stored_config(address, parts.parent) if parts.parent is not None else None,
        pending(entry.writes, serde, codec),
    )


def pending(writes: Sequence[Write], serde: SerializerProtocol, codec: Codec) -> list[PendingWrite]:
    return [(unpack_id(write.task), write.key, value_from_text(write.text, serde, codec)) for write in writes]


def writes_from(
    writes: Sequence[tuple[str, Any]], task_id: str, task_path: str, serde: SerializerProtocol
) -> list[Write]:
    """A task's writes as they are stored. Raises Unstorable, which names the channel."""
    task = pack_id(task_id)
    check_text(task_path, "a task's path")
    packed: list[Write] = []
    for position, (channel, value) in enumerate(writes):
        check_text(channel, "a channel's name")
        if channel == ERROR and isinstance(value, BaseException):
            value = repr(value)  # as LangGraph's own savers keep it: an exception is not data
        try:
            text = value_to_text(value, serde)
        except Unstorable as error:
            path = f"state[{orjson.dumps(channel).decode()}]{error.path.removeprefix('state')}"
            named = Unstorable(str(error).replace(error.path, path, 1), path=path)
            raise name_channel(named, [channel]) from error
        packed.append(Write(task, WRITES_IDX_MAP.get(channel, position), channel, task_path, text))
    return packed


def wanted_of(config: RunnableConfig | None, before: RunnableConfig | None) -> Wanted:
    """Which checkpoints a `list` asks for."""
    limit = (before or {}).get("configurable", {}).get("checkpoint_id")
    packed = pack_id(str(limit)) if limit else None
    if config is None or config.get("configurable", {}).get("thread_id") is None:
        namespace = (config or {}).get("configurable", {}).get("checkpoint_ns")
        return Wanted(namespace=namespace, before=packed)
    address = address_of(config)
    namespace = config["configurable"].get("checkpoint_ns")
    return Wanted(address.thread, namespace, pack_id(address.id) if address.id else None, packed)


def matches(entry: Entry, conditions: Mapping[str, Any] | None, serde: SerializerProtocol, codec: Codec) -> bool:
    """Whether a checkpoint's metadata has all of these. Keys are keys, whatever characters they have."""
    if not conditions:
        return True
    metadata = metadata_of(entry.text, serde, codec)
    return all(metadata.get(key) == value for key, value in conditions.items())


class DeltaWalk:
    """The walk from a checkpoint to its ancestors that rebuilds delta channels: writes, and where they start from."""

    def __init__(self, channels: Sequence[str], serde: SerializerProtocol, codec: Codec) -> None:
        self._channels = list(channels)
        self._open = set(channels)
        self._writes: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
        self._seeds: dict[str, Any] = {}
        self._serde, self._codec = serde, codec
        self._next: str | None = None

    def begin(self, target: Entry | None) -> None:
        """The checkpoint itself: what is pending on it is not part of it."""
        self._next = from_text(target.text, self._serde, self._codec).parent if target is not None else None

    def next_id(self) -> bytes | None:
        return pack_id(self._next) if self._next is not None and self._open else None

    def take(self, entry: Entry | None) -> None:
        """The next ancestor: its writes, and its values of channels that have one."""
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
        found: dict[str, DeltaChannelHistory] = {}
        for channel in self._channels:
            found[channel] = {"writes": self._writes[channel][::-1]}
            if channel in self._seeds:
                found[channel]["seed"] = self._seeds[channel]
        return found
