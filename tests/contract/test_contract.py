"""The contract suite on every driver and in both modes: sqlite, sqlite-async, postgres, postgres-async."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.contract import Harness, Mode, StoreContract

KINDS = ("sqlite", "sqlite-async", "postgres", "postgres-async")


@pytest.fixture(params=KINDS)
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A harness on an empty database. Ends with a verification of all that the test has left."""
    database, _, suffix = request.param.partition("-")
    url = str(tmp_path / "store.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    mode: Mode = "async" if suffix else "blocking"
    made = Harness(partial(holdfast.open, url, durability="normal"), mode)
    yield made
    await made.finish()


class TestStore(StoreContract):
    """Everything a store promises."""
