"""Makes checkpoints and configs as LangGraph makes them, and shows what a saver holds, for the tests beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

_versions = itertools.count(1)


def config_of(thread: Any = "t", *, ns: str = "", id: str | None = None) -> RunnableConfig:
    """The config of a thread and namespace, or of one of its checkpoints."""
    configurable: dict[str, Any] = {"thread_id": thread, "checkpoint_ns": ns}
    if id is not None:
        configurable["checkpoint_id"] = id
    return {"configurable": configurable}


def id_of(config: RunnableConfig | None) -> str:
    """The checkpoint id that a config names."""
    assert config is not None
    return str(config["configurable"]["checkpoint_id"])


def numbered_id(number: int) -> str:
    """A checkpoint id that sorts as its number does and is the same in every process."""
    return f"1f000000-0000-6000-8000-{number:012d}"


def checkpoint_of(values: Mapping[str, Any] | None = None, *, id: str | None = None) -> Checkpoint:
    """A checkpoint with these channel values, each of a version of its own."""
    kept = dict(values or {})
    return Checkpoint(
        v=4,
        id=id or str(uuid6(clock_seq=1)),
        ts=datetime.now(UTC).isoformat(),
        channel_values=kept,
        channel_versions={name: next(_versions) for name in kept},
        versions_seen={"node": dict.fromkeys(kept, 1)},
        updated_channels=list(kept),
    )


def metadata_of(**more: Any) -> CheckpointMetadata:
    return cast(CheckpointMetadata, {"source": "loop", "step": 0, "parents": {}, **more})


def put_arguments(
    thread: Any = "t",
    values: Mapping[str, Any] | None = None,
    *,
    parent: RunnableConfig | None = None,
    ns: str = "",
    id: str | None = None,
    **metadata: Any,
) -> tuple[RunnableConfig, Checkpoint, CheckpointMetadata, Any]:
    """The arguments of a `put`: a checkpoint whose parent is the one that the config `parent` names."""
    checkpoint = checkpoint_of(values, id=id)
    config = config_of(thread, ns=ns, id=id_of(parent) if parent else None)
    return config, checkpoint, metadata_of(**metadata), dict(checkpoint["channel_versions"])


def put(
    saver: BaseCheckpointSaver[Any], thread: Any = "t", values: Mapping[str, Any] | None = None, **options: Any
) -> RunnableConfig:
    return saver.put(*put_arguments(thread, values, **options))


async def aput(
    saver: BaseCheckpointSaver[Any], thread: Any = "t", values: Mapping[str, Any] | None = None, **options: Any
) -> RunnableConfig:
    return await saver.aput(*put_arguments(thread, values, **options))


def got(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> CheckpointTuple:
    """The tuple that must be there."""
    found = saver.get_tuple(config)
    assert found is not None
    return found


def values_at(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> dict[str, Any]:
    return got(saver, config).checkpoint["channel_values"]


def writes_at(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> list[tuple[str, str, Any]]:
    return list(got(saver, config).pending_writes or [])


def ids_in(saver: BaseCheckpointSaver[Any], config: RunnableConfig | None, **options: Any) -> list[str]:
    """The ids that `list` gives, in its order."""
    return [id_of(found.config) for found in saver.list(config, **options)]


def everything(saver: BaseCheckpointSaver[Any]) -> list[Any]:
    """All that a saver holds, in a form that is equal for equal contents."""
    return sorted(
        (
            (
                found.config["configurable"]["thread_id"],
                found.config["configurable"]["checkpoint_ns"],
                id_of(found.config),
                id_of(found.parent_config) if found.parent_config else None,
                found.checkpoint["channel_values"],
                found.metadata,
                found.pending_writes,
            )
            for found in saver.list(None)
        ),
        key=lambda row: row[:3],
    )
