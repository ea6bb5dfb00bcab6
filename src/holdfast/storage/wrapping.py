"""A driver around another one: what it does not do itself is that one's business."""

from __future__ import annotations

from typing import Any

from holdfast.storage.program import Dialect, Driver


class WrappingDriver:
    """What every wrapper has. `run` and `arun` are the wrapper's own; what else is asked of it, `inner` has."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def dialect(self) -> Dialect:
        return self.inner.dialect

    def close(self) -> None:
        self.inner.close()

    async def aclose(self) -> None:
        await self.inner.aclose()
