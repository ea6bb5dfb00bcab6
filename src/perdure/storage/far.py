"""A driver for stores whose large cold cells are in an object store: it fetches them, and programs never notice.

A cell that was moved out (`ops/far/objects.py` does that) is a few bytes that say where it is, how long, and its hash.
A program that meets one which is not at hand is stopped, its transaction rolled back, the object fetched, and the
operation run again: so nobody waits for a network with a lock in hand. An operation that only reads, and goes on to
meet others, fetches them on the way in the end: it holds up nobody, and must not hold all of them in memory.

This driver is next to the database, below the one that encrypts: so what is in an object is what would be in the
column, sealed if the store is encrypted, and whoever can read the objects reads nothing.

What is under a name never changes, and a name is never used again: so what was fetched may be kept.
"""

from __future__ import annotations

from asyncio import to_thread
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import Any

from perdure.errors import Damaged, ObjectMissing
from perdure.storage.cells import UNREADABLE
from perdure.storage.far_cells import MARK, Wanted, is_far, wanted_of
from perdure.storage.objects import Objects, Place
from perdure.storage.program import (
    Batch,
    Driver,
    Outside,
    Program,
    Reclaim,
    Rows,
    Scrub,
    Sql,
    Statement,
    Transaction,
)
from perdure.storage.wrapping import Whole, WrappingDriver

CACHE_BYTES = 32 << 20
_AHEAD_BYTES = 32 << 20
_ROUNDS = 2  # so often a reading operation is run again before it fetches on the way
# What a program that meets one pack after the other will want next.
_NEIGHBOURS = Sql(
    """SELECT p.data FROM pack p WHERE p.tenant = :tenant AND substr(p.data, 1, 5) = :mark AND p.tree = coalesce(
        CAST(:tree AS bigint), (SELECT o.tree FROM pack o WHERE o.tenant = :tenant AND o.pack = CAST(:pack AS bigint)))
    ORDER BY p.pack LIMIT 4096"""
)

Fetched = bytes | ObjectMissing | Damaged
Fetch = Callable[[list[Wanted]], Mapping[str, Fetched]]


class NotFetched(Exception):
    """A program has met cells whose objects are not at hand."""

    def __init__(self, wanted: list[Wanted], statement: Statement) -> None:
        super().__init__(f"{len(wanted)} objects")
        self.wanted, self.statement = wanted, statement


# --- what flows may ask for


class Put(Outside):
    """Store objects."""

    def __init__(self, named: Mapping[str, bytes]) -> None:
        self.named = named


class Get(Outside):
    """Fetch objects: by name the bytes, or what is wrong with them."""

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        self.wanted = list(wanted)


class Remove(Outside):
    """Remove objects."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)


class Missing(Outside):
    """Which objects are not there, or not of the right size."""

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        self.wanted = list(wanted)


# --- fetching


class Cache:
    """Objects that were fetched, the last used ones, bounded in bytes. For any thread."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._max = bytes_max
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def get(self, name: str) -> bytes | None:
        with self._lock:
            data = self._kept.get(name)
            if data is not None:
                self._kept.move_to_end(name)
            return data

    def add(self, name: str, data: bytes) -> None:
        if len(data) > self._max // 4:
            return
        with self._lock:
            if name not in self._kept:
                self._kept[name] = data
                self.bytes += len(data)
            while self.bytes > self._max:
                self.bytes -= len(self._kept.popitem(last=False)[1])

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self.bytes -= len(self._kept.pop(name, b""))


def far_program(
    cache: Cache, op: Callable[[], Program[Any]], got: Mapping[str, Fetched], fetch: Fetch | None, checks: bool
) -> Program[Any]:
    """The same program, with what was moved out in its place. `fetch`: get what is not at hand now."""
    program = op()
    answers: Any = None
    try:
        while True:
            batch = program.send(answers)
            if not any(statement.sql.far for statement in batch.statements):
                answers = yield batch
                continue
            # Not as the last one: what it gives may stop the program, and then nothing must be committed.
            answers = yield Batch(*batch.statements)
            for at, statement in enumerate(batch.statements):
                if statement.sql.far and any(is_far(row[i]) for row in answers[at] for i in statement.sql.far):
                    answers[at] = _brought(cache, statement, answers[at], got, fetch, checks)
    except StopIteration as stop:
        return stop.value


def _brought(
    cache: Cache, statement: Statement, rows: Rows, got: Mapping[str, Fetched], fetch: Fetch | None, checks: bool
) -> Rows:
    found: dict[bytes, Fetched] = {}
    wanted: dict[bytes, Wanted] = {}
    for row in rows:
        for index in statement.sql.far:
            if is_far(cell := row[index]) and cell not in found and cell not in wanted:
                try:
                    one = wanted_of(cell)
                except Damaged as problem:
                    found[cell] = problem
                    continue
                data = got.get(one.name) or cache.get(one.name)
                if data is None:
                    wanted[cell] = one
                else:
                    found[cell] = data
    if wanted and fetch is None:
        raise NotFetched(list(wanted.values()), statement)
    if wanted and fetch is not None:
        fetched = fetch(list(wanted.values()))
        found.update({cell: fetched[one.name] for cell, one in wanted.items()})
    table = [list(row) for row in rows]
    for cells in table:
        for index in statement.sql.far:
            if is_far(cells[index]):
                cells[index] = _read(found[cells[index]], bool(statement.sql.tolerant), checks)
    return [tuple(cells) for cells in table]


def _read(data: Fetched, tolerant: bool, checks: bool) -> Any:
    """What is damaged is as good as lost, and another checkpoint may stand in for it. What is missing may be elsewhere:
    an older state must not pass for the newest because somebody has given the wrong address."""
    if isinstance(data, bytes):
        return data
    if checks or (tolerant and isinstance(data, Damaged)):
        return UNREADABLE
    raise data


class FarDriver(WrappingDriver):
    """A driver whose far cells are fetched. Everything else is the driver's below (`inner`)."""

    def __init__(self, inner: Driver, objects: Objects, place: Place) -> None:
        super().__init__(inner)
        self.objects = objects
        self.place = place
        self.cache = Cache()

    def __repr__(self) -> str:
        return f"{self.inner!r} with {self.place!r}"

    def run(self, transaction: Transaction) -> Any:
        """Run a program in one transaction, on this thread."""
        op = transaction.op
        if isinstance(op, Outside):
            return self._outside(op)
        if isinstance(op, Reclaim | Scrub):  # the driver knows it by its class
            return self.inner.run(transaction)
        attempt = _Attempt(self.cache, transaction)
        while True:
            try:
                return self.inner.run(attempt.next())
            except NotFetched as stopped:
                if attempt.is_long:
                    return self._on_the_way(transaction)
                wanted = stopped.wanted
                if (look := attempt.neighbours(stopped)) is not None:
                    wanted = _ahead(wanted, self.inner.run(look))
                attempt.take(self._fetch(wanted))

    async def arun(self, transaction: Transaction) -> Any:
        """Run a program in one transaction without blocking the event loop."""
        op = transaction.op
        if isinstance(op, Outside):
            return await self._aoutside(op)
        if isinstance(op, Reclaim | Scrub):
            return await self.inner.arun(transaction)
        whole = Whole(transaction)
        return await whole.finish(self._arun(transaction, whole))

    async def _arun(self, transaction: Transaction, whole: Whole) -> Any:
        attempt = _Attempt(self.cache, transaction)
        while True:
            try:
                return await whole.attempt(self.inner.arun(attempt.next()))
            except NotFetched as stopped:
                if attempt.is_long:
                    return await to_thread(self._on_the_way, transaction)
                wanted = stopped.wanted
                if (look := attempt.neighbours(stopped)) is not None:
                    wanted = _ahead(wanted, await whole.need(self.inner.arun(look)))
                attempt.take(self._kept(await whole.need(self.place.afetch(wanted))))

    def _on_the_way(self, transaction: Transaction) -> Any:
        """A reading operation, which fetches what it meets while its transaction is open."""
        wrapped = partial(far_program, self.cache, transaction.op, {}, self._fetch, transaction.checks)
        try:
            return self.inner.run(Transaction(wrapped))
        except ObjectMissing:  # perhaps it has gone since this transaction began, and so has the row that named it
            return self.inner.run(Transaction(wrapped))

    def _fetch(self, wanted: list[Wanted]) -> Mapping[str, Fetched]:
        return self._kept(self.place.fetch(wanted))

    def _kept(self, fetched: dict[str, Fetched]) -> dict[str, Fetched]:
        for name, data in fetched.items():
            if isinstance(data, bytes):
                self.cache.add(name, data)
        return fetched

    def _outside(self, op: Outside) -> Any:
        if isinstance(op, Put):
            return self.place.put(op.named)
        if isinstance(op, Get):
            return self._fetch(op.wanted)
        if isinstance(op, Remove):
            self.cache.drop(op.names)
            return self.place.remove(op.names)
        assert isinstance(op, Missing)
        return self.place.missing(op.wanted)

    async def _aoutside(self, op: Outside) -> Any:
        if isinstance(op, Put):
            return await self.place.aput(op.named)
        if isinstance(op, Get):
            return self._kept(await self.place.afetch(op.wanted))
        if isinstance(op, Remove):
            self.cache.drop(op.names)
            return await self.place.aremove(op.names)
        assert isinstance(op, Missing)
        return await self.place.amissing(op.wanted)


class _Attempt:
    """An operation that is run until all that it needs is at hand."""

    def __init__(self, cache: Cache, transaction: Transaction) -> None:
        self._transaction = transaction
        self._got: dict[str, Fetched] = {}
        self._missed: set[str] = set()
        self._rounds = 0
        wrapped = partial(far_program, cache, transaction.op, self._got, None, transaction.checks)
        self._wrapped = Transaction(wrapped, transaction.write, transaction.solo, transaction.whole)

    @property
    def is_long(self) -> bool:
        return self._rounds > _ROUNDS and not self._transaction.write

    def next(self) -> Transaction:
        self._rounds += 1
        return self._wrapped

    def neighbours(self, stopped: NotFetched) -> Transaction | None:
        """What finds the objects that a writing operation will want next; it must not be run again for each of them."""
        params = stopped.statement.params
        if self._rounds < 2 or not self._transaction.write or not ("pack" in params or "tree" in params):
            return None
        return Transaction(partial(_neighbours, params["tenant"], params.get("tree"), params.get("pack")))

    def take(self, fetched: Mapping[str, Fetched]) -> None:
        for name, data in fetched.items():
            # It may have gone since the row was read: then the row does not name it any more.
            if isinstance(data, ObjectMissing) and name not in self._missed:
                self._missed.add(name)
            else:
                self._got[name] = data


def _neighbours(tenant: int, tree: int | None, pack: int | None) -> Program[list[Wanted]]:
    [rows] = yield Batch(_NEIGHBOURS(tenant=tenant, tree=tree, pack=pack, mark=MARK), last=True)
    found = []
    for (cell,) in rows:
        try:
            found.append(wanted_of(cell))
        except Damaged:
            continue
    return found


def _ahead(wanted: list[Wanted], others: list[Wanted]) -> list[Wanted]:
    """What is wanted, and of the others as much as may be held at once."""
    chosen = {one.name: one for one in wanted}
    held = sum(one.size for one in wanted)
    for other in others:
        held += other.size
        if held > _AHEAD_BYTES:
            break
        chosen.setdefault(other.name, other)
    return list(chosen.values())
