"""The contract suite on encrypted stores: nothing that a store promises changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from contracts import Harness, Mode, StoreContract, StoreSmoke
from soak import SOAK

import perdure

KEY = bytes(range(32))


@pytest.fixture(params=("sqlite", "postgres-async") if SOAK else ("sqlite",))
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """A harness on an empty, encrypted database. Ends with a verification of all that the test has left."""
    database, _, suffix = request.param.partition("-")
    url = str(tmp_path / "store.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    mode: Mode = "async" if suffix else "blocking"
    made = Harness(partial(perdure.open, url, durability="normal", keys=KEY), mode)
    yield made
    await made.finish()


class TestEncryptedStore(StoreContract if SOAK else StoreSmoke):  # type: ignore[misc]
    """Everything a store promises, encrypted. PERDURE_SOAK=1: the whole suite, on both databases."""
