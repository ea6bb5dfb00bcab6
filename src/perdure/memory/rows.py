"""Programs that read and write the rows of memory. Times, values and vectors are passed in.

Each change of an item is a version of its own, written under the lock of its namespace. A deletion is a version with a
reason. A version takes the next number of its namespace, so that an index in memory reads only newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from perdure.errors import Conflict, Damaged, NotFound, UsageError
from perdure.log.thread_table import next_number
from perdure.memory.labels import above, below, unescaped
from perdure.memory.policies import DEFAULT, MemoryPolicy, load
from perdure.memory.tables import ITEM, ITEM_VECTOR, ITEM_WORDS
from perdure.storage.columns import EncryptedColumn
from perdure.storage.program import Batch, Program, Row, Rows, Sql, Statement
from perdure.storage.store_tables import STORE

SEQUENCE_BITS = 32
_EVICTED = 50  # rows per round of evictions
DELETED, FORGOTTEN, EXPIRED, CAP = "deleted", "forgotten", "expired", "cap"

ROW_COLUMNS = (
    "id, key, version, kind, body, bytes, pinned, created_at, at, ended_at, valid_from, valid_to, expires, gone"
)
# The columns that the hash of a row's body covers, in their order.
OPENS = {4: ITEM.at(0, 1, 2, 3, 6, 7, 8, 10, 11, 13)}
OF_ITEM = "i." + ROW_COLUMNS.replace(", ", ", i.")
IN_SCOPE = """memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path >= :path AND s.path < :below"""
LIVE = "i.ended_at IS NULL AND i.gone IS NULL"
_THERE = "(i.expires IS NULL OR i.expires > :now)"
KNOWN_THEN = "i.at <= :now AND (i.ended_at IS NULL OR i.ended_at > :now) AND i.gone IS NULL"
_WANTED = """(:kind = '' OR i.kind = :kind) AND i.pinned >= :pinned AND (CAST(:valid_at AS bigint) = 0
    OR (coalesce(i.valid_from, :valid_at) <= :valid_at AND coalesce(i.valid_to, :valid_at + 1) > :valid_at))"""
_LOCK = Sql("SELECT space, last, items, bytes FROM memory_space WHERE tenant = :tenant AND path = :path {for_update}")
_ADD_SPACE = Sql(
    """INSERT INTO memory_space (tenant, space, path, last, generation, items, bytes)
    VALUES (:tenant, :space, :path, 0, 0, 0, 0) ON CONFLICT (tenant, path) DO NOTHING"""
)
_POLICY = Sql("SELECT policy FROM memory_space WHERE tenant = :tenant AND path = :path AND policy IS NOT NULL")
_SET_SPACE = Sql(
    """UPDATE memory_space SET last = :last, items = :items, bytes = :bytes
    WHERE tenant = :tenant AND space = :space"""
)
_KEY = f"""SELECT {OF_ITEM} FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path = :path AND i.key = :key"""
_NEWEST = Sql(
    f"""WITH k (key) AS {{texts:keys}} SELECT {OF_ITEM} FROM memory_item i WHERE i.tenant = :tenant AND i.id IN (
        SELECT (SELECT n.id FROM memory_item n WHERE n.tenant = :tenant AND n.space = s.space AND n.key = k.key
        ORDER BY n.version DESC LIMIT 1) FROM k, memory_space s WHERE s.tenant = :tenant AND s.path = :path)""",
    opens=OPENS,
)
_HISTORY = Sql(f"{_KEY} ORDER BY i.version", opens=OPENS)
_UNPINNED = f"SELECT {OF_ITEM} FROM memory_item i WHERE i.tenant = :tenant AND i.space = :space AND i.pinned = 0"
_OVER = (
    Sql(f"{_UNPINNED} AND {LIVE} AND i.expires <= :now LIMIT :limit", opens=OPENS),
    Sql(f"{_UNPINNED} AND {LIVE} ORDER BY i.id LIMIT :limit", opens=OPENS),
)
_END = Sql("UPDATE memory_item SET ended_at = :at WHERE tenant = :tenant AND id = :id")
ADD_ITEM = Sql(
    f"""INSERT INTO memory_item (tenant, space, words, {ROW_COLUMNS})
    VALUES (:tenant, :space, :words, :{ROW_COLUMNS.replace(", ", ", :")})""",
    seals={"body": ITEM, "words": ITEM_WORDS},
)
# The words and the vector that the next version of an unchanged text takes over.
CARRIED = Sql(
    """SELECT i.id, i.words, v.model, v.vec FROM memory_item i
    LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id WHERE i.tenant = :tenant AND i.id = :id""",
    opens={1: ITEM_WORDS.at(0), 3: ITEM_VECTOR.at(0)},
)
ADD_VECTOR = Sql(
    "INSERT INTO memory_vector (tenant, id, model, vec) VALUES (:tenant, :id, :model, :vec)", seals={"vec": ITEM_VECTOR}
)


def when(text: str, opens: Mapping[int, EncryptedColumn] | None = OPENS) -> tuple[Sql, Sql]:
    """Return two forms of a statement about items that are there (HOLDS): now, and as it was known at a time.

    `ItemQuery.then` is the index of the form to use.
    """
    now, then = (text.replace("HOLDS", f"{known} AND {_THERE}") for known in (LIVE, KNOWN_THEN))
    return Sql(now, opens=opens), Sql(then, opens=opens)


WANTED = f"HOLDS AND {_WANTED}"
_GET = when(f"{_KEY} AND HOLDS")
_LIST = when(
    f"""SELECT {OF_ITEM}, s.path FROM {IN_SCOPE} AND {WANTED}
    AND (i.at < :before OR (i.at = :before AND i.id < :before_id)) ORDER BY i.at DESC, i.id DESC LIMIT :limit"""
)
_SPACES = when(
    f"SELECT s.path, count(*), sum(i.bytes) FROM {IN_SCOPE} AND HOLDS GROUP BY s.path ORDER BY s.path", opens=None
)
_STATS = Sql(
    f"""SELECT count(*), count(v.id) FROM {
        IN_SCOPE.replace(
            "WHERE", "LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id AND v.model = :model WHERE"
        )
    }"""
)


class ItemQuery(NamedTuple):
    """Selects items of a namespace and of all below it."""

    path: str
    now: int  # items that are there at this time …
    then: bool = False  # … as it was known then
    kind: str = ""  # "": any
    valid_at: int = 0  # items that hold at this time; 0: any
    pinned: int = 0  # 1: only pinned items

    def params(self, tenant: int) -> dict[str, Any]:
        return {"tenant": tenant, "below": below(self.path), **self._asdict()}


class Content(NamedTuple):
    value: bytes  # encoded
    schema: str | None = None
    text: str | None = None  # the text to index instead of the value's own
    context: str | None = None
    source: str | None = None
    ttl_s: float | None = None  # a refresh sets the expiry to this long after now


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Content).decode


class ItemRow(NamedTuple):
    """A version as it is stored, with the path of its namespace."""

    id: int
    key: str
    version: int
    kind: str
    body: bytes
    bytes: int
    pinned: int
    created_at: int
    at: int
    ended_at: int | None
    valid_from: int | None
    valid_to: int | None
    expires: int | None
    gone: str | None
    path: str

    def content(self) -> Content:
        """Return the content of the body. Raises Damaged."""
        try:
            return unpack(self.body)
        except msgspec.MsgspecError as error:
            raise Damaged(f"the item {unescaped(self.key)!r} of memory is damaged ({error})") from error

    def is_there(self, now: int) -> bool:
        return self.gone is None and (self.expires is None or self.expires > now)


class MergeVersions(Protocol):
    """Makes the version to write of a new one and the one that is there (`merging.py`)."""

    body: bytes  # of the version that it last returned

    def __call__(self, change: NewVersion, old: ItemRow | None, identity: str, number: int, at: int, /) -> NewVersion:
        """`identity` is the namespace's among those of all stores, `number` and `at` are those of the new row."""


class NewVersion(msgspec.Struct, eq=False, gc=False):
    """A version to write. If `body` is None, it deletes the item, and `gone` is the reason."""

    key: str
    body: bytes | None = None
    kind: str = ""
    words: bytes | None = None
    pinned: bool = False
    valid_from: int | None = None
    valid_to: int | None = None
    expires: int | None = None
    gone: str | None = None
    expect: int | None = None  # the version that must be there; 0: none
    only: int | None = None  # write only if this version is the newest
    embedded: str = ""  # the text to embed
    model: str | None = None
    vec: bytes | None = None
    closes_at: int | None = None  # repeats the current version, valid only until this time
    is_summary: bool = False  # of the items that caps remove; its row is not returned
    merge: MergeVersions | None = None
    content: Content = Content(b"")  # of a put: body, words and the text to embed are made of it


Seen = frozenset[tuple[str, int]]  # keys and versions


class CapReached(Exception):
    """Caps would remove items that a `summarize` hook must see first. The transaction is undone and repeated."""

    def __init__(self, path: str, rows: list[ItemRow]) -> None:
        super().__init__()
        self.path, self.rows = path, rows


class _Space:
    """A namespace whose lock is held, and the statements of its changes."""

    def __init__(self, tenant: int, path: str, row: Row, policy: MemoryPolicy) -> None:
        self.tenant, self.path, self.policy = tenant, path, policy
        self.space, self.last, self.items, self.bytes = row
        self.newest: dict[str, ItemRow | None] = {}  # by key
        self.capped: list[ItemRow] = []  # rows that caps have removed
        self.statements: list[Statement] = []
        self.identity = ""  # of the namespace among those of all stores; "" if nothing merges

    @property
    def is_over(self) -> bool:
        """Whether the items that are not pinned exceed the policy."""
        most, size = self.policy.max_items, self.policy.max_bytes
        return (most is not None and self.items > most) or (size is not None and self.bytes > size)

    def write(self, change: NewVersion, now: int) -> ItemRow | None:
        """Add the version that a change makes, and return its row. Raises Conflict.

        Return None if the change deletes an item that is not there, or concerns another version (`only`).
        """
        old = self.newest.get(change.key)
        there = old is not None and old.is_there(now)
        if change.gone == EXPIRED:  # an expired item is not there: it is ended now
            there = old is not None and old.gone is None and not there
        if change.expect is not None and change.expect != (old.version if old is not None and there else 0):
            raise _conflict(change, old if there else None)
        if change.body is None and not there:
            return None
        if change.only is not None and (old is None or old.version != change.only):
            return None
        at = now if old is None else max(now, old.at + 1)
        if change.merge is not None:
            change = change.merge(change, old if there else None, self.identity, self.last + 1, at)
            if old is not None and there and _repeats(change, old):
                return old
        _refuse_too_large(change, self.policy.max_bytes)
        if old is not None:
            if change.gone == CAP or (change.gone == EXPIRED and self.policy.is_aged(old.at, old.expires)):
                self.capped.append(old)
            self.statements.append(_END(tenant=self.tenant, id=old.id, at=at))
            self._count(old, -1)
        self.last += 1
        params: dict[str, Any] = {  # in the order of the row
            "id": self.space << SEQUENCE_BITS | self.last,
            "key": change.key,
            "version": 1 if old is None else old.version + 1,
            "kind": change.kind or (old.kind if old is not None else ""),
            "body": change.body or b"",
            "bytes": len(change.body or b""),
            "pinned": int(change.pinned),
            "created_at": old.created_at if old is not None and there else at,
            "at": at,
            "ended_at": None,
            "valid_from": change.valid_from,
            "valid_to": change.valid_to,
            "expires": self.policy.expires(at, change.expires, change.pinned) if change.gone is None else None,
            "gone": change.gone,
        }
        row = ItemRow(*[*params.values(), self.path])
        self._count(row, 1)
        params |= {"tenant": self.tenant, "space": self.space, "words": change.words}
        self.statements.append(ADD_ITEM.of(params))
        if change.vec is not None:
            self.statements.append(ADD_VECTOR(tenant=self.tenant, id=row.id, model=change.model, vec=change.vec))
        self.newest[change.key] = row
        return row

    def _count(self, row: ItemRow, sign: int) -> None:
        if row.gone is None and not row.pinned:
            self.items, self.bytes = self.items + sign, self.bytes + sign * row.bytes


def _conflict(change: NewVersion, actual: ItemRow | None) -> Conflict:
    there = f"there is version {actual.version}" if actual is not None else "there is none"
    expected = f"version {change.expect} was expected" if change.expect else "no item was expected"
    return Conflict(
        f"item {unescaped(change.key)!r}: {expected}, and {there}: nothing was written; read it again, or use update()",
        expected=str(change.expect) if change.expect else None,
        actual=str(actual.version) if actual is not None else None,
    )


def write_versions(
    tenant: int,
    path: str,
    changes: Sequence[NewVersion],
    now: int,
    *,
    last: bool = True,
    seen: Seen | None = None,
) -> Program[list[ItemRow | None]]:
    """Write versions into one namespace, all or none. Raises Conflict and CapReached.

    Return a row for each change, except for summaries and for versions that only close an item (`closes_at`). `last`:
    the transaction may end with the last statement. `seen`: caps must remove exactly these items; None allows any.
    """
    keys = dict.fromkeys([one.key for one in changes])
    newest = _NEWEST(tenant=tenant, path=path, keys=msgspec.json.encode([*keys]).decode())
    reads = [newest, *_policies(tenant, path)]
    merges = any(one.merge is not None for one in changes)
    stores = (yield Batch(STORE(tenant=tenant)))[0] if merges else []
    locked, olds, *policies = yield Batch(_LOCK(tenant=tenant, path=path), *reads)
    if not locked:
        if all(one.body is None and one.closes_at is None and not one.expect for one in changes):
            return [None] * len(changes)
        yield from lock_space(tenant, path)
        locked, olds, *policies = yield Batch(_LOCK(tenant=tenant, path=path), *reads)
    space = _Space(tenant, path, locked[0], _nearest(policies))
    space.identity = identity_of(stores, space.space) if merges else ""
    space.newest = {**keys, **{row[1]: item_row(row, path) for row in olds}}
    written = []
    for one in changes:
        if one.closes_at is not None:
            space.write((yield from _closing(tenant, one, space.newest[one.key], now)), now)
        else:
            row = space.write(one, now)
            written += [] if one.is_summary else [row]
    while space.is_over:  # expired items are removed first, then the oldest
        if space.statements:
            yield Batch(*space.statements)
            space.statements = []
        answers = yield Batch(*(sql(tenant=tenant, space=space.space, now=now, limit=_EVICTED) for sql in _OVER))
        over = {row[0]: item_row(row, path) for rows in answers for row in rows}
        if not over:
            break  # the counters are damaged: `verify` says so
        for row in over.values():
            if space.is_over:
                space.newest[row.key] = row
                space.write(NewVersion(row.key, gone=CAP if row.is_there(now) else EXPIRED), now)
    if seen is not None and seen != {(row.key, row.version) for row in space.capped}:
        raise CapReached(path, space.capped)
    if space.last != locked[0][1]:
        numbers = {"last": space.last, "items": space.items, "bytes": space.bytes}
        yield Batch(*space.statements, _SET_SPACE(tenant=tenant, space=space.space, **numbers), last=last)
    return written


def identity_of(stores: Rows, space: int) -> str:
    """Return the name of a namespace among those of all stores, from the row of `STORE`.

    A store that was restored from a backup is in another era. Raises Damaged.
    """
    if not stores or not isinstance(stores[0][0], str):
        raise Damaged("the store's id is damaged: `perdure store repair` makes a copy with another one")
    return blake3(f"{stores[0][0]} {stores[0][1]} {space}".encode()).hexdigest()[:16]


def _repeats(change: NewVersion, old: ItemRow) -> bool:
    """Return whether a change says nothing new."""
    times = change.valid_from, change.valid_to, change.expires
    same = (old.body, old.kind, bool(old.pinned), old.valid_from, old.valid_to, old.expires)
    return (change.body, change.kind, change.pinned, *times) == same


def _refuse_too_large(change: NewVersion, most: int | None) -> None:
    size = len(change.body or b"")
    if most is not None and size > most and (change.is_summary or not change.pinned):
        raise UsageError(
            f"item {unescaped(change.key)!r} has {size} bytes, and its namespace is capped at {most}: nothing was "
            "written; make it shorter, pin it, or change the policy"
        )


def _closing(tenant: int, change: NewVersion, old: ItemRow | None, now: int) -> Program[NewVersion]:
    """Return the version that ends the validity of an item. Raises NotFound."""
    if old is None or not old.is_there(now):
        raise NotFound(f"there is no item {unescaped(change.key)!r} to supersede: nothing was written")
    [[(_, words, model, vec)]] = yield Batch(CARRIED(tenant=tenant, id=old.id))
    version = replace(change, body=old.body, words=words, pinned=bool(old.pinned), model=model, vec=vec)
    return replace(version, valid_from=old.valid_from, valid_to=change.closes_at, expires=old.expires)


def repeated(tenant: int, path: str, key: str, now: int, *, pinned: bool) -> Program[NewVersion | None]:
    """Return the version that repeats an item with its words and its vector, pinned or not. None: there is no item."""
    [item] = yield from read_keys(tenant, [(path, key)], now, last=False)
    if item is None:
        return None
    carried, *policies = yield Batch(CARRIED(tenant=tenant, id=item.id), *_policies(tenant, path), last=True)
    [(_, words, model, vec)] = carried
    expires = None if _nearest(policies).is_aged(item.at, item.expires) else item.expires  # of one that is not pinned
    holds = item.valid_from, item.valid_to, expires
    return NewVersion(key, item.body, item.kind, words, pinned, *holds, expect=item.version, model=model, vec=vec)


def lock_space(tenant: int, path: str) -> Program[None]:
    """Lock a namespace. Create it first if it does not exist."""
    [locked] = yield Batch(_LOCK(tenant=tenant, path=path))
    if not locked:
        yield Batch(_ADD_SPACE(tenant=tenant, space=(yield from next_number()), path=path))
        yield Batch(_LOCK(tenant=tenant, path=path))


def policy_of(tenant: int, path: str) -> Program[MemoryPolicy]:
    """Return the policy of a namespace, or that of the nearest one above, or DEFAULT."""
    return _nearest((yield Batch(*_policies(tenant, path))))


def _policies(tenant: int, path: str) -> list[Statement]:
    return [_POLICY(tenant=tenant, path=each) for each in above(path)]


def _nearest(answers: Sequence[Rows]) -> MemoryPolicy:
    return next((load(rows[0][0]) for rows in answers if rows), DEFAULT)


def item_row(row: Row, path: str) -> ItemRow:
    return ItemRow._make((*row, path))


def read_keys(
    tenant: int, places: Sequence[tuple[str, str]], now: int, then: bool = False, *, last: bool = True
) -> Program[list[ItemRow | None]]:
    """Return the items at pairs of path and key, with None where there is none.

    With `then`, return them as they were known at `now`. `last`: the transaction may end with this statement.
    """
    if not places:
        return []
    reads = [_GET[then](tenant=tenant, path=path, key=key, now=now) for path, key in places]
    answers = yield Batch(*reads, last=last)
    return [item_row(rows[0], path) if rows else None for rows, (path, _) in zip(answers, places, strict=True)]


def read_history(
    tenant: int, path: str, key: str, until: int | None = None, *, last: bool = True
) -> Program[list[ItemRow]]:
    """Return the versions of a key up to a time, the oldest first.

    `last`: the transaction may end with this statement.
    """
    [rows] = yield Batch(_HISTORY(tenant=tenant, path=path, key=key), last=last)
    return [item_row(row, path) for row in rows if until is None or row[8] <= until]


def read_page(tenant: int, scope: ItemQuery, after: ItemRow | None, limit: int) -> Program[list[ItemRow]]:
    """Return the next page of items after `after`, the newest first."""
    before, before_id = (after.at, after.id) if after is not None else (2**62, 2**62)
    params = {"before": before, "before_id": before_id, "limit": limit, **scope.params(tenant)}
    [rows] = yield Batch(_LIST[scope.then](**params))
    return [ItemRow(*row) for row in rows]


def read_spaces(tenant: int, scope: ItemQuery) -> Program[list[tuple[str, int, int]]]:
    """Return the path, the number of items and their bytes of each namespace at and below a path that holds items."""
    [rows] = yield Batch(_SPACES[scope.then](**scope.params(tenant)), last=True)
    return [(path, int(items), int(size)) for path, items, size in rows]


def read_stats(tenant: int, scope: ItemQuery, model: str) -> Program[tuple[int, int]]:
    """Return how many versions are stored at and below a path, and how many of them have a vector of a model."""
    [[(versions, embedded)]] = yield Batch(_STATS(model=model, **scope.params(tenant)), last=True)
    return int(versions), int(embedded)
