"""Fixtures of the tests of runs: a store for all tests of a module, and a lab, which writes each agent in both ways."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import PLACES, Lab, open_at, open_place
from soak import SOAK

import perdure


@pytest.fixture(scope="module", params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    """A store on either database. Each lab is a tenant of its own."""
    yield from open_place(request, tmp_path_factory)


@pytest.fixture(scope="module")
def other(
    store: perdure.Store, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[perdure.Store]:
    """A store at the other place: from SQLite to PostgreSQL, and back."""
    place = "postgres" if store._context.driver.dialect == "sqlite" else "sqlite"
    yield from open_at(place, request, tmp_path_factory)


@pytest.fixture
def target(lab: Lab, other: perdure.Store) -> perdure.Store:
    """The same tenant in the other store."""
    return other.tenant(lab.store._context.tenant_name)


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file that is not there yet, or an empty database."""
    return str(tmp_path / "agent.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["paired", "crossed"] if SOAK else ["paired"])
def lab(request: pytest.FixtureRequest, store: perdure.Store) -> Lab:
    """Where a test runs its agents: as sync functions on SQLite, async ones on PostgreSQL; in a soak crosswise too."""
    is_sqlite = store._context.driver.dialect == "sqlite"
    return Lab(store, "sync" if is_sqlite == (request.param == "paired") else "async")


@pytest.fixture(scope="module")
def opened_again(store: perdure.Store) -> Iterator[perdure.Store]:
    """The same database, opened a second time."""
    driver: Any = store._context.driver
    with perdure.open(driver.capabilities.path or driver._target.conninfo) as opened:
        yield opened


@pytest.fixture
def elsewhere(lab: Lab, opened_again: perdure.Store) -> perdure.Store:
    """The lab's tenant as another process sees it."""
    return opened_again.tenant(lab.store._context.tenant_name)


@pytest.fixture
def sync_lab(store: perdure.Store) -> Lab:
    """For what is the same in both."""
    return Lab(store, "sync")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
