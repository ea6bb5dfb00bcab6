"""The order in which the tasks of an async run receive recorded ends, and how long a call waits for other tasks.

Recorded ends are handed out one at a time, in the order of the journal. The next one is handed out when the code has
nothing left to do after the last. So code that takes results as they come (`asyncio.as_completed`, a queue) takes them
in the recorded order. An end that no task comes to is given up; if its branch has not begun, only until it begins. A
call without a record waits in `settle`; matching.py says why.

Every wait here is bounded, because a timer, the network or code that is never idle may hold up the tasks of a run.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol

from perdure.runs.execution.asyncio_internals import is_stirring

if TYPE_CHECKING:
    from perdure.runs.execution.supervisor import Supervisor

LOOK_S = 0.002
PATIENCE_S = 1.0  # how long to wait for an earlier recorded end; halved each time that it does not come
ADOPTION_S = 0.25  # how long to wait for the task that made a recorded call before
REFUSAL_S = 30.0  # how long to wait for tasks that do unrecorded work before they come to a recorded effect


class BlockedCall(Protocol):
    """A call that waits while other tasks may come to recorded calls."""

    @property
    def is_blocked(self) -> bool: ...

    @property
    def equals(self) -> list[str]: ...


class ReplayOrder:
    """The order in which the waiting tasks of a run continue."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._execution = supervisor.execution
        self._loop = supervisor.loop
        self._turns: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = count()
        self._settling: dict[asyncio.Future[None], BlockedCall] = {}
        self._patience_s = PATIENCE_S
        self._since = 0.0  # when a task last continued
        self._answered = 0
        self._handle: asyncio.Handle | None = None

    @property
    def matters(self) -> bool:
        """Whether a recorded end or a new body may have to wait for its turn."""
        return bool((self._turns or self._execution.index.ahead) and self._supervisor.is_parallel)

    @property
    def waiting(self) -> list[asyncio.Future[None]]:
        return [*self._settling, *(future for _, _, future in self._turns)]

    async def in_turn(self, seq: int) -> None:
        """Wait until the code has received every end that was recorded before this place in the journal."""
        future: asyncio.Future[None] = self._loop.create_future()
        heappush(self._turns, (seq, next(self._numbers), future))
        self._arm()
        await future

    async def settle(self, call: BlockedCall) -> bool:
        """Wait until a call is free, or no other task of the run can do anything. Return True: the call has waited.

        In the second case one call continues at a time, first one that can adopt a recorded call.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._settling[future] = call
        self._arm()
        try:
            await future
        finally:
            self._settling.pop(future, None)
        return True

    # --- who continues

    def _arm(self) -> None:
        if self._handle is None:
            self._since, self._answered = self._loop.time(), self._execution.index.answered
            self._handle = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._handle = None
        while self._turns and self._turns[0][2].done():  # cancelled, or had its turn
            heappop(self._turns)
        if not self._turns and not self._settling:
            return
        now, answered = self._loop.time(), self._execution.index.answered
        if answered != self._answered:
            self._since, self._answered = now, answered
        waited = now - self._since
        chosen = self.waiting if self._execution.stop is not None else self._free(waited)
        for future in chosen:
            if not future.done():
                future.set_result(None)
        if chosen:
            self._since = now
        if chosen or is_stirring(self._loop, self._execution):
            self._handle = self._loop.call_soon(self._look)
        else:
            self._handle = self._loop.call_later(LOOK_S + waited / 8, self._look)

    def _free(self, waited: float) -> list[asyncio.Future[None]]:
        if not self._turns:
            return self._settled(waited)
        seq, _, future = self._turns[0]
        is_late = waited > self._patience_s
        if is_stirring(self._loop, self._execution) and not is_late:
            return []  # the code is still at work on the last end
        if 0 < self._execution.index.next_end() < seq:
            if not is_late and not self._supervisor.is_idle(self.waiting, but_for_timeouts=True):
                return []
            self._execution.index.give_up_ends(seq)
        if is_late:
            self._patience_s /= 2
        return [future]

    def _settled(self, waited: float) -> list[asyncio.Future[None]]:
        left = {future: call for future, call in self._settling.items() if not future.done()}
        free = [future for future, call in left.items() if not call.is_blocked]
        if free or (is_stirring(self._loop, self._execution) and waited < ADOPTION_S):
            return free
        if waited > ADOPTION_S or self._supervisor.is_idle(self.waiting, but_for_timeouts=True):
            free = [future for future, call in left.items() if call.equals][:1]
            if not free and self._supervisor.start_another():
                self._since = self._loop.time()
                return []
        if not free and (waited > REFUSAL_S or self._supervisor.is_idle(self.waiting)):
            free = list(left)[:1]
        return free
