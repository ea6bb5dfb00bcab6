"""An import that is killed, wherever that may be, is finished by the next one; nothing is there twice or half."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from graph_kit import asking, at, human, inner, outer, talking
from import_kit import assert_equal, everything, kept_writes, raw_writes, stock

from perdure.langgraph import PerdureSaver
from perdure.langgraph.importing import import_langgraph
from perdure.storage.base import ConstraintFailed

SCRIPT = Path(__file__).with_name("import_run.py")
KILLS = 30 if os.environ.get("PERDURE_SOAK") else 4


def run(source: str, target: str, statements: int) -> tuple[int, list[int]]:
    """The exit code of the process, and what it said: steps, checkpoints, skipped."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), source, target, str(statements)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [int(word) for word in done.stdout.split()]


@pytest.mark.timeout(240)
def test_killed_and_run_again(tmp_path: Path, saver_url: str) -> None:
    source = str(tmp_path / "old.sqlite")
    with stock(source) as saver:
        for turn in range(4):
            talking(saver).invoke({"messages": [human(f"turn {turn}")]}, at("chat"))
        asking(saver).invoke({"items": []}, at("asking"))
        outer(saver, inner(ask=True)).invoke({"topic": "tides"}, at("nested"))
        count = len(everything(saver))
    writes = raw_writes(source)
    code, [steps, checkpoints, _] = run(source, str(tmp_path / "whole.db"), 0)
    assert (code, checkpoints) == (0, count)
    rng = random.Random(20)
    for _ in range(KILLS):
        code, _ = run(source, saver_url, rng.randrange(steps // 4, steps // 2))
        with PerdureSaver(saver_url) as mine:
            for key in everything(mine):  # what is there is whole
                assert kept_writes(mine, key) == writes.get(key, set())
            assert mine.store.verify().ok
    with PerdureSaver(saver_url) as mine, stock(source) as theirs:
        done = import_langgraph(source, mine)
        assert done.ok
        assert done.checkpoints + done.skipped == count
        assert_equal(mine, theirs)
        assert mine.store.stats().checkpoints == count


@pytest.fixture
def old(tmp_path: Path) -> str:
    path = str(tmp_path / "old.sqlite")
    with stock(path) as saver:
        for thread in ("a", "b"):
            talking(saver).invoke({"messages": [human("hi")]}, at(thread))
    return path


class Fault:
    """A driver's hook that raises once, at a step of a write transaction."""

    def __init__(self, error: Exception) -> None:
        self.error, self.left = error, 0

    def __call__(self, step: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def test_a_failed_transaction_leaves_what_was_before_it(old: str, tmp_path: Path) -> None:
    fault = Fault(OSError("injected"))
    with PerdureSaver(str(tmp_path / "new.db"), hook=fault) as mine, stock(old) as theirs:
        for fault.left in (20, 40):
            with pytest.raises(OSError, match="injected"):
                import_langgraph(old, mine)
            assert everything(mine) == {}
        assert import_langgraph(old, mine).ok
        assert_equal(mine, theirs)


@pytest.mark.parametrize("step", [15, 25, 35, 45])
def test_a_transaction_that_is_run_again_starts_from_what_is_stored(old: str, saver_url: str, step: int) -> None:
    """What the flows have remembered of it never happened: an id that was taken is drawn anew."""
    fault = Fault(ConstraintFailed("the id is taken", kind="unique"))
    with PerdureSaver(saver_url, hook=fault) as mine, stock(old) as theirs:
        fault.left = step
        done = import_langgraph(old, mine)
        assert (done.checkpoints, done.ok) == (6, True)
        assert fault.left < 0
        assert_equal(mine, theirs)
        assert mine.store.stats().checkpoints == 6
