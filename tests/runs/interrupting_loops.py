"""An exit in a task leaves the run free at once. test_interrupting.py runs this file in a process of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from interrupted_kit import IN_TASKS, ends_in_a_group
from lab import Lab

import perdure


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("function", IN_TASKS, ids=lambda each: each.__name__)
def test_an_exit_in_a_task_leaves_the_run_of_a_blocking_caller_free(lab: Lab, function: Any, kind: Any) -> None:
    with pytest.raises(kind):
        lab.store.run(function, kind.__name__, id="r")
    assert lab.store.get_run("r").status == "queued"


@pytest.mark.parametrize("function", IN_TASKS, ids=lambda each: each.__name__)
def test_an_exit_in_a_task_leaves_the_run_of_a_closed_loop_free(
    lab: Lab, elsewhere: perdure.Store, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.runs.engine.runtime.TICK_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(lab.store.arun(function, "KeyboardInterrupt", id="r"))
    until_s = time.monotonic() + 10
    while elsewhere.get_run("r").status != "queued":
        assert time.monotonic() < until_s, "no other process can claim the run"


def test_the_process_of_a_closed_loop_claims_the_run_anew_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.runs.engine.runtime.TICK_S", 60.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(lab.store.arun(ends_in_a_group, "KeyboardInterrupt", id="r"))
    assert lab.store.get_run("r").refresh().attempts == 2
