"""The journal writes of an async run that are under way, and the order in which the tasks that await them continue.

Tasks continue one at a time, in the order of the journal. The next one continues when the code has nothing left to do
after the last. A replay hands out recorded ends in the same way (replay_order.py), so that both orders are equal.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from perdure.runs.execution.execution import Execution

_ROUNDS_MAX = 50  # iterations of the loop to wait until the code is idle; some code never is


class JournalWrite:
    """A write under way, and the future that its task awaits."""

    __slots__ = ("future", "is_answered", "writing")

    def __init__(self, writing: asyncio.Task[Any]) -> None:
        self.writing = writing
        self.is_answered = False
        self.future: asyncio.Future[None] | None = None

    def renewed_future(self) -> asyncio.Future[None]:
        """Return a new future to await. A cancelled task awaits a second one, because it must know what was written."""
        self.future = self.writing.get_loop().create_future()
        return self.future

    def answer(self) -> None:
        self.is_answered = True
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class LandedWrites:
    """The writes of a run that are under way, answered in their order."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._writes: deque[JournalWrite] = deque()
        self._is_answering = False

    def add(self, writing: asyncio.Task[Any]) -> JournalWrite:
        """Add a write, to be answered after those before it."""
        write = JournalWrite(writing)
        self._writes.append(write)
        writing.add_done_callback(self._landed)
        return write

    def _landed(self, writing: asyncio.Task[Any]) -> None:
        if not self._is_answering:
            self._answer(writing.get_loop(), 0)

    def _answer(self, loop: asyncio.AbstractEventLoop, rounds: int) -> None:
        from perdure.runs.execution.asyncio_internals import is_stirring

        self._is_answering = False
        while self._writes and self._writes[0].writing.done():
            if rounds < _ROUNDS_MAX and is_stirring(loop, self._execution):
                self._is_answering = True
                loop.call_soon(self._answer, loop, rounds + 1)
                return
            self._writes.popleft().answer()
            rounds = 0
