"""Waiting for the end of a write that was sent, by a task that is cancelled meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import Future


async def until_done(future: Future[Any]) -> None:
    """Wait until a future is done, however often the task is cancelled meanwhile. Its error is not raised.

    For a task that was cancelled: it raises its cancellation afterwards. How long a write may take is bounded by the
    driver's own timeouts.
    """
    import asyncio

    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # retrieved: asyncio logs no error that a cancelled task did not look at
