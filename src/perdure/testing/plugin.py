"""Fixtures for pytest: `perdure_store`, a new store for each test, and `perdure_clock`, which sets its time.

pytest loads them by itself where Perdure is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported when a test uses them: pytest loads this module in every project
    from perdure.ops.store import Store
    from perdure.testing.clock import Clock


@pytest.fixture
def perdure_store(tmp_path: Path) -> Iterator[Store]:
    """Open a new store in a file. Define a fixture of the same name in your conftest to test on PostgreSQL."""
    import perdure

    with perdure.open(tmp_path / "perdure.db", durability="normal") as store:
        yield store


@pytest.fixture
def perdure_clock(perdure_store: Store) -> Clock:
    """Set the time of `perdure_store`: it begins on 2026-01-01 and stands still until the test advances it."""
    from perdure.testing import Clock

    return Clock(perdure_store)
