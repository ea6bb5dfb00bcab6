"""The policies of autosave: when each says that a save is due."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.threads.autosave import _states
from perdure.threads.autosave_policies import Every


def test_every_counts_changes() -> None:
    policy = perdure.autosave.every(3)
    assert [policy.due(changes, 0.0, 0.0) for changes in (1, 2, 3, 4)] == [False, False, True, True]


def test_periodic_waits_from_save_to_save_and_wants_a_change() -> None:
    policy = perdure.autosave.periodic(10)
    assert [policy.due(1, elapsed_s, 0.0) for elapsed_s in (9.9, 10.0)] == [False, True]
    assert not policy.due(0, 100.0, 0.0)


def test_adaptive_follows_young_and_daly_within_its_bounds() -> None:
    policy = perdure.autosave.adaptive(mtbf_s=3600, min_s=5, max_s=600)
    interval_s = math.sqrt(2 * 2.0 * 3600)
    assert [policy.due(1, elapsed_s, 2.0) for elapsed_s in (interval_s - 1, interval_s + 1)] == [False, True]
    assert not policy.due(0, 1e9, 2.0)
    assert (policy.interval_s(1e-6), policy.interval_s(1000.0)) == (5, 600)


def test_adaptive_follows_the_failures_that_sessions_of_a_thread_had(tmp_path: Path) -> None:
    policy = perdure.autosave.adaptive(mtbf_s=3600, min_s=0, max_s=1e9)
    moment = 1_800_000_000_000_000
    with perdure.open(tmp_path / "a.db") as store:
        store._context.clock_us = lambda: moment
        thread = store.thread("a")
        for _ in range(2):  # sessions that end well add to the time
            with thread.autosave(policy, initial={"n": 0}) as state:
                state["n"] += 1
                moment += 1800 * 1_000_000
        known: Any = thread.get_autosave()
        assert (known.failures, known.uptime_s, known.mtbf_s) == (0, 3600, 3600 + 1800)
        lost = store.thread("a").autosave(policy)
        lost.__enter__()
        lost["n"] = -1
        lost.save()
        _states.pop(id(lost))  # as if its process had died after 1800 seconds
        moment += 1800 * 1_000_000
        store.thread("a").save({"n": 7})
        with store.thread("a").autosave(policy) as state:
            state["n"] += 1
            state.save()
            known = store.thread("a").get_autosave()
            assert known.failures == 1
        known = asyncio.run(store.thread("a").aget_autosave())
        assert (known.failures, known.uptime_s, known.mtbf_s) == (1, 5400, (3600 + 5400) / 2)
        expected = policy.interval_s(known.cost_s) * math.sqrt(known.mtbf_s / 3600)
        assert known.interval_s == pytest.approx(expected)
        with store.thread("other").autosave(perdure.autosave.every(1)) as state:
            state["n"] = 1
        assert store.thread("other").get_autosave() is None


def test_a_policy_says_what_is_wrong_with_its_arguments() -> None:
    for wrong in (0, -1, 1.5, True, "5"):
        with pytest.raises(perdure.UsageError, match="1 or more"):
            perdure.autosave.every(wrong)  # type: ignore[arg-type]
    for wrong in (0, -3, float("nan"), "1"):
        with pytest.raises(perdure.UsageError, match="seconds"):
            perdure.autosave.periodic(wrong)  # type: ignore[arg-type]
    with pytest.raises(perdure.UsageError, match="min_s is at most max_s"):
        perdure.autosave.adaptive(min_s=10, max_s=5)
    assert perdure.autosave.every(5) == Every(5)
