"""The removal of expired items as LangGraph's stores offer it: `sweep_ttl`, and a thread that calls it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Self

from langgraph.store.base import TTLConfig

from perdure.adapters import Items, event, said
from perdure.langgraph.opening import OpensStore

_INTERVAL_MINUTES = 5
_log = logging.getLogger("perdure")


class AwaitableInt(int):
    """A number that may be awaited: LangGraph's blocking stores return it, and its async ones a coroutine."""

    def __await__(self) -> Generator[Any, None, int]:
        yield from ()
        return int(self)


class Sweeping(Future[None]):
    """The work of a sweeper. It ends when the sweeper stops. Cancelling it stops the sweeper."""

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


class SweepsItems(OpensStore):
    """The part of the store that removes expired items. No read returns them, so sweeping only frees space."""

    ttl_config: TTLConfig | None
    _items: Items
    _sweeper: threading.Thread | None = None
    _sweeping: Sweeping

    def sweep_ttl(self) -> AwaitableInt:
        """Remove expired items and return how many. May be awaited too. `asweep_ttl` does not block the event loop."""
        return AwaitableInt(self._items.run(self._items.end_expired()))

    async def asweep_ttl(self) -> int:
        """`sweep_ttl`, awaited."""
        return await self._items.arun(self._items.end_expired())

    def start_ttl_sweeper(self, sweep_interval_minutes: float | None = None) -> Sweeping:
        """Call `sweep_ttl` in a thread until `stop_ttl_sweeper` or until the result is cancelled.

        The interval is `sweep_interval_minutes`, or that of `ttl`, or five minutes. Without `ttl`, nothing is started.
        May be awaited too, as with LangGraph's async stores.
        """
        if self._sweeper is not None and self._sweeper.is_alive():
            return self._sweeping
        self._sweeping = sweeping = Sweeping()
        if not self.ttl_config:
            sweeping.set_result(None)
            return sweeping
        minutes = sweep_interval_minutes or self.ttl_config.get("sweep_interval_minutes") or _INTERVAL_MINUTES
        stop = threading.Event()
        sweeping.add_done_callback(lambda _: stop.set())

        def sweep() -> None:
            while not stop.wait(minutes * 60):
                try:
                    self.sweep_ttl()
                except Exception as error:
                    _log.warning(
                        "expired items were not removed, the next sweep tries again: %s",
                        said(error),
                        extra=event("memory.not_swept"),
                    )

        self._sweeper = threading.Thread(target=sweep, name="perdure-ttl-sweeper", daemon=True)
        self._sweeper.start()
        return sweeping

    def stop_ttl_sweeper(self, timeout: float | None = None) -> AwaitableInt:
        """Stop the sweeper. Return a true value unless it still runs after `timeout` seconds. May be awaited too."""
        if self._sweeper is None or not self._sweeper.is_alive():
            return AwaitableInt(True)
        if not self._sweeping.done():
            self._sweeping.set_result(None)
        self._sweeper.join(timeout)
        return AwaitableInt(not self._sweeper.is_alive())

    def close(self) -> None:
        """Stop the sweeper, and close the store if this object opened it. May be called twice."""
        self.stop_ttl_sweeper()
        super().close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._sweeper is not None:
            await asyncio.to_thread(self.stop_ttl_sweeper)
        await super().aclose()
