"""Repairing the log: tree by tree, each in one transaction, so that a kill leaves a tree as it was or mended.

In this order: rows, what states are made of (by their hashes), then what cannot be proved is set
aside and becomes a tombstone, so that the hashes of what follows still hold; then whatever points at records. A tree in
which nothing is wrong is only read. Must never happen here: something that its hash does not prove is kept as good, or
something is removed that is not kept in `quarantine`.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from perdure.errors import Damaged, NotEncrypted
from perdure.log.branches import threads_in_tree
from perdure.log.choosing import Node, Plan, nodes_of
from perdure.log.ids import ID_MAX
from perdure.log.mended import Done
from perdure.log.mending_bodies import CANNOT_READ, is_intruder, loads, mend_record, set_row, unlink
from perdure.log.mending_packs import place_packs, take_apart
from perdure.log.mending_rows import sane_of, tombstone_of
from perdure.log.mending_threads import mend_heads, mend_labels, mend_rows, mend_writes
from perdure.log.quarantine import keep, set_aside
from perdure.log.reading import NOT_SWEPT, read_chain
from perdure.log.records import R_COLUMNS, RECORD_CELLS, Record, record_of
from perdure.log.repairing_strays import drop_orphans, repair_strays
from perdure.log.sweeping import rearrange, sweep
from perdure.log.verifying import Findings, check_tree
from perdure.storage.cells import DIFF, FULL_TEXT, SALT
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, mend, read, write
from perdure.values.compress import decompress_full
from perdure.values.delta import apply_all
from perdure.values.dictionary import Dictionary

_PAGE = 200
_ROUNDS_MAX = 8
_PASSES_MAX = 4
LEAST = -(1 << 63)  # before every number, also a damaged one
_TEXT_MAX = 1 << 20
_WIDTH = len(Record._fields)
_ROWS = Sql(
    f"""SELECT {R_COLUMNS} FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT}
    ORDER BY r.id LIMIT :limit""",
    opens=RECORD_CELLS,
    tolerant="all",
)
_BODIES = Sql(
    f"""SELECT r.id, b.id, b.salt, b.diff, b.full_text FROM record r
    JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT} ORDER BY r.id LIMIT :limit""",
    opens={2: SALT, 3: DIFF, 4: FULL_TEXT},
    tolerant="all",
)
_EMPTY_BODY = Sql(
    "UPDATE body SET salt = :salt, diff = NULL, full_text = :full_text WHERE tenant = :tenant AND id = :body",
    seals={"salt": SALT, "full_text": FULL_TEXT},
)
_KEEP_DIFF = Sql(
    "UPDATE body SET salt = :salt, full_text = :full_text WHERE tenant = :tenant AND id = :body",
    seals={"salt": SALT, "full_text": FULL_TEXT},
)
_DROP_ROW = Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_TREES = Sql(
    """SELECT tree FROM thread WHERE tenant = :tenant AND tree > :after GROUP BY tree ORDER BY tree LIMIT :limit"""
)
_SEALED = Sql("SELECT 1 FROM seal WHERE tenant = :tenant LIMIT 1")


def repair_log(tenant: int, *, rows_lost: bool, progress: Progress | None = None) -> Flow[Done]:
    """Mend all of a tenant's threads. `rows_lost`: the database itself was damaged, so that rows may be missing."""
    done = Done()
    yield from _mend_thread_rows(tenant, done)
    strays = yield from repair_strays(tenant)
    if strays.mended:  # threads were made again
        yield from _mend_thread_rows(tenant, Done())
    done.add(strays)
    done.add((yield from place_packs(tenant)))
    for _ in range(_PASSES_MAX):  # a row may go back to a tree that was looked at already
        found = yield from _repair_trees(tenant, rows_lost, progress)
        done.add(found)
        if not found.mended and not found.lost:
            break
    yield from sweep(tenant)
    if done.mended or done.lost:
        done.add((yield from place_packs(tenant)))
    done.add((yield from drop_orphans(tenant)))
    return done


def _repair_trees(tenant: int, rows_lost: bool, progress: Progress | None) -> Flow[Done]:
    done = Done()
    tree = LEAST
    while trees := (yield from read(partial(_page, tenant, tree))):
        for at, tree in enumerate(trees):
            done.add((yield from _repair_tree(tenant, tree, rows_lost)))
            done.trees += 1
            if progress is not None:
                progress(done.trees, done.trees + len(trees) - at - 1)
    return done


def _mend_thread_rows(tenant: int, done: Done) -> Flow[None]:
    after: int | None = LEAST
    while after is not None:
        after, notes = yield from write(partial(mend_rows, tenant, after, _PAGE))
        done.mended += notes


def _page(tenant: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_TREES(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [tree for (tree,) in rows]


def _repair_tree(tenant: int, tree: int, rows_lost: bool) -> Flow[Done]:
    try:
        findings = yield from check(partial(check_tree, tenant, tree))
        sound = not findings.problems and not rows_lost
    except (Damaged, NotEncrypted):
        sound = False
    if sound:
        return Done()
    return (yield from mend(partial(mend_tree, tenant, tree, rows_lost)))


def mend_tree(tenant: int, tree: int, rows_lost: bool) -> Program[Done]:
    """Mend one tree."""
    threads = yield from threads_in_tree(tenant, tree, lock=True)
    names = {thread.thread: thread.name for thread in threads}
    done = Done()
    # Labels and writes that cannot even be read stand in the way of checking the rest.
    done.mended += yield from mend_labels(tenant, tree, threads, False)
    yield from _mend_record_rows(tenant, tree, names, done)
    [sealed] = yield Batch(_SEALED(tenant=tenant))
    if sealed:
        yield from _drop_unopened(tenant, tree, names, done)
    for _ in range(_ROUNDS_MAX):
        findings = yield from check_tree(tenant, tree)
        wrong = sorted({record for _, record, _ in findings.problems if record is not None})
        if not wrong:
            break
        for number in wrong:
            what = yield from mend_record(tenant, tree, number)
            if what is not None:
                done.mended.append((_name(findings, number), number, what))
        yield from _set_lost_aside(tenant, tree, findings, wrong, bool(sealed), done)
        done.mended += yield from mend_heads(tenant, tree, threads)
        threads = yield from threads_in_tree(tenant, tree)
        done.mended += yield from mend_writes(tenant, tree, threads)
        done.mended += yield from mend_labels(tenant, tree, threads, rows_lost)
    else:
        raise Damaged(f"the tree of thread {next(iter(names.values()), tree)!r} could not be mended; please report it")
    if rows_lost:
        done.mended += yield from mend_writes(tenant, tree, threads)
        done.mended += yield from mend_labels(tenant, tree, threads, True)
    _tidy(done)
    return done


def _tidy(done: Done) -> None:
    """What was mended and then lost all the same is lost."""
    lost = {record for _, record, _ in done.lost if record is not None}
    done.mended = list(dict.fromkeys(note for note in done.mended if note[1] not in lost or "head" in note[2]))


def _name(findings: Findings, number: int) -> str:
    return next((name for name, record, _ in findings.problems if record == number), "(store)")


# --- rows


def _mend_record_rows(tenant: int, tree: int, names: dict[int, str], done: Done) -> Generator[Batch, list[Rows], None]:
    """Rows that are not even rows are taken out."""
    after: Any = LEAST
    while True:
        [rows] = yield Batch(_ROWS(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            if _record(row) is None:
                yield from _lose_row(tenant, tree, row, names, done)
        if len(rows) < _PAGE:
            return


def _record(row: tuple[Any, ...]) -> Record | None:
    try:
        return record_of(row)
    except Damaged:
        return None


def _lose_row(
    tenant: int, tree: int, row: tuple[Any, ...], names: dict[int, str], done: Done
) -> Generator[Batch, list[Rows], None]:
    number = row[1]
    yield from set_aside(tenant, "record", (tree, number), "its row is damaged", drop=False)
    sane = sane_of(row)
    if sane is not None:  # if that was not all, its hash says so
        yield Batch(set_row(tenant, sane, (tenant, tree, number)))
        done.mended.append((names.get(sane.thread, "(store)"), sane.id, "its row was made readable again"))
        return
    stays = tombstone_of(row)
    yield Batch(
        _DROP_ROW(tenant=tenant, tree=tree, id=number)
        if stays is None
        else set_row(tenant, stays, (tenant, tree, number))
    )
    name = names.get(row[2], "(store)") if type(row[2]) is int else "(store)"
    done.lost.append((name, number if type(number) is int else None, "its row is damaged"))


# --- what cannot be proved


def _set_lost_aside(
    tenant: int, tree: int, findings: Findings, wrong: list[int], sealed: bool, done: Done
) -> Generator[Batch, list[Rows], None]:
    """Keep what cannot be proved in quarantine, and make tombstones of it. What was built on it, and can be proved,
    gets its full text."""
    reasons: dict[int, str] = {}
    for _, record, what in findings.problems:
        if record is not None:
            reasons.setdefault(record, what)
    nodes = yield from nodes_of(tenant, tree)
    lost: list[int] = []
    for number in wrong:
        node = nodes.get(number)
        if node is not None and node.body is not None and not (yield from loads(tenant, tree, number)):
            lost.append(number)
    intruders = []
    for number in lost:
        body = nodes[number].body
        if body is not None and (yield from is_intruder(tenant, tree, number, body)):
            intruders.append(number)
    lost = intruders or lost  # with them gone, others may be read again
    for number in lost:
        yield from _keep_record(tenant, tree, number, nodes[number].body, reasons[number], sealed)
        done.lost.append((_name(findings, number), number, reasons[number]))
        parent = nodes[number].parent
        if parent is not None and 0 <= parent <= ID_MAX and parent not in nodes:
            done.lost.append((_name(findings, number), parent, "its row is gone"))
    if not intruders:
        yield from take_apart(tenant, tree, nodes, set(lost))
        yield from _entomb(tenant, tree, (yield from nodes_of(tenant, tree)), lost)
    for number in lost:
        yield from _make_tombstone(tenant, tree, number)


def _entomb(tenant: int, tree: int, nodes: dict[int, Node], lost: list[int]) -> Generator[Batch, list[Rows], None]:
    gone = set(lost)
    plan = Plan(entomb=lost)
    unlinked: list[int] = []
    for node in nodes.values():
        if node.body is None or node.id in gone or node.base is None:
            continue
        if node.base in gone or node.base not in nodes or nodes[node.base].body is None:
            (unlinked if node.keyframe else plan.rebase).append(node.id)
    for number in unlinked:
        yield from unlink(tenant, tree, number)
    if lost or plan.rebase:
        yield from rearrange(tenant, tree, nodes, plan)


def _keep_record(
    tenant: int, tree: int, number: int, body: int | None, reason: str, sealed: bool
) -> Generator[Batch, list[Rows], None]:
    yield from set_aside(tenant, "record", (tree, number), reason, drop=False)
    if body is not None:
        table, key = ("pack", -body) if body < 0 else ("body", body)
        yield from set_aside(tenant, table, (key,), f"of a checkpoint that is lost: {reason}", drop=False)
    text = None if sealed else (yield from _unproved_text(tenant, tree, number))
    if text is not None:
        content = {"tree": tree, "id": number, "text": text}
        yield Batch(
            keep(tenant, "state", {"tree": tree, "id": number}, f"what it seems to be, unproved: {reason}", content)
        )


def _unproved_text(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], bytes | None]:
    """What a state would be if nothing of it were checked: for people to look at."""
    try:
        chain = yield from read_chain(tenant, tree, number)
        if chain is None or chain.full is None:
            return None
        key_data = decompress_full(chain.full, chain.key_size)
        diffs = chain.diffs(key_data)
        text = apply_all(key_data, diffs, Dictionary(key_data)) if diffs else key_data
    except CANNOT_READ:
        return None
    usable = diffs is not None and len(text) == chain.record.size and len(text) <= _TEXT_MAX
    return text if usable else None


def _make_tombstone(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], None]:
    [rows] = yield Batch(_ROWS(tenant=tenant, tree=tree, after=number - 1, limit=1))
    stays = tombstone_of(rows[0]) if rows and rows[0][1] == number else None
    if stays is not None:
        yield Batch(set_row(tenant, stays))


# --- encrypted stores


def _drop_unopened(tenant: int, tree: int, names: dict[int, str], done: Done) -> Generator[Batch, list[Rows], None]:
    """Cells that do not open, or look as if they had never been encrypted, are kept in quarantine and emptied: whoever
    reads them afterwards finds them damaged, not refused."""
    after = -1
    while True:
        [rows] = yield Batch(_BODIES(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for number, body, salt, diff, full in rows:
            after = number
            if all(cell is None or type(cell) is bytes for cell in (salt, diff, full)):
                continue
            yield from set_aside(tenant, "body", (body,), "it does not open with the key", drop=False)
            keep_diff = diff is None or type(diff) is bytes
            yield Batch(
                (_KEEP_DIFF if keep_diff else _EMPTY_BODY)(
                    tenant=tenant,
                    body=body,
                    salt=salt if type(salt) is bytes else b"",
                    full_text=full if type(full) is bytes else None,
                )
            )
        if len(rows) < _PAGE:
            return
