"""A driver around a real one, for tests in which writes get lost, arrive late or are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.errors import OutcomeUnknown
from perdure.storage.program import Driver, Statement, Transaction
from perdure.storage.wrapping import WrappingDriver


class WriteProxy(WrappingDriver):
    """Every write, a transaction or an append, passes through `write`, which a subclass defines."""

    def write(self, do: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def run(self, transaction: Transaction) -> Any:
        if not transaction.write:
            return self.inner.run(transaction)
        return self.write(lambda: self.inner.run(transaction))

    async def arun(self, transaction: Transaction) -> Any:
        return self.run(transaction)

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return bool(self.write(lambda: self.inner.append(statements, counts)))

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        return self.append(statements, counts)


class LateDriver(WriteProxy):
    """A network of nightmares: a write seems lost, is looked for and not found, and arrives before it is repeated."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.armed = False
        self.late: Callable[[], Any] | None = None

    def write(self, do: Callable[[], Any]) -> Any:
        if self.late is not None:
            late, self.late = self.late, None
            late()
        elif self.armed:
            self.armed, self.late = False, do
            raise OutcomeUnknown("the connection broke during COMMIT")
        return do()


class LostDriver(WriteProxy):
    """The answer to the COMMIT of one write is lost; the write is there."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.armed = False

    def write(self, do: Callable[[], Any]) -> Any:
        answer = do()
        if self.armed:
            self.armed = False
            raise OutcomeUnknown("the connection broke during COMMIT")
        return answer
