"""Removing records: pruning a thread's line, deleting a thread. What lives never loses its base.

One transaction decides and rearranges: a live record whose base is to go gets its full text, the differences after
it are encoded anew (they shared the old keyframe's dictionary), records that are only parents of live ones become
tombstones, and the rest is listed in `sweep`. From then on nothing builds on what is listed. The listed records are
removed in bounded batches; a crash in between is taken up by the next prune or delete. No hash changes.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import orjson

from holdfast.errors import Damaged
from holdfast.log.books import delta_channels
from holdfast.log.branches import ThreadRow, find_thread, no_thread, threads_in_tree
from holdfast.log.ids import show_id
from holdfast.log.labels import LABELLED_KIND, MAIN, LabelRow, bases_of_writes, drop_labels, labels_in
from holdfast.log.reading import NOT_SWEPT, RECORD, Loaded, read_chain, read_state
from holdfast.log.records import Record, body_checksum, record_of, row_checksum
from holdfast.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, write
from holdfast.values.compress import compress_full
from holdfast.values.delta import Decoder, Encoder, Splices
from holdfast.values.dictionary import Dictionary

_BATCH = 500

_TREE = Sql(
    f"""SELECT id, thread, parent, base, keyframe, body FROM record r
    WHERE r.tenant = :tenant AND r.tree = :tree AND {NOT_SWEPT}"""
)
_NEXT_GENERATION = Sql("UPDATE thread SET generation = generation + 1 WHERE tenant = :tenant AND tree = :tree")
_DIFF = Sql("SELECT diff FROM body WHERE tenant = :tenant AND id = :body")
_SET_DIFF = Sql("UPDATE body SET diff = :diff, checksum = checksum + :change WHERE tenant = :tenant AND id = :body")
_SET_FULL = Sql(
    "UPDATE body SET diff = NULL, full_text = :full_text, checksum = checksum + :change"
    " WHERE tenant = :tenant AND id = :body"
)
_DROP_DIFF = Sql("UPDATE body SET diff = NULL, checksum = checksum + :change WHERE tenant = :tenant AND id = :body")
_SET_RECORD = Sql(
    """UPDATE record SET thread = :thread, base = :base, keyframe = :keyframe, key = :key, cost = :cost,
        checksum = :checksum
    WHERE tenant = :tenant AND tree = :tree AND id = :id"""
)
_LIST = Sql("INSERT INTO sweep (tenant, tree, id) VALUES (:tenant, :tree, :id) ON CONFLICT DO NOTHING")
# A row's checksum is its own plus body plus stamp: taking the body out of it needs no other column.
_ENTOMB = Sql(
    sqlite=(
        "DELETE FROM body WHERE tenant = :tenant AND id = :body",
        "UPDATE record SET checksum = checksum - body, body = NULL"
        " WHERE tenant = :tenant AND tree = :tree AND id = :id",
    ),
    postgres="""WITH gone AS (DELETE FROM body WHERE tenant = :tenant AND id = :body)
        UPDATE record SET checksum = checksum - body, body = NULL
        WHERE tenant = :tenant AND tree = :tree AND id = :id""",
)
_FORGET = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND thread = :thread")
    for table in ("tag", "write", "label", "space", "thread")
]
_OF_KIND = Sql("SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND kind = :kind")
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :head_hash WHERE tenant = :tenant AND thread = :thread")
_COUNT = Sql("SELECT count(*) FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL")
_LISTED = Sql("SELECT tree, id FROM sweep WHERE tenant = :tenant ORDER BY tree, id LIMIT :limit")
_COUNT_LISTED = Sql("SELECT count(*) FROM sweep WHERE tenant = :tenant")
_ANY_IN_TREE = Sql("SELECT id, body FROM record WHERE tenant = :tenant AND tree = :tree ORDER BY id LIMIT :limit")
_UNLIST = Sql("DELETE FROM sweep WHERE tenant = :tenant AND tree = :tree AND id = :id")
_BODY_OF = Sql("SELECT body FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")
_REMOVE_BODY = Sql("DELETE FROM body WHERE tenant = :tenant AND id = :body")
_REMOVE = Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id = :id")


class Node(NamedTuple):
    """The pointers of a record."""

    id: int
    thread: int
    parent: int | None
    base: int | None
    keyframe: int
    body: int | None


@dataclass
class Plan:
    """What is to become of a tree's records."""

    rebase: list[int] = field(default_factory=list)  # live, but their base goes: they get their full text
    unlink: list[int] = field(default_factory=list)  # live keyframes whose base goes: they lose their difference
    entomb: list[int] = field(default_factory=list)  # go, but are parents of live ones
    remove: list[int] = field(default_factory=list)


def prune(tenant: int, thread: int, name: str, keep: int, progress: Progress | None = None) -> Flow[tuple[int, int]]:
    """Keep the newest `keep` records of a thread's line. How many went, how many got their full text."""
    counts = yield from write(partial(_prune, tenant, thread, name, keep), solo=True)
    yield from sweep(tenant, progress)
    return counts


def delete(
    tenant: int, name: str, thread: int | None, progress: Progress | None = None, *, idle_since: int | None = None
) -> Flow[int]:
    """Remove a thread and every record that no other thread needs; with `idle_since`, only if it was not written to
    from then on. How many records went."""
    removed = yield from write(partial(_delete, tenant, name, thread, idle_since), solo=True)
    yield from sweep(tenant, progress)
    return removed


def sweep(tenant: int, progress: Progress | None = None) -> Flow[None]:
    """Remove what is listed, in batches, until nothing is; also what an earlier process left half done."""
    removed = 0
    while True:
        gone, left = yield from write(partial(_sweep_some, tenant))
        removed += gone
        if progress is not None:
            progress(removed, removed + left)
        if not left:
            return


def _prune(tenant: int, thread: int, name: str, keep: int) -> Program[tuple[int, int]]:
    row, others = yield from _lock(tenant, name, thread)
    nodes = yield from _nodes(tenant, row.tree)
    kept = _line(nodes, row.head)[:keep]
    oldest = kept[-1] if kept else 0
    # What became a branch since the oldest kept checkpoint is as recent as what is kept.
    recent = [node.id for node in nodes.values() if node.thread == thread and node.id > oldest]
    needed = yield from _needed_by(tenant, nodes, others)
    needed |= yield from bases_of_writes(tenant, [thread])
    labels = yield from labels_in(tenant, [thread])
    live = {*kept, *recent, *needed}
    deltas = yield from _needed_for_deltas(tenant, row.tree, nodes, live, {label.record for label in labels})
    plan = make_plan(nodes, live | deltas)
    yield from _rearrange(tenant, row.tree, nodes, plan)
    gone = {*plan.remove, *plan.entomb}
    yield from _drop([label for label in labels if label.record in gone], tenant)
    own = {*kept, *recent, *deltas}
    for other in others:
        for record in _line(nodes, other.head):
            if nodes[record].thread == thread and record not in own:
                own.add(record)
                # Kept for this fork alone: it goes when the fork goes.
                found = yield from _record(tenant, row.tree, record)
                yield Batch(_store(tenant, found._replace(thread=other.thread)))
    return _gone(nodes, plan), len(plan.rebase)


def _needed_for_deltas(
    tenant: int, tree: int, nodes: dict[int, Node], live: set[int], labelled: set[int]
) -> Generator[Batch, list[Rows], set[int]]:
    """Ancestors whose writes rebuild what a live state of LangGraph's does not hold itself (its DeltaChannels)."""
    needed: set[int] = set()
    for record in live & labelled & nodes.keys():
        parent = nodes[record].parent
        missing: set[str] = set()
        if parent is not None and parent not in live:
            missing = set(delta_channels((yield from _plain_state(tenant, tree, record))))
        while missing and parent is not None and (node := nodes.get(parent)) is not None and node.body is not None:
            needed.add(node.id)
            missing -= (yield from _plain_state(tenant, tree, node.id)).keys()
            parent = node.parent
    return needed


def _plain_state(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], dict[str, Any]]:
    loaded = yield from read_state(tenant, tree, record)
    state = orjson.loads(loaded.data) if loaded is not None else None
    return state if type(state) is dict else {}


def _lock(
    tenant: int, name: str, thread: int | None
) -> Generator[Batch, list[Rows], tuple[ThreadRow, list[ThreadRow]]]:
    """A thread and all others of its tree, locked."""
    row = yield from find_thread(tenant, name, thread)
    threads = {found.thread: found for found in (yield from threads_in_tree(tenant, row.tree, lock=True))}
    own = threads.pop(row.thread, None)
    if own is None:  # deleted while we waited
        raise no_thread(name, row.thread)
    return own, list(threads.values())


def _gone(nodes: dict[int, Node], plan: Plan) -> int:
    """How many checkpoints go: tombstones were none."""
    return sum(nodes[record].body is not None for record in (*plan.remove, *plan.entomb))


def _delete(tenant: int, name: str, thread: int | None, idle_since: int | None = None) -> Program[int]:
    row, others = yield from _lock(tenant, name, thread)
    if idle_since is not None and row.updated_at >= idle_since:
        return 0
    yield Batch(*(statement(tenant=tenant, thread=row.thread) for statement in _FORGET))
    if not others:
        [[(count,)], _] = yield Batch(_COUNT(tenant=tenant, tree=row.tree), _LIST(tenant=tenant, tree=row.tree, id=0))
        return int(count)
    nodes = yield from _nodes(tenant, row.tree)
    plan = make_plan(nodes, (yield from _needed_by(tenant, nodes, others)))
    yield from _rearrange(tenant, row.tree, nodes, plan)
    return _gone(nodes, plan)


def remove_labelled(tenant: int, name: str, doomed: Container[tuple[int, bytes]]) -> Flow[int]:
    """Remove labels of a thread (namespace and id), what is pending on them, and their records unless somebody else
    needs these. Also records that lost their label to another one. How many records went."""
    removed = yield from write(partial(_remove_labelled, tenant, name, doomed), solo=True)
    yield from sweep(tenant)
    return removed


def _remove_labelled(tenant: int, name: str, doomed: Container[tuple[int, bytes]]) -> Program[int]:
    row, others = yield from _lock(tenant, name, None)
    labels = yield from labels_in(tenant, [row.thread])
    gone = [label for label in labels if (label.space, label.id) in doomed]
    kept = [label for label in labels if (label.space, label.id) not in doomed]
    nodes = yield from _nodes(tenant, row.tree)
    unlabelled = yield from _unlabelled(tenant, row, {label.record for label in labels})
    removed = {label.record for label in gone} | unlabelled
    # What was saved in other ways, without an id, stays; a record whose id now means another one does not.
    saved = {node.id for node in nodes.values() if node.thread == row.thread and node.body is not None} - removed
    if not kept and not saved:
        return (yield from _delete(tenant, name, row.thread))
    head = row.head
    if head in removed:  # the newest of what stays
        own = [label for label in kept if label.space == MAIN]
        head = max(own, key=_by_id).record if own else max(saved - {label.record for label in kept}, default=None)
    needed = yield from _needed_by(tenant, nodes, others)
    needed.update(label.record for label in kept)
    needed |= yield from bases_of_writes(tenant, [row.thread])
    dead = removed - needed - {head}
    plan = make_plan(nodes, nodes.keys() - dead)
    yield from _rearrange(tenant, row.tree, nodes, plan)
    yield from _drop(gone, tenant)
    if head != row.head:
        yield from _set_head(tenant, row, head)
    return _gone(nodes, plan)


def _by_id(label: LabelRow) -> bytes:
    return label.id


def _unlabelled(tenant: int, row: ThreadRow, labelled: set[int]) -> Generator[Batch, list[Rows], set[int]]:
    [rows] = yield Batch(_OF_KIND(tenant=tenant, tree=row.tree, thread=row.thread, kind=LABELLED_KIND))
    return {record for (record,) in rows} - labelled


def _set_head(tenant: int, row: ThreadRow, head: int | None) -> Generator[Batch, list[Rows], None]:
    found = (yield from _record(tenant, row.tree, head)) if head is not None else None
    yield Batch(
        _SET_HEAD(tenant=tenant, thread=row.thread, head=head, head_hash=found.hash if found is not None else None)
    )


def _drop(labels: list[LabelRow], tenant: int) -> Generator[Batch, list[Rows], None]:
    for start in range(0, len(labels), _BATCH):
        yield Batch(*drop_labels(tenant, labels[start : start + _BATCH]))


def _nodes(tenant: int, tree: int) -> Generator[Batch, list[Rows], dict[int, Node]]:
    [rows] = yield Batch(_TREE(tenant=tenant, tree=tree))
    return {row[0]: Node._make(row) for row in rows}


def _line(nodes: dict[int, Node], head: int | None) -> list[int]:
    """A record and its ancestors that have a body, newest first."""
    line: list[int] = []
    seen: set[int] = set()
    while head is not None and head not in seen and (node := nodes.get(head)) and node.body is not None:
        line.append(head)
        seen.add(head)
        head = node.parent
    return line


def _needed_by(tenant: int, nodes: dict[int, Node], threads: list[ThreadRow]) -> Generator[Batch, list[Rows], set[int]]:
    """Everything that other threads of the tree can reach: their lines, their branches', and what they have ids for."""
    owners = {thread.thread for thread in threads}
    tips = [thread.head for thread in threads]
    tips += [node.id for node in nodes.values() if node.thread in owners]
    needed: set[int] = set()
    for tip in tips:
        while tip is not None and tip not in needed and (node := nodes.get(tip)) and node.body is not None:
            needed.add(tip)
            tip = node.parent
    needed.update(label.record for label in (yield from labels_in(tenant, sorted(owners))))
    needed |= yield from bases_of_writes(tenant, sorted(owners))
    return needed


def make_plan(nodes: dict[int, Node], live_ids: Iterable[int]) -> Plan:
    """What follows for every record if these, and only these, live. Pure."""
    live = {record for record in live_ids if record in nodes and nodes[record].body is not None}
    plan = Plan()
    parents = {nodes[record].parent for record in live}
    for node in nodes.values():
        if node.id in live:
            if node.base is not None and node.base not in live:
                (plan.unlink if node.keyframe else plan.rebase).append(node.id)
        elif node.id not in parents:
            plan.remove.append(node.id)
        elif node.body is not None:
            plan.entomb.append(node.id)
    return plan


def _rearrange(tenant: int, tree: int, nodes: dict[int, Node], plan: Plan) -> Generator[Batch, list[Rows], None]:
    yield Batch(_NEXT_GENERATION(tenant=tenant, tree=tree))
    gone = {*plan.remove, *plan.entomb}
    dependants: dict[int, list[int]] = {}
    for node in nodes.values():
        if node.base is not None and node.body is not None and node.id not in gone:
            dependants.setdefault(node.base, []).append(node.id)
    # Newest first: a chain only reaches back, so what is still to be read has not been moved yet.
    for record in sorted(plan.rebase, reverse=True):
        yield from _rebase(tenant, tree, record, dependants)
    for record in plan.unlink:
        yield from _unlink(tenant, tree, record)
    for record in plan.entomb:
        yield Batch(_ENTOMB(tenant=tenant, tree=tree, id=record, body=nodes[record].body))
    for start in range(0, len(plan.remove), _BATCH):
        yield Batch(*(_LIST(tenant=tenant, tree=tree, id=record) for record in plan.remove[start : start + _BATCH]))


def _record(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], Record]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record))
    if not rows:
        raise Damaged(f"checkpoint {show_id(record)} is missing; run `holdfast verify`")
    return record_of(rows[0])


def _diff(tenant: int, record: Record) -> Generator[Batch, list[Rows], bytes]:
    [rows] = yield Batch(_DIFF(tenant=tenant, body=record.body))
    if not rows or type(rows[0][0]) is not bytes:
        raise Damaged(f"checkpoint {show_id(record.id)} has lost its difference", checkpoints=(show_id(record.id),))
    return rows[0][0]


def _rebase(
    tenant: int, tree: int, record: int, dependants: dict[int, list[int]]
) -> Generator[Batch, list[Rows], None]:
    """Give a record its full text, and encode the differences that build on it with its dictionary."""
    loaded = yield from read_state(tenant, tree, record)
    if loaded is None:
        raise Damaged(f"checkpoint {show_id(record)} has lost its body", checkpoints=(show_id(record),))
    lines = yield from _lines_after(tenant, tree, loaded, dependants)
    dictionary = Dictionary(loaded.data)
    old = loaded.record
    diff = yield from _diff(tenant, old)
    full = compress_full(loaded.data)
    yield Batch(
        _SET_FULL(tenant=tenant, body=old.body, full_text=full, change=body_checksum(full) - body_checksum(diff)),
        _store(tenant, old._replace(base=None, keyframe=1, key=record, cost=0)),
    )
    before, after = {record: loaded.record.cost}, {record: 0}  # what reading costs, along the chain
    for line in lines:
        encoder = Encoder(dictionary)
        for following, stored, splices in line:
            assert following.base is not None
            diff = encoder.encode_splices(splices)
            moved = following
            if not following.keyframe:  # a keyframe's difference is moved too, but the chain ends there
                before[following.id] = following.cost
                own = following.cost - before[following.base] + len(diff) - len(stored)
                after[following.id] = after[following.base] + own
                moved = following._replace(key=record, cost=after[following.id])
            yield Batch(
                _SET_DIFF(
                    tenant=tenant,
                    body=following.body,
                    diff=diff,
                    change=body_checksum(diff) - body_checksum(stored),
                ),
                _store(tenant, moved),
            )


def _lines_after(
    tenant: int, tree: int, loaded: Loaded, dependants: dict[int, list[int]]
) -> Generator[Batch, list[Rows], list[list[tuple[Record, bytes, Splices]]]]:
    """The chains of differences that build on a record, up to and with the next keyframes: each as a line of records
    that no other line has, with their differences as stored and as splices."""
    lines: list[list[tuple[Record, bytes, Splices]]] = []
    seen: set[int] = {loaded.record.id}
    ends: list[Record] = []
    waiting = list(dependants.get(loaded.record.id, ()))
    while waiting:
        following = yield from _record(tenant, tree, waiting.pop())
        after = [] if following.keyframe else dependants.get(following.id, ())
        waiting.extend(after)
        if not after:
            ends.append(following)
    # An older end first: a newer one then only adds what lies beyond the place where they part.
    for end in sorted(ends):
        chain = yield from read_chain(tenant, tree, end.base if end.keyframe and end.base else end.id)
        if chain is None or chain.diffs is None:
            raise Damaged(f"checkpoint {show_id(end.id)} has lost its base", checkpoints=(show_id(end.id),))
        ids, diffs = list(chain.ids), list(chain.diffs)
        if end.keyframe:
            diff = yield from _diff(tenant, end)
            ids.append(end.id)
            diffs.append(diff)
        batches = Decoder(Dictionary(loaded.key_data)).batches(diffs)
        decoded = [splices for batch in batches for splices in batch]
        start = ids.index(loaded.record.id) + 1 if loaded.record.id in ids else 0
        line = []
        for at in range(start, len(ids)):
            if ids[at] not in seen:
                seen.add(ids[at])
                line.append(((yield from _record(tenant, tree, ids[at])), diffs[at], decoded[at]))
        lines.append(line)
    return lines


def _unlink(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    found = yield from _record(tenant, tree, record)
    diff = yield from _diff(tenant, found)
    yield Batch(
        _DROP_DIFF(tenant=tenant, body=found.body, change=-body_checksum(diff)),
        _store(tenant, found._replace(base=None)),
    )


def _store(tenant: int, record: Record) -> Statement:
    return _SET_RECORD(
        thread=record.thread,
        base=record.base,
        keyframe=record.keyframe,
        key=record.key,
        cost=record.cost,
        checksum=row_checksum(tenant, record) + (record.body or 0) + record.stamp,
        tenant=tenant,
        tree=record.tree,
        id=record.id,
    )


def _sweep_some(tenant: int) -> Program[tuple[int, int]]:
    """Remove a batch of listed records. How many went, how many are left (at least)."""
    [listed] = yield Batch(_LISTED(tenant=tenant, limit=_BATCH))
    if not listed:
        return 0, 0
    tree = listed[0][0]
    if listed[0][1] == 0:  # the whole tree
        [found] = yield Batch(_ANY_IN_TREE(tenant=tenant, tree=tree, limit=_BATCH))
        doomed = [(tree, record, body) for record, body in found]
        done = [(tree, 0)] if len(found) < _BATCH else []
    else:
        bodies = yield Batch(*(_BODY_OF(tenant=tenant, tree=t, id=record) for t, record in listed if record))
        named = [(t, record) for t, record in listed if record]
        doomed = [(*name, rows[0][0]) for name, rows in zip(named, bodies, strict=True) if rows]
        done = named
    statements = [_REMOVE_BODY(tenant=tenant, body=body) for _, _, body in doomed if body is not None]
    statements += [_REMOVE(tenant=tenant, tree=t, id=record) for t, record, _ in doomed]
    statements += [_UNLIST(tenant=tenant, tree=t, id=record) for t, record in done]
    if statements:
        yield Batch(*statements)
    [[(left,)]] = yield Batch(_COUNT_LISTED(tenant=tenant))
    return len(doomed), left
