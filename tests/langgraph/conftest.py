"""Fixtures of the LangGraph tests: savers and stores on a real SQLite file and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.cosmos_server import client_of, emulator, new_database
from messages_kit import accelerator
from store_kit import Caller

from perdure.langgraph import PerdureSaver, columns

if TYPE_CHECKING:  # Azure's client takes long to import, and few tests need it
    from azure.cosmos import CosmosClient

    from perdure.cosmos import CosmosSaver


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


@pytest.fixture(params=["python", "accelerator"])
def columns_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How messages are compared and copied."""
    if request.param == "accelerator":
        accelerator()
    chosen = columns.SpeedColumns if request.param == "accelerator" else columns.PlainColumns
    monkeypatch.setattr(columns, "columns_class", chosen)


@pytest.fixture(scope="session")
def cosmos_url() -> Iterator[str]:
    """The address of an emulator of Cosmos DB."""
    with emulator() as url:
        yield url


@pytest.fixture(scope="session")
def cosmos_client(cosmos_url: str) -> CosmosClient:
    return client_of(cosmos_url)


@pytest.fixture
def cosmos_saver(cosmos_client: CosmosClient) -> CosmosSaver:
    """A saver on an empty container."""
    from perdure.cosmos import CosmosSaver

    opened = CosmosSaver(cosmos_client, new_database())
    opened.setup()
    return opened
