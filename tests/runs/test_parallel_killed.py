"""Parallel branches under SIGKILL at every point that they come to: every booking once, and every decision kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import killed_branches
import pytest
from lab import MODES, PLACES
from soak import SOAK

from perdure.testing.processes import ForkServer

POINTS_MAX = 120


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("killed_branches:work") as started:
        yield started


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_point_repeats_nothing_and_loses_nothing(
    place: str, mode: str, fork_server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "store.db") if place == "sqlite" else request.getfixturevalue("postgres_url")
    kills, stride = 0, (1 if place == "sqlite" else 4) if SOAK else (5 if place == "sqlite" else 11)
    for deadly in range(1, POINTS_MAX, stride):
        folder = tmp_path / f"run-{deadly}"
        folder.mkdir()
        said = list(fork_server.start(url, str(folder), mode, deadly).lines())
        died = not said
        if died:
            kills += 1
            said = list(fork_server.start(url, str(folder), mode, 0).lines())
        [[both, fastest, rooms, is_the_same]] = said
        assert [trip[1] for trip in both] == ["booked 1", "booked 2"]
        assert fastest in ("seen a", "seen b", "seen c")
        assert rooms == ["booked 3", "booked 4", "booked 5"]
        assert is_the_same, f"killed at point {deadly}"
        booked = sorted(line.partition(" ")[2] for line in killed_branches.ledger(str(folder)))
        assert booked == ["1", "2", "3", "4", "5"], f"killed at point {deadly}"
        if not died:
            break
    assert 40 < kills * stride < POINTS_MAX - stride
