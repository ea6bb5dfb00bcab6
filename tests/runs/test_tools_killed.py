"""Tools and progress under SIGKILL at every named point: what was booked is booked once, the file tells the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import killed_tools
import pytest
from lab import MODES, PLACES
from soak import SOAK

from perdure.agents import progress_file
from perdure.testing.processes import ForkServer

POINTS_MAX = 60


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("killed_tools:work") as started:
        yield started


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_point_repeats_nothing_and_loses_nothing(
    place: str, mode: str, fork_server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "store.db") if place == "sqlite" else request.getfixturevalue("postgres_url")
    kills, stride = 0, 1 if SOAK else 7
    for deadly in range(1, POINTS_MAX, stride):
        folder = tmp_path / f"run-{deadly}"
        folder.mkdir()
        said = list(fork_server.start(url, str(folder), mode, deadly).lines())
        died = not said
        if died:
            kills += 1
            said = list(fork_server.start(url, str(folder), mode, 0).lines())
        [[result, done]] = said
        assert result == killed_tools.RESULT
        assert done == ["all"]
        booked = [line.partition(" ")[2] for line in killed_tools.ledger(str(folder))]
        assert booked == ["7"], f"killed at point {deadly}"
        found = progress_file.read(folder / "PROGRESS.md")
        assert found is not None
        assert (found.goal, found.done, found.next) == ("Rome", ["all"], None)
        if not died:
            break
    assert 20 < kills * stride < POINTS_MAX - stride
