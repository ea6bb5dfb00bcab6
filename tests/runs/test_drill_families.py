"""The drill knows children, whatever they wait for, and runs that begin anew: the same paths stand for other steps."""

from __future__ import annotations

from pathlib import Path

from perdure.testing.drill import drill

AGENTS = Path(__file__).with_name("drilled_families.py")


def test_an_agent_with_children_that_begins_anew_is_right() -> None:
    report = drill(f"{AGENTS}:parent", random_kills=0)
    assert report.ok, report.text()
    assert report.kills == report.points > 15
    assert report.same_result == report.trials
