"""Workers that are killed while they resume a graph: each answer is taken once, and no effect happens twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from graph_kit import at
from resuming_run import make_graph
from two_runners import bookings
from workshop import end_leases

from perdure.langgraph import PerdureSaver
from perdure.testing.processes import ForkServer


@pytest.fixture(scope="module")
def fork_servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    with ForkServer("resuming_run:child") as one, ForkServer("resuming_run:child") as two:
        yield one, two


@pytest.mark.parametrize(("gate", "is_async"), [("before", True), ("after", False)])
def test_a_graph_whose_worker_was_killed_is_resumed_once(
    saver: PerdureSaver,
    saver_url: str,
    tmp_path: Path,
    fork_servers: tuple[ForkServer, ForkServer],
    gate: str,
    is_async: bool,
) -> None:
    """While the first worker is at it, no other one resumes the thread."""
    graph = make_graph(saver, tmp_path, is_async=is_async)
    for thread in ("a", "b"):
        asyncio.run(graph.ainvoke({"booked": []}, at(thread)))
    saver.store.answer("a", "LH400", who="maria")
    os.mkfifo(tmp_path / gate)
    first = fork_servers[0].start(saver_url, str(tmp_path), is_async)
    lines = first.lines()
    assert [next(lines), next(lines)] == ["ready", gate]
    assert list(fork_servers[1].start(saver_url, str(tmp_path), is_async).lines()) == ["ready", {}]
    first.kill()
    (tmp_path / gate).unlink()
    end_leases(saver.store)
    assert list(fork_servers[1].start(saver_url, str(tmp_path), is_async).lines()) == ["ready", {"resumed": 1}]
    assert graph.get_state(at("a")).values["booked"] == ["LH400", "end"]
    assert bookings(tmp_path) == ["LH400"]
    assert [question.thread for question in saver.store.questions()] == ["b"]
    assert list(fork_servers[1].start(saver_url, str(tmp_path), is_async).lines()) == ["ready", {}]
    assert saver.store.ops.verify().ok
