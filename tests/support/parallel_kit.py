"""What the tests of parallel branches share: branches that end in the order that a test wants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from lab import Interrupt, Lab, finished

import perdure

PATIENCE_S = 30.0


def branch(lab: Lab, fn: Callable[..., Any], *args: Any) -> Any:
    """A call as the parallel functions take it: `fn` is async, and in a sync run it never really waits."""
    return fn(*args) if lab.is_async else lambda: finished(fn(*args))


def again(lab: Lab, agent: Callable[..., Any], *args: Any, id: str) -> perdure.Run:
    """The same line twice: the first is interrupted, the second goes on."""
    with pytest.raises(Interrupt):
        lab.run(agent, *args, id=id)
    assert lab.store.get_run(id).status == "queued"
    return lab.run(agent, *args, id=id)


class Order:
    """Lets bodies end in a given order, one after the other, whoever comes first."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self._turn = threading.Condition()

    def free(self) -> None:
        with self._turn:
            self.names.clear()
            self._turn.notify_all()

    def wait(self, name: str) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: not self.names or self.names[0] == name, PATIENCE_S)
            if self.names:
                self.names.pop(0)
            self._turn.notify_all()

    async def await_(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.names and self.names[0] != name:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        if self.names:
            self.names.pop(0)


def ordered(lab: Lab, order: Order, *, effect: bool = False) -> Any:
    """A step whose calls end in this order."""

    def work(name: str) -> str:
        order.wait(name)
        lab.ran.append(name)
        return name.upper()

    async def awork(name: str) -> str:
        await order.await_(name)
        lab.ran.append(name)
        return name.upper()

    body: Any = awork if lab.is_async else work
    return perdure.effect(name="work")(body) if effect else perdure.step(name="work")(body)


def paths(run: perdure.Run) -> list[tuple[str, str]]:
    return sorted((step.path, step.name) for step in run.steps())
