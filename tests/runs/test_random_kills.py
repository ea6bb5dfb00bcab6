"""`kill -9` of a 30-step agent with five bookings, at random times and at random points, against a real airline.

    the airline honours the key               each booking exactly once, by retrying
    it does not, but can be asked             never twice, by `reconcile`
    neither                                   parked, not repeated: a person looks and says which

Some bookings travel slowly: they arrive after the agent died, and are not doubled either. PERDURE_SOAK=1: more than
500 kills, else 60.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from crash_agents import World
from lab import PLACES
from ledger import AirlineProcess, airline
from random_agents import BOOKINGS, DEADLINE_S, THOUGHTS

import perdure
from perdure.testing.processes import ForkServer

SOAK = bool(os.environ.get("PERDURE_SOAK"))
VARIANTS = ("honours", "reconciles", "neither")
KILLS = 90 if SOAK else 3  # of each variant on each database
POINTS_MAX = 60  # a whole run has some two hundred
MOMENT_S_MAX = 0.12


@dataclass
class Figures:
    """What happened to the runs of a test."""

    kills: Counter[str] = field(default_factory=Counter)  # by: a point, a moment
    runs: int = 0
    doubts: int = 0  # bookings that were under way when the agent died
    asked: int = 0  # doubts that a person settled
    late: int = 0  # bookings that arrived after their sender's death
    ran_again: int = 0  # steps whose end was recorded

    def __str__(self) -> str:
        return (
            f"{sum(self.kills.values())} kills ({dict(self.kills)}), {self.runs} runs, {self.doubts} bookings in doubt "
            f"({self.asked} asked about, {self.late} arrived after their sender's death), {self.ran_again} finished "
            f"steps run again"
        )


class Killing:
    """One variant on one database."""

    def __init__(self, url: str, folder: Path, variant: str, outside: AirlineProcess, fork_server: ForkServer) -> None:
        self.variant, self.outside, self.fork_server, self.url = variant, outside, fork_server, url
        self.path = str(folder / "acts.jsonl")
        self.world, self.figures = World(self.path), Figures()
        self.chance = random.Random(f"{variant} {url.partition(':')[0]}")
        self.deaths: list[tuple[str, float]] = []

    def run(self, store: perdure.Store, kills: int) -> None:
        while sum(self.figures.kills.values()) < kills:
            run_id = f"{self.variant}-{self.figures.runs}"
            mode = self.chance.choice(("sync", "async"))
            while (end := self._attempt(store, run_id, mode)) is None or end["status"] != "done":
                if end is not None:
                    assert end["status"] == "waiting", end
                    self._settle(store, run_id)
            self.figures.runs += 1
            self._check(store, run_id, end["result"])
        self._count_late()

    def _attempt(self, store: perdure.Store, run_id: str, mode: str) -> dict[str, Any] | None:
        """One life of the agent: None if it was killed."""
        by_point = self.chance.random() < 0.5
        at = self.chance.randint(1, POINTS_MAX) if by_point else None
        child = self.fork_server.start(self.url, self.path, self.outside.url, self.variant, mode, run_id, at)
        lines = child.lines()
        begun = next(lines)
        if not by_point:
            time.sleep(self.chance.random() * MOMENT_S_MAX)  # a moment that nothing marks
            left = child.kill()
        else:
            left = list(lines)
        self._check_again(run_id, begun)
        if left:
            return dict(left[0])
        self.deaths.append((run_id, time.time()))
        self.figures.kills["point" if by_point else "moment"] += 1
        if self._exists(store, run_id):
            self.figures.doubts += sum(step.status == "in doubt" for step in store.get_run(run_id).steps())
        return None

    def _exists(self, store: perdure.Store, run_id: str) -> bool:
        try:
            store.get_run(run_id)
        except perdure.NotFound:
            return False
        return True

    def _settle(self, store: perdure.Store, run_id: str) -> None:
        """What a person does: looks at the airline when nothing can be under way any more, and says what there is."""
        run = store.get_run(run_id)
        [ask] = store.questions(run_id)
        assert ask.kind == "doubt"
        assert ask.step is not None
        assert self.variant == "neither"
        time.sleep(max(0.0, ask.asked_at.timestamp() + DEADLINE_S - time.time()))
        found = self.outside.client.bookings(ask.key)
        self.figures.asked += 1
        if found:
            run.resolve(ask.step, done=found[0].booking, who="ann")
        else:
            run.resolve(ask.step, not_done=True, who="ann")

    def _check_again(self, run_id: str, begun: dict[str, Any]) -> None:
        """No step whose end was recorded before this life has run in it."""
        recorded = set(begun["recorded"])
        mine = [line for line in self.world.lines(run_id) if line.pid == begun["pid"]]
        self.figures.ran_again += sum(line.path in recorded for line in mine)

    def _check(self, store: perdure.Store, run_id: str, result: Any) -> None:
        """Each booking is there once, and is what the run believes."""
        total, booked = result
        assert total == sum(range(BOOKINGS * THOUGHTS))
        bookings = [one for one in self.outside.bookings() if one.item.startswith(f"{run_id}:")]
        assert sorted(one.item for one in bookings) == [f"{run_id}:{number}" for number in range(BOOKINGS)], bookings
        assert {one.booking for one in bookings} == set(booked)
        steps = store.get_run(run_id).steps()
        assert len(steps) == BOOKINGS * (THOUGHTS + 1)
        assert all(step.status == "done" for step in steps)
        keys = {step.key for step in steps if step.kind == "effect"}
        assert keys == {one.key for one in bookings}

    def _count_late(self) -> None:
        for request in self.outside.requests():
            item = str(request.body.get("item", ""))
            for run_id, at in self.deaths:
                acted = request.acted_at or 0.0
                if item.startswith(f"{run_id}:") and request.at < at < acted and request.outcome == "booked":
                    self.figures.late += 1


@pytest.mark.timeout(0 if SOAK else 120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_kills(request: pytest.FixtureRequest, tmp_path: Path, place: str, variant: str) -> None:
    url = str(tmp_path / "a.db") if place == "sqlite" else request.getfixturevalue("postgres_url")
    begun = time.perf_counter()
    ignores = variant != "honours"
    with (
        airline(tmp_path, ignore_keys=ignores) as outside,
        ForkServer("random_agents:live") as fork_server,
        perdure.open(url) as store,
    ):
        killing = Killing(url, tmp_path, variant, outside, fork_server)
        killing.run(store, KILLS)
        figures = killing.figures
        twice = Counter(one.item for one in outside.bookings())
    print(f"\n{place} {variant}: {figures}, {time.perf_counter() - begun:.1f} s")
    assert figures.ran_again == 0
    assert max(twice.values()) == 1
    assert sum(figures.kills.values()) >= KILLS
    assert figures.doubts > 0 or not SOAK
    assert figures.late > 0 or not SOAK
    assert not figures.asked or variant == "neither"
