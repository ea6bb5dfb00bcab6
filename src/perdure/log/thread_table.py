"""The rows of threads and tenants. A thread has a name, a head, and a tree, whose records it shares with its forks.

A fork is one row that points at a record; its `source` is the thread that it was forked from. `generation` grows when
pruning moves the bases of a thread's own records: a difference that was made before is then refused. Numbers are never
reused, so a late write to a deleted thread finds no row.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from perdure.errors import Damaged, KeyMissing, NotFound, ThreadDeleted
from perdure.log.archived import check_archived
from perdure.log.tables import TAG_VALUE, THREAD_METADATA
from perdure.storage.columns import Unreadable
from perdure.storage.program import Batch, Program, Rows, Sql, Statement, one_row
from perdure.storage.store_tables import HAS_KEY

MINUTE_US = 60_000_000
_TAG_BYTES_MAX = 200  # with a key of 512 characters it must fit into PostgreSQL's index entries of 2704 bytes
THREAD_COLUMNS = (
    "thread", "tree", "name", "metadata", "origin", "generation", "head", "head_hash", "created_at", "updated_at",
    "source",
)  # fmt: skip
_COLUMNS = ", ".join(THREAD_COLUMNS)

# The encrypted columns of a row selected as THREAD_COLUMNS.
THREAD_ENCRYPTED = {3: THREAD_METADATA.at(0)}


def _select(where: str) -> Sql:
    return Sql(
        f"SELECT {_COLUMNS} FROM thread WHERE tenant = :tenant AND {where}", opens=THREAD_ENCRYPTED, tolerant=True
    )


_BY_NAME, _LOCK_BY_NAME = _select("name = :name"), _select("name = :name {for_update}")
_BY_NUMBER, _LOCK = _select("thread = :thread"), _select("thread = :thread {for_update}")
_IN_TREE, _LOCK_IN_TREE = _select("tree = :tree"), _select("tree = :tree ORDER BY thread {for_update}")
# The second column is the key of an encrypted tenant. A store that was opened with keys reads NULL here.
_TENANT = Sql(
    """SELECT t.tenant, (SELECT k.wrapped_by FROM tenant_key k WHERE k.tenant = t.tenant)
    FROM tenant t WHERE t.name = :tenant_name""",
    opens={1: HAS_KEY},
)
_ADD_TENANT = Sql("INSERT INTO tenant (tenant, name) VALUES (:number, :tenant_name) ON CONFLICT (name) DO NOTHING")
_NUMBER = Sql(
    sqlite="UPDATE counter SET number = number + 1 RETURNING number",
    postgres="SELECT nextval('number')",
)
_NUMBERS = Sql(
    sqlite="UPDATE counter SET number = number + :many RETURNING number",
    postgres="SELECT nextval('number') FROM generate_series(1, CAST(:many AS integer))",
)
_INSERT = Sql(
    f"""INSERT INTO thread (tenant, {_COLUMNS}, active)
    VALUES (:tenant, :{_COLUMNS.replace(", ", ", :")}, :active)
    ON CONFLICT (tenant, name) DO NOTHING RETURNING thread""",
    seals={"metadata": THREAD_METADATA},
)
SET_METADATA = Sql(
    "UPDATE thread SET metadata = :metadata WHERE tenant = :tenant AND thread = :thread",
    seals={"metadata": THREAD_METADATA},
)
# Makes writers of these threads prepare their differences again, because bases have moved.
_NEXT_GENERATION = Sql(
    "UPDATE thread SET generation = generation + 1 WHERE tenant = :tenant AND thread IN {numbers:ids}"
)
# Makes a thread's forks the forks of its source, because they may hold records of the source.
_PASS_ON_FORKS = Sql(
    """UPDATE thread SET source = (SELECT s.source FROM thread s WHERE s.tenant = :tenant AND s.thread = :thread)
    WHERE tenant = :tenant
        AND thread IN (SELECT f.thread FROM thread f WHERE f.tenant = :tenant AND f.source = :thread)"""
)
_FORKS = Sql("SELECT 1 FROM thread WHERE tenant = :tenant AND source = :thread LIMIT 1")
_OF_NUMBERS = Sql("SELECT thread, name FROM thread WHERE tenant = :tenant AND thread IN {numbers:ids}")
DROP_TAGS = Sql("DELETE FROM tag WHERE tenant = :tenant AND thread = :thread")
# Inserts a tag only if the thread exists: the statement before inserts no thread if its name is taken.
_ADD_TAG = Sql(
    """INSERT INTO tag (tenant, key, value, thread)
    SELECT tenant, CAST(:key AS text), CAST(:value AS text), thread FROM thread
    WHERE tenant = :tenant AND thread = :thread""",
    seals={"value": TAG_VALUE},
)


class ThreadRow(NamedTuple):
    thread: int
    tree: int
    name: str
    metadata: str
    origin: int | None
    generation: int
    head: int | None
    head_hash: bytes | None
    created_at: int
    updated_at: int
    source: int | None = None


_INT, _MAYBE_INT = (int,), (int, type(None))
_SHAPES = set(
    product(
        _INT, _INT, (str,), (str, Unreadable), _MAYBE_INT, _INT, _MAYBE_INT, (bytes, type(None)), _INT, _INT, _MAYBE_INT
    )
)  # all valid combinations of types; a state can be loaded even if the metadata cannot be read


def thread_row(row: tuple[Any, ...]) -> ThreadRow:
    """Return the thread of a row. Raise Damaged if a value has a wrong type."""
    if tuple(map(type, row)) not in _SHAPES:
        raise Damaged(f"the row of thread {row[2]!r} is damaged; run `perdure store verify`")
    return ThreadRow._make(row)


def thread_in(rows: Rows) -> ThreadRow | None:
    """Return the thread in the rows of a selection, or None if there are no rows."""
    row = one_row(rows)
    return thread_row(row) if row else None


def metadata_of(row: ThreadRow) -> dict[str, Any]:
    """Return a thread's metadata. Raise Damaged if it is not JSON."""
    try:
        return dict(orjson.loads(row.metadata))
    except (ValueError, TypeError) as error:
        raise Damaged(f"the metadata of thread {row.name!r} is damaged ({error})") from error


def find_tenant(name: str) -> Program[int | None]:
    [rows] = yield Batch(_TENANT(tenant_name=name), last=True)
    return _tenant_in(rows, name)


def _tenant_in(rows: Rows, name: str) -> int | None:
    """Return a tenant's number, or None. Raise KeyMissing if its data is encrypted and the store has no keys."""
    row = one_row(rows)
    if row is None:
        return None
    number, key = row
    if key is not None:
        raise KeyMissing(
            f"the data of tenant {name!r} is encrypted, with key {bytes(key).hex()}, and the store was opened without "
            "keys: open(url, keys=…), or on the command line set PERDURE_KEYS to the key file",
            tenant=name,
            key=bytes(key).hex(),
        )
    return int(number)


def ensure_tenant(name: str) -> Program[int]:
    """Return the tenant's number. Insert the tenant on first use."""
    [existing] = yield Batch(_TENANT(tenant_name=name))
    if not existing:
        number = yield from next_number()
        yield Batch(_ADD_TENANT(number=number, tenant_name=name))
        [existing] = yield Batch(_TENANT(tenant_name=name))  # another writer may have inserted it first
    number_found = _tenant_in(existing, name)
    assert number_found is not None
    return number_found


def next_number() -> Generator[Batch, list[Rows], int]:
    [[row]] = yield Batch(_NUMBER())
    return int(row[0])


def take_numbers(many: int) -> Program[list[int]]:
    """Reserve numbers for threads. Unused numbers are lost, and no number is used twice."""
    [rows] = yield Batch(_NUMBERS(many=many), last=True)
    last = int(rows[-1][0])
    return [int(row[0]) for row in rows] if len(rows) == many else [*range(last - many + 1, last + 1)]


def try_thread(tenant: int, name: str, number: int | None = None, *, lock: bool = False) -> Program[ThreadRow | None]:
    """Return a thread by its number if that is known, else by name, or None.

    Raise Archived if it is archived, and ThreadDeleted if there is no thread with the number."""
    if number is None:
        by = (_LOCK_BY_NAME if lock else _BY_NAME)(tenant=tenant, name=name)
    else:
        by = (_LOCK if lock else _BY_NUMBER)(tenant=tenant, thread=number)
    [rows] = yield Batch(by)
    row = thread_in(rows)
    if row is None:
        yield from check_archived(tenant, "thread", name)
        if number is not None:
            raise no_thread(name, number)
    return row


def select_thread(tenant: int, name: str) -> Statement:
    """Return the statement that selects a thread by its name, for `thread_in`."""
    return _BY_NAME(tenant=tenant, name=name)


def thread_or_stub(tenant: int, name: str) -> Program[ThreadRow | None]:
    """Return a thread by its name, or None if it does not exist or is archived."""
    [rows] = yield Batch(_BY_NAME(tenant=tenant, name=name))
    return thread_in(rows)


def find_thread(tenant: int, name: str, number: int | None = None, *, lock: bool = False) -> Program[ThreadRow]:
    """Return a thread. Raise NotFound if it does not exist, ThreadDeleted or Archived."""
    row = yield from try_thread(tenant, name, number, lock=lock)
    if row is None:
        raise no_thread(name)
    return row


def no_thread(name: str, number: int | None = None) -> NotFound:
    """Return the error for a missing thread: NotFound, or ThreadDeleted if the caller knew its number."""
    if number is not None:
        return ThreadDeleted(
            f"thread {name!r} was deleted after this handle was made: nothing was read or written; "
            "ask the store for the thread again to start it anew"
        )
    return NotFound(f"thread {name!r} has no checkpoint; store.threads() lists the names")


def threads_in_tree(tenant: int, tree: int, *, lock: bool = False) -> Generator[Batch, list[Rows], list[ThreadRow]]:
    """Return all threads that share the tree's records.

    `lock`: lock them in the order of their numbers, so that two transactions cannot deadlock. Then read again, until
    the set is stable: a fork may have been made while this transaction waited."""
    locked: list[int] = []
    while True:
        [rows] = yield Batch((_LOCK_IN_TREE if lock else _IN_TREE)(tenant=tenant, tree=tree))
        numbers = [row[0] for row in rows]
        if not lock or numbers == locked:
            return [thread_row(row) for row in rows]
        locked = numbers


def next_generation(tenant: int, threads: Iterable[int]) -> Statement:
    """Return the statement that invalidates prepared differences of these threads, because bases move."""
    return _NEXT_GENERATION(tenant=tenant, ids=orjson.dumps(sorted(threads)).decode())


def pass_on_forks(tenant: int, thread: int) -> Statement:
    """Return the statement that makes the forks of a thread to be deleted the forks of its source."""
    return _PASS_ON_FORKS(tenant=tenant, thread=thread)


def has_forks(tenant: int, thread: int) -> Generator[Batch, list[Rows], bool]:
    """Return whether another thread may hold records of this one."""
    [rows] = yield Batch(_FORKS(tenant=tenant, thread=thread))
    return bool(rows)


def names_of(tenant: int, threads: Iterable[int]) -> Generator[Batch, list[Rows], dict[int, str]]:
    """Return the names of threads by number, without deleted threads."""
    [rows] = yield Batch(_OF_NUMBERS(tenant=tenant, ids=orjson.dumps(sorted(threads)).decode()))
    return dict(rows)


def create_thread(
    tenant: int,
    name: str,
    metadata: Mapping[str, Any],
    at: int,
    *,
    tree: int | None = None,
    origin: int | None = None,
    head_hash: bytes | None = None,
    source: int | None = None,
) -> Generator[Batch, list[Rows], ThreadRow | None]:
    """Insert a thread, or a fork if `tree`, `origin`, `head_hash` and `source` are passed.

    Return None if the name is taken."""
    number = yield from next_number()
    metadata = present(metadata)
    row = ThreadRow(number, tree or number, name, json_text(metadata), origin, 0, origin, head_hash, at, at, source)
    [inserted] = yield Batch(_INSERT(tenant=tenant, **row._asdict(), active=at // MINUTE_US))
    if not inserted:
        return None
    tags = add_tags(tenant, number, metadata)
    if tags:
        yield Batch(*tags)
    return row


def merge_metadata(tenant: int, row: ThreadRow, metadata: Mapping[str, Any]) -> Generator[Batch, list[Rows], None]:
    """Merge metadata into a thread's. A value of None removes the key."""
    before = metadata_of(row)
    after = present({**before, **metadata})
    if after == before:
        return
    yield Batch(
        SET_METADATA(metadata=json_text(after), tenant=tenant, thread=row.thread),
        DROP_TAGS(tenant=tenant, thread=row.thread),
        *add_tags(tenant, row.thread, after),
    )


def present(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without the keys whose value is None."""
    return {key: value for key, value in metadata.items() if value is not None}


def json_text(metadata: Mapping[str, Any]) -> str:
    return orjson.dumps(metadata).decode()


def add_tags(tenant: int, thread: int, metadata: Mapping[str, Any]) -> list[Statement]:
    return [_ADD_TAG(tenant=tenant, key=key, value=tag_value(value), thread=thread) for key, value in metadata.items()]


def tag_value(value: object) -> str:
    """Return the text that a metadata value is looked up by: its JSON, or a hash if that is long."""
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return text.decode() if len(text) <= _TAG_BYTES_MAX else "#" + blake3(text).hexdigest()


def select_numbered(tenant: int, number: int) -> Statement:
    """Return the statement that selects a thread by its number, for `thread_in`."""
    return _BY_NUMBER(tenant=tenant, thread=number)


def thread_numbered(tenant: int, number: int) -> Generator[Batch, list[Rows], ThreadRow | None]:
    """Return a thread by its number, or None if it was deleted."""
    [rows] = yield Batch(select_numbered(tenant, number))
    return thread_in(rows)
