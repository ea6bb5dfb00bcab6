"""Context managers that close what they are: `with perdure.open(…) as store:`, `async with …`."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class _HasClose(Protocol):
    def close(self) -> None: ...


class _HasAclose(Protocol):
    async def aclose(self) -> None: ...


class Closing:
    """For what has `close`: it is closed at the end of its `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: _HasClose, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing(Closing):
    """For what has `aclose` too, and is used in `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: _HasAclose, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
