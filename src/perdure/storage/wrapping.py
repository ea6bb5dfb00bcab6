"""A driver around another one: what it does not do itself is done by the driver below."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.storage.notifications import Notifications
from perdure.storage.program import Capabilities, Dialect, Driver, Maintenance, Statement


class WrappingDriver:
    """What every wrapper has. `run` and `arun` are the wrapper's own."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner

    @property
    def dialect(self) -> Dialect:
        return self.inner.dialect

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return self.inner.append(statements, counts)

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return await self.inner.aappend(statements, counts)

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        return self.inner.maintain(kind, table)

    def listen(self) -> Notifications:
        return self.inner.listen()

    def close(self) -> None:
        self.inner.close()

    async def aclose(self) -> None:
        await self.inner.aclose()
