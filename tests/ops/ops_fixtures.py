"""Fixtures of the tests of operating: where a store is, the store, a clock that the test moves, PostgreSQL's roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keeping_kit import Clock
from role_kit import Roles, roles_of

import perdure


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file that is not there yet, or an empty database."""
    return str(tmp_path / "a.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url) as made:
        yield made


@pytest.fixture
def elsewhere(url: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Where to restore to: another file, or another schema of the same database."""
    return (url, {"schema": "restored"}) if url.startswith("postgres") else (str(tmp_path / "restored.db"), {})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    """The roles of a store, made by its owner."""
    yield from roles_of(postgres_url)
