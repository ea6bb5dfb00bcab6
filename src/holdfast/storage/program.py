"""Programs and flows: storage logic without I/O.

A *program* is one transaction: a generator that yields batches of statements, receives their rows, and returns a
result. A *flow* is several transactions with work between them (decode, compare, encode). Neither knows whether it is
driven blocking or async, on SQLite or PostgreSQL; a driver decides that. So no operation is written twice, and a
fault can be injected at every statement of every one.

Must never happen here or in any program: a clock, a random number, I/O. They are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from holdfast.errors import UsageError

T = TypeVar("T")
Dialect = Literal["sqlite", "postgres"]
Row = tuple[Any, ...]
Rows = list[Row]

# {stamp}: the commit that a row belongs to. SQLite: a counter that the driver advances once per transaction.
# PostgreSQL: the transaction's own 64-bit id, which pg_current_snapshot() can be compared with.
# FOR UPDATE, FOR KEY SHARE: SQLite has one writer at a time and needs no row locks.
# {now}: microseconds since 1970 by the clock that all writers share: the server's, or this machine's, passed as :now.
_TOKENS: dict[Dialect, dict[str, str]] = {
    "sqlite": {
        "{stamp}": "(SELECT stamp FROM clock)",
        "{for_update}": "",
        "{for_key_share}": "",
        "{skip_locked}": "",
        "{now}": ":now",
    },
    "postgres": {
        "{stamp}": "pg_current_xact_id()::text::bigint",
        "{for_update}": "FOR UPDATE",
        "{for_key_share}": "FOR KEY SHARE",
        "{skip_locked}": "FOR UPDATE SKIP LOCKED",
        "{now}": "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
    },
}


def _fill(text: str, dialect: Dialect) -> str:
    for token, replacement in _TOKENS[dialect].items():
        text = text.replace(token, replacement)
    return text


class Sql:
    """A statement's text with `:name` parameters: one text for both databases, or one for each.

    For SQLite it may be several statements, run in order with the same parameters; the rows are the last one's.
    `{stamp}` stands for the stamp of the running transaction, `{for_update}` for a row lock, `{for_key_share}` for one
    that only keeps the row from being deleted, `{skip_locked}` for one that passes over rows that others have locked.
    `{now}` is the time by the clock that all writers share; SQLite's is the parameter `:now`.
    """

    __slots__ = ("postgres", "sqlite")

    def __init__(
        self, common: str = "", *, sqlite: str | tuple[str, ...] | None = None, postgres: str | None = None
    ) -> None:
        texts = sqlite if sqlite is not None else common
        self.sqlite: tuple[str, ...] = tuple(
            _fill(text, "sqlite") for text in ((texts,) if isinstance(texts, str) else texts)
        )
        self.postgres: str = _fill(postgres if postgres is not None else common, "postgres")

    def __call__(self, **params: Any) -> Statement:
        return Statement(self, params)


class Statement(NamedTuple):
    """A statement with its parameters."""

    sql: Sql
    params: dict[str, Any]


class Batch:
    """Statements that need nothing from each other's rows, so that PostgreSQL takes them in one round trip.

    `last=True` promises that the program only reads the rows and returns: the driver sends COMMIT along.
    """

    __slots__ = ("last", "statements")

    def __init__(self, *statements: Statement, last: bool = False) -> None:
        self.statements = statements
        self.last = last


Program = Generator[Batch, list[Rows], T]
Progress = Callable[[int, int], None]  # of long work: how much is done, of how much


@dataclass(slots=True)  # not frozen: one is made for every step of every run, and that would double its cost
class Transaction:
    """One transaction that a flow asks for. The operation is passed, not the generator, so it can be run again."""

    op: Callable[[], Program[Any]]
    write: bool = False
    solo: bool = False  # long work: never joins a group commit
    # SQLite: a write goes on to its end also if the awaiting task is cancelled; the error's `answer` is its answer.
    whole: bool = False


class Reclaim:
    """An operation that gives unused space back to the file system. SQLite rewrites the file, outside of any
    transaction; for PostgreSQL it is an empty program, because the server does that by itself."""

    def __call__(self) -> Program[None]:
        return
        yield


Flow = Generator[Transaction, Any, T]


class Driver(Protocol):
    """What a database must offer: run a program in one transaction, blocking or async."""

    @property
    def dialect(self) -> Dialect: ...

    def run(self, transaction: Transaction) -> Any: ...

    async def arun(self, transaction: Transaction) -> Any: ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


def drive(driver: Driver, flow: Flow[T]) -> T:
    """Run a flow to its end, blocking."""
    try:
        transaction = next(flow)
        while True:
            try:
                answer = driver.run(transaction)
            except BaseException as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def adrive(driver: Driver, flow: Flow[T]) -> T:
    """Run a flow to its end on the running event loop."""
    try:
        transaction = next(flow)
        while True:
            try:
                answer = await driver.arun(transaction)
            except BaseException as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def read(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """Inside a flow: `value = yield from read(op)`, a read-only transaction."""
    return (yield Transaction(op))


def write(op: Callable[[], Program[T]], *, solo: bool = False) -> Generator[Transaction, T, T]:
    """Inside a flow: `value = yield from write(op)`, a read-write transaction."""
    return (yield Transaction(op, write=True, solo=solo))


def one_row(rows: Rows) -> Row | None:
    """The only row, or None. More than one is a defect of the statement."""
    if len(rows) > 1:
        raise UsageError(f"a statement that should give at most one row gave {len(rows)}")
    return rows[0] if rows else None
