"""Many items, or long texts, are indexed and decoded on threads: the event loop turns meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.memory import handle, reading, words

MANY = 150


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the thread of the test has indexed or decoded an item."""
    counted: Counter[str] = Counter()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            counted[name] += threading.current_thread() is threading.main_thread()
            return original(*args, **options)

        monkeypatch.setattr(module, name, noted)

    watch(words.Analyzer, "pack")
    watch(handle, "item_of")
    watch(reading, "item_of")
    return counted


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
async def test_many_items_do_not_hold_up_the_loop(url: str, on_loop: Counter[str]) -> None:
    store = perdure.open(url)
    memory = store.memory("users", "alice")
    values = {f"key {number}": {"fact": f"likes place {number}"} for number in range(MANY)}
    put = await memory.aput_many(values)
    assert {item.key: item.value for item in put} == values
    found = await memory.aget_many([*values, "none"])
    assert [item and item.value for item in found] == [*values.values(), None]
    assert len(await memory.alist(limit=None)) == MANY
    await memory.aput("long", "word " * 10_000)
    assert on_loop["pack"] == 0
    assert on_loop["item_of"] == 1  # of the last put: one item is decoded at once
    await store.aclose()


async def test_what_is_put_is_what_was_given(url: str) -> None:
    """Also if the caller changes it while a thread indexes it."""
    store = perdure.open(url)
    memory = store.memory("users", "alice")
    values = {f"key {number}": ["as given"] for number in range(MANY)}

    class Changing(dict[str, Any]):
        """Changes the values as soon as all were taken."""

        def items(self) -> Any:
            yield from super().items()
            for value in self.values():
                value[0] = "changed later"

    put = await memory.aput_many(Changing(values))
    assert {item.value[0] for item in put} == {"as given"}
    await store.aclose()


FIRST_SEARCH = """
import asyncio, sys, threading
import perdure

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("on the loop" if threading.current_thread() is threading.main_thread() else "on a thread")

async def main():
    store = perdure.open(sys.argv[1])
    memory = store.memory("users", "alice")
    await memory.aput("hobby", {"fact": "likes hiking"})
    sys.meta_path.insert(0, Watch())
    print([item.key for item in await memory.asearch("hiking")])
    await store.aclose()

asyncio.run(main())
"""


def test_the_first_search_of_a_process_imports_numpy_on_a_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_SEARCH, str(tmp_path / "a.db")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == "on a thread\n['hobby']\n"
