"""A driver that encrypts: it wraps each program, seals the secret parameters of its statements and opens its rows.

Programs stay as they are; their statements say what is secret (`cells.py`). What the store knows of a tenant's keys
(the table `seal`) is read inside the transaction that needs it, remembered, and looked at again after a second: so a
process learns soon that a new key has come into use, and stops writing with the old one. A tenant's first write, and
the first one with a new key, also write down that key's id and the proof of it.

Keys come from `vault.py`. A program that meets a tenant whose keys are not there is stopped, its transaction rolled
back, the provider asked, and the operation run again: so nobody waits for a key service with a lock in hand.

Without keys a store is not wrapped at all: then nothing of this costs anything.
"""

from __future__ import annotations

from asyncio import ensure_future, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any

from perdure.errors import Damaged, KeyMissing, NotEncrypted, Unavailable, UsageError
from perdure.storage.cells import NEEDED, UNREADABLE
from perdure.storage.keyring import Keys
from perdure.storage.locks import Locks, UnknownKey
from perdure.storage.program import (
    Batch,
    Driver,
    Program,
    Rows,
    Sql,
    Statement,
    Transaction,
)
from perdure.storage.row_hashes import without_hash
from perdure.storage.vault import KeysWanted, Vault
from perdure.storage.wrapping import Whole, WrappingDriver

_ROUNDS = 8  # so often an operation asks for one tenant's keys; once is usual
_NAME = Sql("SELECT name FROM tenant WHERE tenant = :tenant")
_ROWS = Sql("SELECT key, proof, since FROM seal WHERE tenant = :tenant ORDER BY since, key")
_USED = Sql(
    """SELECT 1 WHERE EXISTS (SELECT 1 FROM thread WHERE tenant = :tenant)
    OR EXISTS (SELECT 1 FROM run WHERE tenant = :tenant)"""
)
# Two that bring the first key must not bring two. Not the tenant's row: a role may be allowed to read it only.
_ALONE = Sql(
    sqlite="SELECT 1", postgres="SELECT CAST(pg_advisory_xact_lock(4851032, CAST(:tenant % 1000000007 AS int)) AS text)"
)
_ADD = Sql(
    """INSERT INTO seal (tenant, key, proof, since) VALUES (:tenant, :key, :proof, :since)
    ON CONFLICT (tenant, key) DO NOTHING"""
)


_NOTHING = Sql("SELECT 1 WHERE 1 = 0")
_LOAD = Sql("SELECT NULL WHERE 1 = 0", opens={0: NEEDED})


class AskKeys:
    """An operation that asks the provider for a tenant's keys. With its number: they are in use from now on."""

    def __init__(self, name: str, tenant: int | None = None) -> None:
        self.name, self.tenant = name, tenant

    def __call__(self) -> Program[Any]:
        raise UsageError("the store was opened without keys: open(url, keys=…)")


Reading = Generator[Batch, list[Rows], Locks]


def load(vault: Vault, tenant: int, *, write: bool, again: bool = False, plain: bool = False) -> Reading:
    """A tenant's keys as the store has them; in a write, a key that is new is written down. `plain`: it may hold data
    that is not encrypted, which is about to be."""
    # In this order: each statement sees what was committed before it, and a tenant's first row comes with its key.
    names, used, rows = yield Batch(_NAME(tenant=tenant), _USED(tenant=tenant), _ROWS(tenant=tenant))
    name = str(names[0][0]) if names else ""
    locks = vault.settled(tenant, name, rows, bool(used) and not plain, again=again)
    if not write or locks.current in locks.rows:
        if rows:
            vault.remember(tenant, locks)
        return locks
    yield Batch(_ALONE(tenant=tenant))
    [rows] = yield Batch(_ROWS(tenant=tenant))
    locks = vault.settled(tenant, name, rows, bool(used) and not plain, again=True)
    if locks.current not in locks.rows:
        since = max([vault.clock_us(), *(at + 1 for at in locks.rows.values())])
        yield Batch(_ADD(tenant=tenant, key=locks.current, proof=locks.proof(), since=since))
        locks.rows[locks.current] = since
    return locks


class _Unfinished:
    """A program whose last rows were read, and committed, but cannot be opened yet: a key came into use just now."""

    __slots__ = ("answers", "program", "statements")

    def __init__(self, program: Program[Any], statements: list[Statement], answers: list[Rows]) -> None:
        self.program, self.statements, self.answers = program, statements, answers


def sealed_program(vault: Vault, op: Callable[[], Program[Any]], write: bool) -> Program[Any]:
    """The same program, as the store sees it."""
    program = op()
    own: dict[int, Locks] = {}  # for the whole transaction: it has one key
    answers: Any = None
    try:
        while True:
            batch = program.send(answers)
            for statement in batch.statements:
                if statement.sql.sealed:
                    break
            else:
                answers = yield batch
                continue
            sealed: list[Statement] = []
            wanted: dict[int, KeysWanted] = {}
            for statement in batch.statements:
                if statement.sql.sealed:
                    tenant = statement.params.get("tenant")
                    if tenant in wanted:
                        continue
                    if tenant is not None and tenant not in own:
                        try:
                            own[tenant] = vault.known(tenant) or (yield from load(vault, tenant, write=write))
                        except KeysWanted as stopped:  # go on: they can all be asked for at once
                            wanted[tenant] = stopped
                            continue
                        except (KeyMissing, NotEncrypted, Unavailable):
                            if not statement.sql.keyless:
                                raise
                            vault.bar(tenant)
                            sealed.append(_NOTHING())
                            continue
                    statement = _sealed(own, statement)
                sealed.append(statement)
            if wanted:
                first, *others = wanted.values()
                first.others = tuple(others)
                raise first
            answers = yield Batch(*sealed, last=batch.last)
            try:
                answers = _opened(own, sealed, answers)
            except UnknownKey:
                if batch.last:
                    return _Unfinished(program, sealed, answers)
                for tenant in own:
                    own[tenant] = yield from load(vault, tenant, write=write, again=True)
                answers = _opened(own, sealed, answers, vault)
    except StopIteration as stop:
        return stop.value


def _sealed(own: dict[int, Locks], statement: Statement) -> Statement:
    sql, params = statement
    if not sql.seals:
        return Statement(sql.bare, params)
    locks = own[params["tenant"]]
    params = dict(params)
    for name, cell in sql.seals:
        value = params[name]
        if value is not None:
            params[name] = locks.seal(cell, value, tuple([params[by] for by in cell.by]))  # type: ignore[index]
    return Statement(sql.bare, params)


def _opened(
    own: dict[int, Locks], statements: list[Statement], answers: list[Rows], vault: Vault | None = None
) -> list[Rows]:
    """All answers with their cells opened. With the vault: what the store knows of keys was read just now."""
    return [
        _open_rows(own, statement, rows, vault) if rows and statement.sql.opens else rows
        for statement, rows in zip(statements, answers, strict=True)
    ]


def _open_rows(own: dict[int, Locks], statement: Statement, rows: Rows, vault: Vault | None) -> Rows:
    sql, params = statement
    table = [list(row) for row in rows]
    locks = own.get(params.get("tenant", -1))
    for index, cell in sql.opens:
        if locks is None:  # only which key a tenant needs
            for row in table:
                row[index] = None
            continue
        open_, by = locks.open, cell.by
        for row in table:
            value = row[index]
            if value is None or value is UNREADABLE:  # the driver below could not read it
                continue
            where = tuple([row[at] if isinstance(at, int) else params[at] for at in by]) if by else ()
            try:
                row[index] = open_(cell, value, where)
                if cell.hashed:
                    row[index] = without_hash(cell, params["tenant"], where, row[index])
            except Damaged:
                if not sql.tolerant:
                    raise
                row[index] = UNREADABLE
            except NotEncrypted:
                if sql.tolerant != "all":
                    raise
                row[index] = UNREADABLE
            except UnknownKey as unknown:
                if vault is None:
                    raise
                if unknown.key in locks.rows and not vault.was_asked_about(params["tenant"], unknown.key):
                    raise vault.wanted(params["tenant"], locks.name, locks.rows) from None
                error = locks.unknown(unknown.key, cell)
                if not sql.tolerant or isinstance(error, KeyMissing):
                    raise error from None
                row[index] = UNREADABLE
    return [tuple(row) for row in table]


class SealedDriver(WrappingDriver):
    """A driver whose secret cells are encrypted. Everything else is the driver's below (`inner`)."""

    def __init__(self, inner: Driver, vault: Vault) -> None:
        super().__init__(inner)
        self.vault = vault

    def __repr__(self) -> str:
        return f"<encrypted {self.inner!r}>"

    def run(self, transaction: Transaction) -> Any:
        """Run a program in one transaction, on this thread."""
        op = transaction.op
        if isinstance(op, AskKeys):
            return self._took(op, *self.vault.asker.ask(op.name))
        if self.vault.is_due():
            self.vault.tend()
        wrapped = self._wrapped(transaction)
        result = self._asking(lambda: self.inner.run(wrapped))
        if type(result) is not _Unfinished:
            return result

        def open_() -> list[Rows]:
            own = {tenant: self.inner.run(self._load(tenant)) for tenant in _tenants(result)}
            return _opened(own, result.statements, result.answers, self.vault)

        return _finished(result, self._asking(open_))

    async def arun(self, transaction: Transaction) -> Any:
        """Run a program in one transaction without blocking the event loop."""
        op = transaction.op
        if isinstance(op, AskKeys):
            return self._took(op, *(await self.vault.asker.aask(op.name)))
        whole = Whole(transaction)
        return await whole.finish(self._arun(transaction, whole))

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """Append what is encrypted."""
        tenant = statements[0].params["tenant"]
        while (locks := self.vault.known(tenant)) is None:
            self.run(Transaction(partial(_load_keys, tenant), write=True))
        return self.inner.append([_sealed({tenant: locks}, statement) for statement in statements], counts)

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        """`append`, awaited."""
        tenant = statements[0].params["tenant"]
        while (locks := self.vault.known(tenant)) is None:
            await self.arun(Transaction(partial(_load_keys, tenant), write=True))
        return await self.inner.aappend([_sealed({tenant: locks}, statement) for statement in statements], counts)

    async def _arun(self, transaction: Transaction, whole: Whole) -> Any:
        if self.vault.is_due():
            tending = get_running_loop().run_in_executor(None, self.vault.tend)
            await whole.until(tending)
            tending.result()
        wrapped = self._wrapped(transaction)
        result = await self._aasking(lambda: whole.attempt(self.inner.arun(wrapped)), whole)
        if type(result) is not _Unfinished:
            return result

        async def open_() -> list[Rows]:
            own = {tenant: await whole.need(self.inner.arun(self._load(tenant))) for tenant in _tenants(result)}
            return _opened(own, result.statements, result.answers, self.vault)

        return _finished(result, await self._aasking(open_, whole))

    def _asking(self, attempt: Callable[[], Any]) -> Any:
        """Run something until all keys that it needs are at hand."""
        asked: Counter[int] = Counter()
        while True:
            try:
                return attempt()
            except KeysWanted as stopped:
                wanted = stopped
            self._count(asked, wanted)
            self.vault.answer(wanted)
            self.vault.keep_problems(asked)

    async def _aasking(self, attempt: Callable[[], Awaitable[Any]], whole: Whole) -> Any:
        """`_asking`, awaited."""
        asked: Counter[int] = Counter()
        while True:
            try:
                return await attempt()
            except KeysWanted as stopped:
                wanted = stopped
            self._count(asked, wanted)
            asking = ensure_future(self.vault.aanswer(wanted))
            await whole.until(asking)  # else the answer is remembered all the same
            if not asking.cancelled():  # by whoever ends the event loop: then it is asked once more
                asking.result()
            self.vault.keep_problems(asked)

    def _count(self, asked: Counter[int], wanted: KeysWanted) -> None:
        """An operation may meet any number of tenants, but must not ask for one of them for ever."""
        asked.update([one.tenant for one in wanted.each])
        for one in wanted.each:
            if asked[one.tenant] > _ROUNDS:
                raise Unavailable(
                    f"the keys of tenant {one.name!r} change faster than they can be asked for: nothing was read or "
                    "written; try again"
                )

    def _took(self, op: AskKeys, keys: Keys, at: float) -> Keys:
        if op.tenant is not None:
            self.vault.took(KeysWanted(op.tenant, op.name, frozenset(), at), keys, at)
        return keys

    def _wrapped(self, transaction: Transaction) -> Transaction:
        wrapped = partial(sealed_program, self.vault, transaction.op, transaction.write)
        return Transaction(wrapped, transaction.write, transaction.solo, transaction.whole, transaction.checks)

    def _load(self, tenant: int) -> Transaction:
        return Transaction(partial(load, self.vault, tenant, write=False, again=True))


def _load_keys(tenant: int) -> Program[None]:
    yield Batch(_LOAD(tenant=tenant), last=True)


def _finished(unfinished: _Unfinished, answers: list[Rows]) -> Any:
    """Give a program the rows of its last batch."""
    try:
        unfinished.program.send(answers)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a program went on after the batch that it had called its last")


def _tenants(unfinished: _Unfinished) -> list[int]:
    return sorted({s.params["tenant"] for s in unfinished.statements if s.sql.opens and "tenant" in s.params})
