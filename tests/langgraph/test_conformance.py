"""LangGraph's own conformance suite: all eight capabilities, all 81 tests, on both databases, blocking and async."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator

import pytest
from conformance_kit import Blocking, conform
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.langgraph import PerdureSaver

_suites = itertools.count(1)


@pytest.mark.parametrize("way", ["async", "blocking"])
async def test_all_81_conformance_tests_pass(saver_url: str, way: str) -> None:
    async def fresh() -> AsyncGenerator[BaseCheckpointSaver[int], None]:
        """A saver that sees nothing of the capability before: a tenant of its own."""
        async with PerdureSaver(saver_url, tenant=f"suite {next(_suites)}") as saver:
            yield Blocking(saver) if way == "blocking" else saver

    await conform("PerdureSaver", fresh)
