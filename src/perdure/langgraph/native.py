"""The base class of the checkpointers: what they share, whatever database is below."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.errors import UsageError
from perdure.langgraph.serde import PerdureSerde


class NativeSaver(BaseCheckpointSaver[Any]):
    """A checkpointer whose values Perdure's codec encodes, unless another serializer is assigned."""

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> BaseCheckpointSaver[Any]:
        """Return this saver with more classes (module, name) allowed. LangGraph takes them from a graph's schema."""
        if not isinstance(self.serde, PerdureSerde):
            return super().with_allowlist(extra_allowlist)
        serde = self.serde.with_classes(extra_allowlist)
        if serde is self.serde:
            return self
        clone = copy.copy(self)
        clone.serde = serde
        return clone

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the next version of a channel: a counter. Versions of imported threads are text, and stay text."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}"
        return int(current) + 1


def check_pruned(threads: Sequence[str], strategy: str) -> Sequence[str]:
    """Return the threads to prune. Raises UsageError."""
    if strategy not in ("keep_latest", "delete"):
        raise UsageError(f'strategy={strategy!r}: "keep_latest" or "delete"')
    return check_many(threads, "prune", "thread_ids")


def check_many(names: Sequence[str], method: str, parameter: str) -> Sequence[str]:
    """Return a list of names as text. Raises UsageError for a single one: its characters would be taken for names."""
    if isinstance(names, str | bytes):
        raise UsageError(f"{method}({names!r}): {parameter} are a list: [{names!r}]")
    return [str(one) for one in names]
