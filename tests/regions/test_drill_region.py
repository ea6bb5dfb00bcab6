"""A region that is killed costs what it had not replicated, and no effect is done twice."""

from __future__ import annotations

from pathlib import Path

from perdure.regions.drill import drill_region

APP = """
import time
import perdure

@perdure.effect(on_doubt="retry")
def pay(flight: str, key: perdure.IdempotencyKey) -> str: ...

@perdure.effect
def book(flight: str) -> str: ...

@perdure.durable
def travel(city):
    time.sleep(0.05)
    booked = book(city)
    time.sleep(0.05)
    return [booked, pay(booked), book("back")]
"""


def test_a_lost_region_is_resumed_in_the_other(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    report = drill_region(f"{tmp_path / 'app.py'}:travel", ["NYC"], runs=12, seed=1)
    assert report.ok, report.text()
    assert report.effects_twice == 0
    assert report.same_result == report.trials > 0
    assert report.rounds > 0
    assert "commits lost with the region" in report.text()
