"""Read a record's state: its keyframe, the differences since, and the check of the result.

Every returned state has been checked against the record's hash. A damaged keyframe is rebuilt from the one before it.
If that fails, `Damaged` names the record. The caller decides what to offer instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from perdure.errors import Damaged, Undecodable
from perdure.log.ids import show_id
from perdure.log.keyframes import RECORD_COST_BYTES
from perdure.log.records import COLUMNS, ERASED, NO_HASH, R_COLUMNS, RECORD_ENCRYPTED, Record, hash_holds, record_of
from perdure.log.tables import DIFF, FULL_TEXT, SALT
from perdure.log.thread_table import ThreadRow, find_thread, no_thread
from perdure.storage import metrics
from perdure.storage.program import Batch, Program, Rows, Sql, one_row
from perdure.values.compress import decompress_full
from perdure.values.delta import Decoder, apply_all
from perdure.values.dictionary import Dictionary
from perdure.values.diff import Splices
from perdure.values.hashing import chunk_digests, content_digest

_THIS = "tenant = :tenant AND tree = :tree AND id = :id"
_RECOVERED_MAX = 32  # damaged keyframes in a row that are worth rebuilding

RECORD = Sql(f"SELECT {COLUMNS} FROM record r WHERE {_THIS}", opens=RECORD_ENCRYPTED, tolerant=True)
_LIVE = Sql(
    f"SELECT {COLUMNS} FROM record r WHERE {_THIS} AND body IS NOT NULL",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)
_WITH_SALT = Sql(
    f"""SELECT {COLUMNS}, (SELECT b.salt FROM body b WHERE b.tenant = r.tenant AND b.id = r.body),
        (SELECT p.hash FROM record p WHERE p.tenant = r.tenant AND p.tree = r.tree AND p.id = r.parent)
    FROM record r WHERE {_THIS}""",
    opens={**RECORD_ENCRYPTED, len(Record._fields): SALT},
    tolerant=True,
)
_KEY = f"(SELECT key FROM record WHERE {_THIS})"
_KEYFRAME = Sql(
    f"""SELECT k.base, k.size, b.full_text, k.thread FROM record k JOIN body b ON b.tenant = k.tenant AND b.id = k.body
    WHERE k.tenant = :tenant AND k.tree = :tree AND k.id = {_KEY}""",
    opens={2: FULL_TEXT},
    tolerant=True,
)
_DIFF = Sql(
    f"SELECT diff FROM body WHERE tenant = :tenant AND id = (SELECT body FROM record WHERE {_THIS})",
    opens={0: DIFF},
    tolerant=True,
)
# Ids grow along a chain, so the chain lies in a range of ids. Reading the range is three times faster than following
# the pointers. Other branches may lie in that range too, so the limit is the longest possible chain, with some room.
# Bodies are read by subqueries, not by LEFT JOIN: at a snapshot `body` is a union, which SQLite would build first.
_LIMIT = f"""coalesce((SELECT 64 + CASE WHEN cost > 0 THEN cost / {RECORD_COST_BYTES // 2} ELSE 0 END
    FROM record WHERE {_THIS}), 0)"""
_RANGE = Sql(
    f"""SELECT r.id, r.base, r.keyframe, (SELECT b.diff FROM body b WHERE b.tenant = r.tenant AND b.id = r.body)
    FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id <= :id AND r.id > {_KEY} AND r.body IS NOT NULL
    ORDER BY r.id DESC LIMIT {_LIMIT}""",
    opens={3: DIFF},
    tolerant=True,
)
# Subqueries instead of a join, for the same reason, also in `_HISTORY`. SQLite would read the whole tree at each step.
_OF_BASE = "FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = c.base"
# `c.base < c.id`: a base is older than what is built on it. Damaged pointers must not form a circle.
_FOLLOW = Sql(
    f"""WITH RECURSIVE chain (id, base, keyframe, body) AS (
        SELECT id, base, keyframe, body FROM record WHERE {_THIS}
        UNION ALL
        SELECT c.base, (SELECT r.base {_OF_BASE}), (SELECT r.keyframe {_OF_BASE}), (SELECT r.body {_OF_BASE})
        FROM chain c WHERE c.keyframe = 0 AND c.base < c.id)
    SELECT c.id, c.base, c.keyframe, (SELECT b.diff FROM body b WHERE b.tenant = :tenant AND b.id = c.body)
    FROM chain c
    WHERE c.body IS NOT NULL ORDER BY c.id DESC""",
    opens={3: DIFF},
    tolerant=True,
)


class Loaded(NamedTuple):
    """A record and its checked text, with the keyframe's text, which the next difference needs."""

    record: Record
    data: bytes
    digests: tuple[bytes, ...]
    key_data: bytes
    key_thread: int


class Chain(NamedTuple):
    """The stored parts of a record's state, unchecked."""

    record: Record
    parent_hash: bytes | None  # None: the parent's row is gone
    salt: bytes
    ids: Sequence[int]  # after the keyframe, oldest first
    stored: Sequence[bytes] | None  # their differences; None: the chain is broken
    key_base: int | None
    key_size: int
    full: bytes | None
    key_thread: int  # the thread that wrote the keyframe

    def batches(self, key_data: bytes, *more: bytes) -> Iterator[list[Splices]]:
        """Decode the differences from the keyframe to the record, oldest first, then `more`. May raise Undecodable."""
        if self.stored is None:
            raise Undecodable("the chain is broken")
        return Decoder(Dictionary(key_data)).batches([*self.stored, *more])


def read_thread_state(
    tenant: int, name: str, number: int | None, at: int | None
) -> Program[tuple[ThreadRow, Loaded | None]]:
    """Return a thread's row and its state at the head, or at checkpoint `at`, from one transaction.

    Raise Damaged if the state cannot be read, or if the head is not the record that was saved last."""
    row = yield from find_thread(tenant, name, number)
    if row.head is None:
        raise no_thread(name)
    target = row.head if at is None else at
    loaded = (yield from read_state(tenant, row.tree, target)) if target is not None else None
    if at is None and (loaded is None or loaded.record.hash != row.head_hash):
        head = show_id(row.head or 0)
        raise Damaged(f"the head of thread {name!r} ({head}) is missing or was changed", checkpoints=(head,))
    return row, loaded


def read_live(tenant: int, tree: int, record: int) -> Program[Record | None]:
    """Return a record that a new record may build on, or None if it is missing or a tombstone."""
    [rows] = yield Batch(_LIVE(tenant=tenant, tree=tree, id=record))
    row = one_row(rows)
    return record_of(row) if row else None


def read_chain(tenant: int, tree: int, record: int) -> Program[Chain | None]:
    """Read the stored parts of a record's state: one batch, and a second if many other branches lie in between.

    Return None if there is no such record.
    """
    key = {"tenant": tenant, "tree": tree, "id": record}
    rows, keyframes, links = yield Batch(_WITH_SALT(**key), _KEYFRAME(**key), _RANGE(**key))
    row = one_row(rows)
    if row is None:
        return None
    head, salt, parent_hash = record_of(row[:-2]), row[-2], row[-1]
    key_base, key_size, full, key_thread = one_row(keyframes) or (None, 0, None, 0)
    if head.parent is None:
        parent_hash = NO_HASH
    ids: Sequence[int] = ()
    stored: Sequence[bytes] | None = ()
    if not head.keyframe:
        ids, stored = _follow(links, head)
        if stored is None:
            [links] = yield Batch(_FOLLOW(**key))
            ids, stored = _follow(links, head)
    # A damaged row may hold anything: a value that is not bytes counts as lost.
    salt, full = (part if type(part) is bytes else None for part in (salt, full))
    return Chain(head, parent_hash, salt or b"", ids, stored, key_base, key_size, full, key_thread)


def _follow(links: Rows, record: Record) -> tuple[Sequence[int], Sequence[bytes] | None]:
    """Return the ids from the keyframe to the record and their differences, oldest first. `links`: newest first.

    The differences are None if the links do not lead to the keyframe, or one of them has no difference.
    """
    if not links:
        return (), None
    ids, bases, _, diffs = zip(*reversed(links), strict=True)
    if ids[-1] == record.id and bases == (record.key, *ids[:-1]):
        return ids, diffs if set(map(type, diffs)) == {bytes} else None
    # Leave out the links of other branches.
    expected, line = record.id, []
    for link in links:
        if link[0] == expected and not link[2]:
            line.append(link)
            expected = link[1]
    return _follow(line, record) if expected == record.key and len(line) < len(links) else ((), None)


def read_state(tenant: int, tree: int, record: int) -> Program[Loaded | None]:
    """Return the checked state of a record, or None if the record is missing or a tombstone. May raise Damaged."""
    chain = yield from read_chain(tenant, tree, record)
    if chain is None or chain.record.body is None:
        return None
    key_data = _key_data(chain)
    loaded = _rebuild(chain, key_data) if key_data is not None else None
    if loaded is None:
        # The keyframe's full text or a difference is damaged. A keyframe keeps its difference, so it can be rebuilt.
        key_data = yield from recover_key(tenant, tree, chain)
        loaded = _rebuild(chain, key_data) if key_data is not None else None
        if (sink := metrics.sink) is not None:
            sink.record(metrics.CORRUPTIONS, 1, "checkpoint")
            if loaded is not None:
                sink.record(metrics.RECOVERIES, 1, "keyframe")
    if loaded is None:
        raise Damaged(
            f"checkpoint {show_id(record)} is damaged: what is stored does not add up to what was saved",
            checkpoints=(show_id(record),),
        )
    return loaded


def _key_data(chain: Chain) -> bytes | None:
    try:
        return None if chain.full is None else decompress_full(chain.full, chain.key_size)
    except Undecodable:
        return None


def _rebuild(chain: Chain, key_data: bytes) -> Loaded | None:
    """Apply the differences and check the result. Return None if it is not what was saved."""
    record = chain.record
    if chain.stored is None or chain.parent_hash is None:
        return None
    try:
        data = apply_all(key_data, chain.batches(key_data)) if chain.stored else key_data
    except Undecodable:
        return None
    if len(data) != record.size:
        return None
    digests = chunk_digests(data)
    content = content_digest(chain.salt, len(data), digests)
    if not hash_holds(record, chain.parent_hash, content):
        return None
    return Loaded(record, data, digests, key_data, chain.key_thread)


def recover_key(
    tenant: int, tree: int, chain: Chain, tries: int = _RECOVERED_MAX
) -> Generator[Batch, list[Rows], bytes | None]:
    """Rebuild a keyframe's text from the keyframe before it and its own difference. Return None if that fails."""
    [rows] = yield Batch(_DIFF(tenant=tenant, tree=tree, id=chain.record.key))
    if tries == 0 or chain.key_base is None or not rows or type(rows[0][0]) is not bytes:
        return None
    before = yield from read_chain(tenant, tree, chain.key_base)
    if (
        before is None or before.stored is None or before.record.key >= chain.record.key
    ):  # damaged pointers may form a circle
        return None
    key_data = _key_data(before)
    if key_data is None or _rebuild(before, key_data) is None:
        key_data = yield from recover_key(tenant, tree, before, tries - 1)
    if key_data is None:
        return None
    try:
        return apply_all(key_data, before.batches(key_data, rows[0][0]))
    except Undecodable:
        return None


# Erased records are skipped and do not count. CROSS JOIN makes SQLite read `line` first. It cannot know how many rows
# that has, and would scan all records of the tree for each of them.
# Sorted by a column of the result, which a union allows without being built first. Parents have smaller ids.
_AT = "FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = l.at_id"
_HISTORY = Sql(
    f"""WITH RECURSIVE line (at_id, depth) AS (
        SELECT CAST(:id AS bigint), 0
        UNION ALL
        SELECT (SELECT r.parent {_AT} AND r.parent < r.id),
            l.depth + (SELECT CASE r.keyframe WHEN {ERASED} THEN 0 ELSE 1 END {_AT})
        FROM line l WHERE l.depth < :limit AND l.at_id IS NOT NULL)
    SELECT {R_COLUMNS} FROM line l
    CROSS JOIN record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = l.at_id AND l.depth < :limit AND r.keyframe <> {ERASED}
    ORDER BY r.id DESC""",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)


def read_line(tenant: int, tree: int, record: int, limit: int) -> Program[list[Record]]:
    """Return a record and its ancestors, newest first, at most `limit`. Skip erased ones; end at other tombstones."""
    [rows] = yield Batch(_HISTORY(tenant=tenant, tree=tree, id=record, limit=limit), last=True)
    line: list[Record] = []
    for row in rows:
        one = record_of(row)
        if one.body is None:
            break
        line.append(one)
    return line


_OWN = Sql(
    """SELECT id FROM record r WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND id <= :upto
      AND body IS NOT NULL ORDER BY id DESC LIMIT :limit"""
)


def read_newest(tenant: int, tree: int, thread: int, upto: int, limit: int) -> Program[list[int]]:
    """Return the newest records that a thread wrote. It follows no pointers, so it works when these are damaged."""
    [rows] = yield Batch(_OWN(tenant=tenant, tree=tree, thread=thread, upto=upto, limit=limit), last=True)
    return [row[0] for row in rows]


_TIP_IDS = """SELECT r.id FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
        AND r.body IS NOT NULL
    EXCEPT
    SELECT r.parent FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.thread = :thread
        AND r.parent IS NOT NULL
    UNION
    SELECT head FROM thread WHERE tenant = :tenant AND thread = :thread"""
# Each is looked up by its key: if its statistics are old, PostgreSQL would compare every record with every tip.
_TIPS = Sql(
    sqlite=f"""SELECT {R_COLUMNS} FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id IN ({_TIP_IDS}) ORDER BY r.at DESC, r.id DESC""",
    postgres=f"""WITH tips (id) AS MATERIALIZED ({_TIP_IDS})
    SELECT {R_COLUMNS} FROM tips t CROSS JOIN LATERAL (
        SELECT * FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id = t.id OFFSET 0) r
    ORDER BY r.at DESC, r.id DESC""",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)


def read_tips(tenant: int, tree: int, thread: int) -> Program[list[Record]]:
    """Return the records of a thread that have no child: its head, and the ends of its branches."""
    [rows] = yield Batch(_TIPS(tenant=tenant, tree=tree, thread=thread), last=True)
    return [record_of(row) for row in rows]
