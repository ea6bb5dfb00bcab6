"""The state of a listed checkpoint can be had without blocking the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import perdure


def test_astate_loads_what_state_loads(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        thread = store.thread("t")
        for number in range(3):
            thread.save({"n": number})

        async def states() -> list[object]:
            return [await checkpoint.astate() async for checkpoint in thread.ahistory()]

        assert asyncio.run(states()) == [checkpoint.state for checkpoint in thread.history()]
