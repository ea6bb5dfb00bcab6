"""The policies of autosave: when each says that a save is due, and what `adaptive` wastes beside the best interval.

The simulation has no clock: lives of a process come from a Weibull distribution, steps of work from a lognormal one, a
save takes its time, and what was not saved when the process dies is done again. All meet the same lives and steps.
docs/how-to/autosave.md shows the same numbers: `python tests/ops/test_autosave_policies.py` prints its table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.threads.policies import Adaptive, Every, Learning, Periodic, Policy

STEP_S, SPREAD, LIVES, SHAPE = 20.0, 0.8, 240, 0.7
CASES = [(3600.0, 2.0), (3600.0, 0.05), (600.0, 2.0), (600.0, 0.05)]
FACTORS = (0.1, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # of W = sqrt(2 C M): fixed intervals to compare with


def waste(
    policy: Policy, mtbf_s: float, cost_s: float, *, memory: Mapping[str, Any] | None = None, seed: int = 1
) -> float:
    """The share of the time that saving, and doing work again, takes."""
    chance, scale = random.Random(seed), mtbf_s / math.gamma(1 + 1 / SHAPE)
    mean = math.log(STEP_S) - SPREAD * SPREAD / 2
    now = kept_s = 0.0
    died = False
    for life in range(LIVES):
        end = now + chance.weibullvariate(scale, SHAPE)
        steps = random.Random(seed * 1_000_003 + life)
        machine = policy.start(now, memory, died=died)
        work_s, changes = 0.0, 0
        while (ended := now + (step_s := steps.lognormvariate(mean, SPREAD))) < end:
            now, work_s, changes = ended, work_s + step_s, changes + 1
            if machine.due(now, changes):
                if now + cost_s >= end:
                    break  # it dies while it saves
                now += cost_s
                machine.saved(now, cost_s)
                memory, kept_s = machine.memory(now), kept_s + work_s
                work_s, changes = 0.0, 0
        now = end
        died = memory is not None  # a save is there, and nothing says that its session ended
    return 1 - kept_s / now


def best_fixed(mtbf_s: float, cost_s: float) -> tuple[float, float]:
    """The best of the fixed intervals: what it wastes, and its length."""
    best_s = math.sqrt(2 * cost_s * mtbf_s)
    return min((waste(Periodic(factor * best_s), mtbf_s, cost_s), factor * best_s) for factor in FACTORS)


def variants(mtbf_s: float, cost_s: float) -> dict[str, tuple[Policy, Mapping[str, Any] | None]]:
    adaptive = perdure.autosave.adaptive
    return {
        "right": (adaptive(mtbf_s=mtbf_s), None),
        "M 20 times too long": (adaptive(mtbf_s=20 * mtbf_s), None),
        "M 20 times too short": (adaptive(mtbf_s=mtbf_s / 20), None),
        "C 20 times too high": (adaptive(mtbf_s=mtbf_s), {"cost_s": 20 * cost_s}),
        "C 20 times too low": (adaptive(mtbf_s=mtbf_s), {"cost_s": cost_s / 20}),
    }


@pytest.mark.parametrize(("mtbf_s", "cost_s"), CASES)
def test_adaptive_is_within_a_tenth_of_the_best_fixed_interval_also_when_its_first_guess_is_20_times_wrong(
    mtbf_s: float, cost_s: float
) -> None:
    best, _ = best_fixed(mtbf_s, cost_s)
    for name, (policy, memory) in variants(mtbf_s, cost_s).items():
        assert waste(policy, mtbf_s, cost_s, memory=memory) <= 1.1 * best, name


def test_a_fixed_interval_that_is_wrong_costs_much_more_so_the_simulation_can_tell() -> None:
    best, best_s = best_fixed(3600.0, 2.0)
    assert waste(Periodic(best_s / 20), 3600.0, 2.0) > 2 * best
    assert waste(Periodic(best_s * 8), 3600.0, 2.0) > 2 * best


def test_every_counts_changes() -> None:
    machine = perdure.autosave.every(3).start(0.0)
    assert [machine.due(0.0, changes) for changes in (1, 2, 3, 4)] == [False, False, True, True]
    assert (machine.due_at(), machine.memory(9.0)) == (None, None)


def test_periodic_waits_from_save_to_save_and_wants_a_change() -> None:
    machine = perdure.autosave.periodic(10).start(100.0)
    assert [machine.due(now, 1) for now in (109.9, 110.0)] == [False, True]
    assert not machine.due(200.0, 0)
    machine.saved(112.0, 0.5)
    assert (machine.due(121.0, 5), machine.due(122.0, 5), machine.due_at()) == (False, True, 122.0)


def started(policy: Adaptive, memory: Mapping[str, Any] | None = None, *, died: bool = False) -> Learning:
    machine = policy.start(0.0, memory, died=died)
    assert isinstance(machine, Learning)
    return machine


def test_adaptive_follows_young_and_daly() -> None:
    machine = started(perdure.autosave.adaptive(mtbf_s=3600), {"cost_s": 2.0})
    assert machine.interval_s(0.0) == pytest.approx(math.sqrt(2 * 2.0 * 3600))


def test_adaptive_learns_what_a_save_costs() -> None:
    machine = started(perdure.autosave.adaptive(mtbf_s=3600))
    machine.saved(10.0, 4.0)
    assert machine.cost_s == 4.0  # the first measure counts alone: the guess before it was none
    for _ in range(30):
        machine.saved(10.0, 1.0)
    assert machine.cost_s == pytest.approx(1.0, rel=0.01)
    machine.saved(10.0, None)  # nothing was written: nothing was measured
    assert machine.cost_s == pytest.approx(1.0, rel=0.01)


def test_adaptive_learns_from_processes_that_died_and_from_those_that_live() -> None:
    policy = perdure.autosave.adaptive(mtbf_s=3600)
    machine = started(policy)
    assert machine.mtbf_s(0.0) == 3600
    assert machine.mtbf_s(7200.0) == 10_800  # it lives: failures are rarer than was thought
    memory = machine.memory(7200.0)
    assert memory == {"uptime_s": 7200.0, "failures": 0}
    assert started(policy, memory, died=True).mtbf_s(0.0) == 5400
    assert started(policy, memory, died=False).mtbf_s(0.0) == 10_800


def test_adaptive_keeps_its_bounds() -> None:
    adaptive = perdure.autosave.adaptive
    assert started(adaptive(min_s=5), {"cost_s": 1e-6}).interval_s(0.0) == 5
    assert started(adaptive(max_s=60), {"cost_s": 2.0}).interval_s(0.0) == 60
    # Saving takes at most this share of the time …
    assert started(adaptive(overhead_max=0.01, mtbf_s=60), {"cost_s": 2.0}).interval_s(0.0) == 200
    # … unless that would be longer than what may be lost.
    assert started(adaptive(overhead_max=0.01, max_s=90, mtbf_s=60), {"cost_s": 2.0}).interval_s(0.0) == 90


def test_adaptive_saves_at_this_change_if_the_next_would_come_too_late() -> None:
    machine = started(perdure.autosave.adaptive(mtbf_s=3600), {"cost_s": 2.0})  # 120 s
    due = [machine.due(100.0 * changes, changes) for changes in (1, 2)]  # changes come every 100 s
    assert due[0]  # at 200 it would be 80 s late; now it is 20 s early


@pytest.mark.parametrize(
    "memory", [{}, {"cost_s": "much"}, {"cost_s": -1, "uptime_s": None}, {"failures": float("nan")}, {"failures": True}]
)
def test_adaptive_starts_anew_from_a_memory_that_somebody_else_wrote(memory: dict[str, Any]) -> None:
    assert started(perdure.autosave.adaptive(), memory).interval_s(0.0) == started(
        perdure.autosave.adaptive()
    ).interval_s(0.0)


def test_a_policy_says_what_is_wrong_with_its_arguments() -> None:
    for wrong in (0, -1, 1.5, True, "5"):
        with pytest.raises(perdure.UsageError, match="1 or more"):
            perdure.autosave.every(wrong)  # type: ignore[arg-type]
    for wrong in (0, -3, float("nan"), "1"):
        with pytest.raises(perdure.UsageError, match="seconds"):
            perdure.autosave.periodic(wrong)  # type: ignore[arg-type]
    with pytest.raises(perdure.UsageError, match="min_s is at most max_s"):
        perdure.autosave.adaptive(min_s=10, max_s=5)
    with pytest.raises(perdure.UsageError, match="a share of the time"):
        perdure.autosave.adaptive(overhead_max=0)
    assert perdure.autosave.every(5) == Every(5)


def table() -> str:
    """The table of docs/how-to/autosave.md."""
    lines = [
        "| process lives | a save takes | `every(1)` | best fixed interval | `adaptive()` | its guess 20 times wrong |",
        "|---|---|---|---|---|---|",
    ]
    for mtbf_s, cost_s in CASES:
        best, best_s = best_fixed(mtbf_s, cost_s)
        found = [waste(policy, mtbf_s, cost_s, memory=memory) for policy, memory in variants(mtbf_s, cost_s).values()]
        parts = (waste(Every(1), mtbf_s, cost_s), best, found[0], min(found[1:]), max(found[1:]))
        each, fixed, right, low, high = (f"{100 * part:.2f} %" for part in parts)
        save = f"{cost_s:.0f} s" if cost_s >= 1 else f"{cost_s * 1000:.0f} ms"
        lines.append(
            f"| {mtbf_s / 60:.0f} min | {save} | {each} | {fixed} ({best_s:.0f} s) | {right} | {low} to {high} |"
        )
    return "\n".join(lines)


def test_the_page_shows_these_numbers() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "how-to" / "autosave.md").read_text()


if __name__ == "__main__":
    print(table())
