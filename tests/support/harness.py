"""One face for blocking and async: the contract suite is written once and runs in both modes.

`await harness.save(thread, …)` calls `thread.save` on the event loop's own thread in blocking mode, and awaits
`thread.asave` in async mode. `together` runs calls at the same time: in threads, or as tasks.

Must never happen here: a test that passes because an operation was not run. `finish` verifies every tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from perdure.memory.handle import Memory
from perdure.ops.store import Store
from perdure.threads.models import Change, Checkpoint, Pruned, Report, Stats, ThreadInfo
from perdure.threads.thread import Thread

Mode = Literal["blocking", "async"]
Call = tuple[Any, str, tuple[Any, ...], dict[str, Any]]


def call(handle: Store | Thread | Memory, operation: str, *args: Any, **kwargs: Any) -> Call:
    """A call to be made later, with others at the same time: `call(thread, "save", state)`."""
    return handle, operation, args, kwargs


class Harness:
    """Stores on one database, and their operations in one mode.

    `opener(**options)` opens the database under test; called again, it gives another store object on the same one.
    """

    def __init__(self, opener: Callable[..., Store], mode: Mode) -> None:
        self.mode: Mode = mode
        self._opener = opener
        self._opened: list[Store] = []
        self._tenants: set[str] = set()
        self.store = self.open()

    def open(self, **options: Any) -> Store:
        """Another store object on the same database. Closed by `finish`."""
        store = self._opener(**options)
        self._opened.append(store)
        return store

    def tenant(self, name: str) -> Store:
        self._tenants.add(name)
        return self.store.tenant(name)

    def thread(self, name: str = "t", **options: Any) -> Thread:
        return self.store.thread(name, **options)

    async def reopen(self) -> Store:
        """Close everything and open the database anew."""
        await self._close_all()
        self.store = self.open()
        return self.store

    async def finish(self) -> None:
        """Every test ends with this: what is stored is sound, whatever the test did."""
        try:
            for store in (self.open(), *(self.open(tenant=name) for name in sorted(self._tenants))):
                report = await self.verify(store)
                assert report.ok, [str(problem) for problem in report.problems]
        finally:
            await self._close_all()

    async def _close_all(self) -> None:
        opened, self._opened = self._opened, []
        for store in opened:
            await self.close(store)

    # --- calling

    async def run(self, one: Call) -> Any:
        handle, operation, args, kwargs = one
        if self.mode == "async":
            return await getattr(handle, "a" + operation)(*args, **kwargs)
        return getattr(handle, operation)(*args, **kwargs)

    async def together(self, calls: Iterable[Call], *, errors: bool = False) -> list[Any]:
        """Make calls at the same time. With `errors`, an exception is handed back in its call's place."""
        if self.mode == "async":
            waiting = [self.run(one) for one in calls]
        else:
            waiting = [asyncio.to_thread(getattr(h, name), *args, **kw) for h, name, args, kw in calls]
        return list(await asyncio.gather(*waiting, return_exceptions=errors))

    async def _do(self, handle: Store | Thread, operation: str, *args: Any, **kwargs: Any) -> Any:
        return await self.run((handle, operation, args, kwargs))

    # --- threads

    async def save(self, thread: Thread, state: Any, **options: Any) -> Checkpoint:
        made: Checkpoint = await self._do(thread, "save", state, **options)
        return made

    async def update(self, thread: Thread, patch: Any, **options: Any) -> Checkpoint:
        made: Checkpoint = await self._do(thread, "update", patch, **options)
        return made

    async def rollback(self, thread: Thread, to: Checkpoint | str, **options: Any) -> Checkpoint:
        made: Checkpoint = await self._do(thread, "rollback", to, **options)
        return made

    async def load(self, thread: Thread, at: Checkpoint | str | None = None, **options: Any) -> Checkpoint:
        found: Checkpoint = await self._do(thread, "load", at, **options)
        return found

    async def state(self, thread: Thread, at: Checkpoint | str | None = None) -> Any:
        return (await self.load(thread, at, strict=True)).state

    async def head(self, thread: Thread) -> Checkpoint | None:
        found: Checkpoint | None = await self._do(thread, "get_head")
        return found

    async def history(self, thread: Thread, **options: Any) -> list[Checkpoint]:
        if self.mode == "async":
            return [checkpoint async for checkpoint in thread.ahistory(**options)]
        return list(thread.history(**options))

    async def branches(self, thread: Thread) -> list[Checkpoint]:
        found: list[Checkpoint] = await self._do(thread, "branches")
        return found

    async def diff(
        self, thread: Thread, before: Checkpoint | str, after: Checkpoint | str | None = None
    ) -> list[Change]:
        found: list[Change] = await self._do(thread, "diff", before, after)
        return found

    async def info(self, thread: Thread) -> ThreadInfo:
        found: ThreadInfo = await self._do(thread, "info")
        return found

    async def fork(self, thread: Thread, at: Checkpoint | str | None = None, **options: Any) -> Thread:
        made: Thread = await self._do(thread, "fork", at, **options)
        return made

    async def annotate(self, thread: Thread, metadata: Any) -> ThreadInfo:
        found: ThreadInfo = await self._do(thread, "annotate", metadata)
        return found

    async def prune(self, thread: Thread, **options: Any) -> Pruned:
        done: Pruned = await self._do(thread, "prune", **options)
        return done

    # --- stores

    async def verify(self, handle: Store | Thread, **options: Any) -> Report:
        verify = handle.verify if isinstance(handle, Thread) else handle.ops.verify
        return await asyncio.to_thread(verify, **options)

    async def threads(self, store: Store | None = None, **options: Any) -> list[ThreadInfo]:
        found: list[ThreadInfo] = await self._do(store or self.store, "threads", **options)
        return found

    async def names(self, store: Store | None = None, **options: Any) -> list[str]:
        return [info.name for info in await self.threads(store, **options)]

    async def delete(self, thread: Thread | str, store: Store | None = None) -> Pruned:
        done: Pruned = await self._do(store or self.store, "delete_thread", thread)
        return done

    async def stats(self, store: Store | None = None) -> Stats:
        return await asyncio.to_thread((store or self.store).ops.stats)

    async def close(self, store: Store) -> None:
        await self._do(store, "close")

    # --- shorthand

    async def save_all(self, thread: Thread, states: Sequence[Any]) -> list[Checkpoint]:
        return [await self.save(thread, state) for state in states]
