"""A line of a thread as the adapter contract sees it: what the smallest adapter would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapter_contract import THREAD, child

import perdure


class LineAdapter:
    def open(self, url: str, hook: Callable[[str], None] | None = None) -> perdure.Store:
        return perdure.open(url, hook=hook) if hook is not None else perdure.open(url)

    def save(self, opened: perdure.Store, value: int, after: Any = None) -> str:
        line, id_ = opened.thread(THREAD).line(), f"{value:04}"
        newest = line.load() if after is None else None
        line.save({"n": value}, id=id_, parent=after or (newest.id if newest is not None else None))
        return id_

    def load(self, opened: perdure.Store) -> int | None:
        found = opened.thread(THREAD).line().load()
        return None if found is None else found.state["n"]


__all__ = ["ADAPTER", "child"]
ADAPTER = LineAdapter()
