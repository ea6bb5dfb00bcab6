"""What the tests of `PerdureStore` share: a store on each database, its methods blocking or awaited, an embedder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langgraph.store.base import Item, SearchItem
from memory_fixtures import Clock

from perdure.langgraph import PerdureStore

MODES = ["sqlite", "sqlite-async", "postgres", "postgres-async"]
BOTH = ["sqlite", "postgres-async"]
ALICE = ("users", "alice")


class Caller:
    """A store as one calls it, blocking or awaited. Its clock is the test's, and moves with each call."""

    def __init__(self, url: str, waits: bool) -> None:
        self.url, self.waits = url, waits
        self.clock = Clock()
        self._open: list[PerdureStore] = []

    def open(self, **options: Any) -> PerdureStore:
        store = PerdureStore(self.url, durability="normal", **options)
        store.store._context.clock_us = self.clock
        self._open.append(store)
        return store

    async def call(self, store: PerdureStore, method: str, *args: Any, **options: Any) -> Any:
        self.clock.us += 1000
        if self.waits:
            return await getattr(store, f"a{method}")(*args, **options)
        return getattr(store, method)(*args, **options)

    async def put(self, store: PerdureStore, key: str, value: dict[str, Any], **options: Any) -> None:
        await self.call(store, "put", options.pop("namespace", ALICE), key, value, **options)

    async def get(self, store: PerdureStore, key: str, **options: Any) -> Item | None:
        found: Item | None = await self.call(store, "get", options.pop("namespace", ALICE), key, **options)
        return found

    async def search(self, store: PerdureStore, namespace: tuple[str, ...] = ALICE, **options: Any) -> list[SearchItem]:
        found: list[SearchItem] = await self.call(store, "search", namespace, **options)
        return found

    async def keys(self, store: PerdureStore, namespace: tuple[str, ...] = ALICE, **options: Any) -> list[str]:
        return [item.key for item in await self.search(store, namespace, **options)]

    async def finish(self) -> None:
        """What the test has left is sound. Close everything."""
        for store in self._open:
            assert store.store.ops.verify().ok
            await store.aclose()


def letters(texts: Sequence[str]) -> list[list[float]]:
    """An embedder: how often each letter occurs."""
    return [[text.lower().count(letter) + 0.01 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
