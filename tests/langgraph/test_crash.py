"""Processes that are killed in the middle: no finished task runs twice, and no operation is ever half done.

`put` is a barrier: it waits until the writes that are pending on its parent are stored. So a crash between a task's
end and the next checkpoint, wherever it comes, finds the task's result. LangGraph's own savers lose it
(langgraph#8039).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_run
import pytest
from checkpoints import everything
from soak import SOAK, spread

import perdure
from perdure.langgraph import PerdureSaver
from perdure.testing.processes import ForkServer

TRIALS = 20 if SOAK else 2
POINTS_MAX = 1000 if SOAK else 2  # of an operation, at which it is killed, besides its last commit
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """Forks processes that die, or go on where others died."""
    with ForkServer("crash_run:child") as opened:
        yield opened


class Trial:
    """A run that is killed and run again, with a log of what its tasks did."""

    def __init__(self, folder: Path, kind: str, url: str, durability: str, way: str, *, hold_writes: bool) -> None:
        self.thread = f"thread {next(_numbers)}"
        self.log = folder / f"{self.thread}.log"
        self.arguments = [kind, url, self.thread, durability, str(self.log), way]
        self.hold_writes = hold_writes

    def tasks_done_twice(self, fork_server: ForkServer) -> list[str]:
        assert list(fork_server.start("crash", *self.arguments, self.hold_writes).lines()) == [], (
            "the process was not killed"
        )
        assert sorted(self.log.read_text().split(), key=int) == [str(n) for n in range(crash_run.TASKS)]
        assert list(fork_server.start("finish", *self.arguments).lines()) == [crash_run.TOTAL]
        return [line for line, times in Counter(self.log.read_text().split()).items() if times > 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["sync", "async", "exit"] if SOAK else ["sync", "async"])
def test_put_is_a_barrier_for_its_parents_pending_writes(
    saver_url: str, tmp_path: Path, fork_server: ForkServer, durability: str
) -> None:
    """Killed as the superseding put is about to commit: every result is stored by then."""
    twice = {}
    for number in range(TRIALS):
        way = "async" if number % 2 else "blocking"
        hold_writes = number % 4 < 2 and durability != "exit"  # or in the order in which they come
        trial = Trial(tmp_path, "perdure", saver_url, durability, way, hold_writes=hold_writes)
        twice[number] = trial.tasks_done_twice(fork_server)
    assert {number: tasks for number, tasks in twice.items() if tasks} == {}
    with perdure.open(saver_url) as store:
        report = store.ops.verify()
        assert report.ok, report.problems


@pytest.mark.parametrize("way", ["blocking", "async"])
def test_the_harness_sees_the_loss_where_no_put_waits(
    saver_url: str, tmp_path: Path, fork_server: ForkServer, way: str
) -> None:
    """The same saver, but for the waiting; or the tests above would prove nothing."""
    trial = Trial(tmp_path, "without barrier", saver_url, "sync", way, hold_writes=True)
    assert trial.tasks_done_twice(fork_server)


def test_the_harness_sees_the_loss_of_langgraphs_own_saver(tmp_path: Path, fork_server: ForkServer) -> None:
    url = str(tmp_path / "stock.db")
    trials = [Trial(tmp_path, "stock", url, "sync", "blocking", hold_writes=True) for _ in range(3)]
    twice = [len(trial.tasks_done_twice(fork_server)) for trial in trials]
    print(f"\ntasks of {crash_run.TASKS} done twice after a crash: {twice}")
    assert sum(twice) > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("saver_url", "operation"),
    [("sqlite", one) for one in crash_run.OPERATIONS]
    + [("postgres", one) for one in spread(list(crash_run.OPERATIONS), 4)],
    indirect=["saver_url"],
)
def test_a_kill_at_any_statement_leaves_before_or_after(
    saver_url: str, fork_server: ForkServer, operation: str
) -> None:
    """Visible is the one or the other; everything verifies; and whoever does it again gets to the same end."""
    act, points = crash_run.OPERATIONS[operation], list[str]()
    with (
        perdure.open(saver_url, durability="normal") as store,
        PerdureSaver(saver_url, tenant="whole", hook=points.append) as whole,
    ):
        crash_run.prepare(whole)
        before = everything(whole)
        points.clear()
        act(whole)
        to_strike = chosen(points)
        after = everything(whole)
        assert before != after or operation == "put_writes_first"  # which shows only when its checkpoint comes
        outcomes = []
        for at in to_strike:
            saver = PerdureSaver(store.tenant(f"struck at {at}"))
            crash_run.prepare(saver)
            assert list(fork_server.start("strike", saver_url, f"struck at {at}", operation, at).lines()) == [], (
                "not killed"
            )
            seen = everything(saver)
            check_whole(seen, before, after, f"a kill at point {at}: {points[at - 1]}", operation)
            check_sound(saver)
            outcomes.append(seen == after)
            if seen != after:
                act(saver)
            assert everything(saver) == after
            check_sound(saver)
        assert outcomes == sorted(outcomes)  # nothing before a commit, everything after the last one


def chosen(points: list[str]) -> list[int]:
    """The numbers of the points to strike at: the last commit, right after it, and some of those before."""
    last = len(points) - points[::-1].index("commit")
    others = [at for at in range(1, len(points) + 1) if at not in (last, last + 1)]
    if len(others) > POINTS_MAX:
        others = random.Random(len(points)).sample(others, POINTS_MAX)
    return sorted([*others, last, last + 1])


def check_whole(seen: list[Any], before: list[Any], after: list[Any], when: str, operation: str) -> None:
    """Each thread is as it was or as it shall be; and all of them alike, but for what goes over many threads."""
    for thread in ("main", "bystander", "new", "copy"):
        was, shall_be, found = ([row for row in rows if row[0] == thread] for rows in (before, after, seen))
        assert found in (was, shall_be), f"{thread} is half done after {when}"
    assert operation == "delete_for_runs" or seen in (before, after), f"half done after {when}"


def check_sound(saver: PerdureSaver) -> None:
    report = saver.store.ops.verify()
    assert report.ok, [str(problem) for problem in report.problems]
