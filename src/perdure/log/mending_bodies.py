"""Mending what a record's state is made of: nothing is kept that the record's hash does not prove.

A full text is made again from the difference that its keyframe kept, that difference from two full texts; one changed
byte in a salt, a difference, a full text or a pack is found. Inside the
transaction that repairs a tree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.packs import salts_in
from perdure.log.reading import RECORD, read_chain, read_state
from perdure.log.records import (
    NO_HASH,
    NUMBER_MAX,
    RECORD_SEALS,
    Record,
    chain_hash,
    record_of,
)
from perdure.storage.cells import DIFF, FULL_TEXT, SALT
from perdure.storage.cells import PACK as PACK_CELL
from perdure.storage.program import Batch, Rows, Sql, Statement
from perdure.values.compress import compress_full, decompress_bounded
from perdure.values.delta import Encoder, apply_all
from perdure.values.dictionary import Dictionary
from perdure.values.finding import find
from perdure.values.hashing import digest
from perdure.values.limits import SIZE_MAX

# What reading raises for what is damaged; in an encrypted store also for what does not look encrypted any more.
CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_PACKED_MENDED = "its row was mended"
_HASH = Sql("SELECT hash FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_BODY = Sql(
    "SELECT salt, diff, full_text FROM body WHERE tenant = :tenant AND id = :body",
    opens={0: SALT, 1: DIFF, 2: FULL_TEXT},
    tolerant="all",
)
_SET_BODY = Sql(
    """UPDATE body SET salt = :salt, diff = :diff, full_text = :full_text
    WHERE tenant = :tenant AND id = :body""",
    seals={"salt": SALT, "diff": DIFF, "full_text": FULL_TEXT},
)
_OWNERS = Sql("SELECT tree, id FROM record WHERE tenant = :tenant AND body = :body LIMIT 2")
_NAMES = ", ".join(f"{name} = :{name}" for name in Record._fields)
SET_ROW = Sql(
    f"""UPDATE record SET tenant = :tenant, {_NAMES}
    WHERE tenant = :old_tenant AND tree = :old_tree AND id = :old_id""",
    seals=RECORD_SEALS,
)
_PACK = Sql(
    "SELECT key, first, last, data FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens={3: PACK_CELL},
    tolerant="all",
)
_MEMBERS = Sql(
    "SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND body = :body ORDER BY id",
)


class _Standing(NamedTuple):
    """What a difference is applied to: the state it was made against, and how that is read."""

    record: Record
    key_data: bytes
    diffs: Sequence[bytes]
    text: bytes


def set_row(tenant: int, record: Record, old: tuple[int, Any, Any] | None = None) -> Statement:
    """A statement that writes a whole row. `old`: the tenant, tree and id that it has now."""
    old_tenant, tree, number = old or (tenant, record.tree, record.id)
    params = record._asdict()
    return SET_ROW(tenant=tenant, old_tenant=old_tenant, old_tree=tree, old_id=number, **params)


def mend_record(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], str | None]:
    """Mend what one record is stored as. What was done; None: it cannot be."""
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=number))
    if not rows:
        return None
    try:
        record = record_of(rows[0])
    except Damaged:
        return None
    if record.body is None:
        return None
    parent_hash = yield from _parent_hash(tenant, record)
    if parent_hash is None:
        return None
    if record.body < 0:
        return (yield from _mend_packed(tenant, record))
    standing = yield from _standing(tenant, record)
    [found] = yield Batch(_BODY(tenant=tenant, body=record.body))
    return (yield from _mend_body(tenant, record, parent_hash, standing, found[0])) if found else None


def is_intruder(tenant: int, tree: int, number: int, body: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a record has a body by damage, or has lost it: then it must not take along what is another's."""
    if body >= 0:
        owners, rows = yield Batch(_OWNERS(tenant=tenant, body=body), _BODY(tenant=tenant, body=body))
        return len(owners) > 1 or not rows  # a number that is free may be given to another one
    members, rows = yield Batch(_MEMBERS(tenant=tenant, tree=tree, body=body), _PACK(tenant=tenant, pack=-body))
    try:
        if not rows or type(rows[0][3]) is not bytes:
            return False
        return len(salts_in(rows[0][3])) < len(members) or not rows[0][1] <= number <= rows[0][2]
    except Undecodable:
        return False


def unlink(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], None]:
    """Let a keyframe whose base is gone stand by its full text alone."""
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=number))
    record = record_of(rows[0])
    [found] = yield Batch(_BODY(tenant=tenant, body=record.body))
    salt, _, full = found[0]
    params = {"salt": salt, "diff": None, "full_text": full}
    yield Batch(_SET_BODY(tenant=tenant, body=record.body, **params), set_row(tenant, record._replace(base=None)))


def _parent_hash(tenant: int, record: Record) -> Generator[Batch, list[Rows], bytes | None]:
    if record.parent is None:
        return NO_HASH
    [rows] = yield Batch(_HASH(tenant=tenant, tree=record.tree, id=record.parent))
    found = rows[0][0] if rows and record.parent < record.id else None
    return found if type(found) is bytes else None


def _standing(tenant: int, record: Record) -> Generator[Batch, list[Rows], _Standing | None]:
    if record.base is None or not 0 <= record.base < record.id:
        return None
    try:
        loaded = yield from read_state(tenant, record.tree, record.base)
        chain = yield from read_chain(tenant, record.tree, record.base)
        diffs = chain.diffs(loaded.key_data) if loaded is not None and chain is not None else None
    except CANNOT_READ:
        return None
    if loaded is None or diffs is None:
        return None
    return _Standing(loaded.record, loaded.key_data, diffs, loaded.data)


def _mend_body(
    tenant: int, record: Record, parent_hash: bytes, standing: _Standing | None, row: tuple[Any, ...]
) -> Generator[Batch, list[Rows], str | None]:
    salt, diff, full = (part if type(part) is bytes else None for part in row)
    if salt is None:
        return None
    for data in _texts(record, diff, full, standing):
        proved = _proved(record, parent_hash, salt, data)
        if proved is not None:
            stored = (record, salt, diff, full)
            return (yield from _store(tenant, stored, proved, salt, diff, full, standing, data))
    return None


def _texts(record: Record, diff: bytes | None, full: bytes | None, standing: _Standing | None) -> Iterator[bytes]:
    if full is not None:
        text = _from_full(full, record.size)
        if text is not None:
            yield text
    if diff is not None and standing is not None:
        text = _from_diff(diff, standing)
        if text is not None:
            yield text


def _from_full(full: bytes, size: int) -> bytes | None:
    for exact in (True, False):
        try:
            return decompress_bounded(full, size if exact else SIZE_MAX, exact=exact)
        except (Undecodable, OverflowError):
            continue
    return None


def _from_diff(diff: bytes, standing: _Standing) -> bytes | None:
    try:
        return apply_all(standing.key_data, [*standing.diffs, diff], Dictionary(standing.key_data))
    except Undecodable:
        return None


def _proved(record: Record, parent_hash: bytes, salt: bytes, data: bytes) -> Record | None:
    """The record, if its hash says that this is what was saved."""
    meaning = (record.id, record.kind, record.at, record.step, record.note, record.metadata)
    expected = chain_hash(parent_hash, *meaning, digest(salt, data))
    return record._replace(size=len(data)) if expected == record.hash else None


def _store(
    tenant: int,
    stored: tuple[Any, ...],
    record: Record,
    salt: bytes,
    diff: bytes | None,
    full: bytes | None,
    standing: _Standing | None,
    data: bytes,
) -> Generator[Batch, list[Rows], str | None]:
    """Write a proved state as it should be stored: what is sound of it stays as it is."""
    done = "its row was mended"
    if record.keyframe or full is not None:
        if full is None or _from_full(full, len(data)) != data:
            full, done = compress_full(data), "its full text was rebuilt from the keyframe before it"
        if diff is not None and (standing is None or _from_diff(diff, standing) != data):
            diff = None
        if diff is None and standing is not None:
            diff = Encoder(Dictionary(standing.key_data)).encode(find(standing.text, data))
            done = "its difference was made again from two full texts"
        elif diff is None and record.base is not None:
            done = "it has lost its difference, and stands by its full text alone"
        base = record.base if diff is not None else None
        record = record._replace(keyframe=1, key=record.id, cost=0, base=base)
    elif standing is not None:
        cost = record.cost if 0 <= record.cost <= NUMBER_MAX else standing.record.cost
        record = record._replace(key=standing.record.key, cost=cost)
    if stored == (record, salt, diff, full):
        return None  # nothing is wrong with it: with something that points at it
    yield Batch(
        _SET_BODY(
            tenant=tenant,
            body=record.body,
            salt=salt,
            diff=diff,
            full_text=full,
        ),
        set_row(tenant, record),
    )
    return done


# --- packs


def _mend_packed(tenant: int, record: Record) -> Generator[Batch, list[Rows], str | None]:
    """A packed record whose pack is sound: what may be wrong is its row."""
    if (yield from loads(tenant, record.tree, record.id)):
        return None
    return (yield from _mend_key(tenant, record))


def _mend_key(tenant: int, record: Record) -> Generator[Batch, list[Rows], str | None]:
    """A packed record that cannot be read: which keyframe it begins at, its pack says too."""
    [rows] = yield Batch(_PACK(tenant=tenant, pack=-(record.body or 0)))
    key = rows[0][0] if rows else None
    if type(key) is not int or key == record.key:
        return None
    yield Batch(set_row(tenant, record._replace(key=key)))
    if (yield from loads(tenant, record.tree, record.id)):
        return _PACKED_MENDED
    # As it was, to be kept so.
    this = {"old_tenant": tenant, "old_tree": record.tree, "old_id": record.id}
    yield Batch(SET_ROW(tenant=tenant, **this, **record._asdict()))
    return None


def loads(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a record's state can be read."""
    try:
        return (yield from read_state(tenant, tree, number)) is not None
    except CANNOT_READ:
        return False
