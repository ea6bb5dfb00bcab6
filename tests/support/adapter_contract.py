"""What every adapter that stores checkpoints must prove: killed anywhere, two writers, resumed by another process.

A test module makes a subclass of `AdapterContract` and names an `Adapter`: how its framework opens a store, saves a
value after the newest one, and loads the newest.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest
from soak import of_each_kind

import perdure
from perdure.testing.processes import ForkServer, Say

THREAD = "contract"


class Adapter(Protocol):
    """How a framework uses a store."""

    def open(self, url: str, hook: Callable[[str], None] | None = None) -> AbstractContextManager[Any]: ...

    def save(self, opened: Any, value: int, after: Any = None) -> Any:
        """Save a value after the newest checkpoint, or after the one that `after` (what `save` returned) names."""
        ...

    def load(self, opened: Any) -> int | None: ...


def child(say: Say, module: str, url: str, value: int, at: int) -> None:
    """Save a value, and die at the point of that number of its transactions. Without dying, say which there are."""
    adapter: Adapter = importlib.import_module(module).ADAPTER
    points: list[str] = []

    def hook(point: str) -> None:
        points.append(point)
        if len(points) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    with adapter.open(url, hook) as opened:
        adapter.load(opened)
        points.clear()
        adapter.save(opened, value)
    say(points)


class AdapterContract:
    """The tests. `module` holds `ADAPTER`, and can be imported by a process of its own: the fixture `fork_server`."""

    module: str

    @pytest.fixture
    def adapter(self) -> Adapter:
        found: Adapter = importlib.import_module(self.module).ADAPTER
        return found

    def test_killed_anywhere_a_save_is_there_or_not_and_is_done_again(
        self, saver_url: str, adapter: Adapter, fork_server: ForkServer
    ) -> None:
        with adapter.open(saver_url) as opened:
            for value in range(3):
                adapter.save(opened, value)
        [points] = fork_server.start(self.module, saver_url, 3, 0).lines()
        with adapter.open(saver_url) as opened:
            assert adapter.load(opened) == 3  # another process saved it
        saved, outcomes = 3, []
        for at in of_each_kind(points):
            assert list(fork_server.start(self.module, saver_url, saved + 1, at).lines()) == [], "it was not killed"
            with adapter.open(saver_url) as opened:
                found = adapter.load(opened)
                assert found in (saved, saved + 1)
                outcomes.append(found == saved + 1)
                if found == saved:
                    adapter.save(opened, saved + 1)
            saved += 1
        assert outcomes == sorted(outcomes)  # nothing before the commit, everything after it
        with perdure.open(saver_url) as store:
            assert store.ops.verify().ok

    def test_of_two_writers_neither_loses_what_the_other_saved(self, saver_url: str, adapter: Adapter) -> None:
        with adapter.open(saver_url) as one, adapter.open(saver_url) as other:
            first = adapter.save(one, 1)
            assert adapter.load(other) == 1
            adapter.save(one, 2, first)
            adapter.save(other, 3, first)
            assert adapter.load(one) == adapter.load(other) == 3
        with perdure.open(saver_url) as store:
            states = [one.state for one in store.thread(THREAD).history()]
            assert len(states) == 2  # the branch that leads to the head
            assert store.ops.stats().checkpoints == 3
            assert store.ops.verify().ok
