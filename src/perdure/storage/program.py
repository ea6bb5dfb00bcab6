"""Programs and flows: storage logic without I/O.

A *program* is one transaction: a generator that yields batches of statements, receives their rows, and returns a
result. A *flow* is several transactions with work between them. A driver decides whether they run blocking or async, on
SQLite or PostgreSQL. No program or flow reads a clock, draws a random number or does I/O: these are passed in.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
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
Params = Mapping[str, Any]

# SQLite has one writer at a time and needs no row locks.
# {now} is in microseconds since 1970, by the clock that all writers share. SQLite has no such clock: callers pass :now.
SERVER_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
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
        "{now}": SERVER_NOW,
    },
}


_LIST = re.compile(r"\{(numbers|texts):(\w+)\}")
_LISTS: dict[Dialect, dict[str, str]] = {
    "sqlite": dict.fromkeys(("numbers", "texts"), "(SELECT value FROM json_each(:{}))"),
    "postgres": {
        "numbers": "(SELECT v::bigint FROM json_array_elements_text(:{}::json) v)",
        "texts": "(SELECT jsonb_array_elements_text(:{}::jsonb))",
    },
}


def values_of(names: Sequence[Any]) -> Callable[[Params], tuple[Any, ...]]:
    """Return a function that takes the values of these parameters, in this order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda params: tuple([params[name] for name in names])


def _fill(text: str, dialect: Dialect) -> str:
    for token, replacement in _TOKENS[dialect].items():
        text = text.replace(token, replacement)
    return _LIST.sub(lambda token: _LISTS[dialect][token[1]].format(token[2]), text) if "{" in text else text


class Sql:
    """A statement's text with `:name` parameters: one text for both databases, or one for each.

    SQLite may have several texts. They run in order with the same parameters, and the last one gives the rows.
    Tokens: `{for_update}` locks a row, `{for_share}` keeps it unchanged, `{for_key_share}` keeps it from being deleted,
    and `{skip_locked}` passes over locked rows. `{no_index}` before a column keeps SQLite from using an index that
    begins with it. `{now}` is the time by the clock that all writers share. `{numbers:ids}` and `{texts:names}` are
    lists that callers pass as JSON: `id IN {numbers:ids}`. One statement for many rows is faster than one for each row.

    seals: parameters that are encrypted columns (`columns.py`). A column that is `hashed` is stored with its hash.
    opens: the encrypted columns of the rows, by index. A column that is `hashed` is checked against its hash.
    bare: the same statement without that check, for a driver that decrypts first.
    tolerant: return UNREADABLE for values that fail their check. A value that is not encrypted, in an encrypted store,
    is among them only in a transaction that `checks`.
    keyless: return no row for a tenant whose key is missing, and UNREADABLE for a value that is not encrypted.
    step: a name under which SQLite may run all texts in one step (`Driver.append`). Such a statement changes nothing if
    its last text changes no row.
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
        tolerant: bool = False,
        keyless: bool = False,
        step: str = "",
    ) -> None:
        # Index columns first: the others are bound to their encrypted form.
        self.seals = sorted(seals.items(), key=lambda item: item[1].kind != "index") if seals else []
        self.opens = list(opens.items()) if opens else []
        self.encrypted = bool(seals or opens)
        self.hashes = [(name, column, values_of(column.by)) for name, column in self.seals if column.hashed]
        self.checks = [(index, column) for index, column in self.opens if column.hashed]
        self.tolerant = tolerant
        self.keyless = keyless
        self.step = step
        texts = sqlite if sqlite is not None else common
        self.sqlite: tuple[str, ...] = tuple(
            _fill(text, "sqlite") for text in ((texts,) if isinstance(texts, str) else texts)
        )
        self.prepared: Any = None  # set by the driver at the first run
        self.postgres: str = _fill(postgres if postgres is not None else common, "postgres")
        self.bare = self
        if self.checks:
            self.bare = copy(self)
            self.bare.checks = []

    def __call__(self, **params: Any) -> Statement:
        return self.of(params)

    def of(self, params: dict[str, Any]) -> Statement:
        """Return the statement with these parameters. It keeps the dict, and adds the hashes of columns to it."""
        for name, column, identity_of in self.hashes:
            if params[name] is not None:
                params[name] = with_hash(column, params["tenant"], identity_of(params), params[name])
        return _new_statement(Statement, (self, params))


class Statement(NamedTuple):
    sql: Sql
    params: dict[str, Any]


# Saves the Python call that NamedTuple's own constructor makes.
_new_statement: Callable[[type[Statement], tuple[Sql, dict[str, Any]]], Statement] = tuple.__new__


class Batch:
    """Statements that do not depend on each other's rows. PostgreSQL gets them in one round trip.

    last: the program only reads the rows and returns. The driver may send COMMIT along with the statements.
    """

    __slots__ = ("last", "statements")

    def __init__(self, *statements: Statement, last: bool = False) -> None:
        self.statements = statements
        self.last = last


Program = Generator[Batch, list[Rows], T]
WRITE_EVENT = "perdure.write"  # drivers raise this audit event before they write; its argument is the driver
Progress = Callable[[int, int], None]  # called during long work: how much is done, of how much


@dataclass(slots=True)  # not frozen, which would double its cost: every step of every run makes one
class Transaction:
    """A request of a flow for one transaction. It holds the function, not a generator, so that it can run again."""

    op: Callable[[], Program[Any]]
    write: bool = False
    solo: bool = False  # long work: never joins a group commit
    checks: bool = False  # return UNREADABLE for values that fail their check, so that the program can report them
    volatile: bool = False  # uses only tables that are `volatile` (`domains.py`), which SQLite has in another file
    prepare: str = ""  # PostgreSQL: prepare the transaction under this name instead of committing it
    settles: bool = False  # ends a prepared transaction: SQLite runs it although there is one (`prepared.py`)

    def perform(self, driver: Driver) -> Any:
        return driver.run(self)

    async def aperform(self, driver: Driver) -> Any:
        return await driver.arun(self)


class Call(Transaction):
    """A request of a flow for something other than a transaction: `do` if the flow runs blocking, `ado` if async."""

    def __init__(self, do: Callable[[Driver], Any], ado: Callable[[Driver], Awaitable[Any]]) -> None:
        super().__init__(_no_program)
        self._do, self._ado = do, ado

    def perform(self, driver: Driver) -> Any:
        return self._do(driver)

    async def aperform(self, driver: Driver) -> Any:
        return await self._ado(driver)


class Append(Transaction):
    """A request of a flow to write statements by `Driver.append`, the shortest way."""

    def __init__(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> None:
        self.statements, self.counts = statements, counts

    def perform(self, driver: Driver) -> Any:
        return driver.append(self.statements, self.counts)

    async def aperform(self, driver: Driver) -> Any:
        return await driver.aappend(self.statements, self.counts)


def _no_program() -> Program[Any]:
    raise UsageError("this is not a transaction: use drive or adrive")


# reclaim: return unused space to the file system.
# scrub: overwrite removed data in the store's files, as far as the database allows without locking out others.
# scrub_full: overwrite it although others are locked out meanwhile. scrub_log: only in SQLite's log.
Maintenance = Literal["reclaim", "scrub", "scrub_full", "scrub_log"]

Flow = Generator[Transaction, Any, T]


class Capabilities(NamedTuple):
    """What a driver offers beyond its methods."""

    base: Driver  # the driver that talks to the database, without those that wrap it
    path: str = ""  # SQLite: the store's file, absolute and without symlinks, or ":memory:"
    keys: Any = None  # the key cache of an encrypted store (`encryption/cache.py`)
    place: Any = None  # equal for two drivers of one database; None if no other driver can open it
    data_version: Callable[[], str] | None = None  # a text that changes with every commit; None: a query tells it


class Driver(Protocol):
    """Runs programs in one transaction each, blocking or async.

    `append` is the short path of a save, a recorded step and an effect: no generator and no batch. It runs `statements`
    in order in one transaction. It commits and returns True if each changed as many rows as `counts` says at its place
    (None: any number). If a count differs it writes nothing and returns False: the caller then uses `run`, which finds
    out why. It raises what `run` raises. The statements return no rows; `seals` apply, `opens` and `checks` do not.

    SQLite stops at the first statement that differs. A statement alone is a transaction of its own: it must change
    nothing where its condition does not hold. PostgreSQL gets all statements in one round trip and commits what they
    did, so each of them must do nothing where its condition does not hold. One statement with data-modifying CTEs is
    the natural form: `Sql(sqlite=(…), postgres="WITH …")`. Of several texts the rows of the last one are counted.

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
        """Maintain the store's files, blocking and outside of any transaction. Return "" or what prevented it."""
        ...

    def listen(self) -> Notifications:
        """Return notifications of commits, or of runs that are due."""
        ...

    def at(self, epoch: int, token: str) -> Driver:
        """Return a driver that reads the store as it was at a snapshot (`storage/versions.py`)."""
        ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


ConstraintKind = Literal["unique", "foreign_key", "check", "not_null", "other"]


class ConstraintFailed(StoreError):
    """A constraint of the schema refused the transaction, which was rolled back.

    The flow decides whether that is a conflict or a race to run again. If it reaches a user, the store is damaged or
    Perdure has a defect.
    """

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
        flow.close()  # release what the flow holds now: the traceback would keep it
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
    """Inside a flow, between transactions: call `work`, which keeps a processor busy, on a thread if the flow is async.

    It must not touch what other threads change.
    """
    return (yield Call(lambda _: work(), lambda driver: _in_a_thread(driver, work)))


def maintain(kind: Maintenance, table: str = "") -> Generator[Transaction, str, str]:
    """Inside a flow: maintain the store's files. Return "" or what prevented it."""
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
    """Inside a flow: return the rows of one statement, in a read-only transaction of its own."""

    def program() -> Program[Rows]:
        [rows] = yield Batch(sql(**params), last=True)
        return rows

    return (yield Transaction(program))


def change(*statements: Statement) -> Generator[Transaction, Rows, Rows]:
    """Inside a flow: run statements in a read-write transaction of their own. Return the rows of the first."""

    def program() -> Program[Rows]:
        first, *_ = yield Batch(*statements, last=True)
        return first

    return (yield Transaction(program, write=True))


def check(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """Inside a flow: a read-only transaction that gets UNREADABLE for values that fail their check."""
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
    """Inside a flow: return what a write transaction would return, and roll it back."""

    def rolled_back() -> Program[None]:
        raise _RolledBack((yield from op()))

    try:
        yield from write(rolled_back, solo=True)
    except _RolledBack as ended:
        return ended.result  # type: ignore[no-any-return]
    raise AssertionError("a dry run was committed")


def write_repair(op: Callable[[], Program[T]]) -> Generator[Transaction, T, T]:
    """Inside a flow: a long write transaction that gets UNREADABLE for values that fail their check."""
    return (yield Transaction(op, write=True, solo=True, checks=True))


def side_by_side(programs: Sequence[Program[T]]) -> Program[list[T]]:
    """Run programs in one transaction, in as many round trips as the longest of them takes.

    An error of the database ends all of them.
    """
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))  # None starts a program
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


def run_on_nothing(op: Callable[[], Program[T]]) -> T:
    """Run a program as if all tables were empty."""
    program = op()
    try:
        batch = next(program)
        while True:
            batch = program.send([[] for _ in batch.statements])
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def one_row(rows: Rows) -> Row | None:
    """Return the only row, or None. Raises Damaged if there are more: a snapshot shows two versions of a row."""
    if len(rows) > 1:
        raise Damaged(f"there are {len(rows)} rows where one is expected: run `perdure store verify`")
    return rows[0] if rows else None
