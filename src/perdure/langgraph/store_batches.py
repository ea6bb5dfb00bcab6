"""Async batches of the store that wait at the same time, run as one.

A graph's nodes call `aput` and `aget` side by side. Run one by one, each would be a transaction of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from langgraph.store.base import Op, PutOp, Result

from perdure.errors import OutcomeUnknown, Unavailable

_MOST = 1000  # operations of one batch
_Run = Callable[[Sequence[Op]], Awaitable[list[Result]]]
_Waiting = tuple[Sequence[Op], "asyncio.Future[list[Result]]"]


class _LoopQueue:
    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.task: asyncio.Task[None] | None = None


class MergedBatches:
    """Runs the batches of each event loop in turn, and those that came meanwhile as one."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopQueue] = WeakKeyDictionary()

    def run(self, ops: Sequence[Op]) -> asyncio.Future[list[Result]]:
        """Run operations, and return a future of their results in order. Others of this event loop may run with them.

        If it is cancelled before its batch has begun, nothing is done.
        """
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = _LoopQueue()
        future: asyncio.Future[list[Result]] = loop.create_future()
        queue.waiting.append((ops, future))
        if queue.task is None:
            queue.task = loop.create_task(self._drain(queue))
        return future

    async def _drain(self, queue: _LoopQueue) -> None:
        try:
            while queue.waiting:
                count, size = 0, 0
                while count < len(queue.waiting) and (not count or size + len(queue.waiting[count][0]) <= _MOST):
                    size, count = size + len(queue.waiting[count][0]), count + 1
                batches, queue.waiting = queue.waiting[:count], queue.waiting[count:]
                await self._serve([batch for batch in batches if not batch[1].done()])
        finally:
            queue.task = None
            for _, future in queue.waiting:  # the loop is ending
                future.cancel()
            queue.waiting = []

    async def _serve(self, batches: Sequence[_Waiting]) -> None:
        if len(batches) > 1:
            try:
                merged, places = _merge([ops for ops, _ in batches])
                results = await self._run(merged)
            except (Unavailable, OutcomeUnknown) as error:  # of the database: it concerns all
                for _, future in batches:
                    if not future.done():
                        future.set_exception(error)
                return
            except Exception:
                # Whose operation it was is not known: each batch is run alone and has its own result.
                for batch in batches:
                    await self._serve([batch])
                return
            for (_, future), mine in zip(batches, places, strict=True):
                if not future.done():
                    future.set_result([results[place] for place in mine])
            return
        for ops, future in batches:
            try:
                result = await self._run(ops)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)


def _merge(batches: Sequence[Sequence[Op]]) -> tuple[list[Op], list[list[int]]]:
    """Return the operations of all batches, equal reads once, and for each batch the places of its results."""
    merged: list[Op] = []
    reads: dict[Any, int] = {}
    places: list[list[int]] = []
    for ops in batches:
        mine = []
        for op in ops:
            place = len(merged)
            if not isinstance(op, PutOp):
                try:
                    place = reads.setdefault((type(op), op), place)
                except TypeError:  # a search with a filter has a dict, which has no hash
                    place = reads.setdefault(repr(op), place)
            if place == len(merged):
                merged.append(op)
            mine.append(place)
        places.append(mine)
    return merged, places
