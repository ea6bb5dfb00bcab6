"""Transactions over several stores, as one of the stores sees them (`teams/commit.py` begins them).

A store that takes part is *prepared*: it can commit, and waits for the decision, which is a row of another store. Who
inserts that row first decides, so a slow coordinator and an impatient waiter never disagree. PostgreSQL keeps the
prepared transaction itself. SQLite keeps the statements, and lets no other writer in until they are run or dropped: so
they do at the commit what they did at first, and rows get the epoch of the commit.

A stored statement is the digest of one that this code has, and its values. No text from the table is ever executed. No
address from the table is connected to, except a file, whose id must be the recorded one.
"""

from __future__ import annotations

import pkgutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

import msgspec
import orjson
from blake3 import blake3

from perdure.errors import Busy, Damaged, PerdureError, StoreError, UsageError
from perdure.storage.program import Batch, Driver, Program, Sql, Statement, Transaction

COMMIT, ABORT = "commit", "abort"
_PAUSE_S = 0.005
_ORPHAN_US = 60_000_000  # a coordinator that has recorded its intent prepares within this time, or not at all
_ABORTS_KEPT_US = 86_400_000_000
# The packages whose statements can be part of such a transaction.
_STATEMENTS = tuple(f"perdure.{name}." for name in ("encryption", "log", "threads", "runs", "memory"))
_VALUES = frozenset({int, float, str, bytes, bool, type(None)})
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, dict[str, Any]]]).decode
_encode = msgspec.msgpack.Encoder().encode

_STORE = Sql("SELECT value FROM meta WHERE key = 'store'")
_ADD = Sql("INSERT INTO prepared (gid, decider, redo, deadline) VALUES (:gid, :decider, :redo, :deadline)")
_DROP = Sql("DELETE FROM prepared WHERE gid = :gid")
_REDO = Sql("SELECT redo FROM prepared WHERE gid = :gid")
_ALL = Sql("SELECT gid, decider, deadline FROM prepared ORDER BY gid")
_OUTCOME = Sql("SELECT outcome FROM decision WHERE gid = :gid")
_FORGET = Sql("DELETE FROM decision WHERE gid = :gid")
_FORGET_ABORTS = Sql(f"DELETE FROM decision WHERE outcome = '{ABORT}' AND at < :before")
_ABORT = Sql(
    f"INSERT INTO decision (gid, outcome, at) VALUES (:gid, '{ABORT}', :at) ON CONFLICT (gid) DO NOTHING",
)
_COMMIT = Sql(f"INSERT INTO decision (gid, outcome, at) VALUES (:gid, '{COMMIT}', :at)")
NOTIFY = Sql(sqlite="SELECT 1", postgres="SELECT pg_notify(left('perdure_' || current_schema(), 63), '')")

_open: WeakSet[Driver] = WeakSet()  # the drivers of this process


def remembered(driver: Driver) -> Driver:
    """Remember a driver while it is used: its store may have the decision about a transaction of another one."""
    _open.add(driver)
    return driver


def clock_us() -> int:
    return time.time_ns() // 1000


class PreparedHere(StoreError):
    """The store waits for the decision about a transaction."""

    def __init__(self, gid: str, decider: str, deadline: int) -> None:
        super().__init__(f"the store waits for the decision about transaction {gid!r:.50}")
        self.gid, self.decider, self.deadline = gid, decider, deadline

    @property
    def store(self) -> tuple[str, str]:
        """The id of the store that decides, and its place. Raises Damaged."""
        try:
            store, place = orjson.loads(self.decider)
            if not (type(store) is type(place) is type(self.gid) is str and len(self.gid) == 32):
                raise ValueError("wrong types")
            int(self.gid, 16)
            return store, place
        except (ValueError, TypeError) as error:
            raise Damaged(
                f"a transaction that is prepared in this store is damaged ({error}): `perdure store settle --drop` "
                "removes it; look yourself whether the other store has committed its part"
            ) from error


def decider_text(store: str, driver: Driver) -> str:
    """Return what a prepared store records of the one that decides: no address with a password."""
    return orjson.dumps([store, driver.capabilities.path or str(driver.capabilities.base)]).decode()


def run(driver: Driver, op: Any) -> Any:
    """Run a write transaction although the store is prepared."""
    return driver.run(Transaction(op, write=True, solo=True, settles=True))


def store_id(driver: Driver) -> str:
    def program() -> Program[str]:
        [rows] = yield Batch(_STORE(tenant=None), last=True)
        return str(rows[0][0]) if rows else ""

    return str(driver.run(Transaction(program)))


# --- statements


_known: dict[bytes, Sql] = {}  # the statements of this code by their digests: those that modules have under a name
_scanned: set[str] = set()


def _statement(digest: bytes, *, imports: bool) -> Sql | None:
    """Return the statement with a digest. With `imports`, also look in modules that this process has not used yet."""
    _scan(name for name in [*sys.modules] if name.startswith(_STATEMENTS))
    if digest not in _known and imports:
        for start in _STATEMENTS:
            package = import_module(start.removesuffix("."))
            for module in pkgutil.walk_packages(package.__path__, start):
                with suppress(ImportError):  # of an extra
                    import_module(module.name)
        _scan(name for name in [*sys.modules] if name.startswith(_STATEMENTS))
    return _known.get(digest)


def _scan(names: Iterable[str]) -> None:
    for name in names:
        if name not in _scanned:
            _scanned.add(name)
            _known.update((_digest(sql), sql) for sql in _statements_in([*vars(sys.modules[name]).values()], 3))


def _statements_in(values: Iterable[Any], depth: int) -> Iterator[Sql]:
    for value in values:
        if isinstance(value, Sql):
            yield value
        elif depth and isinstance(value, list | tuple):
            yield from _statements_in(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _statements_in(value.values(), depth - 1)


def _digest(sql: Sql) -> bytes:
    return blake3("\0".join(sql.sqlite).encode()).digest(16)


def is_reading(sql: Sql) -> bool:
    return all(text.lstrip().startswith("SELECT") for text in sql.sqlite)


def redo_of(statements: Sequence[Statement]) -> bytes:
    """Return statements as they are stored. Raises UsageError if one of them is not known by a name."""
    redo = [(_digest(sql), params) for sql, params in statements]
    for (sql, params), (digest, _) in zip(statements, redo, strict=True):
        if _statement(digest, imports=False) is None or not _VALUES.issuperset(map(type, params.values())):
            raise UsageError(
                f"this operation cannot be part of two_phase() on SQLite: nothing was written ({sql.sqlite[0]:.80})"
            )
    return _encode(redo)


# --- programs


def add_prepared(gid: str, decider: str, redo: bytes | None, deadline: int) -> Program[None]:
    yield Batch(_ADD(gid=gid, decider=decider, redo=redo, deadline=deadline))


def add_commit(gid: str, now: int) -> Program[None]:
    """Decide. Raises ConstraintFailed if it is decided already: then a waiter has lost its patience."""
    yield Batch(_COMMIT(gid=gid, at=now), _FORGET_ABORTS(before=now - _ABORTS_KEPT_US))


def forget_decision(gid: str) -> Program[None]:
    """Forget a decision that all stores have followed."""
    yield Batch(_FORGET(gid=gid), last=True)


def _decide(gid: str, now: int) -> Program[str]:
    _, [(outcome,)] = yield Batch(_ABORT(gid=gid, at=now), _OUTCOME(gid=gid))
    return str(outcome)


def _drop(gid: str) -> Program[None]:
    yield Batch(_DROP(gid=gid), NOTIFY(), last=True)


def _redo(gid: str, outcome: str) -> Program[None]:
    [rows] = yield Batch(_REDO(gid=gid))
    if not rows:
        return  # another process was faster
    if outcome == COMMIT:
        try:
            redo = _decode(rows[0][0])
            if not all(_VALUES.issuperset(map(type, params.values())) for _, params in redo):
                raise TypeError("a value has a wrong type")
            statements = [(_statement(digest, imports=True), params) for digest, params in redo]
            if any(sql is None for sql, _ in statements):
                raise TypeError("a statement is not known")
        except (msgspec.MsgspecError, TypeError) as error:
            raise Damaged(
                f"the transaction {gid} was decided, and cannot be committed here: it is damaged, or another version "
                "of Perdure has prepared it. Use that version, or drop it with `perdure store settle --drop`"
            ) from error
        for sql, params in statements:
            if sql is not None:
                yield Batch(Statement(sql, params))
    yield Batch(_DROP(gid=gid))


# --- the end


def decide(driver: Driver, gid: str) -> str:
    """Return how a transaction ends, by the store that decides. If it is not decided yet, it is aborted."""
    return str(run(driver, lambda: _decide(gid, clock_us())))


def finish(driver: Driver, gid: str, outcome: str) -> None:
    """Commit or abort a prepared transaction of this store, unless it is done."""
    base = driver.capabilities.base
    if base.dialect == "sqlite":
        run(base, lambda: _redo(gid, outcome))
    else:
        base.end_prepared(gid, outcome)  # type: ignore[attr-defined]
        run(base, lambda: _drop(gid))


def all_prepared(driver: Driver) -> list[PreparedHere]:
    """Return the transactions that a store waits for."""

    def program() -> Program[list[PreparedHere]]:
        [rows] = yield Batch(_ALL(tenant=None), last=True)
        return [PreparedHere(*row) for row in rows]

    return driver.run(Transaction(program))  # type: ignore[no-any-return]


def settle_all(driver: Driver, deciders: Sequence[Driver] = ()) -> int:
    """End the transactions of a store that are past their deadline. Return how many."""
    late = [one for one in all_prepared(driver.capabilities.base) if one.deadline <= clock_us()]
    return sum(settle(driver, one, deciders) for one in late)


def drop_all(driver: Driver) -> int:
    """Abort the transactions of a store, whatever was decided. Return how many."""
    base = driver.capabilities.base
    every = all_prepared(base)
    for one in every:
        if base.dialect == "postgres":
            with suppress(ValueError):  # a name that Perdure does not give
                base.end_prepared(one.gid, ABORT)  # type: ignore[attr-defined]
        run(base, partial(_drop, one.gid))
    return len(every)


def settle_quietly(driver: Driver) -> None:
    """End what can be ended now, as `settle_all` does. A caller that needs the rows or the lock meets the others."""
    with suppress(PerdureError):
        settle_all(driver)


def settle(driver: Driver, prepared: PreparedHere, deciders: Sequence[Driver] = ()) -> bool:
    """End a transaction that is past its deadline. Raises Busy if the store that decides is not at hand."""
    store, place = prepared.store
    base = driver.capabilities.base
    decider, opened = _decider(store, place, deciders)
    try:
        outcome = decide(decider, prepared.gid)
    finally:
        if opened:
            decider.close()
    if base.dialect != "sqlite" and prepared.deadline + _ORPHAN_US > clock_us():
        # Its coordinator may still be about to prepare it: the row stays until that is impossible.
        return bool(base.end_prepared(prepared.gid, outcome)) and not run(base, lambda: _drop(prepared.gid))  # type: ignore[attr-defined]
    finish(base, prepared.gid, outcome)
    return True


def _decider(store: str, place: str, deciders: Sequence[Driver]) -> tuple[Driver, bool]:
    """Return a driver of the store that decides, and whether it was opened for this."""
    for driver in (*deciders, *_open):
        try:
            base = driver.capabilities.base
            if store_id(base) == store:
                return base, False
        except PerdureError:  # closed, or not reachable
            continue
    try:
        from perdure.storage.sqlite.driver import SqliteDriver

        if not place.startswith("/"):
            raise UsageError(place)
        driver = SqliteDriver(place, create=False)
        if store_id(driver) == store:
            return driver, True
        driver.close()
        raise UsageError(f"{place} is another store")
    except PerdureError as error:
        raise Busy(
            f"a transaction over two stores was interrupted, and its outcome is in the other one ({place:.200}): open "
            f"that store in this process too, or run `perdure store settle` with both ({error})"
        ) from error


class Patience:
    """How long a writer waits for transactions that are prepared in its store."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def settle(self, driver: Driver, prepared: PreparedHere) -> None:
        """Wait a moment for the coordinator, or end the transaction if it is late. Raises Busy."""
        if prepared.deadline <= clock_us():
            settle(driver, prepared)
        elif time.monotonic() > self._until:
            raise Busy(f"{prepared}: nothing was written; try again later")
        else:
            time.sleep(_PAUSE_S)
