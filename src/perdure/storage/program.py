"""Programs and flows: storage logic without I/O.

A *program* is one transaction: a generator that yields batches of statements, receives their rows, and returns a
result. A *flow* is several transactions with work between them (decode, compare, encode). Neither knows whether it is
driven blocking or async, on SQLite or PostgreSQL; a driver decides that. So no operation is written twice, and a
fault can be injected at every statement of every one.

Must never happen here or in any program: a clock, a random number, I/O. They are passed in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from perdure.errors import Damaged, StoreError, UsageError
from perdure.storage.notifications import Notifications
from perdure.storage.row_hashes import with_hash

if TYPE_CHECKING:
    from perdure.storage.columns import EncryptedColumn

T = TypeVar("T")
Dialect = Literal["sqlite", "postgres"]
Row = tuple[Any, ...]
Rows = list[Row]

# FOR UPDATE, FOR KEY SHARE: SQLite has one writer at a time and needs no row locks.
# {now}: microseconds since 1970 by the clock that all writers share: the server's, or this machine's, passed as :now.
_TOKENS: dict[Dialect, dict[str, str]] = {
    "sqlite": {
        "{for_update}": "",
        "{for_key_share}": "",
        "{for_share}": "",
        "{skip_locked}": "",
        "{no_index}": "+",
        "{now}": ":now",
    },
    "postgres": {
        "{for_update}": "FOR UPDATE",
        "{for_key_share}": "FOR KEY SHARE",
        "{for_share}": "FOR SHARE",
        "{skip_locked}": "FOR UPDATE SKIP LOCKED",
        "{no_index}": "",
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
    `{for_update}` stands for a row lock, `{for_key_share}` for one that only keeps the row from being deleted,
    `{for_share}` for one that keeps it unchanged, `{skip_locked}` for one that skips rows that are locked.
    `{no_index}` before a column keeps SQLite from choosing an index that begins with it.
    `{now}` is the time by the clock that all writers share; SQLite's is the parameter `:now`.

    `seals` names the parameters that are encrypted columns, `opens` those columns of its rows (`columns.py`): they are
    encrypted if the store is, and those that are `hashed` are stored with their hash and checked against it.
    `bare` is the same statement without that check, for a driver that decrypts first.
    `tolerant`: who reads the rows looks at the types of these columns, so that one that is damaged may come as
    something else than bytes or text; "all": also one that is not encrypted.
    `step` names a statement of several texts that SQLite may run in one step, for `Driver.append`. It changes nothing
    if its last text changes no row.
    `keyless`: for a tenant whose key is not there it does nothing and gives no row, instead of an error.
    """

    __slots__ = (
        "bare",
        "checks",
        "encrypted",
        "hashes",
        "keyless",
        "opens",
        "postgres",
        "prepared",
        "seals",
        "sqlite",
        "step",
        "tolerant",
    )

    def __init__(
        self,
        common: str = "",
        *,
        sqlite: str | tuple[str, ...] | None = None,
        postgres: str | None = None,
        seals: Mapping[str, EncryptedColumn] | None = None,
        opens: Mapping[int, EncryptedColumn] | None = None,
        tolerant: bool | Literal["all"] = False,
        keyless: bool = False,
        step: str = "",
    ) -> None:
        # What others are identified by comes first: they are bound to what stands in the row.
        self.seals = sorted(seals.items(), key=lambda item: item[1].kind != "index") if seals else []
        self.opens = list(opens.items()) if opens else []
        self.encrypted = bool(seals or opens)
        self.hashes = [(name, column) for name, column in self.seals if column.hashed]
        self.checks = [(index, column) for index, column in self.opens if column.hashed]
        self.tolerant = tolerant
        self.keyless = keyless
        self.step = step
        texts = sqlite if sqlite is not None else common
        self.sqlite: tuple[str, ...] = tuple(
            _fill(text, "sqlite") for text in ((texts,) if isinstance(texts, str) else texts)
        )
        self.prepared: Any = None  # by the driver, when it is first run
        self.postgres: str = _fill(postgres if postgres is not None else common, "postgres")
        self.bare = self
        if self.checks:
            self.bare = copy(self)
            self.bare.checks = []

    def __call__(self, **params: Any) -> Statement:
        for name, column in self.hashes:
            if params[name] is not None:
                by = tuple([params[by] for by in column.by])  # type: ignore[index]
                params[name] = with_hash(column, params["tenant"], by, params[name])
        return _new_statement(Statement, (self, params))


class Statement(NamedTuple):
    """A statement with its parameters."""

    sql: Sql
    params: dict[str, Any]


_new_statement: Callable[[type[Statement], tuple[Sql, dict[str, Any]]], Statement] = tuple.__new__  # without a call


class Batch:
    """Statements that need nothing from each other's rows, so that PostgreSQL takes them in one round trip.

    `last=True` promises that the program only reads the rows and returns: the driver sends COMMIT along.
    """

    __slots__ = ("last", "statements")

    def __init__(self, *statements: Statement, last: bool = False) -> None:
        self.statements = statements
        self.last = last


Program = Generator[Batch, list[Rows], T]
# What drivers report to `sys.audit` before they write, with themselves.
WRITE_EVENT = "perdure.write"
Progress = Callable[[int, int], None]  # of long work: how much is done, of how much


@dataclass(slots=True)  # not frozen: one is made for every step of every run, and that would double its cost
class Transaction:
    """One transaction that a flow asks for. The operation is passed, not the generator, so it can be run again."""

    op: Callable[[], Program[Any]]
    write: bool = False
    solo: bool = False  # long work: never joins a group commit
    # It looks at what is stored and says what is wrong: what cannot be read comes as something unreadable.
    checks: bool = False

    def perform(self, driver: Driver) -> Any:
        return driver.run(self)

    async def aperform(self, driver: Driver) -> Any:
        return await driver.arun(self)


class Call(Transaction):
    """Something other than a transaction that a flow wants done, in the way in which the flow itself is driven."""

    def __init__(self, do: Callable[[Driver], Any], ado: Callable[[Driver], Awaitable[Any]]) -> None:
        super().__init__(_no_program)
        self._do, self._ado = do, ado

    def perform(self, driver: Driver) -> Any:
        return self._do(driver)

    async def aperform(self, driver: Driver) -> Any:
        return await self._ado(driver)


class Append(Transaction):
    """Statements that a flow wants written by the driver's shortest way (`Driver.append`)."""

    def __init__(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> None:
        self.statements, self.counts = statements, counts

    def perform(self, driver: Driver) -> Any:
        return driver.append(self.statements, self.counts)

    async def aperform(self, driver: Driver) -> Any:
        return await driver.aappend(self.statements, self.counts)


def _no_program() -> Program[Any]:
    raise UsageError("this is not a transaction: use drive or adrive")


# reclaim: give unused space back to the file system. scrub: what was removed is gone from the store's own files, as far
# as the database allows it; scrub_full: also where that locks out others meanwhile. scrub_log: only from SQLite's log.
Maintenance = Literal["reclaim", "scrub", "scrub_full", "scrub_log"]


Flow = Generator[Transaction, Any, T]


class Capabilities(NamedTuple):
    """What the layers above may ask of a driver beyond its methods."""

    base: Driver  # the driver that talks to the database, below those that wrap it
    path: str = ""  # SQLite: the store's file, absolute and without symlinks, or ":memory:"
    sees_all_tenants: bool = True  # else the database's role is held to one tenant at a time
    keys: Any = None  # of an encrypted store: its key cache (`encryption/cache.py`)
    place: Any = None  # equal for two drivers of one database; None: this driver is the only one


class Driver(Protocol):
    """What a database must offer: run a program in one transaction, blocking or async.

    `append` is the straight line for the hot writes (a save, a recorded step, an effect): no generator, no batch, no
    group object while no other writer is at work. It runs `statements` in order in one transaction and commits if
    each changed as many rows as `counts` says at its place (None: any number). It returns True when they are
    committed, with the durability of a write; False if a count differs: then nothing was written, and the caller
    takes the general way, which finds out why. Errors are those of `run`, OutcomeUnknown and ConstraintFailed among
    them. The statements give no rows (no RETURNING); `seals` are honoured, `opens` and `checks` have no meaning.

    SQLite runs one statement after the other, and the first that differs ends it; one alone is a transaction by itself,
    and must change nothing where it does not apply. PostgreSQL gets all of them in one
    round trip, and commits what they did: there every statement must do nothing by itself if the condition does not
    hold. One statement with data-modifying CTEs is the natural form (`Sql(sqlite=(…), postgres="WITH …")`: a `Sql`
    with several texts counts the rows of its last one).

        driver.append([ADD_ENTRY(tenant=…, run=…, seq=…, body=…, fence=…)], [1])
    """

    @property
    def dialect(self) -> Dialect: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def run(self, transaction: Transaction) -> Any: ...

    async def arun(self, transaction: Transaction) -> Any: ...

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool: ...

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool: ...

    def maintain(self, kind: Maintenance, table: str = "") -> str:
        """Maintain the store's files, blocking, outside of any transaction. Empty, or what prevented it."""
        ...

    def listen(self) -> Notifications:
        """Hear of commits, or of runs that are due."""
        ...

    def at(self, epoch: int, token: str) -> Driver:
        """The store as it was at a snapshot: reads only (`storage/versions.py`)."""
        ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


ConstraintKind = Literal["unique", "foreign_key", "check", "not_null", "other"]


class ConstraintFailed(StoreError):
    """A constraint of the schema refused the transaction, which was rolled back. The flow decides whether that is a
    conflict or a race to run again; where it reaches a user, the store is damaged or this library has a defect."""

    def __init__(self, message: str, *, kind: ConstraintKind = "other") -> None:
        super().__init__(message)
        self.kind: ConstraintKind = kind


def drive(driver: Driver, flow: Flow[T]) -> T:
    """Run a flow to its end, blocking."""
    try:
        transaction = next(flow)
        while True:
            try:
                answer = transaction.perform(driver)
            except BaseException as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:
        flow.close()  # interrupted between two calls: what the flow holds is given up now, not with the traceback
        raise


async def adrive(driver: Driver, flow: Flow[T]) -> T:
    """Run a flow to its end on the running event loop."""
    try:
        transaction = next(flow)
        while True:
            try:
                answer = await transaction.aperform(driver)
            except BaseException as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:
        flow.close()  # as in `drive`
        raise


def either(do: Callable[[], T], ado: Callable[[], Awaitable[T]]) -> Generator[Transaction, T, T]:
    """Inside a flow: call `do`, or await `ado`."""
    return (yield Call(lambda _: do(), lambda _: ado()))


def sleep(seconds: float) -> Generator[Transaction, None, None]:
    """Inside a flow: let time pass."""

    async def ado(_: Driver) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    return (yield Call(lambda _: time.sleep(seconds), ado))


def aside(work: Callable[[], T]) -> Generator[Transaction, T, T]:
    """Inside a flow, between transactions: `value = yield from aside(work)`, for what keeps a processor busy: an event
    loop has a thread do it. It may not touch what other threads change."""
    return (yield Call(lambda _: work(), lambda driver: _in_a_thread(driver, work)))


def maintain(kind: Maintenance, table: str = "") -> Generator[Transaction, str, str]:
    """Inside a flow: maintenance of the store's files. Empty, or what prevented it."""
    return (
        yield Call(
            lambda driver: driver.maintain(kind, table),
            lambda driver: _in_a_thread(driver, partial(driver.maintain, kind, table)),
        )
    )


async def _in_a_thread(driver: Driver, work: Callable[[], T]) -> T:
    from perdure.storage.store_threads import threads_of  # imported late: it needs this module

    return await threads_of(driver).call(work)


def read(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """Inside a flow: `value = yield from read(op)`, a read-only transaction."""
    return (yield Transaction(op))


def fetch(sql: Sql, **params: Any) -> Generator[Transaction, Rows, Rows]:
    """Inside a flow: the rows of one statement, in a read-only transaction of its own."""

    def program() -> Program[Rows]:
        [rows] = yield Batch(sql(**params), last=True)
        return rows

    return (yield Transaction(program))


def check(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """The same for an operation that says what is wrong with what is stored."""
    return (yield Transaction(op, checks=True))


def write(op: Callable[[], Program[T]], *, solo: bool = False) -> Generator[Transaction, T, T]:
    """Inside a flow: `value = yield from write(op)`, a read-write transaction."""
    return (yield Transaction(op, write=True, solo=solo))


class _RolledBack(Exception):
    """Ends a transaction that is a dry run."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def dry_write(op: Callable[[], Program[T]]) -> Generator[Transaction, Any, T]:
    """Inside a flow: what a write transaction would return. It is rolled back: nothing of it stays."""

    def rolled_back() -> Program[None]:
        raise _RolledBack((yield from op()))

    try:
        yield from write(rolled_back, solo=True)
    except _RolledBack as ended:
        return ended.result  # type: ignore[no-any-return]
    raise AssertionError("a dry run was committed")


def write_repair(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """A long write transaction for an operation that repairs what is stored: what cannot be read does not stop it."""
    return (yield Transaction(op, write=True, solo=True, checks=True))


def side_by_side(programs: Sequence[Program[T]]) -> Program[list[T]]:
    """Programs in one transaction, as many as wanted in as many round trips as the longest of them takes. An error of
    the database ends all of them."""
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))  # None: it begins
    while answers:
        asked: dict[int, Batch] = {}
        for number, answer in answers.items():
            try:
                asked[number] = programs[number].send(answer)
            except StopIteration as stop:
                results[number] = stop.value
        rows = iter((yield Batch(*(one for batch in asked.values() for one in batch.statements))) if asked else ())
        answers = {number: list(islice(rows, len(batch.statements))) for number, batch in asked.items()}
    return [results[number] for number in range(len(programs))]


def as_subprogram(program: Program[Any]) -> Program[Any]:
    """Run a program as a part of another one: none of its batches is the last of the transaction."""
    try:
        batch = next(program)
        while True:
            answers = yield Batch(*batch.statements)
            batch = program.send(answers)
    except StopIteration as stop:
        return stop.value


def one_row(rows: Rows) -> Row | None:
    """Return the only row, or None. Raises Damaged if there are more: a snapshot shows two versions of a row."""
    if len(rows) > 1:
        raise Damaged(f"there are {len(rows)} rows where one is expected: run `perdure store verify`")
    return rows[0] if rows else None
