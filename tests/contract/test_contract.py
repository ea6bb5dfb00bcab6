"""The contract suite: in full on sqlite and postgres-async, its heart on sqlite-async and postgres.

PERDURE_SOAK=1: in full on all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from contracts import Harness, Mode, StoreContract, StoreSmoke
from soak import SOAK

import perdure


@pytest.fixture
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A harness on an empty database. Ends with a verification of all that the test has left."""
    database, _, suffix = request.param.partition("-")
    url = str(tmp_path / "store.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    mode: Mode = "async" if suffix else "blocking"
    made = Harness(partial(perdure.open, url, durability="normal"), mode)
    yield made
    await made.finish()


@pytest.mark.parametrize("harness", ["sqlite", "postgres-async"], indirect=True)
class TestStore(StoreContract):
    """Everything a store promises."""


@pytest.mark.parametrize("harness", ["sqlite-async", "postgres"], indirect=True)
class TestStoreInTheOtherModes(StoreContract if SOAK else StoreSmoke):  # type: ignore[misc]
    """What depends on the driver: races, tenants, opening and closing, and one of everything else."""
