"""A driver that encrypts: it wraps each program, seals the secret parameters of its statements and opens its rows.

Programs stay as they are; their statements say what is secret (`cells.py`). What the store knows of a tenant's keys
(the table `seal`) is read inside the transaction that needs it, remembered, and looked at again after a second: so a
process learns soon that a new key has come into use, and stops writing with the old one. A tenant's first write, and
the first one with a new key, also write down that key's id and the proof of it.

Without keys a store is not wrapped at all: then nothing of this costs anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from holdfast.errors import Damaged, KeyMissing, NotEncrypted
from holdfast.storage.cells import UNREADABLE
from holdfast.storage.keyring import KeyProvider
from holdfast.storage.program import (
    Batch,
    Dialect,
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
from holdfast.storage.vault import Locks, UnknownKey, first_index_key, open_proof

BARRED_S = 30.0  # for so long a worker passes over a tenant that it has no key for
FRESH_S = 1.0  # for so long what is known of a tenant's keys is relied on
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


class Vault:
    """The keys of a store: where they come from, and what is known of each tenant's."""

    def __init__(
        self,
        provider: KeyProvider,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.provider = provider
        self.clock_us = clock_us
        self._monotonic = monotonic
        self._locks: dict[int, Locks] = {}
        self._barred: dict[int, float] = {}

    def known(self, tenant: int) -> Locks | None:
        """A tenant's keys, if they were looked at a moment ago."""
        locks = self._locks.get(tenant)
        return locks if locks is not None and self._monotonic() - locks.checked_at < FRESH_S else None

    def settled(self, tenant: int, name: str, rows: Rows, used: bool, *, again: bool = False) -> Locks:
        """A tenant's keys, from what the store knows of them. Raises KeyMissing, NotEncrypted."""
        since = {bytes(key): int(at) for key, _, at in rows}
        before = self._locks.get(tenant)
        if before is not None and before.rows == since and not again:
            before.checked_at = self._monotonic()
            return before
        keys = self.provider.keys_for(name)
        if not since:
            if used:
                raise NotEncrypted(
                    f"tenant {name!r} holds data that is not encrypted, and the store was opened with keys: "
                    "encrypt it with `holdfast keys encrypt` (or store.encrypt()), or open it without keys"
                )
            index = first_index_key(keys.by_id[keys.current])
            return Locks(tenant, name, keys, keys.current, index, {}, self._monotonic())
        newest = next(reversed(since))
        proofs = [(bytes(key), bytes(proof)) for key, proof, _ in reversed(rows) if bytes(key) in keys.by_id]
        if not proofs:
            raise KeyMissing(
                f"the data of tenant {name!r} is encrypted with key {newest.hex()}, and the keys that were given are "
                f"others ({', '.join(key.hex() for key in keys.by_id)}): open the store with the right key file",
                tenant=name,
                key=newest.hex(),
            )
        opened = open_proof(tenant, keys, *proofs[0])
        if opened is None:
            raise Damaged(f"what the store keeps about key {proofs[0][0].hex()} of tenant {name!r} is damaged")
        # A key that the store has not seen is new. Of those it has seen, only the newest may be written with: whoever
        # still has an older one as its current has not heard of the rotation.
        current = keys.current if keys.current not in since else newest
        locks = Locks(tenant, name, keys, current, opened, since, self._monotonic())
        if current not in keys.by_id:
            raise locks.unknown(current)
        return locks

    def remember(self, tenant: int, locks: Locks) -> None:
        """Only what is committed: what a transaction has just added may be rolled back."""
        self._locks[tenant] = locks

    def bar(self, tenant: int) -> None:
        """A tenant has no key here: nothing of it need be tried for a while."""
        self._barred[tenant] = self._monotonic() + BARRED_S

    def barred(self) -> tuple[int, ...]:
        """Tenants that had no key a moment ago."""
        now = self._monotonic()
        return tuple([tenant for tenant, until in tuple(self._barred.items()) if until > now])

    def forget(self) -> None:
        """Ask the provider and the store again."""
        self._locks.clear()


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
            for statement in batch.statements:
                if statement.sql.sealed:
                    tenant = statement.params.get("tenant")
                    if tenant is not None and tenant not in own:
                        try:
                            own[tenant] = vault.known(tenant) or (yield from load(vault, tenant, write=write))
                        except (KeyMissing, NotEncrypted):
                            if not statement.sql.keyless:
                                raise
                            vault.bar(tenant)
                            sealed.append(_NOTHING())
                            continue
                    statement = _sealed(own, statement)
                sealed.append(statement)
            answers = yield Batch(*sealed, last=batch.last)
            try:
                answers = _opened(own, sealed, answers)
            except UnknownKey:
                if batch.last:
                    return _Unfinished(program, sealed, answers)
                for tenant in own:
                    own[tenant] = yield from load(vault, tenant, write=write, again=True)
                answers = _opened(own, sealed, answers, known=True)
    except StopIteration as stop:
        return stop.value


def _sealed(own: dict[int, Locks], statement: Statement) -> Statement:
    sql, params = statement
    if not sql.seals:
        return statement
    locks = own[params["tenant"]]
    params = dict(params)
    for name, cell in sql.seals:
        value = params[name]
        if value is not None:
            params[name] = locks.seal(cell, value, tuple([params[by] for by in cell.by]))  # type: ignore[index]
    return Statement(sql, params)


def _opened(
    own: dict[int, Locks], statements: list[Statement], answers: list[Rows], *, known: bool = False
) -> list[Rows]:
    """All answers with their cells opened. `known`: the keys were looked up just now."""
    return [
        _open_rows(own, statement, rows, known) if rows and statement.sql.opens else rows
        for statement, rows in zip(statements, answers, strict=True)
    ]


def _open_rows(own: dict[int, Locks], statement: Statement, rows: Rows, known: bool) -> Rows:
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
            except Damaged:
                if not sql.tolerant:
                    raise
                row[index] = UNREADABLE
            except NotEncrypted:
                if sql.tolerant != "all":
                    raise
                row[index] = UNREADABLE
            except UnknownKey as unknown:
                if not known:
                    raise
                error = locks.unknown(unknown.key, cell)
                if not sql.tolerant or isinstance(error, KeyMissing):
                    raise error from None
                row[index] = UNREADABLE
    return [tuple(row) for row in table]


class SealedDriver:
    """A driver whose secret cells are encrypted. Everything else is the driver's below (`inner`)."""

    def __init__(self, inner: Driver, vault: Vault) -> None:
        self.inner = inner
        self.vault = vault

    def __repr__(self) -> str:
        return f"<encrypted {self.inner!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def dialect(self) -> Dialect:
        return self.inner.dialect

    def run(self, transaction: Transaction) -> Any:
        """Run a program in one transaction, on this thread."""
        result = self.inner.run(self._wrapped(transaction))
        if type(result) is _Unfinished:
            return self._finish(result, {t: self.inner.run(self._load(t)) for t in _tenants(result)})
        return result

    async def arun(self, transaction: Transaction) -> Any:
        """Run a program in one transaction without blocking the event loop."""
        result = await self.inner.arun(self._wrapped(transaction))
        if type(result) is _Unfinished:
            return self._finish(result, {t: await self.inner.arun(self._load(t)) for t in _tenants(result)})
        return result

    def close(self) -> None:
        self.inner.close()

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _wrapped(self, transaction: Transaction) -> Transaction:
        op, write = transaction.op, transaction.write
        if isinstance(op, Reclaim | Scrub | Outside):  # the driver knows it by its class
            return transaction
        wrapped = partial(sealed_program, self.vault, op, write)
        return Transaction(wrapped, write, transaction.solo, transaction.whole, transaction.checks)

    def _load(self, tenant: int) -> Transaction:
        return Transaction(partial(load, self.vault, tenant, write=False, again=True))

    def _finish(self, unfinished: _Unfinished, own: dict[int, Locks]) -> Any:
        """Give a program the rows of its last batch."""
        answers = _opened(own, unfinished.statements, unfinished.answers, known=True)
        try:
            unfinished.program.send(answers)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("a program went on after the batch that it had called its last")


def _tenants(unfinished: _Unfinished) -> list[int]:
    return sorted({s.params["tenant"] for s in unfinished.statements if s.sql.opens and "tenant" in s.params})
