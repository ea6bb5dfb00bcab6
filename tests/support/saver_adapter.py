"""LangGraph's saver as the adapter contract sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapter_contract import THREAD, child
from checkpoints import config_of, put

from perdure.langgraph import PerdureSaver


class SaverAdapter:
    def open(self, url: str, hook: Callable[[str], None] | None = None) -> PerdureSaver:
        return PerdureSaver(url, hook=hook) if hook is not None else PerdureSaver(url)

    def save(self, opened: PerdureSaver, value: int, after: Any = None) -> Any:
        newest = opened.get_tuple(config_of(THREAD)) if after is None else None
        return put(opened, THREAD, {"n": value}, parent=after or (newest.config if newest is not None else None))

    def load(self, opened: PerdureSaver) -> int | None:
        found = opened.get_tuple(config_of(THREAD))
        return None if found is None else found.checkpoint["channel_values"]["n"]


__all__ = ["ADAPTER", "child"]
ADAPTER = SaverAdapter()
