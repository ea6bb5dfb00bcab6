"""A team in two stores whose workers and couriers are killed and stopped: no coin is lost or doubled, at rest or in
any cut that was taken meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import team_coins
from soak import SOAK

import perdure

KILLS = 24 if SOAK else 2


class Processes:
    """The workers of both stores and two couriers."""

    def __init__(self, urls: tuple[str, str]) -> None:
        self.urls = urls
        self.running = {role: self.start(role) for role in ("east", "west", "courier", "courier 2")}

    def start(self, role: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, team_coins.__file__, role.split()[0], *self.urls])

    def kill(self, role: str) -> None:
        self.running[role].kill()
        self.running[role].wait()
        self.running[role] = self.start(role)

    def stop_for_a_moment(self, role: str, until: Callable[[], bool]) -> None:
        os.kill(self.running[role].pid, signal.SIGSTOP)
        wait_for(until, 3)  # others go on, or wait for a lock that it holds
        os.kill(self.running[role].pid, signal.SIGCONT)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    give_up = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < give_up:
        time.sleep(0.1)
    return done


def has_seen(east: perdure.Store, west: perdure.Store, turns: int) -> bool:
    return team_coins.seen(east, west) >= turns


@pytest.mark.parametrize("database", ["sqlite", "postgres"] if SOAK else ["postgres"])
def test_killed_and_stopped_processes_of_two_stores_lose_and_double_nothing(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rng = random.Random(database)
    west_url = request.getfixturevalue("postgres_url") if database == "postgres" else str(tmp_path / "west.db")
    urls = str(tmp_path / "east.db"), west_url
    with perdure.open(urls[0], lease_s=1) as east, perdure.open(urls[1], lease_s=1) as west:
        linked, coins = team_coins.start(east, west)
        processes = Processes(urls)
        try:
            for number in range(KILLS):
                goal = min(team_coins.seen(east, west) + 8, team_coins.EXPECTED_TURNS)
                wait_for(partial(has_seen, east, west, goal))
                assert team_coins.coins_of(linked.snapshot(f"cut {number}")) == coins
                role = rng.choice(list(processes.running))
                if number % 2:
                    processes.stop_for_a_moment(role, partial(has_seen, east, west, goal + 4))
                processes.kill(role)
            assert wait_for(partial(has_seen, east, west, team_coins.EXPECTED_TURNS))
        finally:
            processes.close()
        end = linked.snapshot("end")
        assert end.in_flight() == []
        assert team_coins.coins_of(end) == coins
