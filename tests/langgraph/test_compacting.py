"""Compaction: smaller, and all is read as before, while others write and after a failure at any point."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graph_kit import at, human, talking
from langchain_core.messages import HumanMessage

from perdure.errors import OutcomeUnknown
from perdure.langgraph import Compacted, PerdureSaver


def words(turn: int) -> HumanMessage:
    return human(" ".join(f"word{(turn * 7919 + at * 104729) % 1000}" for at in range(60)))


def talk(saver: PerdureSaver, thread: str, turns: int) -> None:
    graph = talking(saver)
    for turn in range(turns):
        graph.invoke({"messages": [words(turn)]}, at(thread))


def everything(saver: PerdureSaver) -> list[Any]:
    return [tuple(one) for one in saver.list(None)]


def hashes(saver: PerdureSaver, thread: str) -> list[bytes]:
    return [one._record.hash for one in saver.store.thread(thread).history(limit=None)]


def test_what_is_read_stays_and_takes_less(saver: PerdureSaver) -> None:
    for thread in ("a", "b"):
        talk(saver, thread, 40)
    before, chained, size = everything(saver), hashes(saver, "a"), saver.store.ops.stats().stored_bytes
    steps: list[tuple[int, int]] = []
    done = saver.compact(progress=lambda now, of: steps.append((now, of)))
    assert done.threads == done.checkpoints == 0
    assert done.saved_bytes > 0
    assert saver.store.ops.stats().stored_bytes == size - done.saved_bytes
    assert steps == [(1, 2), (2, 2)]
    assert everything(saver) == before
    assert hashes(saver, "a") == chained
    assert saver.store.ops.verify().ok
    assert saver.compact() == Compacted(0, 0, 0)
    talk(saver, "a", 2)
    assert saver.store.ops.verify().ok


async def test_compaction_in_async_code_applies_retention(saver_url: str) -> None:
    async with PerdureSaver(saver_url, keep_last=3) as saver:
        assert await saver.acompact() == Compacted(0, 0, 0)
        talk(saver, "t", 4)
        done = await saver.acompact()
        assert done.checkpoints > 0
        assert len([one async for one in saver.alist(at("t"))]) == 3
        assert (await asyncio.to_thread(saver.store.ops.verify)).ok


def test_an_sqlite_file_gives_its_space_back(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with PerdureSaver(str(path)) as saver:
        talk(saver, "kept", 3)
        saver.put_writes(at("kept", checkpoint_id="1", checkpoint_ns=""), [("big", os.urandom(4_000_000))], "task")
        saver.delete_thread("kept")
        talk(saver, "kept", 1)
        saver.compact()
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 1_000_000
        assert saver.store.ops.verify().ok


def test_others_write_meanwhile(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        talk(saver, "t", 20)
        writing = threading.Thread(target=talk, args=(other, "t", 20))
        writing.start()
        rounds = 0
        while writing.is_alive() or rounds == 0:
            saver.compact()
            rounds += 1
        writing.join()
        assert len(list(saver.list(at("t")))) == 120
        assert saver.store.ops.verify().ok


@pytest.mark.parametrize("point", ["begin", "statement:0", "commit", "committed"])
def test_a_failure_at_any_point_changes_nothing_that_is_read(tmp_path: Path, point: str) -> None:
    path = str(tmp_path / "agent.db")
    with PerdureSaver(path) as saver:
        talk(saver, "t", 30)
        before = everything(saver)
    count = failures = 0
    while True:
        fail = _failing(point, count)
        with PerdureSaver(path, hook=fail) as saver:
            try:
                saver.compact()
            except (RuntimeError, OutcomeUnknown):
                failures += 1
            else:
                break
        with PerdureSaver(path) as saver:
            assert everything(saver) == before
            assert saver.store.ops.verify().ok
        count += 1
    assert failures > 0


def _failing(point: str, after: int) -> Callable[[str], None]:
    left = [after]

    def hook(where: str) -> None:
        if where == point:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("injected")

    return hook
