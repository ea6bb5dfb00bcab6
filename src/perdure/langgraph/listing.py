"""What `list` and `alist` of `PerdureSaver` share: which checkpoints they read, return and count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple

from perdure.adapters import LineCheckpoint
from perdure.langgraph.convert import history_filters, matches, tuple_of
from perdure.langgraph.history import History
from perdure.langgraph.serde import PerdureSerde

if TYPE_CHECKING:
    from perdure.langgraph.saver import PerdureSaver


_GROUP_MAX = 64  # checkpoints that are decoded together
_GROUP_BYTES = 8_000_000  # and their texts: copying so many messages takes some 10 ms


class CheckpointListing:
    """The state of one `list` or `alist`.

    Checkpoints are decoded in groups. The first group is one checkpoint, and each has twice as many as the one before,
    so that little is read in vain if the caller stops.
    """

    def __init__(
        self,
        saver: PerdureSaver,
        config: RunnableConfig | None,
        conditions: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> None:
        self._saver, self._conditions = saver, conditions
        self.left = None if limit is None else max(0, limit)
        self._history = History(saver.serde.codec) if isinstance(saver.serde, PerdureSerde) else None
        self._group: list[LineCheckpoint] = []
        self._group_size = 1
        self.filters: dict[str, Any] = history_filters(config, before)
        thread, namespace = self.filters.get("thread"), self.filters["namespace"]
        if thread is not None and namespace is not None:
            saver._checkpointed.note(thread, namespace)
        # When a graph goes back in time, its subgraph lists its own namespace like this to find where to resume. If it
        # finds no checkpoint, it starts from its beginning.
        self._goes_back = thread is not None and bool(namespace) and before is not None

    def takes(self, checkpoint: LineCheckpoint) -> bool:
        """Return whether a checkpoint is listed, and count it."""
        if not matches(checkpoint, self._conditions, self._saver.serde, self._saver._codec):
            return False
        self._went_back(checkpoint.id)
        if self.left is not None:
            self.left -= 1
        return True

    def add(self, checkpoint: LineCheckpoint) -> Iterator[CheckpointTuple]:
        """Add a checkpoint to the group. Return the group's tuples if it is complete, else nothing."""
        self._group.append(checkpoint)
        is_full = self.left == 0 or len(self._group) >= self._group_size
        return self._tuples() if is_full or sum([len(one.text) for one in self._group]) > _GROUP_BYTES else iter(())

    def end(self) -> Iterator[CheckpointTuple]:
        """Record that no further checkpoint matched. Return the tuples of the last group."""
        self._went_back("")
        return self._tuples()

    def _tuples(self) -> Iterator[CheckpointTuple]:
        group, self._group = self._group, []
        self._group_size = min(2 * self._group_size, _GROUP_MAX)
        serde, codec = self._saver.serde, self._saver._codec
        if self._history is None:
            yield from [tuple_of(checkpoint, serde, codec) for checkpoint in group]
            return
        while group:
            states = self._history.states(group)
            for checkpoint, state in zip(group, states, strict=False):
                yield tuple_of(checkpoint, serde, codec, state)
            del group[: len(states)]

    def _went_back(self, id_: str) -> None:
        if self._goes_back and self.left == 1:
            self._saver._requested.read(self.filters["thread"], self.filters["namespace"], "", id_)
