"""The child of the kill tests of autosave: changes a state without pause, and says what is durable of it."""

from __future__ import annotations

import asyncio
from typing import Any

import perdure
from perdure.testing.processes import Say

POLICIES: dict[str, Any] = {
    "every": perdure.autosave.every(3),
    "background": perdure.autosave.every(1),
    "async": perdure.autosave.every(2),
    "adaptive": perdure.autosave.adaptive(min_s=0, mtbf_s=1e-6),
}


def log_of(number: int) -> list[str]:
    """What the log holds at a number."""
    return [f"entry {each} " * 5 for each in range(number)]


def work(say: Say, url: str, mode: str) -> None:
    if mode == "async":
        asyncio.run(_awork(say, url, mode))
        return
    with perdure.open(url) as store:
        thread = store.thread(mode)
        with thread.autosave(POLICIES[mode], background=mode == "background", initial={"log": [], "n": 0}) as state:
            while True:
                _step(say, state)


async def _awork(say: Say, url: str, mode: str) -> None:
    initial = {"log": [], "n": 0}
    async with perdure.open(url) as store, store.thread(mode).autosave(POLICIES[mode], initial=initial) as state:
        while True:
            _step(say, state)
            await asyncio.sleep(0)


def _step(say: Say, state: Any) -> None:
    number = state["n"] + 1
    state.update(log=[*state["log"], f"entry {number - 1} " * 5], n=number)
    # How many of the last numbers may be lost: two changes each.
    say([number, -(-state.unsaved.changes // 2)])
