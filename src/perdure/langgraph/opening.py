"""The base class of the saver and the store: opening and closing a Perdure store."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Self

import perdure
from perdure import Store
from perdure.adapters import AsyncClosing
from perdure.errors import UsageError

IN_MEMORY = ":memory:"


class OpensStore(AsyncClosing):
    """Opens a store from a path or URL with the options of `perdure.open`, or uses an open one."""

    def __init__(self, store: str | Store = IN_MEMORY, tenant: str | None = None, **options: Any) -> None:
        self._owned = not isinstance(store, Store)
        if not isinstance(store, Store):
            of_tenant: dict[str, Any] = {} if tenant is None else {"tenant": tenant}
            opened = perdure.open(store, **of_tenant, **options)
        elif options:
            raise UsageError(f"give {', '.join(sorted(options))} to perdure.open: this store is open already")
        else:
            opened = store if tenant is None else store.tenant(tenant)
        #: the Perdure store with the same threads and items
        self.store: Store = opened

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.store!r}>"

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Return `cls(conn_string, …)`, to be used directly, or in a `with` or `async with`."""
        return cls(conn_string, **options)

    def setup(self) -> Awaitable[None]:
        """Do nothing: opening has created the store. May be called or awaited, as with LangGraph's own classes."""
        return _Done()

    def close(self) -> None:
        """Close the store if this object opened it. May be called twice."""
        if self._owned:
            self.store.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._owned:
            await self.store.aclose()


class _Done:
    """The result of `setup()`: awaiting it returns at once."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
