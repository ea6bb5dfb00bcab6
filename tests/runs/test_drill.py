"""The drill passes an agent that is right, and catches each known way to be wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from soak import SOAK

from perdure.errors import UsageError
from perdure.testing.drill import drill
from perdure.testing.fake_airline import AirlineProcess

AGENTS = Path(__file__).with_name("drilled.py")


def agent(name: str) -> str:
    return f"{AGENTS}:{name}"


@pytest.mark.parametrize("name", ["right", "right_async", "undone", "pinned"] if SOAK else ["undone"])
def test_an_agent_that_is_right_passes_at_every_point(name: str) -> None:
    report = drill(agent(name), ["NYC"], random_kills=6 if SOAK else 1)
    assert report.ok, report.text()
    assert not report.notes, report.text()
    assert report.kills >= report.points > 8
    assert report.same_result == report.trials
    assert report.recover_s
    assert "power-loss" in report.text()


def test_random_kills_do_kill() -> None:
    report = drill(agent("right"), ["NYC"], random_kills=4, seed=5)
    assert report.ok, report.text()
    assert report.kills > report.points


def test_a_post_in_a_plain_step_is_an_effect_nobody_marked(tmp_path: Path) -> None:
    with AirlineProcess(tmp_path / "airline.db") as server:
        report = drill(agent("unmarked_post"), [f"{server.url}/book"], random_kills=0)
    assert not report.ok
    assert any("pay" in found and "POST" in found for found in report.unmarked), report.text()
    assert not report.notes  # a request that is judged is not noted too


def test_a_file_written_in_a_plain_step_is_an_effect_nobody_marked(tmp_path: Path) -> None:
    report = drill(agent("unmarked_file"), [str(tmp_path / "out.txt")], random_kills=0)
    assert not report.ok
    assert any("write_file" in found for found in report.unmarked), report.text()


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("unmarked_async", ["write_later", "write_elsewhere"]),
        ("unmarked_generator", ["write_in_parts"]),
        ("unmarked_async_generator", ["awrite_in_parts"]),
    ][:: 1 if SOAK else 2],
)
def test_nor_may_a_step_that_awaits_or_yields_write_one(name: str, steps: list[str], tmp_path: Path) -> None:
    report = drill(agent(name), [str(tmp_path / "out")], random_kills=0)
    assert not report.ok
    assert [found.partition(": writes ")[0] for found in report.unmarked] == steps, report.text()
    assert not report.failures, report.text()


@pytest.mark.parametrize("name", ["main_body", "async_main_body"] if SOAK else ["async_main_body"])
def test_nor_may_the_durable_function_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    report = drill(agent(name), [str(path)], random_kills=0)
    assert not report.ok
    assert report.unmarked == [f"{name} itself: writes {path}: put it into an effect"], report.text()


def test_a_client_that_the_drill_does_not_know_is_noted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = drill(agent("raw_sockets"), [port], random_kills=0)
    assert report.ok, report.text()
    advice = f"talks to 127.0.0.1:{port} by itself: if that changes something there, mark it as an effect"
    assert report.notes == [f"talk: {advice}", f"atalk: {advice}"]
    assert f"to be looked at: talk: {advice}" in report.text()


def test_an_undo_that_is_repeated_without_a_key_is_done_twice() -> None:
    report = drill(agent("undo_repeated"), ["NYC"], random_kills=0)
    assert not report.ok
    assert report.effects_twice > 0, report.text()
    assert any("give_back was done 2 times" in problem for one in report.failures for problem in one.problems)


def test_with_real_effects_one_that_does_not_use_its_key_is_done_twice(tmp_path: Path) -> None:
    report = drill(agent("key_not_used"), [str(tmp_path / "sent.txt")], random_kills=0, real=True)
    assert not report.ok
    assert report.effects_twice > 0, report.text()
    assert any("was done 2 times" in problem for failure in report.failures for problem in failure.problems)
    assert report.failures[0].timeline


def test_with_real_effects_one_that_uses_its_key_passes(tmp_path: Path) -> None:
    report = drill(agent("key_used"), [str(tmp_path / "sent.txt")], random_kills=0, real=True)
    assert report.effects_twice == 0, report.text()


def test_with_real_effects_undos_are_real_too_and_judged(tmp_path: Path) -> None:
    report = drill(agent("really_undone"), [str(tmp_path / "put")], random_kills=0, real=True)
    assert report.ok, report.text()
    assert (tmp_path / "put.undone").read_text().count("undone") > 1  # the rehearsal's, and one of most trials


def test_state_in_a_global_gives_another_result() -> None:
    report = drill(agent("state_in_a_global"), ["x"], random_kills=0)
    assert not report.ok
    assert report.same_result < report.trials, report.text()


def test_an_order_that_depends_on_time_is_not_deterministic() -> None:
    report = drill(agent("order_by_time"), ["NYC"], random_kills=0)
    assert not report.ok
    shown = report.text()
    assert "did not go the way that its journal says" in shown, shown


def test_a_result_that_depends_on_time_differs() -> None:
    report = drill(agent("result_by_time"), ["NYC"], random_kills=0)
    assert report.same_result < report.trials, report.text()


def test_on_postgresql_the_database_is_restarted_too() -> None:
    report = drill(agent("right_async"), ["NYC"], random_kills=2, postgres=True)
    assert report.ok, report.text()
    assert not report.notes, report.text()  # what Perdure itself does is not the agent's
    assert report.restarts >= 2


def test_workers_are_killed_and_stopped() -> None:
    report = drill(agent("right_async"), ["NYC"], random_kills=2, workers=3)
    assert report.ok, report.text()
    assert report.kills == 2


def test_a_function_that_is_not_named_or_never_ends_is_refused() -> None:
    with pytest.raises(UsageError, match=r"app\.py:travel"):
        drill("app.py", [])


def test_the_command_prints_a_table_and_exits_with_1_on_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure", "drill"]
    done = subprocess.run(
        [*command, agent("state_in_a_global"), "--args", "x", "--kills", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "BAD" in done.stdout
    assert "process" in done.stdout


def test_a_run_that_another_entry_point_cannot_resume_is_found() -> None:
    report = drill(agent("named_by_module"), ["NYC"], random_kills=0)
    assert not report.ok
    assert any("__mp_main__.search_here" in problem for one in report.failures for problem in one.problems), (
        report.text()
    )


def test_a_reconcile_that_raises_fails_the_drill() -> None:
    report = drill(agent("looks_wrong"), ["tea"], random_kills=0)
    assert not report.ok
    assert "reconcile of drilled.order raised KeyError" in report.text()
    assert report.same_result == report.trials  # a person can still settle it
