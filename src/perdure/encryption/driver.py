"""The encrypting driver: it wraps each program, encrypts parameters of its statements and decrypts columns of its rows.

A tenant's data key is read inside the transaction that first needs it, and made by the tenant's first write. A program
that lacks the provider's keys is rolled back, the provider is asked, and the operation runs again. A store without keys
is not wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Sequence
from functools import lru_cache, partial
from typing import Any

from perdure.encryption.cache import KeyCache, KeysWanted
from perdure.encryption.cipher import DATA_KEY_BYTES, Cipher, wrap_data_key
from perdure.errors import Damaged, KeyMissing, NotEncrypted, Unavailable
from perdure.storage.columns import UNREADABLE
from perdure.storage.domains import all_tables
from perdure.storage.program import Batch, Capabilities, Driver, Program, Rows, Sql, Statement, Transaction
from perdure.storage.row_hashes import without_hash
from perdure.storage.store_tables import HAS_KEY
from perdure.storage.wrapping import WrappingDriver

_ROW = Sql(
    """SELECT t.name, k.wrapped_by, k.wrapped FROM tenant t LEFT JOIN tenant_key k ON k.tenant = t.tenant
    WHERE t.tenant = :tenant"""
)
_ADD = Sql(
    """INSERT INTO tenant_key (tenant, wrapped_by, wrapped, since) VALUES (:tenant, :key, :wrapped, :since)
    ON CONFLICT (tenant) DO NOTHING"""
)
_NO_ROWS = Sql("SELECT 1 WHERE 1 = 0")

Asked = Collection[str]


@lru_cache(maxsize=1)
def _used() -> Sql:
    """Return the statement that asks whether a tenant has a row in a table with encrypted columns."""
    names = [table.name for table in all_tables().values() if table.encrypted_columns and not table.volatile]
    return Sql(
        "SELECT 1 WHERE " + " OR ".join(f"EXISTS (SELECT 1 FROM {name} WHERE tenant = :tenant)" for name in names)
    )


def load(cache: KeyCache, tenant: int, asked: Asked, *, write: bool) -> Generator[Batch, list[Rows], Cipher]:
    """Return the cipher of a tenant. The first write makes its data key."""
    used: Rows = []
    [rows] = yield Batch(_ROW(tenant=tenant))
    if not rows or rows[0][2] is None:
        # In this order: each statement sees what was committed before it, and a tenant's first data comes with its key.
        used, rows = yield Batch(_used()(tenant=tenant), _ROW(tenant=tenant))
    name, key, wrapped = rows[0] if rows else ("", None, None)
    keys = cache.keys(name, asked)
    if wrapped is not None:
        cipher = cache.unwrapped(tenant, name, keys, bytes(key), bytes(wrapped), asked)
        cache.remember(tenant, cipher)
        return cipher
    if used:
        raise NotEncrypted(
            f"tenant {name!r} holds data that is not encrypted, and the store was opened with keys: transfer it to a "
            "new store that is opened with keys, or open this one without"
        )
    if not write:
        return Cipher(tenant, name, os.urandom(DATA_KEY_BYTES))  # there is no data: searches match nothing
    wrapped = wrap_data_key(tenant, keys, os.urandom(DATA_KEY_BYTES))
    yield Batch(_ADD(tenant=tenant, key=keys.current, wrapped=wrapped, since=cache.clock_us()))
    [rows] = yield Batch(_ROW(tenant=tenant))  # another process may have been faster
    _, key, wrapped = rows[0]
    return cache.unwrapped(tenant, name, keys, bytes(key), bytes(wrapped), asked)


def encrypted_program(cache: KeyCache, transaction: Transaction, asked: Asked) -> Program[Any]:
    """Run the program of a transaction with encrypted parameters and decrypted rows."""
    program, write = transaction.op(), transaction.write
    ciphers: dict[int, Cipher] = {}  # for the whole transaction
    answers: Any = None
    try:
        while True:
            batch = program.send(answers)
            for statement in batch.statements:
                if statement.sql.encrypted:
                    break
            else:
                answers = yield batch
                continue
            statements: list[Statement] = []
            for statement in batch.statements:
                tenant = statement.params.get("tenant")
                if statement.sql.encrypted and tenant is not None and tenant not in ciphers:
                    try:
                        cipher = cache.cipher(tenant)
                        if cipher is None and transaction.volatile:
                            raise _CipherWanted(tenant)
                        ciphers[tenant] = cipher or (yield from load(cache, tenant, asked, write=write))
                    except (KeyMissing, NotEncrypted, Unavailable):
                        if not statement.sql.keyless:
                            raise
                        cache.bar(tenant)
                        statements.append(_NO_ROWS())
                        continue
                statements.append(encrypted(ciphers, statement) if statement.sql.encrypted else statement)
            answers = yield Batch(*statements, last=batch.last)
            answers = [
                _decrypted(ciphers, statement, rows, transaction.checks) if rows and statement.sql.opens else rows
                for statement, rows in zip(statements, answers, strict=True)
            ]
    except StopIteration as stop:
        return stop.value


def encrypted(ciphers: dict[int, Cipher], statement: Statement) -> Statement:
    sql, params = statement
    if not sql.seals:
        return Statement(sql.bare, params)
    encrypt = ciphers[params["tenant"]].encrypt
    params = dict(params)
    for name, column in sql.seals:
        value = params[name]
        if value is not None:
            params[name] = encrypt(column, value, tuple([params[by] for by in column.by]))  # type: ignore[index]
    return Statement(sql.bare, params)


def _decrypted(ciphers: dict[int, Cipher], statement: Statement, rows: Rows, checks: bool) -> Rows:
    sql, params = statement
    table = [list(row) for row in rows]
    cipher = ciphers.get(params.get("tenant", -1))
    for index, column in sql.opens:
        if cipher is None:  # only whether a tenant has a key
            for row in table:
                row[index] = None
            continue
        decrypt, by = cipher.decrypt, column.by
        for row in table:
            value = row[index]
            if value is None or value is UNREADABLE:  # the driver below could not read it
                continue
            where = tuple([row[at] if isinstance(at, int) else params[at] for at in by]) if by else ()
            try:
                row[index] = decrypt(column, value, where)
                if column.hashed:
                    row[index] = without_hash(column, params["tenant"], where, row[index])
            except Damaged:
                if not sql.tolerant:
                    raise
                row[index] = UNREADABLE
            except NotEncrypted:
                if not (sql.keyless or (sql.tolerant and checks)):
                    raise
                row[index] = UNREADABLE
    return [tuple(row) for row in table]


class _CipherWanted(Exception):
    """Ends a transaction on volatile tables, which cannot read the tenant's data key."""

    def __init__(self, tenant: int) -> None:
        super().__init__()
        self.tenant = tenant


class EncryptingDriver(WrappingDriver):
    """Encrypts and decrypts the encrypted columns, and leaves all else to the driver below (`inner`)."""

    def __init__(self, inner: Driver, keys: KeyCache) -> None:
        super().__init__(inner)
        self.keys = keys

    def __repr__(self) -> str:
        return f"<encrypted {self.inner!r}>"

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities._replace(keys=self.keys)

    def at(self, epoch: int, token: str) -> Driver:
        return EncryptingDriver(self.inner.at(epoch, token), self.keys)

    def run(self, transaction: Transaction) -> Any:
        asked: set[str] = set()
        while True:
            try:
                return self.inner.run(self._wrapped(transaction, asked))
            except _CipherWanted as stopped:
                self.run(_loading(stopped.tenant))
                continue
            except KeysWanted as stopped:
                tenant = stopped.name
            self.keys.ask(tenant)
            asked.add(tenant)

    async def arun(self, transaction: Transaction) -> Any:
        asked: set[str] = set()
        while True:
            try:
                return await self.inner.arun(self._wrapped(transaction, asked))
            except _CipherWanted as stopped:
                await self.arun(_loading(stopped.tenant))
                continue
            except KeysWanted as stopped:
                tenant = stopped.name
            await self.keys.aask(tenant)
            asked.add(tenant)

    def append(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        tenant = statements[0].params["tenant"]
        while (cipher := self.keys.cipher(tenant)) is None:
            self.run(_loading(tenant))
        return self.inner.append([encrypted({tenant: cipher}, statement) for statement in statements], counts)

    async def aappend(self, statements: Sequence[Statement], counts: Sequence[int | None]) -> bool:
        tenant = statements[0].params["tenant"]
        while (cipher := self.keys.cipher(tenant)) is None:
            await self.arun(_loading(tenant))
        return await self.inner.aappend([encrypted({tenant: cipher}, statement) for statement in statements], counts)

    def _wrapped(self, transaction: Transaction, asked: Asked) -> Transaction:
        wrapped = partial(encrypted_program, self.keys, transaction, asked)
        return Transaction(wrapped, transaction.write, transaction.solo, transaction.checks, transaction.volatile)


_LOAD = Sql("SELECT NULL WHERE 1 = 0", opens={0: HAS_KEY})


def _loading(tenant: int) -> Transaction:
    """Return a transaction that only loads the cipher of a tenant, and makes its data key if it has none."""

    def program() -> Program[None]:
        yield Batch(_LOAD(tenant=tenant))

    return Transaction(program, write=True)
