"""Tells open pages that the store changed: one poller per process, however many pages are open."""

from __future__ import annotations

import asyncio
import time
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
        self._queues: set[asyncio.Queue[None]] = set()
        self._poller: asyncio.Task[None] | None = None

    async def respond(self, request: Request) -> Response:
        """Answer an EventSource."""
        return self.stream(self._changes())

    def stream(self, events: AsyncGenerator[str, None]) -> Response:
        """Answer an EventSource with events, until they end or the server stops."""
        return StreamingResponse(self._while_serving(events), media_type="text/event-stream")

    async def _changes(self) -> AsyncGenerator[str, None]:
        queue: asyncio.Queue[None] = asyncio.Queue(maxsize=1)
        self._queues.add(queue)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield "retry: 1000\nevent: hello\ndata:\n\n"
            while True:
                await queue.get()
                yield "event: change\ndata:\n\n"
        finally:
            self._queues.discard(queue)

    async def _while_serving(self, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        waiting, said_at = None, time.monotonic()
        try:
            while not self._is_stopping():
                waiting = waiting or asyncio.ensure_future(anext(events))
                if (await asyncio.wait({waiting}, timeout=_INTERVAL_S))[0]:
                    event, waiting, said_at = waiting.result(), None, time.monotonic()
                    yield event
                elif time.monotonic() - said_at > _QUIET_S:
                    said_at = time.monotonic()
                    yield ": still here\n\n"
        except (StopAsyncIteration, perdure.PerdureError):  # its run has ended, or is gone
            return
        finally:
            if waiting is not None:
                waiting.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration, perdure.PerdureError):
                    await waiting
            await events.aclose()

    async def _poll(self) -> None:
        seen = None
        while self._queues and not self._is_stopping():
            with suppress(perdure.PerdureError):  # the database may be away for a while
                version = await self._store.aversion()
                if seen is not None and version != seen:
                    for queue in self._queues:
                        with suppress(asyncio.QueueFull):  # it has not read the last one yet, which says the same
                            queue.put_nowait(None)
                seen = version
            await asyncio.sleep(_INTERVAL_S)
