"""Read LangGraph's configs: thread, namespace, checkpoint, and metadata of a run. Pure."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import EXCLUDED_METADATA_KEYS, CheckpointMetadata, get_checkpoint_metadata

from perdure.errors import UsageError

DURABILITY = "__pregel_durability"  # LangGraph's key of a run's durability has no public name
# Metadata of one step or run: no tags of the thread.
_OF_STEP = frozenset({"source", "step", "parents", "run_id", "writes", "counters_since_delta_snapshot"})
_SOURCES = frozenset({"input", "loop", "update", "fork"})
_TAGS_MAX = 32
_KEY_CHARACTERS_MAX = 500
_TAG_CHARACTERS_MAX = 1000


class Address(NamedTuple):
    """The checkpoint that a config names; the newest one if `id` is None."""

    thread: str
    namespace: str
    id: str | None


def address_of(config: RunnableConfig) -> Address:
    configurable = config.get("configurable") or {}
    thread = configurable.get("thread_id")
    if thread is None:
        raise UsageError('a checkpointer needs a thread: pass config={"configurable": {"thread_id": "…"}}')
    id_ = configurable.get("checkpoint_id")
    return Address(str(thread), str(configurable.get("checkpoint_ns") or ""), str(id_) if id_ else None)


def stored_config(address: Address, id_: str) -> RunnableConfig:
    """Return the config of a stored checkpoint."""
    return {
        "configurable": {"thread_id": address.thread, "checkpoint_ns": address.namespace, "checkpoint_id": id_},
    }


def metadata_for(config: RunnableConfig, metadata: CheckpointMetadata) -> Mapping[str, Any]:
    """Return the metadata to store. LangGraph's own function is called only if it would add something."""
    if _OF_STEP.issuperset(metadata) and metadata.get("source") in _SOURCES:
        for keys in (config.get("metadata"), config.get("configurable")):
            maps: Any = keys.maps if isinstance(keys, ChainMap) else (keys or (),)  # iterating over one makes a dict
            for one in maps:
                for key in one:
                    if key not in EXCLUDED_METADATA_KEYS and key[:2] != "__":
                        return get_checkpoint_metadata(config, metadata)
        return metadata
    return get_checkpoint_metadata(config, metadata)


def note_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the note that `perdure log` shows for a checkpoint: its source and step."""
    source, step = metadata.get("source"), metadata.get("step")
    if source in _SOURCES and type(step) is int:
        return f"{source} {step}"
    parts = [str(part) for part in (source, step) if type(part) is int or _fits(part)]
    return " ".join(parts)[:200].replace("\0", "") or None


def tags_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that describes the thread. Threads can be listed by these tags."""
    tags: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in _OF_STEP or not _fits(key) or len(key) > _KEY_CHARACTERS_MAX or len(tags) == _TAGS_MAX:
            continue
        if (
            type(value) is bool
            or (type(value) is float and isfinite(value))
            or (type(value) is int and abs(value) < 2**63)
            or (type(value) is str and _fits(value))
        ):
            tags[key] = value
    return tags


def _fits(text: object) -> bool:
    if type(text) is not str or not 0 < len(text) <= _TAG_CHARACTERS_MAX or "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
