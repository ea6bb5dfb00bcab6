"""Fixtures of the LangGraph tests: a saver on a real SQLite file and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
