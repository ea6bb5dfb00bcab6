"""Read one snapshot of a store while one transaction of another store writes it.

The read transaction runs in its own thread, at most a few pages ahead of the writer. So a copy of one point in time is
written in one transaction, and never has to fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Semaphore, Thread, current_thread
from typing import Any, Self

from perdure.errors import Unavailable
from perdure.storage.program import Batch, Driver, Program, Rows, Sql, drive, read

_AHEAD = 2
# No timeouts, in both transactions: each waits for the other database in between.
PATIENCE = Sql(
    sqlite="SELECT 1",
    postgres="""SELECT set_config('idle_in_transaction_session_timeout', '0', true),
        set_config('statement_timeout', '0', true)""",
)

Put = Callable[[Any], None]


PAGE_ROWS, _PAGE_BYTES = 200, 4_000_000


def next_page_rows(limit: int, rows: Rows) -> int:
    """Return the row limit of the next page, after a page read with `limit`. It is lower if the rows are large."""
    size = sum(len(value) for row in rows for value in row if isinstance(value, bytes | str))
    return max(1, min(PAGE_ROWS, limit * _PAGE_BYTES // (size + 1)))


class _Stopped(Exception):
    """Raised in the reader when the writer has ended."""


class ReadAhead:
    """An iterator over the pages that a reading program puts. Use it as a context manager in the writing program."""

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
        if self._thread is not current_thread():  # the garbage collector may drop the writing program on any thread
            self._thread.join()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next page. Raises the error of the reading program."""
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
            if self._begun:  # a retry of the driver, but pages of the first snapshot may be written already
                raise Unavailable("the source was lost while it was read: repeat the call")
            yield Batch(PATIENCE())
            yield from op(self._put)

        try:
            drive(driver, read(once))
            self._pages.put(StopIteration())
        except BaseException as error:
            self._pages.put(error)
