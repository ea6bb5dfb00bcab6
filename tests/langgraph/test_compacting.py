"""Compacting a store of graphs: nothing that is read changes, retention is applied, and space is given back."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from graph_kit import at, human, talking

from perdure.langgraph import PerdureSaver


def talk(saver: PerdureSaver, thread: str, turns: int) -> None:
    graph = talking(saver)
    for turn in range(turns):
        words = " ".join(f"word{(turn * 7919 + at * 104729) % 1000}" for at in range(60))
        graph.invoke({"messages": [human(words)]}, at(thread))


def everything(saver: PerdureSaver) -> list[Any]:
    return [tuple(one) for one in saver.list(None)]


def test_what_is_read_stays(saver: PerdureSaver) -> None:
    for thread in ("a", "b"):
        talk(saver, thread, 20)
    before = everything(saver)
    saver.store._context.clock_us = lambda: time.time_ns() // 1000 + 3_600_000_000  # an hour later
    done = saver.store.ops.compact(vacuum=True)
    assert (done.threads, done.checkpoints) == (0, 0)
    assert everything(saver) == before
    assert saver.store.ops.verify().ok
    talk(saver, "a", 2)
    assert saver.store.ops.verify().ok


async def test_compaction_in_async_code_applies_retention(saver_url: str) -> None:
    async with PerdureSaver(saver_url) as saver:
        saver.store.ops.retention(checkpoints=3)
        assert (await asyncio.to_thread(saver.store.ops.compact, vacuum=True)).checkpoints == 0
        talk(saver, "t", 4)
        done = await asyncio.to_thread(saver.store.ops.compact, vacuum=True)
        assert done.checkpoints > 0
        assert len([one async for one in saver.alist(at("t"))]) == 3
        assert (await asyncio.to_thread(saver.store.ops.verify)).ok


def test_an_sqlite_file_gives_its_space_back(tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "agent.db")) as saver:
        talk(saver, "kept", 3)
        saver.put_writes(at("kept", checkpoint_id="1", checkpoint_ns=""), [("big", os.urandom(4_000_000))], "task")
        saver.delete_thread("kept")
        talk(saver, "kept", 1)
        saver.store.ops.compact(vacuum=True)
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 1_000_000
        assert saver.store.ops.verify().ok
