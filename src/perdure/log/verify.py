"""Checking everything that is stored: rows, bodies, hashes, keyframes, heads.

One tree at a time, in one read transaction, in the order of the ids, in bounded pages. Each record's text is rebuilt
from its base's and compared with its hash; a keyframe's full text must equal what its difference gives. Nothing is
changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.envelopes import id_of
from perdure.log.labels import LABELLED_KIND, LabelRow, labels_in_tree
from perdure.log.packs import PACK, Packs
from perdure.log.pending import odd_bases, select_writes, writes_of
from perdure.log.reading import NOT_SWEPT, read_chain, read_state
from perdure.log.records import (
    NO_HASH,
    R_COLUMNS,
    RECORD_CELLS,
    Record,
    chain_hash,
    record_of,
)
from perdure.log.thread_table import ThreadRow, metadata_of, tag_value, threads_in_tree
from perdure.storage.columns import DIFF, FULL_TEXT, SALT, TAG
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, check, read
from perdure.values.compress import decompress_full
from perdure.values.delta import Decoder, apply_splices
from perdure.values.dictionary import Dictionary
from perdure.values.hashing import digest

CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_PAGE = 200
_PLACES_MAX = 4  # bases kept in memory; other branches' are read again

_WIDTH = len(Record._fields)
_COUNT = Sql(f"SELECT count(*) FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND {NOT_SWEPT}")
_PAGE_OF = Sql(
    f"""SELECT {R_COLUMNS},
        b.salt, b.diff, b.full_text
    FROM record r LEFT JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT} ORDER BY r.id LIMIT :limit""",
    opens={**RECORD_CELLS, _WIDTH: SALT, _WIDTH + 1: DIFF, _WIDTH + 2: FULL_TEXT},
    tolerant="all",
)
_LOST_PACKS = Sql(
    """SELECT count(*) FROM pack p WHERE p.tenant = :tenant AND NOT EXISTS (SELECT 1 FROM record r
        WHERE r.tenant = p.tenant AND r.tree = p.tree AND r.id = p.first AND r.body = -p.pack)
    AND p.tree NOT IN (SELECT tree FROM sweep WHERE tenant = :tenant AND id = 0)"""
)
_TAGS = Sql("SELECT count(*) FROM tag WHERE tenant = :tenant AND thread = :thread")
_TAG = Sql(
    "SELECT count(*) FROM tag WHERE tenant = :tenant AND thread = :thread AND key = :key AND value = :value",
    seals={"value": TAG},
)
_TREES = Sql("SELECT DISTINCT tree FROM thread WHERE tenant = :tenant ORDER BY tree")
_ORPHANS = Sql(
    """SELECT count(*) FROM (SELECT id FROM body WHERE tenant = :tenant
    EXCEPT SELECT body FROM record WHERE tenant = :tenant) orphan"""
)
# No thread leads to a record whose tree has changed; of a deleted thread's, which are swept, nothing is wrong.
_STRAYS = Sql(
    """SELECT count(*) FROM record WHERE tenant = :tenant
    AND tree NOT IN (SELECT tree FROM thread WHERE tenant = :tenant)
    AND tree NOT IN (SELECT tree FROM sweep WHERE tenant = :tenant)"""
)
_DATABASE = Sql(sqlite="PRAGMA quick_check(20)", postgres="SELECT 'ok'")


@dataclass
class Findings:
    """What was looked at, and what is wrong: thread's name, record (None: the thread itself), what."""

    threads: int = 0
    records: int = 0
    problems: list[tuple[str, int | None, str]] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)  # records whose content is wrong, not only what points at them


@dataclass(frozen=True, slots=True)
class _Place:
    """A record's text, and a decoder that can go on from there (None: it has gone on with another)."""

    data: bytes
    decoder: Decoder | None


@dataclass(frozen=True, slots=True)
class _Open:
    """A pack, and the keyframe's text that it is read with."""

    packs: Packs
    key_text: bytes


@dataclass
class _Walk:
    """What checking a record needs of those before it."""

    tenant: int
    tree: int
    names: dict[int, str]
    findings: Findings
    labels: dict[int, list[LabelRow]] = field(default_factory=dict)  # by record
    hashes: dict[int, bytes] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)  # the keyframe that each record's chain starts at
    places: OrderedDict[int, _Place] = field(default_factory=OrderedDict)
    packs: OrderedDict[int, _Open] = field(default_factory=OrderedDict)
    packed: dict[int, int] = field(default_factory=dict)  # how many records of each pack have been met

    def wrong(self, record: Record, what: str) -> None:
        name = self.names.get(record.thread, f"(deleted thread {record.thread})")
        self.findings.problems.append((name, record.id, what))
        self.findings.damaged.add(record.id)

    def keep(self, record: int, place: _Place) -> None:
        self.places[record] = place
        self.places.move_to_end(record)
        while len(self.places) > _PLACES_MAX:
            self.places.popitem(last=False)


def verify_tree(tenant: int, tree: int, progress: Progress | None = None) -> Flow[Findings]:
    """Check all records that a tree's threads share."""
    return (yield from check(lambda: check_tree(tenant, tree, progress)))


def verify_tenant(tenant: int, progress: Progress | None = None) -> Flow[list[Findings]]:
    """Check the database itself and every tree of a tenant."""
    trees, first = yield from read(lambda: _overview(tenant))
    findings = [first]
    for done, tree in enumerate(trees):
        try:
            findings.append((yield from verify_tree(tenant, tree)))
        except CANNOT_READ as error:
            findings.append(Findings(problems=[("(store)", None, str(error))]))
        if progress is not None:
            progress(done + 1, len(trees))
    return findings


def _overview(tenant: int) -> Program[tuple[list[int], Findings]]:
    trees, orphans, strays, packs, answers = yield Batch(
        _TREES(tenant=tenant),
        _ORPHANS(tenant=tenant),
        _STRAYS(tenant=tenant),
        _LOST_PACKS(tenant=tenant),
        _DATABASE(),
        last=True,
    )
    findings = Findings()
    if orphans[0][0]:
        findings.problems.append(("(store)", None, f"{orphans[0][0]} bodies belong to no record"))
    if packs[0][0]:
        findings.problems.append(("(store)", None, f"{packs[0][0]} packs belong to no record"))
    if strays[0][0]:
        findings.problems.append(("(store)", None, f"{strays[0][0]} records belong to no thread"))
    findings.problems += [("(store)", None, str(answer)) for (answer,) in answers if answer != "ok"]
    return [tree for (tree,) in trees], findings


def check_tree(tenant: int, tree: int, progress: Progress | None = None) -> Program[Findings]:
    """The same inside a transaction: for a repair of what is found."""
    threads = yield from threads_in_tree(tenant, tree)
    findings = Findings(threads=len(threads))
    walk = _Walk(tenant, tree, {thread.thread: thread.name for thread in threads}, findings)
    for labels in (yield from labels_in_tree(tenant, tree)).values():
        for label in labels:
            walk.labels.setdefault(label.record, []).append(label)
    wanted = _metadata(findings, threads)
    [[(total,)], *tags] = yield Batch(_COUNT(tenant=tenant, tree=tree), *tag_statements(tenant, wanted))
    for thread in threads:
        if thread.thread in wanted and not tags_fit(tags, len(wanted[thread.thread])):
            findings.problems.append((thread.name, None, "its metadata is not what it is found by"))
    after, done = -1, 0
    while True:
        [rows] = yield Batch(_PAGE_OF(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            try:
                record = record_of(row[:_WIDTH])
            except Damaged as error:
                findings.problems.append(("(store)", None, str(error)))
                continue
            yield from _check(walk, record, *row[_WIDTH:])
            findings.records += record.body is not None  # a tombstone is no checkpoint
        done += len(rows)
        if progress is not None:
            progress(done, total)
        if len(rows) < _PAGE:
            break
    _check_heads(walk, threads)
    for number, labels in walk.labels.items():
        if number not in walk.hashes:
            name = walk.names[labels[0].thread]
            findings.problems.append((name, number, "an id points at it, but it is missing"))
    return findings


def _metadata(findings: Findings, threads: list[ThreadRow]) -> dict[int, dict[str, Any]]:
    """The metadata of each thread that has one which can be read."""
    found: dict[int, dict[str, Any]] = {}
    for thread in threads:
        try:
            found[thread.thread] = metadata_of(thread)
        except Damaged as error:
            findings.problems.append((thread.name, None, str(error)))
    return found


def tag_statements(tenant: int, threads: Mapping[int, Mapping[str, Any]]) -> list[Statement]:
    """Of each thread: by how many values it is found, and by which of its metadata's."""
    found: list[Statement] = []
    for thread, metadata in threads.items():
        this = {"tenant": tenant, "thread": thread}
        found.append(_TAGS(**this))
        found += [_TAG(**this, key=key, value=tag_value(value)) for key, value in metadata.items()]
    return found


def tags_fit(answers: list[Rows], values: int) -> bool:
    """Whether a thread is found by its values and by no others. Takes its answers from the front."""
    counts = [int(answers.pop(0)[0][0]) for _ in range(1 + values)]
    return counts[0] == values == sum(counts[1:])


def _check_heads(walk: _Walk, threads: list[ThreadRow]) -> None:
    for thread in threads:
        if thread.head is None:  # it waits for its first record: writes came before it
            continue
        if thread.head not in walk.hashes:
            walk.findings.problems.append((thread.name, thread.head, "the head is missing"))
        elif walk.hashes[thread.head] != thread.head_hash:
            walk.findings.problems.append((thread.name, thread.head, "the head is not the record that was saved last"))


def _check(
    walk: _Walk,
    record: Record,
    salt: bytes | None,
    diff: bytes | None,
    full: bytes | None,
) -> Generator[Batch, list[Rows], None]:
    walk.hashes[record.id], walk.keys[record.id] = record.hash, record.key
    if record.body is None:
        return  # a tombstone: its hash is all there is
    key = record.id if record.keyframe else walk.keys.get(record.base or 0, record.key)
    if record.keyframe not in (0, 1) or record.key != key:
        walk.wrong(record, "its row names another keyframe than its chain starts at")
    parent_hash = NO_HASH if record.parent is None else walk.hashes.get(record.parent)
    if parent_hash is None:
        walk.wrong(record, "its parent is missing")
        return
    if record.body < 0:
        try:
            salt, diff = yield from _unpacked(walk, record)
        except CANNOT_READ as problem:
            walk.wrong(record, str(problem))
            return
    if salt is None:
        walk.wrong(record, "its body is missing")
        return
    if any(part is not None and type(part) is not bytes for part in (salt, diff, full)):
        walk.wrong(record, "its body holds something else than bytes")
        return
    data = yield from _text(walk, record, diff, full)
    if data is None:
        return
    if len(data) != record.size:
        walk.wrong(record, "the state's size is not what was saved")
    content = digest(salt, data)
    meaning = (record.id, record.kind, record.at, record.step, record.note, record.metadata)
    if chain_hash(parent_hash, *meaning, content) != record.hash:
        walk.wrong(record, "the hash does not hold: the state, the note or the history before it was changed")
        return
    if record.keyframe:
        walk.keep(record.id, _Place(data, Decoder(Dictionary(data))))
    for label in walk.labels.get(record.id, ()):
        yield from _check_label(walk, record, label, data)


def _check_label(walk: _Walk, record: Record, label: LabelRow, data: bytes) -> Generator[Batch, list[Rows], None]:
    """Whether an id points at the record that has it, and what is pending on it can be read."""
    problem = ""
    try:
        if record.kind == LABELLED_KIND and id_of(data) != label.id:
            problem = "an id points at it that is another checkpoint's"
        [rows] = yield Batch(select_writes(walk.tenant, label.thread, label.space, label.id))
        bases = yield from odd_bases(walk.tenant, walk.tree, rows, [record.id])
        writes_of(rows, {record.id: data, **bases})
    except CANNOT_READ as error:
        problem = str(error)
    if problem:
        walk.findings.problems.append((walk.names[label.thread], record.id, problem))


def _unpacked(walk: _Walk, record: Record) -> Generator[Batch, list[Rows], tuple[bytes, bytes]]:
    """The salt and the difference of a packed record. Records come in order, so counting tells its place."""
    pack = -(record.body or 0)
    index = walk.packed.get(pack, 0)
    walk.packed[pack] = index + 1
    found = walk.packs.get(pack)
    if found is None:
        [rows] = yield Batch(PACK(tenant=walk.tenant, pack=pack))
        keyframe = yield from read_state(walk.tenant, walk.tree, record.key)
        if keyframe is None:
            raise Undecodable("its keyframe is missing")
        found = walk.packs[pack] = _Open(Packs(rows), keyframe.data)
        while len(walk.packs) > _PLACES_MAX:
            walk.packs.popitem(last=False)
    return found.packs.salt(pack, index), found.packs.diff(pack, index, found.key_text)


def _text(
    walk: _Walk, record: Record, diff: bytes | None, full: bytes | None
) -> Generator[Batch, list[Rows], bytes | None]:
    """A record's text, from its difference and, for a keyframe, from its full text: both must agree."""
    from_diff: bytes | None = None
    if diff is not None and record.base is not None:
        from_diff = yield from _apply(walk, record, diff)
        if from_diff is None:
            walk.wrong(record, "its difference cannot be applied")
    elif not record.keyframe:
        walk.wrong(record, "its difference is missing")
    if not record.keyframe:
        return from_diff
    try:
        from_full = decompress_full(full, record.size) if full is not None else None
    except Undecodable:
        from_full = None
    if from_full is None:
        walk.wrong(record, "the keyframe's full text cannot be read")
    elif from_diff is not None and from_diff != from_full:
        walk.wrong(record, "the keyframe's full text is not what its difference gives")
    return from_full if from_full is not None else from_diff


def _apply(walk: _Walk, record: Record, diff: bytes) -> Generator[Batch, list[Rows], bytes | None]:
    """The text that a record's difference gives on its base, with the decoder that stands there."""
    assert record.base is not None
    try:
        place = walk.places.pop(record.base, None)
        if place is None or place.decoder is None:
            place = yield from _stand(walk, record.base)
        if place is None or place.decoder is None:
            return None
        [splices] = place.decoder.decode([diff])
        data = apply_splices(place.data, splices)
        # The base's text may be wanted again, by another branch; its decoder has gone on.
        walk.keep(record.base, _Place(place.data, None))
        walk.keep(record.id, _Place(data, None if record.keyframe else place.decoder))
        return data
    except CANNOT_READ:
        return None


def _stand(walk: _Walk, record: int) -> Generator[Batch, list[Rows], _Place | None]:
    """A record's text, and a decoder that has read its chain."""
    loaded = yield from read_state(walk.tenant, walk.tree, record)
    chain = yield from read_chain(walk.tenant, walk.tree, record)
    diffs = chain.diffs(loaded.key_data) if loaded is not None and chain is not None else None
    if loaded is None or diffs is None:
        return None
    decoder = Decoder(Dictionary(loaded.key_data))
    for _ in decoder.batches(diffs):
        pass
    return _Place(loaded.data, decoder)
