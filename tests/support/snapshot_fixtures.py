"""A store per database and way of opening, for tests of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure


@pytest.fixture(params=["sqlite", "memory", "encrypted", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[perdure.Store]:
    """An empty store: a file, in memory, an encrypted file, on PostgreSQL."""
    kind = request.param
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = ":memory:" if kind == "memory" else str(tmp_path / "store.db")
    keys = bytes(32) if kind == "encrypted" else None
    with perdure.open(url, keys=keys) as opened:
        yield opened
