"""Checking everything that is stored: rows, bodies, hashes, keyframes, heads.

One tree at a time, in one read transaction: first its rows in bounded pages, then its states, chain by chain, each
compared with its hash; a keyframe's difference must give its full text too. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.append import as_subprogram
from perdure.log.envelopes import id_of
from perdure.log.history_walk import read_stretch
from perdure.log.labels import LABELLED_KIND, LabelRow, labels_in_tree
from perdure.log.pending import odd_bases, select_writes, writes_of
from perdure.log.reading import read_chain, read_state, recover_key
from perdure.log.records import R_COLUMNS, RECORD_ENCRYPTED, Record, record_of
from perdure.log.thread_table import ThreadRow, metadata_of, tag_value, threads_in_tree
from perdure.storage.columns import TAG
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, check, read

CANNOT_READ = (Damaged, Undecodable, NotEncrypted)
_PAGE = 200

_PAGE_OF = Sql(
    f"""SELECT {R_COLUMNS} FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after ORDER BY r.id LIMIT :limit""",
    opens=RECORD_ENCRYPTED,
    tolerant="all",
)
_LOST_PACKS = Sql(
    """SELECT count(*) FROM pack p WHERE p.tenant = :tenant AND NOT EXISTS (SELECT 1 FROM record r
        WHERE r.tenant = p.tenant AND r.tree = p.tree AND r.id = p.first AND r.body = -p.pack)"""
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
# No thread leads to a record whose tree has changed.
_OWNERLESS = Sql(
    """SELECT count(*) FROM record WHERE tenant = :tenant
    AND tree NOT IN (SELECT tree FROM thread WHERE tenant = :tenant)"""
)
_DATABASE = Sql(sqlite="PRAGMA quick_check(20)", postgres="SELECT 'ok'")


@dataclass
class Findings:
    """What was looked at, and what is wrong: thread's name, record (None: the thread itself), what."""

    threads: int = 0
    records: int = 0
    problems: list[tuple[str, int | None, str]] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)  # records whose content is wrong, not only what points at them


class _Row(NamedTuple):
    """What checking a record needs of its row."""

    thread: int
    base: int | None
    keyframe: int
    key: int
    hash: bytes
    is_live: bool


@dataclass
class _Walk:
    """What is known of a tree while it is checked."""

    tenant: int
    tree: int
    names: dict[int, str]
    findings: Findings
    labels: dict[int, list[LabelRow]] = field(default_factory=dict)  # by record
    rows: dict[int, _Row] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)  # records whose states were checked

    def wrong(self, record: int, what: str) -> None:
        thread = self.rows[record].thread
        self.findings.problems.append((self.names.get(thread, f"(deleted thread {thread})"), record, what))
        self.findings.damaged.add(record)


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
    trees, orphans, ownerless, packs, answers = yield Batch(
        _TREES(tenant=tenant),
        _ORPHANS(tenant=tenant),
        _OWNERLESS(tenant=tenant),
        _LOST_PACKS(tenant=tenant),
        _DATABASE(),
        last=True,
    )
    findings = Findings()
    if orphans[0][0]:
        findings.problems.append(("(store)", None, f"{orphans[0][0]} bodies belong to no record"))
    if packs[0][0]:
        findings.problems.append(("(store)", None, f"{packs[0][0]} packs belong to no record"))
    if ownerless[0][0]:
        findings.problems.append(("(store)", None, f"{ownerless[0][0]} records belong to no thread"))
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
    tags = (yield Batch(*tag_statements(tenant, wanted))) if wanted else []
    for thread in threads:
        if thread.thread in wanted and not tags_fit(tags, len(wanted[thread.thread])):
            findings.problems.append((thread.name, None, "its metadata is not what it is found by"))
    yield from _check_rows(walk)
    live = {number for number, row in walk.rows.items() if row.is_live}
    findings.records = len(live)
    for leaf in sorted(live - {row.base for row in walk.rows.values() if row.is_live and not row.keyframe}):
        yield from _check_chain(walk, leaf)
        if progress is not None:
            progress(len(walk.done), len(live))
    for number in sorted(live - walk.done):  # one by one, to say which of a chain are damaged
        yield from _check_alone(walk, number)
    if progress is not None:
        progress(len(live), len(live))
    _check_heads(walk, threads)
    for number, labels in walk.labels.items():
        if number not in walk.rows:
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
        if thread.head not in walk.rows:
            walk.findings.problems.append((thread.name, thread.head, "the head is missing"))
        elif walk.rows[thread.head].hash != thread.head_hash:
            walk.findings.problems.append((thread.name, thread.head, "the head is not the record that was saved last"))


def _check_rows(walk: _Walk) -> Generator[Batch, list[Rows], None]:
    """Rows, and what they point at. They come in the order of their ids, so that a base comes before what needs it."""
    after = -1
    while True:
        [rows] = yield Batch(_PAGE_OF(tenant=walk.tenant, tree=walk.tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            try:
                record = record_of(row)
            except Damaged as error:
                walk.findings.problems.append(("(store)", None, str(error)))
                continue
            before = walk.rows.get(record.base or 0)
            key = record.id if record.keyframe or before is None else before.key
            live = record.body is not None  # of a tombstone its hash is all there is
            walk.rows[record.id] = _Row(record.thread, record.base, record.keyframe, record.key, record.hash, live)
            if live and (record.keyframe not in (0, 1)[before is None :] or record.key != key):
                walk.wrong(record.id, "its row names another keyframe than its chain starts at")
            if live and record.parent is not None and record.parent not in walk.rows:
                walk.wrong(record.id, "its parent is missing")
        if len(rows) < _PAGE:
            return


def _check_chain(walk: _Walk, leaf: int) -> Generator[Batch, list[Rows], None]:
    """The states from a keyframe to the end of a line, as far as they are not checked yet."""
    try:
        stretch = yield from as_subprogram(read_stretch(walk.tenant, walk.tree, leaf))
        for link, text, _ in stretch.forward() if stretch is not None else ():
            if link.record.id not in walk.done:
                walk.done.add(link.record.id)
                yield from _check_state(walk, link.record, text)
    except CANNOT_READ:
        return


def _check_alone(walk: _Walk, number: int) -> Generator[Batch, list[Rows], None]:
    try:
        loaded = yield from read_state(walk.tenant, walk.tree, number)
        if loaded is None:
            raise Undecodable("its body is missing")
        yield from _check_state(walk, loaded.record, loaded.data)
        if loaded.record.keyframe:  # it was rebuilt from the keyframe before it
            raise Undecodable("the keyframe's full text cannot be read")
    except Damaged:
        walk.wrong(number, "what is stored does not add up to what was saved")
    except (Undecodable, NotEncrypted) as problem:
        walk.wrong(number, str(problem))


def _check_state(walk: _Walk, record: Record, text: bytes) -> Generator[Batch, list[Rows], None]:
    """What a state that its hash has proved is used for: the keyframe's difference gives it too, and its labels."""
    if record.keyframe and record.base is not None:
        chain = yield from read_chain(walk.tenant, walk.tree, record.id)
        if chain is None or (yield from recover_key(walk.tenant, walk.tree, chain)) != text:
            walk.wrong(record.id, "the keyframe's full text is not what its difference gives")
    for label in walk.labels.get(record.id, ()):
        yield from _check_label(walk, record, label, text)


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
