"""What a step costs in Python: counted calls, so that a detour on the hot path is noticed on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import perdure
from perdure.storage import metrics

STEP_CALLS_MAX = 31
EFFECT_CALLS_MAX = 56


@perdure.step
def note(number: int) -> dict[str, int]:
    return {"number": number}


@perdure.effect
def act(number: int, key: perdure.IdempotencyKey) -> dict[str, int]:
    return {"number": number}


def _calls(fn: Any) -> Counter[str]:
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    for number in range(3):  # what is made once is made
        fn(number)
    sys.setprofile(profile)
    try:
        fn(3)
    finally:
        sys.setprofile(None)
    return found


@perdure.durable
def counted() -> list[Counter[str]]:
    found.extend([_calls(note), _calls(act)])
    return []


found: list[Counter[str]] = []


def test_a_warm_step_and_effect_are_few_python_calls(tmp_path: Path) -> None:
    found.clear()
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.run(counted)
    step, effect = found
    assert step.total() <= STEP_CALLS_MAX, step
    assert effect.total() <= EFFECT_CALLS_MAX, effect


def test_a_request_and_a_lost_fence_are_seen_by_the_next_step(tmp_path: Path) -> None:
    """The straight line writes nothing then: the general way says why."""
    ran: list[int] = []

    @perdure.step
    def work(number: int) -> int:
        ran.append(number)
        if number == 2:
            store.get_run("r").pause()
        return number

    @perdure.durable
    def agent() -> int:
        return sum(work(number) for number in range(5))

    with perdure.open(str(tmp_path / "a.db")) as store:
        run = store.run(agent, id="r")
        assert run.refresh().status == "paused"
        assert [step.path for step in run.steps()] == ["1", "2", "3"]  # what had run is recorded
        run.resume()
        assert store.run(agent, id="r").result() == 10
    assert ran == [0, 1, 2, 3, 4]


class _Sink:
    """Counts what it is told."""

    traces = False

    def __init__(self) -> None:
        self.recorded: Counter[Any] = Counter()

    def record(self, instrument: Any, value: float, *labels: Any) -> None:
        self.recorded[instrument] += 1

    def span_of(self, span: Any) -> str:
        return ""

    def begin(self, *about: Any) -> None:
        pass

    def end(self, *about: Any) -> None:
        pass


def test_metrics_leave_steps_and_saves_on_the_straight_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted there; a step that is measured is a few calls longer, and no operation is made for it."""
    sink = _Sink()
    monkeypatch.setattr(metrics, "sink", sink)
    found.clear()
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.run(counted)
        thread = store.thread("t")
        saves = _calls(lambda number: thread.save({"number": number}))
    step, effect = found
    assert "run_operation" not in step
    assert "run_operation" not in effect
    assert "drive" not in saves
    assert sink.recorded[metrics.STEP_TIME] == 2 * 4
    assert sink.recorded[metrics.STATE_BYTES] == sink.recorded[metrics.STORED_BYTES] == 4
