"""Reading one snapshot of a store while a transaction of another one writes what is read.

The read transaction runs in a thread of its own, at most a few pages ahead of the writer. So everything is of one point
in time, arrives in one transaction, and never has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Self

from perdure.errors import Unavailable
from perdure.storage.program import Batch, Driver, Program, Rows, Sql, drive, read

_AHEAD = 2
# For both transactions: each waits for the other database in between.
PATIENCE = Sql(
    sqlite="SELECT 1",
    postgres="""SELECT set_config('idle_in_transaction_session_timeout', '0', true),
        set_config('statement_timeout', '0', true)""",
)

Put = Callable[[Any], None]


PAGE_ROWS, _PAGE_BYTES = 200, 4_000_000


def next_page_rows(limit: int, rows: Rows) -> int:
    """Return how many rows the next page is to have, after one of `limit` rows: few if they are large."""
    size = sum(len(value) for row in rows for value in row if isinstance(value, bytes | str))
    return max(1, min(PAGE_ROWS, limit * _PAGE_BYTES // (size + 1)))


class _Stopped(Exception):
    """The writer has ended."""


class ReadAhead:
    """What a program puts while it reads, page by page. Use it as a context, inside the writing program."""

    def __init__(self, driver: Driver, op: Callable[[Put], Program[None]]) -> None:
        self._pages: SimpleQueue[Any] = SimpleQueue()
        self._room = Semaphore(_AHEAD)
        self._stopped = self._begun = False
        self._thread = Thread(target=self._read, args=(driver, op), name="perdure-read-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._room.release()
        self._thread.join()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next page. Raises what reading has raised."""
        page = self._pages.get()
        if isinstance(page, BaseException):
            raise page
        self._room.release()
        return page

    def _put(self, page: Any) -> None:
        self._room.acquire()
        if self._stopped:
            raise _Stopped
        self._begun = True
        self._pages.put(page)

    def _read(self, driver: Driver, op: Callable[[Put], Program[None]]) -> None:
        def once() -> Program[None]:
            if self._begun:  # the driver tries again, but pages of the first snapshot are written already
                raise Unavailable("the source was lost while it was read: repeat the call")
            yield Batch(PATIENCE())
            yield from op(self._put)

        try:
            drive(driver, read(once))
            self._pages.put(StopIteration())
        except BaseException as error:
            self._pages.put(error)
