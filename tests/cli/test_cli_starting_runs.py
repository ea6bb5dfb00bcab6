"""`perdure start` queues a run, `perdure worker --trust` runs it with the app's data classes, `perdure run delete`
removes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs_kit import Run

import perdure
from perdure.testing.processes import ForkServer

APP = """
from dataclasses import dataclass

import perdure


@dataclass
class Order:
    item: str

    @perdure.durable
    def ship(self) -> str:
        return self.item


@perdure.step
def find(item: str) -> Order:
    return Order(item)


@perdure.durable
def starting_buy(item: str, count: int = 1) -> str:
    return f"{count} x {find(item).item}"
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path) -> Path:
    (tmp_path / "buying_app.py").write_text(APP)
    perdure.open(str(tmp_path / "agent.db")).close()
    return tmp_path


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("scripts:command") as started:
        yield started


@pytest.fixture
def run_cli(place: Path, fork_server: ForkServer) -> Run:
    """The command in a process of its own: the app must not stay loaded here."""

    def call(*command: str) -> tuple[int, str, str]:
        [(code, out, err)] = fork_server.start(str(place), *command).lines()
        return code, out, err

    return call


def test_a_run_is_queued_run_and_deleted_from_the_command_line(place: Path, run_cli: Run) -> None:
    start = ["start", "buying_app.py:starting_buy", "--args", '["seat", 2]', "--id", "r", "--queue", "shop"]
    assert run_cli(*start) == (0, "r is queued: a worker will run it\n", "")
    code, out, _ = run_cli(*start, "--json")
    assert (code, json.loads(out)) == (0, {"run": "r", "status": "queued"})  # the same id is the same run
    worker = ["worker", "buying_app.py", "--once", "--queue", "shop"]
    code, out, _ = run_cli(*worker, "--trust", "buying_app.")
    assert (code, out) == (0, "1 done\n")
    with perdure.open(str(place / "agent.db")) as store:
        assert store.get_run("r").result() == "2 x seat"
    code, _, err = run_cli("run", "delete", "r")
    assert code != 0
    assert "give --yes" in err
    assert run_cli("run", "delete", "r", "--yes") == (0, "deleted r\n", "")
    code, _, err = run_cli("run", "delete", "r", "--yes")
    assert code != 0
    assert "there is no run 'r'" in err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["buying_app.py"], "which function? Write app.py:travel, not 'buying_app.py'"),
        (["buying_app.py:Order"], "buying_app.py:Order is not a durable function: put @perdure.durable above it"),
        (["buying_app.py:starting_buy"], "item': pass its arguments with --args '[\"NYC\"]'\n"),
        (["buying_app.py:starting_buy", "--args", "[1"], "--args"),
        (["buying_app.py:Order.ship"], "Order.ship is a method: write it with an object of your module"),
    ],
)
def test_a_mistake_is_said_in_a_line_and_nothing_is_queued(
    place: Path, run_cli: Run, command: list[str], said: str
) -> None:
    code, out, err = run_cli("start", *command)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    with perdure.open(str(place / "agent.db")) as store:
        assert store.runs() == []
