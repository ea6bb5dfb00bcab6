"""Check everything that is stored: rows, bodies, hashes, keyframes, heads. Nothing is changed.

Each tree, or one thread with the records that it shares, is checked in one read transaction. First come the rows, in
bounded pages, then the states, chain by chain. Each state is compared with its hash, and a keyframe's difference must
give its full text too. Memory holds the ends of the chains, not the records.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import orjson

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.envelopes import id_of
from perdure.log.history_walk import read_stretch
from perdure.log.labels import LABELLED_KIND, LabelRow, labels_in_tree
from perdure.log.pending import odd_bases, select_writes, writes_of
from perdure.log.reading import read_chain, read_state, recover_key
from perdure.log.records import R_COLUMNS, RECORD_ENCRYPTED, RECORDS_OF_THREAD, Record, record_of
from perdure.log.tables import TAG_VALUE
from perdure.log.thread_table import ThreadRow, metadata_of, names_of, tag_value, threads_in_tree
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, as_subprogram, check, read

CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_PAGE = 200

_SAME_TREE = "o.tenant = r.tenant AND o.tree = r.tree AND o.id < r.id"
_ROWS = f"""SELECT {R_COLUMNS}, (SELECT o.key FROM record o WHERE {_SAME_TREE} AND o.id = r.base),
        (SELECT 1 FROM record o WHERE {_SAME_TREE} AND o.id = r.parent)
    FROM record r WHERE r.tenant = :tenant AND r.tree = :tree"""
_PAGE_OF = Sql(
    f"{_ROWS} AND r.id > :after ORDER BY r.id LIMIT :limit",
    opens=RECORD_ENCRYPTED,
    tolerant=True,
)
_SOME = Sql(f"{_ROWS} AND r.id IN {{numbers:ids}} ORDER BY r.id", opens=RECORD_ENCRYPTED, tolerant=True)
_WIDTH = len(Record._fields)
_OF_THREAD = Sql(f"WITH RECURSIVE {RECORDS_OF_THREAD} SELECT id FROM needed WHERE id IS NOT NULL ORDER BY id")
_OF_CHAIN = Sql(
    """SELECT id, thread FROM record r WHERE tenant = :tenant AND tree = :tree AND id >= :key AND key = :key
    AND body IS NOT NULL ORDER BY id"""
)
_TAGS = Sql("SELECT count(*) FROM tag WHERE tenant = :tenant AND thread = :thread")
_TAG = Sql(
    "SELECT count(*) FROM tag WHERE tenant = :tenant AND thread = :thread AND key = :key AND value = :value",
    seals={"value": TAG_VALUE},
)
_TREES = Sql("SELECT DISTINCT tree FROM thread WHERE tenant = :tenant ORDER BY tree")
_ORPHANS = Sql(
    """SELECT count(*) FROM (SELECT id FROM body WHERE tenant = :tenant
    EXCEPT SELECT body FROM record WHERE tenant = :tenant) orphan"""
)
# Counts records that are in no thread's tree: their column `tree` may be damaged.
_OWNERLESS = Sql(
    """SELECT count(*) FROM record WHERE tenant = :tenant
    AND tree NOT IN (SELECT tree FROM thread WHERE tenant = :tenant)"""
)
_DATABASE = Sql(sqlite="PRAGMA quick_check(20)", postgres="SELECT 'ok'")


@dataclass
class Findings:
    """The result of a check. A problem is a thread's name, a record (None: the thread itself), and a description."""

    threads: int = 0
    records: int = 0
    problems: list[tuple[str, int | None, str]] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)  # records that are wrong themselves, not only pointers to them


class _Wrong(NamedTuple):
    """A problem of a record, with the thread that wrote the record."""

    thread: int
    record: int
    problem: str


@dataclass
class _Walk:
    """The state of a tree's check."""

    tenant: int
    tree: int
    names: dict[int, str]
    findings: Findings
    labels: dict[int, list[LabelRow]] = field(default_factory=dict)  # by record
    heads: dict[int, bytes | None] = field(default_factory=dict)  # the stored hash of each head's record
    missing: set[int] = field(default_factory=set)  # labelled records whose row was not read yet
    tips: dict[int, set[int]] = field(default_factory=dict)  # by keyframe: the ends of its chain
    wrongs: list[_Wrong] = field(default_factory=list)
    checked: int = 0

    def wrong(self, thread: int, record: int, problem: str) -> None:
        self.wrongs.append(_Wrong(thread, record, problem))
        self.findings.damaged.add(record)


def verify_thread(tenant: int, row: ThreadRow, progress: Progress | None = None) -> Flow[Findings]:
    """Check a thread: the records that it wrote, and those that it shares."""
    return (yield from check(lambda: check_tree(tenant, row.tree, progress, row)))


def verify_tenant(tenant: int, progress: Progress | None = None) -> Flow[list[Findings]]:
    """Check the database file and every tree of a tenant."""
    trees, first = yield from read(lambda: _overview(tenant))
    findings = [first]
    for done, tree in enumerate(trees):
        try:
            findings.append((yield from check(partial(check_tree, tenant, tree))))
        except CANNOT_READ as error:
            findings.append(Findings(problems=[("(store)", None, str(error))]))
        if progress is not None:
            progress(done + 1, len(trees))
    return findings


def _overview(tenant: int) -> Program[tuple[list[int], Findings]]:
    trees, orphans, ownerless, answers = yield Batch(
        _TREES(tenant=tenant),
        _ORPHANS(tenant=tenant),
        _OWNERLESS(tenant=tenant),
        _DATABASE(),
        last=True,
    )
    findings = Findings()
    if orphans[0][0]:
        findings.problems.append(("(store)", None, f"{orphans[0][0]} bodies belong to no record"))
    if ownerless[0][0]:
        findings.problems.append(("(store)", None, f"{ownerless[0][0]} records belong to no thread"))
    findings.problems += [("(store)", None, str(answer)) for (answer,) in answers if answer != "ok"]
    return [tree for (tree,) in trees], findings


def check_tree(
    tenant: int, tree: int, progress: Progress | None = None, only: ThreadRow | None = None
) -> Program[Findings]:
    """Check a tree inside a transaction, which may then repair it. `only`: check this thread alone."""
    threads = (yield from threads_in_tree(tenant, tree)) if only is None else [only]
    findings = Findings(threads=len(threads))
    walk = _Walk(tenant, tree, {thread.thread: thread.name for thread in threads}, findings)
    labelled = yield from labels_in_tree(tenant, tree, None if only is None else only.thread)
    for labels in labelled.values():
        for label in labels:
            walk.labels.setdefault(label.record, []).append(label)
    walk.missing.update(walk.labels)
    walk.heads = {thread.head: None for thread in threads if thread.head is not None}
    yield from _check_tags(walk, threads)
    yield from _check_rows(walk, only)
    for key in sorted(walk.tips):
        yield from _check_chain(walk, key)
        if progress is not None:
            progress(walk.checked, findings.records)
    if progress is not None:
        progress(findings.records, findings.records)
    names = walk.names | (yield from names_of(tenant, {wrong.thread for wrong in walk.wrongs}))
    for thread, record, problem in walk.wrongs:
        findings.problems.append((names.get(thread, f"(deleted thread {thread})"), record, problem))
    _check_heads(walk, threads)
    for number in walk.missing:
        name = walk.names[walk.labels[number][0].thread]
        findings.problems.append((name, number, "an id points at it, but it is missing"))
    return findings


def _check_tags(walk: _Walk, threads: list[ThreadRow]) -> Generator[Batch, list[Rows], None]:
    """Check that each thread's tags match its metadata, a page of threads at a time."""
    for start in range(0, len(threads), _PAGE):
        page = threads[start : start + _PAGE]
        expected = _metadata(walk.findings, page)
        tags = (yield Batch(*tag_statements(walk.tenant, expected))) if expected else []
        for thread in page:
            if thread.thread in expected and not tags_fit(tags, len(expected[thread.thread])):
                walk.findings.problems.append((thread.name, None, "its metadata is not what it is found by"))


def _metadata(findings: Findings, threads: list[ThreadRow]) -> dict[int, dict[str, Any]]:
    """Return the readable metadata of threads, by thread. Report the others as problems."""
    metadata: dict[int, dict[str, Any]] = {}
    for thread in threads:
        try:
            metadata[thread.thread] = metadata_of(thread)
        except Damaged as error:
            findings.problems.append((thread.name, None, str(error)))
    return metadata


def tag_statements(tenant: int, threads: Mapping[int, Mapping[str, Any]]) -> list[Statement]:
    """Return statements that count each thread's tags, and then those that match each key of its metadata."""
    statements: list[Statement] = []
    for thread, metadata in threads.items():
        scope = {"tenant": tenant, "thread": thread}
        statements.append(_TAGS(**scope))
        statements += [_TAG(**scope, key=key, value=tag_value(value)) for key, value in metadata.items()]
    return statements


def tags_fit(answers: list[Rows], values: int) -> bool:
    """Return whether a thread has exactly the tags of its metadata. Removes its answers from the front of `answers`."""
    counts = [int(answers.pop(0)[0][0]) for _ in range(1 + values)]
    return counts[0] == values == sum(counts[1:])


def _check_heads(walk: _Walk, threads: list[ThreadRow]) -> None:
    for thread in threads:
        if thread.head is None:  # it has only pending writes, and no record yet
            continue
        if walk.heads[thread.head] is None:
            walk.findings.problems.append((thread.name, thread.head, "the head is missing"))
        elif walk.heads[thread.head] != thread.head_hash:
            walk.findings.problems.append((thread.name, thread.head, "the head is not the record that was saved last"))


def _check_rows(walk: _Walk, only: ThreadRow | None) -> Generator[Batch, list[Rows], None]:
    tree = {"tenant": walk.tenant, "tree": walk.tree}
    if only is not None:
        [ids] = yield Batch(_OF_THREAD(**tree, thread=only.thread))
        for start in range(0, len(ids), _PAGE):
            page = orjson.dumps([record for (record,) in ids[start : start + _PAGE]]).decode()
            [rows] = yield Batch(_SOME(**tree, ids=page))
            for row in rows:
                _check_row(walk, row)
        return
    after = -1
    while True:
        [rows] = yield Batch(_PAGE_OF(**tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            _check_row(walk, row)
        if len(rows) < _PAGE:
            return


def _check_row(walk: _Walk, row: tuple[Any, ...]) -> None:
    """Check a row. Rows must come in the order of their ids: a base before the records that are built on it."""
    try:
        record = record_of(row[:_WIDTH])
    except Damaged as error:
        walk.findings.problems.append(("(store)", None, str(error)))
        return
    base_key, parent = row[_WIDTH:]
    walk.missing.discard(record.id)
    if record.body is None:  # a tombstone has only its hash
        return
    if record.id in walk.heads:
        walk.heads[record.id] = record.hash
    walk.findings.records += 1
    key = record.id if record.keyframe or base_key is None else base_key
    if record.keyframe not in (0, 1)[base_key is None :] or record.key != key:
        walk.wrong(record.thread, record.id, "its row names another keyframe than its chain starts at")
    if record.parent is not None and parent is None:
        walk.wrong(record.thread, record.id, "its parent is missing")
    tips = walk.tips.setdefault(record.key, set())
    tips.add(record.id)
    if record.base is not None and not record.keyframe:
        tips.discard(record.base)


def _check_chain(walk: _Walk, key: int) -> Generator[Batch, list[Rows], None]:
    """Check the states of a chain, from its keyframe to each of its ends.

    If one cannot be read, check the others one by one, to report which are damaged."""
    done: set[int] = set()
    whole = True
    for leaf in sorted(walk.tips[key]):
        try:
            stretch = yield from as_subprogram(read_stretch(walk.tenant, walk.tree, leaf))
            for link, text, _ in stretch.forward() if stretch is not None else ():
                if link.record.id not in done:
                    done.add(link.record.id)
                    yield from _check_state(walk, link.record, text)
        except CANNOT_READ:
            whole = False
        whole = whole and leaf in done
    walk.checked += len(done)
    if not whole:
        [members] = yield Batch(_OF_CHAIN(tenant=walk.tenant, tree=walk.tree, key=key))
        for number, thread in members:
            if number not in done and type(thread) is int:  # `_check_row` has reported rows with another type
                walk.checked += 1
                yield from _check_alone(walk, number, thread)


def _check_alone(walk: _Walk, number: int, thread: int) -> Generator[Batch, list[Rows], None]:
    try:
        loaded = yield from read_state(walk.tenant, walk.tree, number)
        if loaded is None:
            raise Undecodable("its body is missing")
        yield from _check_state(walk, loaded.record, loaded.data)
        if loaded.record.keyframe:  # `read_state` rebuilt it from the keyframe before it
            raise Undecodable("the keyframe's full text cannot be read")
    except Damaged:
        walk.wrong(thread, number, "what is stored does not add up to what was saved")
    except (Undecodable, NotEncrypted) as problem:
        walk.wrong(thread, number, str(problem))


def _check_state(walk: _Walk, record: Record, text: bytes) -> Generator[Batch, list[Rows], None]:
    """Check a keyframe's difference and the labels of a record, whose text was already checked against its hash."""
    if record.keyframe and record.base is not None:
        chain = yield from read_chain(walk.tenant, walk.tree, record.id)
        if chain is None or (yield from recover_key(walk.tenant, walk.tree, chain)) != text:
            walk.wrong(record.thread, record.id, "the keyframe's full text is not what its difference gives")
    for label in walk.labels.get(record.id, ()):
        yield from _check_label(walk, record, label, text)


def _check_label(walk: _Walk, record: Record, label: LabelRow, data: bytes) -> Generator[Batch, list[Rows], None]:
    """Check that a label points at the record with its id, and that its pending writes can be read."""
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
