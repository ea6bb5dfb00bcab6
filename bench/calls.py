"""How many Python functions of Perdure a warm operation calls, and in how many of its modules. No clock: any machine
counts the same. A detour on a hot path shows here first; tests hold the bounds of a save, a step and an effect.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import perdure
from bench.measure import Row, Run

_SOURCE = str(Path(perdure.__file__).parent)
_WARM = 4  # what is made once is made
_STATE = {"messages": [{"role": "user", "content": f"message {number} of a conversation"} for number in range(20)]}
_in_run: dict[str, Counter[str]] = {}


@perdure.step
def _step(number: int) -> dict[str, int]:
    return {"number": number}


@perdure.effect
def _effect(number: int, key: perdure.IdempotencyKey) -> dict[str, int]:
    return {"number": number}


@perdure.durable
def _counted(folder: str) -> None:
    _in_run["a step"], _in_run["an effect"] = _calls(_step), _calls(_effect)
    with perdure.open(folder) as store:
        memory, thread = store.memory("run"), store.thread("run")
        _in_run["a save in a run"] = _calls(lambda number: thread.save({**_STATE, "number": number}))
        _in_run["a memory put in a run"] = _calls(lambda number: memory.put(f"key{number}", {"likes": number}))


def calls(run: Run) -> list[Row]:
    """Count the calls of the operations that agents do most."""
    folder = str(run.folder / "calls.db")
    with perdure.open(folder) as store:
        thread, memory = store.thread("warm"), store.memory("plain")
        counted = {
            "a save": _calls(lambda number: thread.save({**_STATE, "number": number})),
            "a load": _calls(lambda _: store.thread("warm").load()),
            "a memory put": _calls(lambda number: memory.put(f"key{number}", {"likes": number})),
        }
        store.run(_counted, folder).result()
    counted |= _in_run
    return [
        Row(f"calls of {name}", found.total(), "calls", note=f"{len(found)} modules") for name, found in counted.items()
    ]


def _calls(operation: Callable[[int], Any]) -> Counter[str]:
    """Return the calls of an operation's last repetition, by the module that has the function."""
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_SOURCE):
            found[path] += 1

    for number in range(_WARM):
        operation(number)
    sys.setprofile(profile)
    try:
        operation(_WARM)
    finally:
        sys.setprofile(None)
    return found
