"""The checkpoint that ends a thread whose effects were undone: the same values, and nothing that runs next. Pure."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

_TRIGGERS = ("branch:", "join:", "__pregel_tasks", "__start__")  # channels whose value lets a node run


def newest_of(thread: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}


def end_of(saved: CheckpointTuple) -> tuple[Checkpoint, CheckpointMetadata, dict[str, Any]] | None:
    """Return the arguments of the put that ends a thread's run; None if nothing would run next anyway."""
    before = saved.checkpoint
    values = {name: value for name, value in before["channel_values"].items() if not name.startswith(_TRIGGERS)}
    if len(values) == len(before["channel_values"]):
        return None
    step = int(saved.metadata.get("step", 0)) + 1
    ended: Any = {**before, "id": str(uuid6(clock_seq=step)), "channel_values": values}
    return ended, {"source": "update", "step": step, "parents": {}}, {}
