"""The rows of memory: each change of an item is a version of its own, written under the lock of its namespace.

A version takes the next number of its namespace, so that an index in memory reads only what is newer. A deletion is a
version that says why there is nothing. Programs only: times, values and vectors come in finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from perdure.errors import Conflict, Damaged, NotFound, UsageError
from perdure.log.thread_table import next_number
from perdure.memory.labels import above, below, unescaped
from perdure.memory.policies import DEFAULT, MemoryPolicy, load
from perdure.storage.columns import ITEM, ITEM_VECTOR, ITEM_WORDS
from perdure.storage.program import Batch, Program, Row, Rows, Sql, Statement

SEQUENCE_BITS = 32
DELETED, FORGOTTEN, EXPIRED, CAP = "deleted", "forgotten", "expired", "cap"

ROW_COLUMNS = (
    "id, key, version, kind, body, bytes, pinned, created_at, at, ended_at, valid_from, valid_to, expires, gone"
)
# The columns of such a row that say what it is, in the order that its hash has them.
OPENS = {4: ITEM.at(0, 1, 2, 3, 6, 7, 8, 10, 11, 13)}
_OF_ITEM = "i." + ROW_COLUMNS.replace(", ", ", i.")
_NOW = "i.gone IS NULL AND i.ended_at IS NULL AND (i.expires IS NULL OR i.expires > :now)"
# As it was known then.
_THEN = """i.gone IS NULL AND i.at <= :now AND (i.ended_at IS NULL OR i.ended_at > :now)
    AND (i.expires IS NULL OR i.expires > :now)"""
_WANTED = """(:kind = '' OR i.kind = :kind) AND (CAST(:valid_at AS bigint) = 0
    OR (coalesce(i.valid_from, :valid_at) <= :valid_at AND coalesce(i.valid_to, :valid_at + 1) > :valid_at))"""
_SPACE = "SELECT space, last, items, bytes FROM memory_space WHERE tenant = :tenant AND path = :path"
_LOCK = Sql(f"{_SPACE} {{for_update}}")
_ADD_SPACE = Sql(
    """INSERT INTO memory_space (tenant, space, path, last, generation, items, bytes)
    VALUES (:tenant, :space, :path, 0, 0, 0, 0) ON CONFLICT (tenant, path) DO NOTHING"""
)
_UNPINNED = Sql(
    f"""SELECT {ROW_COLUMNS} FROM memory_item WHERE tenant = :tenant AND space = :space AND ended_at IS NULL
    AND gone IS NULL AND pinned = 0 ORDER BY at DESC, id DESC""",
    opens=OPENS,
)
_POLICY = Sql("SELECT policy FROM memory_space WHERE tenant = :tenant AND path = :path AND policy IS NOT NULL")
_SET_SPACE = Sql(
    """UPDATE memory_space SET last = :last, items = :items, bytes = :bytes
    WHERE tenant = :tenant AND space = :space"""
)
_ONE = f"""SELECT {_OF_ITEM} FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path = :path AND i.key = :key"""
_NEWEST = Sql(f"{_ONE} ORDER BY i.version DESC LIMIT 1", opens=OPENS)
_KEY_NOW = Sql(f"{_ONE} AND {_NOW}", opens=OPENS)
_KEY_THEN = Sql(f"{_ONE} AND {_THEN}", opens=OPENS)
_HISTORY = Sql(f"{_ONE} AND i.at <= :now ORDER BY i.version", opens=OPENS)
_END = Sql("UPDATE memory_item SET ended_at = :at WHERE tenant = :tenant AND id = :id")
ADD_ITEM = Sql(
    f"""INSERT INTO memory_item (tenant, space, words, {ROW_COLUMNS})
    VALUES (:tenant, :space, :words, :{ROW_COLUMNS.replace(", ", ", :")})""",
    seals={"body": ITEM, "words": ITEM_WORDS},
)
# What the next version of an unchanged text takes over.
_CARRIED = Sql(
    """SELECT i.id, i.words, v.model, v.vec FROM memory_item i
    LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id WHERE i.tenant = :tenant AND i.id = :id""",
    opens={1: ITEM_WORDS.at(0), 3: ITEM_VECTOR.at(0)},
)
ADD_VECTOR = Sql(
    "INSERT INTO memory_vector (tenant, id, model, vec) VALUES (:tenant, :id, :model, :vec)", seals={"vec": ITEM_VECTOR}
)


def _listing(holds: str) -> Sql:
    """Items of a namespace and of all below it, the newest first, behind one."""
    return Sql(
        f"""SELECT {_OF_ITEM}, s.path
        FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
        WHERE s.tenant = :tenant AND s.path >= :path AND s.path < :below AND {holds}
            AND {_WANTED} AND (i.at < :before OR (i.at = :before AND i.id < :before_id))
        ORDER BY i.at DESC, i.id DESC LIMIT :limit""",
        opens=OPENS,
    )


_LIST_NOW, _LIST_THEN = _listing(_NOW), _listing(_THEN)
_SPACES = Sql(
    f"""SELECT s.path, count(*), sum(i.bytes)
    FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path >= :path AND s.path < :below AND {_THEN} GROUP BY s.path ORDER BY s.path"""
)


_STATS = Sql(
    """SELECT count(*), (SELECT count(*) FROM memory_vector v JOIN memory_item j ON j.tenant = v.tenant AND j.id = v.id
            JOIN memory_space p ON p.tenant = j.tenant AND p.space = j.space
            WHERE v.tenant = :tenant AND v.model = :model AND p.path >= :path AND p.path < :below)
    FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path >= :path AND s.path < :below"""
)


class Content(NamedTuple):
    """What the body of a version says."""

    value: bytes  # its text
    schema: str | None = None
    text: str | None = None  # what is indexed, if it is not the value's own text
    context: str | None = None
    links: tuple[tuple[str, str], ...] = ()
    source: str | None = None
    ttl_s: float | None = None  # what a refresh of its expiry begins anew


_encode = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Content).decode


def pack(body: Content) -> bytes:
    return _encode(body)


class ItemRow(NamedTuple):
    """A version as it is stored, and the path of its namespace."""

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
        """Its body. Raises Damaged."""
        try:
            return unpack(self.body)
        except msgspec.MsgspecError as error:
            raise Damaged(f"the item {unescaped(self.key)!r} of memory is damaged ({error})") from error

    def is_there(self, now: int) -> bool:
        return self.gone is None and (self.expires is None or self.expires > now)


@dataclass(frozen=True, slots=True, eq=False)
class NewVersion:
    """A version to be written. `body` None: the item goes, and `gone` says why."""

    key: str
    body: bytes | None
    kind: str = ""
    words: bytes | None = None
    pinned: bool = False
    valid_from: int | None = None
    valid_to: int | None = None
    expires: int | None = None
    gone: str | None = None
    expect: int | None = None  # the version that must be there; 0: none
    only: int | None = None  # the version that it is about: another one stays
    model: str | None = None
    vec: bytes | None = None
    closes_at: int | None = None  # it says what is there already, and that it does not hold from this time on


class _Space:
    """A namespace while its lock is held."""

    def __init__(self, tenant: int, path: str, row: Row) -> None:
        self.tenant, self.path = tenant, path
        self.space, self.last, self.items, self.bytes = row
        self.policy = DEFAULT
        self.newest: dict[str, ItemRow | None] = {}  # by key
        self.statements: list[Statement] = []

    @property
    def is_over(self) -> bool:
        """Whether it may hold more than its policy allows; pinned items, which are exempt, are counted here."""
        most, size = self.policy.max_items, self.policy.max_bytes
        return (most is not None and self.items > most) or (size is not None and self.bytes > size)

    def evict(self, unpinned: Sequence[ItemRow], now: int) -> None:
        """Let the oldest of these go, newest first, that the policy does not allow."""
        most, size = self.policy.max_items, self.policy.max_bytes
        items = total = 0
        for row in unpinned:
            items, total = items + 1, total + row.bytes
            if (most is not None and items > most) or (size is not None and total > size):
                items, total = items - 1, total - row.bytes
                self.newest[row.key] = row
                self.write(NewVersion(row.key, None, gone=CAP if row.is_there(now) else EXPIRED), now)

    def write(self, change: NewVersion, now: int) -> ItemRow | None:
        """Add the version that a change makes. None: it removes what is not there. Raises Conflict."""
        old = self.newest.get(change.key)
        there = old is not None and old.is_there(now)
        if change.gone == EXPIRED:  # what expired is not there, and goes now
            there = old is not None and old.gone is None and not there
        if change.expect is not None and change.expect != (old.version if old is not None and there else 0):
            raise _conflict(change, old if there else None)
        if change.body is None and not there:
            return None
        if change.only is not None and (old is None or old.version != change.only):
            return None
        at = now if old is None else max(now, old.at + 1)
        if old is not None:
            self.statements.append(_END(tenant=self.tenant, id=old.id, at=at))
            if old.gone is None:
                self.items, self.bytes = self.items - 1, self.bytes - old.bytes
        self.last += 1
        row = ItemRow(
            id=self.space << SEQUENCE_BITS | self.last,
            key=change.key,
            version=1 if old is None else old.version + 1,
            kind=change.kind or (old.kind if old is not None else ""),
            body=change.body or b"",
            bytes=len(change.body or b""),
            pinned=int(change.pinned),
            created_at=old.created_at if old is not None and there else at,
            at=at,
            ended_at=None,
            valid_from=change.valid_from,
            valid_to=change.valid_to,
            expires=self.policy.expires(at, change.expires, change.pinned) if change.gone is None else None,
            gone=change.gone,
            path=self.path,
        )
        if row.gone is None:
            self.items, self.bytes = self.items + 1, self.bytes + row.bytes
        params = row._asdict()
        del params["path"]
        self.statements.append(ADD_ITEM(tenant=self.tenant, space=self.space, words=change.words, **params))
        if change.vec is not None:
            self.statements.append(ADD_VECTOR(tenant=self.tenant, id=row.id, model=change.model, vec=change.vec))
        self.newest[change.key] = row
        return row


def _conflict(change: NewVersion, found: ItemRow | None) -> Conflict:
    there = f"there is version {found.version}" if found is not None else "there is none"
    wanted = f"version {change.expect} was expected" if change.expect else "no item was expected"
    return Conflict(
        f"item {unescaped(change.key)!r}: {wanted}, and {there}: nothing was written; read it again, or use update()",
        expected=str(change.expect) if change.expect else None,
        actual=str(found.version) if found is not None else None,
    )


def write_versions(
    tenant: int, path: str, changes: Sequence[NewVersion], now: int, *, last: bool = True
) -> Program[list[ItemRow | None]]:
    """Write versions into one namespace, all or none. `last`: the transaction may end with it. Raises Conflict."""
    keys = list(dict.fromkeys(one.key for one in changes))
    reads = [_NEWEST(tenant=tenant, path=path, key=key) for key in keys]
    reads += _policies(tenant, above(path))
    found, *newest = yield Batch(_LOCK(tenant=tenant, path=path), *reads)
    if not found:
        if all(one.body is None and one.closes_at is None for one in changes) and not any(
            one.expect for one in changes
        ):
            return [None] * len(changes)
        yield from lock_space(tenant, path)
        found, *newest = yield Batch(_LOCK(tenant=tenant, path=path), *reads)
    space = _Space(tenant, path, found[0])
    space.policy = _nearest(newest[len(keys) :])
    del newest[len(keys) :]
    space.newest = {key: item_row(rows[0], path) if rows else None for key, rows in zip(keys, newest, strict=True)}
    written = []
    for one in changes:
        if one.closes_at is not None:
            one = yield from _closing(tenant, one, space.newest[one.key], now)
        written.append(space.write(one, now))
    if space.is_over:
        if space.statements:
            yield Batch(*space.statements)
            space.statements = []
        [unpinned] = yield Batch(_UNPINNED(tenant=tenant, space=space.space))
        _refuse_too_large(space, [row for row in written if row is not None])
        space.evict([item_row(row, path) for row in unpinned], now)
    if space.last != found[0][1]:
        numbers = {"last": space.last, "items": space.items, "bytes": space.bytes}
        yield Batch(*space.statements, _SET_SPACE(tenant=tenant, space=space.space, **numbers), last=last)
    return written


def _refuse_too_large(space: _Space, written: Sequence[ItemRow]) -> None:
    size = space.policy.max_bytes
    for row in written:
        if size is not None and row.bytes > size and not row.pinned:
            raise UsageError(
                f"item {unescaped(row.key)!r} has {row.bytes} bytes, and its namespace is capped at {size}: nothing "
                "was written; pin it, or change the policy"
            )


def lock_space(tenant: int, path: str) -> Program[None]:
    """Lock a namespace, which is made if it is not there."""
    [found] = yield Batch(_LOCK(tenant=tenant, path=path))
    if not found:
        yield Batch(_ADD_SPACE(tenant=tenant, space=(yield from next_number()), path=path))
        yield Batch(_LOCK(tenant=tenant, path=path))


def _policies(tenant: int, paths: Sequence[str]) -> list[Statement]:
    return [_POLICY(tenant=tenant, path=path) for path in paths]


def _nearest(answers: Sequence[Rows]) -> MemoryPolicy:
    return next((load(rows[0][0]) for rows in answers if rows), DEFAULT)


def policy_of(tenant: int, paths: Sequence[str]) -> Program[MemoryPolicy]:
    """The policy of the nearest of these namespaces that has one."""
    answers = yield Batch(*_policies(tenant, paths))
    return _nearest(answers)


def _closing(tenant: int, change: NewVersion, old: ItemRow | None, now: int) -> Program[NewVersion]:
    """The version that says that an item does not hold any more. Raises NotFound."""
    if old is None or not old.is_there(now):
        raise NotFound(f"there is no item {unescaped(change.key)!r} to supersede: nothing was written")
    [[(_, words, model, vec)]] = yield Batch(_CARRIED(tenant=tenant, id=old.id))
    return NewVersion(
        old.key,
        old.body,
        old.kind,
        words,
        bool(old.pinned),
        old.valid_from,
        change.closes_at,
        old.expires,
        model=model,
        vec=vec,
    )


def item_row(row: Row, path: str) -> ItemRow:
    return ItemRow._make((*row, path))


def read_keys(tenant: int, places: Sequence[tuple[str, str]], now: int, *, then: bool) -> Program[list[ItemRow | None]]:
    """The items at some paths and keys, None for those that are not there. `then`: as it was known at `now`."""
    sql = _KEY_THEN if then else _KEY_NOW
    answers = yield Batch(*(sql(tenant=tenant, path=path, key=key, now=now) for path, key in places), last=True)
    return [item_row(rows[0], path) if rows else None for rows, (path, _) in zip(answers, places, strict=True)]


def read_history(tenant: int, path: str, key: str, now: int, *, last: bool = True) -> Program[list[ItemRow]]:
    """All versions of a key up to a time, the oldest first. `last`: the transaction may end with it."""
    [rows] = yield Batch(_HISTORY(tenant=tenant, path=path, key=key, now=now), last=last)
    return [item_row(row, path) for row in rows]


class ItemQuery(NamedTuple):
    """Which items of a namespace and of all below it are wanted."""

    path: str
    now: int  # what is there at this time …
    then: bool = False  # … as it was known then
    kind: str = ""  # "": any
    valid_at: int = 0  # what holds at this time; 0: any


def read_page(tenant: int, wanted: ItemQuery, after: ItemRow | None, limit: int) -> Program[list[ItemRow]]:
    """Items, the newest first, behind one of them."""
    sql = _LIST_THEN if wanted.then else _LIST_NOW
    before, before_id = (after.at, after.id) if after is not None else (2**62, 2**62)
    where = {"path": wanted.path, "below": below(wanted.path), "now": wanted.now}
    where |= {"kind": wanted.kind, "valid_at": wanted.valid_at, "before": before, "before_id": before_id}
    [rows] = yield Batch(sql(tenant=tenant, limit=limit, **where))
    return [ItemRow(*row) for row in rows]


def read_spaces(tenant: int, path: str, now: int) -> Program[list[tuple[str, int, int]]]:
    """The namespaces at and below a path that hold items, with how many, and their bytes."""
    [rows] = yield Batch(_SPACES(tenant=tenant, path=path, below=below(path), now=now), last=True)
    return [(found, int(items), int(size)) for found, items, size in rows]


def read_stats(tenant: int, path: str, model: str) -> Program[tuple[int, int]]:
    """How many versions are stored at and below a path, and how many have a vector of a model."""
    [[(versions, embedded)]] = yield Batch(_STATS(tenant=tenant, path=path, below=below(path), model=model), last=True)
    return int(versions), int(embedded)
