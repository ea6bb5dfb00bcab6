"""A large state is compared and compressed on a thread: the event loop turns meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.log import append
from perdure.threads import saves


@pytest.mark.parametrize(("size", "aside"), [(1_000, False), (400_000, True)])
async def test_a_large_state_is_prepared_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, aside: bool
) -> None:
    threads: list[threading.Thread] = []
    prepare = append.prepare

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*args, **options)

    monkeypatch.setattr(saves, "prepare", noted)
    store = perdure.open(str(tmp_path / "a.db"))
    thread = store.thread("t")
    for number in range(2):
        await thread.asave({"n": number, "text": "x" * size})
    loaded = await thread.aload()
    assert loaded.state["n"] == 1
    assert [one is not threading.current_thread() for one in threads] == [aside, aside]
    await store.aclose()
