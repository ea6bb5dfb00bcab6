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

from holdfast.langgraph import HoldfastSaver
from holdfast.langgraph.importing import import_langgraph

SCRIPT = Path(__file__).with_name("import_run.py")
KILLS = 30 if os.environ.get("HOLDFAST_SOAK") else 4


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
        with HoldfastSaver(saver_url) as mine:
            for key in everything(mine):  # what is there is whole
                assert kept_writes(mine, key) == writes.get(key, set())
            assert mine.store.verify().ok
    with HoldfastSaver(saver_url) as mine, stock(source) as theirs:
        done = import_langgraph(source, mine)
        assert done.ok
        assert done.checkpoints + done.skipped == count
        assert_equal(mine, theirs)
        assert mine.store.stats().checkpoints == count


def test_a_run_that_was_rolled_back_is_forgotten(tmp_path: Path) -> None:
    """A failure inside a transaction, after the flows have remembered what they did in it: the same import goes on."""
    source = str(tmp_path / "old.sqlite")
    with stock(source) as saver:
        for thread in ("a", "b"):
            talking(saver).invoke({"messages": [human("hi")]}, at(thread))
    failures = iter([30, 60])
    state = {"steps": 0, "next": next(failures)}

    def hook(step: str) -> None:
        state["steps"] += 1
        if state["steps"] == state["next"]:
            state["next"] = next(failures, 0)
            raise OSError("injected")

    with HoldfastSaver(str(tmp_path / "new.db"), hook=hook) as mine, stock(source) as theirs:
        for _ in range(2):
            with pytest.raises(OSError, match="injected"):
                import_langgraph(source, mine)
        assert import_langgraph(source, mine).ok
        assert_equal(mine, theirs)
