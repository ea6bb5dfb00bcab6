"""Fixtures of the tests of memory: a store on each database, and its operations, blocking or awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Mode

import perdure
from perdure.memory.handle import Memory
from perdure.memory.models import Item

MODES = ["sqlite", "sqlite-async", "postgres", "postgres-async"]
BOTH = ["sqlite", "postgres-async"]
START_US = 1_700_000_000_000_000


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.us = START_US

    def __call__(self) -> int:
        return self.us

    def pass_s(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


class MemoryHarness(Harness):
    """A harness whose stores share a clock of the test."""

    def __init__(self, opener: Any, mode: Mode) -> None:
        self.clock = Clock()
        super().__init__(opener, mode)

    def open(self, **options: Any) -> perdure.Store:
        store = super().open(**options)
        store._context.clock_us = self.clock
        return store

    async def do(self, memory: Memory, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operation, or await its twin. Time passes with each."""
        self.clock.us += 1000
        return await self.run((memory, operation, args, kwargs))

    async def put(self, memory: Memory, key: str, value: Any, **options: Any) -> Item:
        item: Item = await self.do(memory, "put", key, value, **options)
        return item

    async def value(self, memory: Memory, key: str) -> Any:
        found = await self.do(memory, "get", key)
        return None if found is None else found.value

    async def keys(self, memory: Memory, **options: Any) -> list[str]:
        return [item.key for item in await self.do(memory, "list", **options)]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, getattr(request, "param", "sqlite"), tmp_path)


def _url(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> str:
    found: str = str(tmp_path / "a.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def memory(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryHarness]:
    """A harness on an empty database. Ends with a verification of all that the test has left."""
    database, _, suffix = request.param.partition("-")
    url = _url(request, database, tmp_path)
    made = MemoryHarness(partial(perdure.open, url, durability="normal"), "async" if suffix else "blocking")
    yield made
    await made.finish()
