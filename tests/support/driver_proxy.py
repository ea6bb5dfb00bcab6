"""A driver around a real one, for tests in which writes get lost, arrive late or are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.storage.program import Statement, Transaction
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
