"""Mending what a record's state is made of: nothing is kept that the record's hash does not prove.

A full text is made again from the difference that its keyframe kept, that difference from two full texts; one changed
byte in a salt, a difference, a full text or a pack is found by its checksum. Inside the
transaction that repairs a tree.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.mended import Done
from perdure.log.mending_rows import body_by_checksum, restored_rows
from perdure.log.packs import pack_checksum, salts_in
from perdure.log.quarantine import set_aside
from perdure.log.reading import RECORD, read_chain, read_state
from perdure.log.records import (
    NO_HASH,
    NUMBER_MAX,
    RECORD_SEALS,
    Record,
    body_checksum,
    chain_hash,
    record_of,
    row_checksum,
    row_is_sound,
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
from perdure.values.mending import one_byte_off

# What reading raises for what is damaged; in an encrypted store also for what does not look encrypted any more.
CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_PACK_MENDED = "its pack was mended"
_PACKED_MENDED = "its pack or its row was mended"
_CANDIDATES_MAX = 16  # of one part: more fit a checksum by chance only if the part is very long
_HASH = Sql("SELECT hash FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_BODY = Sql(
    "SELECT salt, checksum, diff, full_text FROM body WHERE tenant = :tenant AND id = :body",
    opens={0: SALT, 2: DIFF, 3: FULL_TEXT},
    tolerant="all",
)
_SET_BODY = Sql(
    """UPDATE body SET salt = :salt, checksum = :checksum, diff = :diff, full_text = :full_text
    WHERE tenant = :tenant AND id = :body""",
    seals={"salt": SALT, "diff": DIFF, "full_text": FULL_TEXT},
)
_OWNERS = Sql("SELECT tree, id FROM record WHERE tenant = :tenant AND body = :body LIMIT 2")
_OWNER = Sql("SELECT id FROM record WHERE tenant = :tenant AND body = :body LIMIT 1")
_THERE = Sql("SELECT 1 FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_NAMES = ", ".join(f"{name} = :{name}" for name in Record._fields)
SET_ROW = Sql(
    f"""UPDATE record SET tenant = :tenant, {_NAMES}
    WHERE tenant = :old_tenant AND tree = :old_tree AND id = :old_id""",
    seals=RECORD_SEALS,
)
_PACK = Sql(
    "SELECT key, first, last, checksum, data FROM pack WHERE tenant = :tenant AND pack = :pack",
    opens={4: PACK_CELL},
    tolerant="all",
)
_SET_PACK = Sql(
    "UPDATE pack SET checksum = :checksum, data = :data WHERE tenant = :tenant AND pack = :pack",
    seals={"data": PACK_CELL},
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
    """A statement that writes a whole row, with its checksum. `old`: the tenant, tree and id that it has now."""
    checksum = row_checksum(tenant, record) + (record.body or 0) + record.stamp
    old_tenant, tree, number = old or (tenant, record.tree, record.id)
    params = record._replace(checksum=checksum)._asdict()
    return SET_ROW(tenant=tenant, old_tenant=old_tenant, old_tree=tree, old_id=number, **params)


def mend_row(
    tenant: int, row: tuple[Any, ...], names: dict[int, str], done: Done
) -> Generator[Batch, list[Rows], bool]:
    """Write a row as its checksum says that it was. It may go to another place, if its key was what had changed."""
    tree, number = row[0], row[1]
    for owner, record in restored_rows(tenant, row):
        moved = (owner, record.tree, record.id) != (tenant, tree, number)
        if moved and (yield Batch(_THERE(tenant=owner, tree=record.tree, id=record.id)))[0]:
            continue
        yield from set_aside(tenant, "record", (tree, number), "mended by its checksum", drop=False)
        yield Batch(set_row(owner, record, (tenant, tree, number)))
        name = names.get(record.thread, f"(thread {record.thread})")
        done.mended.append((name, record.id, "its row was mended: a changed bit or byte, found by its checksum"))
        return True
    return False


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
        if row_is_sound(tenant, record):
            return None
        yield Batch(set_row(tenant, record))
        return "the checksum of its row was made again"
    parent_hash = yield from _parent_hash(tenant, record)
    if parent_hash is None:
        return None
    found_body = None if row_is_sound(tenant, record) else body_by_checksum(tenant, record)
    moved = None
    if found_body is not None and (yield from _is_body_of(tenant, record, found_body)):
        record, moved = record._replace(body=found_body), "its row points at its body again"
        yield Batch(set_row(tenant, record))
    assert record.body is not None
    if record.body < 0:
        mended = yield from _mend_pack(tenant, record)
        if mended is None:
            return None
        return (yield from _mend_packed(tenant, record)) or mended or moved
    standing = yield from _standing(tenant, record)
    [found] = yield Batch(_BODY(tenant=tenant, body=record.body))
    return ((yield from _mend_body(tenant, record, parent_hash, standing, found[0])) if found else None) or moved


def _is_body_of(tenant: int, record: Record, body: int) -> Generator[Batch, list[Rows], bool]:
    """Whether there is such a body that nobody has, or such a pack in which there is room for this record."""
    if body < 0:
        [rows] = yield Batch(_PACK(tenant=tenant, pack=-body))
        return bool(rows) and rows[0][0] == record.key
    owners, rows = yield Batch(_OWNER(tenant=tenant, body=body), _BODY(tenant=tenant, body=body))
    return bool(rows) and not owners


def is_intruder(tenant: int, tree: int, number: int, body: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a record has a body by damage, or has lost it: then it must not take along what is another's."""
    if body >= 0:
        owners, rows = yield Batch(_OWNERS(tenant=tenant, body=body), _BODY(tenant=tenant, body=body))
        return len(owners) > 1 or not rows  # a number that is free may be given to another one
    members, rows = yield Batch(_MEMBERS(tenant=tenant, tree=tree, body=body), _PACK(tenant=tenant, pack=-body))
    try:
        if not rows or type(rows[0][4]) is not bytes:
            return False
        return len(salts_in(rows[0][4])) < len(members) or not rows[0][1] <= number <= rows[0][2]
    except Undecodable:
        return False


def unlink(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], None]:
    """Let a keyframe whose base is gone stand by its full text alone."""
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=number))
    record = record_of(rows[0])
    [found] = yield Batch(_BODY(tenant=tenant, body=record.body))
    salt, _, _, full = found[0]
    params = {"salt": salt, "diff": None, "full_text": full, "checksum": body_checksum(salt, full)}
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
    checksum = row[1]
    parts = [part if type(part) is bytes else None for part in (row[0], row[2], row[3])]
    for salt, diff, full in _variants(parts, checksum):
        for data in _texts(record, diff, full, standing):
            proved = _proved(tenant, record, parent_hash, salt, data)
            if proved is not None:
                stored = (record, *parts, checksum)
                return (yield from _store(tenant, stored, proved, salt, diff, full, standing, data))
    return None


def _variants(parts: list[bytes | None], checksum: object) -> Iterator[tuple[bytes, bytes | None, bytes | None]]:
    """The parts of a body as they are, and with one byte changed so that the checksum holds."""
    salt, diff, full = parts
    if salt is not None:
        yield salt, diff, full
    if type(checksum) is not int:
        return
    for at, part in enumerate(parts):
        if part is None:
            continue
        wanted = checksum - sum(zlib.crc32(other) for i, other in enumerate(parts) if i != at and other is not None)
        for count, mended in enumerate(one_byte_off(part, wanted)):
            if count == _CANDIDATES_MAX:
                break
            changed = [*parts[:at], mended, *parts[at + 1 :]]
            if changed[0] is not None:
                yield changed[0], changed[1], changed[2]


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


def _proved(tenant: int, record: Record, parent_hash: bytes, salt: bytes, data: bytes) -> Record | None:
    """The record, if this is what was saved: by its hash, or by the checksum of its row if the hash was damaged."""
    meaning = (record.id, record.kind, record.at, record.step, record.note, record.metadata)
    expected = chain_hash(parent_hash, *meaning, digest(salt, data))
    fitting = record._replace(size=len(data))
    if expected == record.hash:
        return fitting
    other = fitting._replace(hash=expected)
    return other if row_is_sound(tenant, other) else None


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
    done = "its row or the checksum of its body was mended"
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
    checksum = body_checksum(salt, diff, full)
    if stored == (record, salt, diff, full, checksum) and row_is_sound(tenant, record):
        return None  # nothing is wrong with it: with something that points at it
    yield Batch(
        _SET_BODY(
            tenant=tenant,
            body=record.body,
            salt=salt,
            diff=diff,
            full_text=full,
            checksum=checksum,
        ),
        set_row(tenant, record),
    )
    return done


# --- packs


def _mend_packed(tenant: int, record: Record) -> Generator[Batch, list[Rows], str | None]:
    """A packed record whose pack is sound: what may be wrong is its row."""
    try:
        loaded = yield from read_state(tenant, record.tree, record.id)
    except CANNOT_READ:
        return (yield from _mend_key(tenant, record))
    if loaded is None or row_is_sound(tenant, loaded.record):
        return None
    yield Batch(set_row(tenant, loaded.record))
    return _PACKED_MENDED


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


def _mend_pack(tenant: int, record: Record) -> Generator[Batch, list[Rows], str | None]:
    """Mend the pack that holds a record, by its checksum and the hashes of its records. What was done, if anything.
    None: it cannot be read."""
    pack = -(record.body or 0)
    this = {"tenant": tenant, "pack": pack}
    found, members = yield Batch(
        _PACK(tenant=tenant, pack=pack), _MEMBERS(tenant=tenant, tree=record.tree, body=record.body)
    )
    if not found or not members:
        return None
    checksum, data = found[0][3:]
    if type(data) is not bytes:
        return None
    if checksum == pack_checksum(data):
        return ""
    variants = [data]
    if type(checksum) is int:
        variants += [mended for mended, _ in zip(one_byte_off(data, checksum), range(_CANDIDATES_MAX), strict=False)]
    ids = [number for (number,) in members]
    best, most = None, 0
    for variant in variants:
        yield Batch(_SET_PACK(**this, checksum=pack_checksum(variant), data=variant))
        good = 0
        for number in ids:
            good += yield from loads(tenant, record.tree, number)
        if good > most:
            best, most = variant, good
        if good == len(ids):
            return _PACK_MENDED
    if best is not None:  # other things are wrong too
        yield Batch(_SET_PACK(**this, checksum=pack_checksum(best), data=best))
        return _PACK_MENDED
    # As it was, to be kept so.
    yield Batch(_SET_PACK(**this, checksum=checksum, data=data))
    return None


def loads(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], bool]:
    """Whether a record's state can be read."""
    try:
        return (yield from read_state(tenant, tree, number)) is not None
    except CANNOT_READ:
        return False
