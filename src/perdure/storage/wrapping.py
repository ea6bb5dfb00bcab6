"""Drivers that wrap another driver and pass on every call that they do not handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from perdure.errors import NotFound, OpenError, ReadOnlyStore
from perdure.storage.notifications import Notifications
from perdure.storage.program import (
    Batch,
    Capabilities,
    Dialect,
    Driver,
    Maintenance,
    Program,
    Sql,
    Statement,
    Transaction,
    run_on_nothing,
)

T = TypeVar("T")
RELEASED = "this snapshot was released; `perdure snapshots` names those that are kept"
# Returns whether the transaction now sees the snapshot. The check is needed because PostgreSQL skips a schema in
# search_path that is missing or that the role may not use: statements would then read the live tables.
_SHOW = Sql(
    sqlite="SELECT 1 FROM snapshot WHERE token = :token",
    postgres="""SELECT set_config('perdure.at', epoch::text, true) <> '' AND split_part(
        set_config('search_path', current_schema() || '_at,' || current_schema(), true), ',', 1) = current_schema()
    FROM snapshot WHERE token = :token""",
)


class WrappingDriver:
    """Base of all wrappers: delegates to `inner`. A subclass adds `run` and `arun`."""

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

    def at(self, epoch: int, token: str) -> Driver:
        return self.inner.at(epoch, token)

    def close(self) -> None:
        self.inner.close()

    async def aclose(self) -> None:
        await self.inner.aclose()


class SnapshotDriver(WrappingDriver):
    """A read-only driver that shows a store as of a snapshot. Writes raise ReadOnlyStore.

    Each read checks in its own transaction that the snapshot still exists. Closing this driver closes nothing: its
    connections belong to the store."""

    def __init__(
        self,
        live: Driver,
        token: str,
        read: Callable[[Callable[[], Program[Any]]], Any],
        aread: Callable[[Callable[[], Program[Any]]], Awaitable[Any]],
    ) -> None:
        super().__init__(live)
        self._token, self._read, self._aread = token, read, aread

    def __repr__(self) -> str:
        return f"<snapshot of {self.inner!r}>"

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities._replace(base=self, place=None)

    def run(self, transaction: Transaction) -> Any:
        if transaction.volatile:  # snapshots do not have such rows
            return run_on_nothing(transaction.op)
        return self._refuse() if transaction.write else self._read(partial(self._guarded, transaction.op))

    async def arun(self, transaction: Transaction) -> Any:
        if transaction.volatile:
            return run_on_nothing(transaction.op)
        return self._refuse() if transaction.write else await self._aread(partial(self._guarded, transaction.op))

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        self._refuse()

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        self._refuse()

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        self._refuse()

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def _guarded(self, op: Callable[[], Program[T]]) -> Program[T]:
        """Run the program with the check of the snapshot added to its first batch."""
        program = op()
        try:
            batch = next(program)
            shown, *answers = yield Batch(_SHOW(token=self._token), *batch.statements, last=batch.last)
            if not shown:
                raise NotFound(RELEASED)
            if not shown[0][0]:
                raise OpenError(
                    "the schema of this store's snapshots (…_at) is missing, or this role may not read it: restore "
                    "both schemas of a dump, and give roles their rights with `perdure store role`"
                )
            while True:
                try:
                    batch = program.send(answers)
                except NotFound as error:
                    if type(error) is not NotFound:  # it says itself what is missing
                        raise
                    raise NotFound(f"{error}. What was made later, or erased since, is not in a snapshot") from None
                answers = yield batch
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            program.close()

    def _refuse(self) -> NoReturn:
        raise ReadOnlyStore("a snapshot cannot be changed; work in a sandbox of it, or restore it")
