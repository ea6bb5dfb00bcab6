"""What the saver and the store do alike: open what they are given, and close what they have opened."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Self

import perdure
from perdure import Store
from perdure.adapters import AsyncClosing
from perdure.errors import UsageError


class OpensStore(AsyncClosing):
    """`store` is a path or URL with the options of `perdure.open`, or a store that is open already."""

    def __init__(self, store: str | Store, tenant: str | None = None, **options: Any) -> None:
        self._owned = not isinstance(store, Store)
        if not isinstance(store, Store):
            of_tenant: dict[str, Any] = {} if tenant is None else {"tenant": tenant}
            opened = perdure.open(store, **of_tenant, **options)
        elif options:
            raise UsageError(f"give {', '.join(sorted(options))} to perdure.open: this store is open already")
        else:
            opened = store if tenant is None else store.tenant(tenant)
        #: the engine underneath: the same threads and items, as Perdure sees them
        self.store: Store = opened

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.store!r}>"

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """The same as the class itself: use what it returns directly, or in a `with` or `async with`."""
        return cls(conn_string, **options)

    def setup(self) -> Awaitable[None]:
        """Not needed: a store is made when it is opened. May be called, and awaited, as with LangGraph's own."""
        return _Done()

    def close(self) -> None:
        """Close the store, if this has opened it. May be called twice."""
        if self._owned:
            self.store.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._owned:
            await self.store.aclose()


class _Done:
    """Nothing to do, and nothing to wait for: what `setup()` gives."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
