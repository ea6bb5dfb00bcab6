"""Fixtures of the LangGraph tests: savers and stores on a real SQLite file and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from store_kit import Caller

from perdure.langgraph import PerdureSaver


@pytest.fixture(params=["sqlite", "postgres"])
def saver_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What to open: a new file, or an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "agent.db")
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def saver(saver_url: str) -> Iterator[PerdureSaver]:
    """A saver on it, closed after the test."""
    with PerdureSaver(saver_url) as opened:
        yield opened


@pytest.fixture
async def caller(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Caller]:
    """What opens stores on an empty database, and calls them. Ends with a verification of what the test has left."""
    database, _, suffix = request.param.partition("-")
    url = str(tmp_path / "agent.db") if database == "sqlite" else str(request.getfixturevalue("postgres_url"))
    made = Caller(url, bool(suffix))
    yield made
    await made.finish()
