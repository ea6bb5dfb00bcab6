"""Effects and steps inside the nodes of graphs: a process that is killed in a tool has booked once.

What is written down belongs to a task of the graph, so that it is found by whoever runs the graph next, and by nobody
else: another turn of a loop, another thread, a fork.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import effect_run
import pytest
from effect_run import FLIGHT, HOTEL

import holdfast as hf
from holdfast.cli import main
from holdfast.testing.ledger import AirlineProcess
from holdfast.testing.processes import Nursery

WAYS = ["sync", "async"]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("effect_run:child") as made:
        yield made


def times_booked(airline: AirlineProcess) -> dict[str, int]:
    return dict(Counter(one.item for one in airline.bookings()))


class Kill:
    """A graph that is killed while the airline has booked and holds its answers back."""

    def __init__(
        self, nursery: Nursery, url: str, airline: AirlineProcess, shape: str, way: str, policy: str, durability: str
    ) -> None:
        self.nursery, self.url, self.airline = nursery, url, airline
        self.arguments = [url, airline.url, shape, way, policy, durability]
        running = nursery.start(*self.arguments)
        airline.wait_for("booked", count=effect_run.BOOKED[shape])
        assert running.kill() == []
        airline.client.behave(hold="")

    def again(self) -> dict[str, Any]:
        [said] = self.nursery.start(*self.arguments).lines()
        assert isinstance(said, dict)
        return said


# --- killed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["key", "reconcile"])
@pytest.mark.parametrize("shape", ["node", "tools"])
def test_a_graph_killed_in_a_tool_has_booked_once(
    saver_url: str, tmp_path: Path, nursery: Nursery, shape: str, policy: str, way: str
) -> None:
    """After the booking went out, before its end is written down. The same line again goes on."""
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=policy != "key") as airline:
        kill = Kill(nursery, saver_url, airline, shape, way, policy, "async")
        said = kill.again()
        assert times_booked(airline) == {FLIGHT: 1, HOTEL: 1}
        assert sorted(said["booked"]) == ["trip-1", "trip-2"]
        assert said["searched"] == 0  # the step before it had ended, and its end was written down


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["subgraph", "deep", "send", "functional"])
@pytest.mark.parametrize("durability", ["async", "sync"])
def test_the_same_in_subgraphs_fan_outs_and_functional_tasks(
    tmp_path: Path, nursery: Nursery, shape: str, way: str, durability: str
) -> None:
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=True) as airline:
        kill = Kill(nursery, str(tmp_path / "a.db"), airline, shape, way, "reconcile", durability)
        said = kill.again()
        assert set(times_booked(airline).values()) == {1}
        assert sorted(said["booked"]) == sorted(one.booking for one in airline.bookings())


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_knows_a_person_says_and_the_graph_goes_on(
    saver_url: str, tmp_path: Path, nursery: Nursery, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error holds the line that settles it; until then the graph stays where it is."""
    with AirlineProcess(tmp_path / "air.db", hold="after", ignore_keys=True) as airline:
        kill = Kill(nursery, saver_url, airline, "node", way, "ask", "async")
        for _ in range(2):
            doubt = kill.again()
            assert doubt["key"] == airline.bookings()[0].key
            assert times_booked(airline) == {FLIGHT: 1}
        with hf.open(saver_url) as store:
            [ask] = store.asks()
            assert (ask.run, ask.kind, ask.key) == (doubt["run"], "doubt", doubt["key"])
            [info] = store.runs()
            assert (info.status, info.waiting_for and info.waiting_for["for"]) == ("waiting", "doubt")
        [line] = re.findall(r"`holdfast (resolve .*?) --done VALUE`", doubt["doubt"])
        assert main([*shlex.split(line), "--done", "trip-1", "--store", saver_url]) == 0, capsys.readouterr()
        assert kill.again()["booked"] == ["trip-1", "trip-2"]
        assert times_booked(airline) == {FLIGHT: 1, HOTEL: 1}
