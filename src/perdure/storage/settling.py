"""Wait for a write that was already sent, in a task that is being cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import Future


async def until_done(future: Future[Any]) -> None:
    """Wait until a future is done, even if the task is cancelled again. Do not raise the future's error.

    The caller is a cancelled task, which raises its CancelledError afterwards. The driver's timeouts bound the wait.
    """
    import asyncio

    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # mark it as retrieved: else asyncio logs it
