"""A driver around another one: what it does not do itself is done by the driver below."""

from __future__ import annotations

from asyncio import CancelledError, ensure_future, wait
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from perdure.storage.program import Dialect, Driver, Maintenance, Statement

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


async def to_completion(running: Coroutine[Any, Any, T]) -> T:
    """Await something to its end although the awaiting task is cancelled. Then the cancellation is raised, with the
    result as its `answer`, or because of the error."""
    task = ensure_future(running)
    cancelled: CancelledError | None = None
    while not task.done():
        try:
            await wait([task])
        except CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (problem := task.exception()) is not None:
        raise cancelled from problem
    cancelled.answer = task.result()  # type: ignore[attr-defined]
    raise cancelled
