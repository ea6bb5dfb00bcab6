"""Every example runs and does what it says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO_S_MAX = 60


def run(name: str, folder: Path, *, code: int = 0) -> str:
    """Run an example in a folder of its own. What it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_there_is_a_test_for_every_example() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in text] == []


def test_the_demo_shows_everything_and_cleans_up(tmp_path: Path) -> None:
    started = time.monotonic()
    output = run("demo.py", tmp_path)
    assert time.monotonic() - started < DEMO_S_MAX
    assert "\x1b" not in output  # no terminal, no colours
    assert f"killed, exit code {-signal.SIGKILL}" in output
    assert "all 10 tasks are done" in output
    assert "0 problems" in output
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_was_killed_goes_on(tmp_path: Path) -> None:
    first = run("survives_a_kill.py", tmp_path, code=-signal.SIGKILL)
    second = run("survives_a_kill.py", tmp_path)
    assert first.count("places to see") == 3
    assert (second.count("known already"), second.count("places to see")) == (3, 2)
    with holdfast.open(str(tmp_path / "agent.db")) as store:
        assert len(store.thread("trip-42").load().state["found"]) == 5
        assert store.verify().ok


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    output = run("two_writers.py", tmp_path)
    assert "ann is the head: True; bob is the head: False" in output
    assert "['Dear all, hello', 'Dear friends']" in output
    assert "moved by somebody else" in output
    assert "left is 60" in output
    assert "votes counted: 8" in output


def test_an_agent_with_tools_is_killed_and_books_once(tmp_path: Path) -> None:
    output = run("tool_agent.py", tmp_path)
    assert f"killed, exit code {-signal.SIGKILL}" in output
    assert [f"turn {turn}" in output for turn in (1, 2, 3, 4)] == [True] * 4
    assert output.count("the model is called") == 4
    assert "Error: SoldOut: Grand Hotel Lisbon is sold out" in output
    assert "['LIS-0715', 'Pension Sol']" in output
    assert list(tmp_path.iterdir()) == []


def test_many_agents_share_a_store(tmp_path: Path) -> None:
    assert "50 agents saved 500 turns; 500 checkpoints verified: ok=True" in run("async_agents.py", tmp_path)


def test_old_classes_are_upgraded_and_unstorable_values_named(tmp_path: Path) -> None:
    output = run("custom_types.py", tmp_path)
    assert "upgraded: Trip(city='Lisbon', country='PT'" in output
    assert "price in cents: 41900" in output
    assert 'refused, nothing written: state["plan"][0]["then"]' in output


def test_a_langgraph_chat_travels_in_time_and_stays_small(tmp_path: Path) -> None:
    for _ in range(2):  # what an earlier run left does not matter
        output = run("langgraph_chat.py", tmp_path)
        assert "6 checkpoints, the newest first" in output
        assert "another way: ['Hello', 'To Oslo, please']" in output
        assert "threads of alice: ['alice-001', 'long']" in output
    in_full, stored = (int(size.replace(",", "")) for size in re.findall(r"([\d,]+) kB$", output, flags=re.MULTILINE))
    assert in_full > 20 * stored
    shown = re.findall(r"holdfast (show|log) (.*)", output)
    assert [command for command, _ in shown] == ["show", "log"]
    for command, arguments in shown:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli", command, *arguments.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
    with holdfast.open(str(tmp_path / "chat.db")) as store:
        assert store.verify().ok
