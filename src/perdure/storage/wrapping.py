"""A driver around another one: what it does not do itself is that one's business.

What it does between one attempt at a write and the next, it does to its end, if the write is one that goes on although
its task is cancelled (`Whole`).
"""

from __future__ import annotations

from asyncio import CancelledError, Future, ensure_future, wait
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from perdure.storage.program import Dialect, Driver, Maintenance, Statement, Transaction

T = TypeVar("T")


class WrappingDriver:
    """What every wrapper has. `run` and `arun` are the wrapper's own; what else is asked of it, `inner` has."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def dialect(self) -> Dialect:
        return self.inner.dialect

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return self.inner.append(statements, counts)

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return await self.inner.aappend(statements, counts)

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        return self.inner.maintain(kind, table)

    def close(self) -> None:
        self.inner.close()

    async def aclose(self) -> None:
        await self.inner.aclose()


class Whole:
    """Keeps the cancellation of a write that must come to its end (see `Transaction`) until it has. Any other operation
    is cancelled at once."""

    __slots__ = ("_cancelled", "_whole")

    def __init__(self, transaction: Transaction) -> None:
        self._whole = transaction.whole and transaction.write
        self._cancelled: CancelledError | None = None

    async def attempt(self, running: Awaitable[T]) -> T:
        """Run the transaction with the driver below. What it gives or raises, cancelled or not."""
        try:
            return await running
        except CancelledError as error:
            if not self._whole:
                raise
            self._cancelled, problem = error, error.__cause__
            if hasattr(error, "answer"):
                answer: T = error.answer
                del error.answer  # it may not be the last word
                return answer
            if problem is None:
                raise
        raise problem

    async def until(self, waiting: Future[Any]) -> None:
        """Wait for something. Who waits does not cancel it."""
        while not waiting.done():
            try:
                await wait([waiting])
            except CancelledError as error:
                if not self._whole:
                    raise
                self._cancelled = error

    async def need(self, running: Awaitable[T]) -> T:
        """Something else that the write needs, and what it gives."""
        if not self._whole:
            return await running
        task = ensure_future(running)
        await self.until(task)
        return task.result()

    async def finish(self, running: Awaitable[T]) -> T:
        """All of it. If it was cancelled meanwhile: the cancellation, with what it gave, or because of what it
        raised."""
        try:
            answer = await running
        except BaseException as error:
            if self._cancelled is None or self._cancelled is error:
                raise
            raise self._cancelled from error
        if self._cancelled is not None:
            self._cancelled.__cause__ = None
            self._cancelled.answer = answer  # type: ignore[attr-defined]
            raise self._cancelled
        return answer
