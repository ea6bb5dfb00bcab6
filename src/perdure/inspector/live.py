"""Tells open pages that the store changed: one poller per process, however many pages are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import perdure

_INTERVAL_S = 0.25
_QUIET_S = 15.0  # a proxy may close a connection that says nothing for longer


class Live:
    """Asks the store for its version while a page listens, and wakes the listeners when it is another one."""

    def __init__(self, store: perdure.Store, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._store, self._is_stopping = store, is_stopping
        self._queues: set[asyncio.Queue[str]] = set()
        self._poller: asyncio.Task[None] | None = None

    async def respond(self, request: Request) -> Response:
        """Answer an EventSource."""
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        self._queues.add(queue)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield "retry: 1000\nevent: hello\ndata:\n\n"
            while not self._is_stopping():
                try:
                    yield f"event: {await asyncio.wait_for(queue.get(), _QUIET_S)}\ndata:\n\n"
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._queues.discard(queue)

    async def while_serving(self, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        """Yield events until they end or the server stops."""
        quiet_s, waiting = 0.0, None
        try:
            while not self._is_stopping():
                waiting = waiting or asyncio.ensure_future(anext(events))
                is_ready, _ = await asyncio.wait({waiting}, timeout=_INTERVAL_S)
                quiet_s = 0.0 if is_ready else quiet_s + _INTERVAL_S
                if is_ready:
                    event, waiting = waiting.result(), None
                    yield event
                elif quiet_s > _QUIET_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
        except (StopAsyncIteration, perdure.PerdureError):  # its run has ended, or is gone
            return
        finally:
            if waiting is not None:
                waiting.cancel()

    async def _poll(self) -> None:
        seen = None
        while self._queues:
            if self._is_stopping():
                self._tell("stop")
                return
            with suppress(perdure.PerdureError):  # the database may be away for a while
                version = await self._store.aversion()
                if seen is not None and version != seen:
                    self._tell("change")
                seen = version
            await asyncio.sleep(_INTERVAL_S)

    def _tell(self, event: str) -> None:
        for queue in self._queues:
            with suppress(asyncio.QueueFull):  # it has not read the last one yet, which says the same
                queue.put_nowait(event)
