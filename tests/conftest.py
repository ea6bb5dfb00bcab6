"""Fixtures shared by all tests: a real PostgreSQL, started once, and a fresh database for each test.

A server that cannot start fails the tests that need it, here and in CI. It never skips them.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import DatabasePool, new_database
from hypothesis import HealthCheck, settings
from installs import Installs
from selection import left_to_soak
from soak import SOAK

from perdure.runs.functions import specs
from perdure.testing.postgres_server import PostgresServer, memory_directory

# Before any test imports them: their assertions are shown as those of tests are.
pytest.register_assert_rewrite(
    *(f"contract_{part}" for part in ("arranging", "history", "placing", "saving", "sharing", "values")), "harness"
)

gc.disable()  # until everything is imported: looking for garbage then takes a third of the time

# The same examples every time, whatever the machine's speed; a soak draws others.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not SOAK,
    max_examples=100 if SOAK else 40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("tests")

# What tests write need not outlive the machine: in memory, an fsync costs nothing. A killed process leaves memory as it
# leaves a disk, and tests of power losses have a file system of their own (power_loss.py).
if (memory := memory_directory()) is not None:
    os.environ["TMPDIR"] = tempfile.tempdir = memory

# A shell without job control starts what runs in the background with Ctrl-C ignored; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres-programs",
        type=Path,
        help="run the tests on another PostgreSQL: the folder of its initdb and postgres",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = left_to_soak(items)
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported stays: collections of garbage need not look at it again
    gc.enable()


@pytest.fixture(autouse=True)
def names_of_functions() -> Iterator[None]:
    """Forget the functions that a test decorated: a run of another test would find them by their names."""
    registries: list[dict[str, Any]] = [specs._durables, specs._steps]
    before = [dict(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> Iterator[PostgresServer]:
    """A server for the whole test run. fsync is off: tests that pull the plug start a server of their own."""
    programs = pytestconfig.getoption("--postgres-programs")
    with PostgresServer(fsync=False, programs=programs) as server, DatabasePool(server):
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database for this test alone. It has the tables of a store, and nothing in them."""
    with DatabasePool.of(postgres_server).database() as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The same for tests of creating a store: a database without any table."""
    name = new_database(postgres_server, migrated=False)
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def installs(tmp_path_factory: pytest.TempPathFactory) -> Installs:
    """Environments with what a reader was told to install. The processes of a test run share them."""
    base = tmp_path_factory.getbasetemp()
    return Installs((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installs")
