"""`saver.undo(config)` undoes the effects of a graph's nodes, newest first and each once, and ends the thread's run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import undoing_run
from graph_kit import MODES, at
from langgraph.graph import START, StateGraph
from two_runners import Trip
from undoing_run import CONFIG, make_graph
from workshop import end_leases

import perdure
from perdure.errors import InDoubt, NotFound, RunUndone
from perdure.langgraph import PerdureSaver
from perdure.runs.calls import saga
from perdure.testing.processes import ForkServer

BOOKED = ["book train", "book hotel", "book boat"]
CANCELLED = ["cancel boat", "cancel hotel", "cancel train"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    undoing_run.use(tmp_path)
    return tmp_path / "log"


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("undoing_run:child") as opened:
        yield opened


def failed(saver: PerdureSaver) -> Any:
    graph = make_graph(saver)
    with pytest.raises(ValueError, match="no seat"):
        graph.invoke({"booked": []}, CONFIG)
    return graph


@pytest.mark.parametrize("mode", MODES)
async def test_a_failed_graph_undoes_its_effects_newest_first(saver: PerdureSaver, log: Path, mode: str) -> None:
    graph = failed(saver)
    for _ in range(2):
        assert (saver.undo(CONFIG) if mode == "sync" else await saver.aundo(CONFIG)) == 3
    assert log.read_text().split("\n")[:-1] == BOOKED + CANCELLED
    assert graph.get_state(CONFIG).next == ()
    assert graph.invoke(None, CONFIG)["booked"] == ["train", "hotel"]  # nothing runs
    with pytest.raises(ValueError, match="no seat"):
        graph.invoke({"booked": []}, CONFIG)  # a new input starts again, with effects of its own
    assert log.read_text().split("\n")[:-1] == BOOKED + CANCELLED + BOOKED
    saver.undo(CONFIG)
    assert log.read_text().split("\n")[:-1] == 2 * (BOOKED + CANCELLED)
    assert saver.store.ops.verify().ok
    with pytest.raises(NotFound):
        saver.undo(at("no such thread"))


@pytest.mark.parametrize("item", ["boat", "train"])
def test_an_undo_that_is_killed_is_continued_and_undoes_nothing_twice(
    saver: PerdureSaver, saver_url: str, tmp_path: Path, log: Path, fork_server: ForkServer, item: str
) -> None:
    graph = failed(saver)
    child = fork_server.start(saver_url, str(tmp_path), item)
    assert list(child.lines()) == []  # killed
    end_leases(saver.store)
    with pytest.raises(RunUndone, match="undo it to the end"):
        graph.invoke(None, CONFIG)
    assert saver.undo(CONFIG) == 3
    assert log.read_text().split("\n")[:-1] == BOOKED + CANCELLED
    assert graph.get_state(CONFIG).next == ()


def test_an_undo_that_breaks_off_before_the_thread_is_ended_leaves_no_task_that_could_go_on(
    saver: PerdureSaver, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = failed(saver)

    def broken(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(saga, "undo_effect", broken)
        with pytest.raises(KeyboardInterrupt):
            saver.undo(CONFIG)
    with pytest.raises(RunUndone):
        graph.invoke(None, CONFIG)
    assert saver.undo(CONFIG) == 3
    assert log.read_text().split("\n")[:-1] == BOOKED + CANCELLED


def test_an_effect_in_doubt_is_settled_by_a_person_before_the_undo(saver: PerdureSaver) -> None:
    done: list[str] = []

    @perdure.effect(name="pay_in_doubt", undo=lambda euros: done.append(f"back {euros}"))
    def pay(euros: int) -> None:
        done.append(f"pay {euros}")
        raise TimeoutError

    builder = StateGraph(Trip)
    builder.add_node("pay", lambda state: pay(90))
    builder.add_edge(START, "pay")
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(InDoubt):
        graph.invoke({"booked": []}, CONFIG)
    with pytest.raises(InDoubt, match="then undo the thread again") as doubt:
        saver.undo(CONFIG)
    saver.store.get_run(doubt.value.run).resolve(doubt.value.step, done=None)
    assert saver.undo(CONFIG) == 1
    assert done == ["pay 90", "back 90"]


def test_the_command_line_undoes_a_thread(saver: PerdureSaver, saver_url: str, log: Path) -> None:
    failed(saver)
    app = str(Path(undoing_run.__file__))
    undo = [sys.executable, "-m", "perdure", "--store", saver_url, "thread", "undo", app, "trip", "--who", "maria"]
    code = f"import undoing_run, pathlib; undoing_run.use(pathlib.Path({str(log.parent)!r})); "
    code += f"from perdure.cli.app import main; raise SystemExit(main({undo[3:]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(app).parent, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "trip: 3 effects undone; its run has ended\n"), done.stderr
    assert log.read_text().split("\n")[:-1] == BOOKED + CANCELLED
    assert [(one.who, one.action) for one in saver.store.ops.actions()] == [("maria", "undo")]
