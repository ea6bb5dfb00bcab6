"""Agreement on the cut: a row of a store, and a cluster of three NATS servers whose leader is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import perdure
from perdure.errors import Unavailable, UsageError
from perdure.storage.program import adrive, drive
from perdure.teams.register import NatsRegister, Register, RowRegister, change
from perdure.teams.views import TeamView
from perdure.testing.nats_cluster import NatsCluster
from perdure.testing.ports import free_port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("nats")) as cluster:
        yield cluster


def races(driver: object, register: Register) -> None:
    """Many start a cut at once: each gets another number, and none is skipped."""

    def start(_: int) -> int:
        return drive(driver, change(register, TeamView.start)).cut  # type: ignore[arg-type]

    drive(driver, change(register, lambda view: view.join("a").join("b")))  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(start, range(12))) == list(range(1, 13))


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_row_agrees_and_only_one_of_several_changes_wins(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = str(tmp_path / "s.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as store:
        register = RowRegister(store._context, "research")
        assert drive(store._context.driver, register.read()) == TeamView()
        races(store._context.driver, register)
        old = drive(store._context.driver, register.read())
        assert drive(store._context.driver, register.swap(old, old.start()))
        assert not drive(store._context.driver, register.swap(old, old.join("late")))
        other = RowRegister(store.tenant("other")._context, "research")
        assert drive(store._context.driver, other.read()) == TeamView()


async def test_the_loss_of_the_leader_costs_seconds_and_no_agreement(cluster: NatsCluster) -> None:
    with perdure.open(":memory:") as store:  # its driver carries the flows; nothing is stored in it
        driver = store._context.driver
        with closing(NatsRegister(cluster.urls, "research")) as register:
            await asyncio.to_thread(races, driver, register)
            await asyncio.to_thread(cluster.kill, await asyncio.to_thread(cluster.leader, register))
            start = time.monotonic()
            view = await adrive(driver, change(register, TeamView.start))
            assert time.monotonic() - start < 10
            assert view.cut == 13
        with closing(NatsRegister(cluster.urls, "research")) as late:
            assert await adrive(driver, late.read()) == view


def test_a_register_that_cannot_be_reached_or_is_closed_says_so() -> None:
    with perdure.open(":memory:") as store:
        register = NatsRegister([f"nats://127.0.0.1:{free_port()}"], "t", timeout_s=0.2)
        with closing(register), pytest.raises(Unavailable, match="more than half of them"):
            drive(store._context.driver, register.read())
        with pytest.raises(UsageError, match="closed"):
            drive(store._context.driver, register.read())
        with pytest.raises(UsageError, match="a list of URLs"):
            NatsRegister("nats://localhost", "t")
