"""The drill passes an agent that is right, and catches each known way to be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK, spread

import perdure.testing.drill
from perdure.errors import UsageError
from perdure.testing.drill import RunDrill, drill
from perdure.testing.fake_airline import AirlineProcess
from perdure.testing.processes import ForkServer

AGENTS = Path(__file__).with_name("drilled.py")


def agent(name: str) -> str:
    return f"{AGENTS}:{name}"


@pytest.mark.parametrize("name", ["right", "right_async", "undone", "pinned"] if SOAK else ["right"])
def test_an_agent_that_is_right_passes_at_every_point_and_at_random_times(name: str) -> None:
    report = drill(agent(name), ["NYC"], random_kills=4, seed=5)
    assert report.ok, report.text()
    assert report.kills >= report.points > 8
    assert report.trials == report.points + 4
    assert report.same_result == report.trials
    assert report.recover_s


def test_tasks_have_the_same_paths_in_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it kills at no point of a task, and results of steps and effects there are not those of the rehearsal."""
    killed_at = RunDrill.killed_at

    def first_in_task(self: RunDrill, fork_server: ForkServer, trials: list[dict[str, Any]]) -> None:
        killed_at(self, fork_server, [trial for trial in trials if "@" in trial["kill"][1]][:1])

    monkeypatch.setattr(RunDrill, "killed_at", first_in_task)
    report = drill(agent("in_tasks"), ["NYC"], random_kills=0)
    assert report.ok, report.text()
    assert report.kills == report.trials == 1


@pytest.fixture
def only_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the undisturbed run shows by itself: nothing is killed."""
    monkeypatch.setattr(perdure.testing.drill.RunDrill, "killed_at", lambda *_: None)


@pytest.fixture
def some_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill at some of the points, in a soak at all: what is tested shows at any of them."""
    killed_at = RunDrill.killed_at
    monkeypatch.setattr(RunDrill, "killed_at", lambda self, server, trials: killed_at(self, server, spread(trials, 9)))


@pytest.fixture
def points_of_undos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill at the points of undos alone, in a soak at all."""
    killed_at = RunDrill.killed_at

    def in_undos(self: RunDrill, fork_server: ForkServer, trials: list[dict[str, Any]]) -> None:
        killed_at(self, fork_server, [trial for trial in trials if SOAK or trial["kill"][1].startswith("undo:")])

    monkeypatch.setattr(RunDrill, "killed_at", in_undos)


@pytest.mark.usefixtures("only_rehearsed")
def test_what_changes_the_world_in_a_plain_step_or_in_the_function_itself_is_found(tmp_path: Path) -> None:
    with AirlineProcess(tmp_path / "airline.db") as server:
        report = drill(agent("unmarked"), [f"{server.url}/behave", str(tmp_path)])
    assert not report.ok
    assert report.unmarked == [
        "pay: sends POST /behave HTTP/1.1",
        f"write_file: writes {tmp_path}/file",
        f"write_later: writes {tmp_path}/later",
        f"write_elsewhere: writes {tmp_path}/elsewhere",
        f"write_in_parts: writes {tmp_path}/parts",
        f"awrite_in_parts: writes {tmp_path}/aparts",
        f"unmarked itself: writes {tmp_path}/main: put it into an effect",
    ], report.text()


@pytest.mark.usefixtures("only_rehearsed")
def test_nor_may_a_blocking_function_itself(tmp_path: Path) -> None:
    report = drill(agent("main_body"), [str(tmp_path / "out")])
    assert report.unmarked == [f"main_body itself: writes {tmp_path}/out: put it into an effect"], report.text()


@pytest.mark.usefixtures("points_of_undos")
def test_an_undo_that_is_repeated_without_a_key_is_done_twice() -> None:
    report = drill(agent("undo_repeated"), ["NYC"], random_kills=0)
    assert not report.ok
    assert report.effects_twice > 0, report.text()
    assert any("give_back was done 2 times" in problem for one in report.failures for problem in one.problems)


@pytest.mark.usefixtures("some_points")
def test_with_real_effects_one_that_does_not_use_its_key_is_done_twice(tmp_path: Path) -> None:
    report = drill(agent("key_not_used"), [str(tmp_path / "sent.txt")], random_kills=0, real=True)
    assert not report.ok
    assert report.effects_twice > 0, report.text()
    assert any("was done 2 times" in problem for failure in report.failures for problem in failure.problems)
    assert report.failures[0].timeline


@pytest.mark.usefixtures("some_points")
def test_with_real_effects_one_that_uses_its_key_passes(tmp_path: Path) -> None:
    report = drill(agent("key_used"), [str(tmp_path / "sent.txt")], random_kills=0, real=True)
    assert report.effects_twice == 0, report.text()


@pytest.mark.usefixtures("some_points")
def test_with_real_effects_undos_are_real_too_and_judged(tmp_path: Path) -> None:
    report = drill(agent("really_undone"), [str(tmp_path / "put")], random_kills=0, real=True)
    assert report.ok, report.text()
    assert (tmp_path / "put.undone").read_text().count("undone") > 1  # the rehearsal's, and one of most trials


@pytest.mark.usefixtures("some_points")
def test_an_order_that_depends_on_time_is_not_deterministic() -> None:
    report = drill(agent("order_by_time"), ["NYC"], random_kills=0)
    assert not report.ok
    shown = report.text()
    assert "diverged from its journal" in shown, shown


def test_workers_are_killed_and_stopped() -> None:
    report = drill(agent("right_async"), ["NYC"], random_kills=1, workers=3)
    assert report.ok, report.text()
    assert report.kills == 1


def test_a_function_that_is_not_named_or_never_ends_is_refused() -> None:
    with pytest.raises(UsageError, match=r"app\.py:travel"):
        drill("app.py", [])


def test_state_in_a_global_gives_another_result_and_the_command_exits_with_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure", "drill"]
    done = subprocess.run(
        [*command, agent("state_in_a_global"), "--args", "x", "--kills", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "BAD" in done.stdout
    assert "it ended done" in done.stdout
    assert "process" in done.stdout


@pytest.mark.usefixtures("some_points")
def test_a_run_that_another_entry_point_cannot_resume_is_found() -> None:
    report = drill(agent("named_by_module"), ["NYC"], random_kills=0)
    assert not report.ok
    assert any("__mp_main__.search_here" in problem for one in report.failures for problem in one.problems), (
        report.text()
    )


@pytest.mark.usefixtures("some_points")
def test_a_reconcile_that_raises_fails_the_drill() -> None:
    report = drill(agent("looks_wrong"), ["tea"], random_kills=0)
    assert not report.ok
    assert "reconcile of drilled.order raised KeyError" in report.text()
    assert report.same_result == report.trials  # a person can still settle it


@pytest.mark.usefixtures("some_points")
def test_an_agent_may_print_and_a_drill_of_one_that_fails_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    report = drill(agent("talks_and_fails"), ["NYC"], random_kills=0)
    assert report.ok, report.text()
    assert "no seat" in report.undisturbed_error
    assert "the undisturbed run failed, and so must every trial" in report.text()
    assert "on its way to NYC" in capfd.readouterr().err


def test_a_fork_server_ends_the_child_that_a_failed_test_left_behind() -> None:
    with ForkServer("scripts:wait") as server:
        left = server.start()
        assert next(left.lines()) == "here"
        following = server.start()
        assert next(following.lines()) == "here"
        with pytest.raises(ProcessLookupError):
            os.kill(left.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(following.pid, 0)
