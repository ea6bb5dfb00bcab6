"""Ctrl-C may come at the entry of any Python function. Whatever the interrupted call held, other threads continue.

test_interrupting.py runs this file in a process of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import perdure
from perdure.storage.store_threads import StoreThreads

PATIENCE_S = 60


@perdure.step
def note(number: int) -> int:
    return number


@perdure.durable
def noting() -> list[int]:
    return perdure.map(note, [1, 2])


def _interrupts(call: Callable[[], Any], step: int = 1) -> Iterator[int]:
    """Do `call` again and again, interrupted at the first entry of a function, the second, …, until it is not."""
    for number in count(0, step):
        entered = 0

        def trace(frame: FrameType, event: str, _: Any, number: int = number) -> None:
            nonlocal entered
            # A generator expression that is closed is entered too. Python ignores errors there, and in finalizers.
            if event == "call" and frame.f_code.co_name not in ("<genexpr>", "__del__"):
                entered += 1
                if entered == number + 1:
                    sys.settrace(None)
                    raise KeyboardInterrupt

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        yield number
        if entered <= number:
            return


def _elsewhere(work: Callable[[], Any]) -> Any:
    """Do something on another thread. Raises its error, or TimeoutError if it does not come to its end."""
    future: Future[Any] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future.result(PATIENCE_S)


def test_threads_of_a_store_are_given_after_an_interrupt() -> None:
    threads = StoreThreads(most=4)
    for _ in _interrupts(lambda: threads.submit(int).result(PATIENCE_S)):
        assert _elsewhere(lambda: threads.submit(int).result(PATIENCE_S)) == 0


@pytest.mark.parametrize("what", ["load", "save", "run"])
def test_a_store_is_used_and_closed_after_an_interrupt(tmp_path: Path, what: str) -> None:
    store = perdure.open(str(tmp_path / "a.db"), durability="normal")
    thread = store.thread("t")
    thread.save({"n": 0})
    calls = {"load": thread.load, "save": lambda: thread.save({"n": 1}), "run": lambda: store.run(noting)}
    for _ in _interrupts(calls[what], step=7 if what == "run" else 1):
        assert _elsewhere(lambda: store.thread("t").load()).state["n"] in (0, 1)
        assert _elsewhere(lambda: store.run(noting).result()) == [1, 2]
    store.close()


def test_connections_are_given_after_an_interrupt(postgres_url: str) -> None:
    store = perdure.open(postgres_url)
    for _ in _interrupts(lambda: store.run(noting), step=7):
        assert _elsewhere(lambda: store.run(noting).result()) == [1, 2]
    store.close()
