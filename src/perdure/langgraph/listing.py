"""What `list` and `alist` of `PerdureSaver` share: which checkpoints they read, return and count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig

from perdure.adapters import LineCheckpoint
from perdure.langgraph.convert import history_filters, matches
from perdure.langgraph.history import History
from perdure.langgraph.serde import PerdureSerde

if TYPE_CHECKING:
    from perdure.langgraph.saver import PerdureSaver


class CheckpointListing:
    """The state of one `list` or `alist`."""

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
        self.history = History(saver.serde.codec) if isinstance(saver.serde, PerdureSerde) else None
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

    def end(self) -> None:
        """Record that no further checkpoint matched."""
        self._went_back("")

    def _went_back(self, id_: str) -> None:
        if self._goes_back and self.left == 1:
            self._saver._requested.read(self.filters["thread"], self.filters["namespace"], "", id_)
