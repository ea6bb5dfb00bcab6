"""Removing records: pruning a thread's line, deleting a thread. What lives never loses its base.

One transaction decides and rearranges: a live record whose base is to go gets its full text, the differences after
it are encoded anew (they shared the old keyframe's dictionary), records that are only parents of live ones become
tombstones, and the rest is listed in `sweep`. From then on nothing builds on what is listed. The listed records are
removed in bounded batches; a crash in between is taken up by the next prune or delete. No hash changes.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from functools import partial
from typing import NamedTuple

import orjson

from perdure.errors import Damaged
from perdure.log.gc_plan import (
    Node,
    Plan,
    Rule,
    checkpoints_in,
    choose,
    choose_for,
    inherited,
    make_plan,
    needed_by,
    nodes_of,
    why_kept,
)
from perdure.log.ids import show_id
from perdure.log.labels import LABELLED_KIND, MAIN, LabelRow, bases_of_writes, drop_labels, labels_in
from perdure.log.pack_release import drop_packs, release
from perdure.log.pins import pinned, pins_in
from perdure.log.reading import NOT_SWEPT, RECORD, Loaded, read_chain, read_state
from perdure.log.records import Record, record_of
from perdure.log.thread_table import ThreadRow, find_thread, no_thread, threads_in_tree
from perdure.storage.columns import DIFF, FULL_TEXT
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, write
from perdure.values.compress import compress_full
from perdure.values.delta import Decoder, Encoder, Splices
from perdure.values.dictionary import Dictionary

_BATCH = 500
_SWEPT_AT_ONCE = 200  # others can write in between

_NEXT_GENERATION = Sql("UPDATE thread SET generation = generation + 1 WHERE tenant = :tenant AND tree = :tree")
_DIFF = Sql("SELECT diff FROM body WHERE tenant = :tenant AND id = :body", opens={0: DIFF}, tolerant=True)
_SET_DIFF = Sql(
    "UPDATE body SET diff = :diff WHERE tenant = :tenant AND id = :body",
    seals={"diff": DIFF},
)
_SET_FULL = Sql(
    "UPDATE body SET diff = NULL, full_text = :full_text WHERE tenant = :tenant AND id = :body",
    seals={"full_text": FULL_TEXT},
)
_DROP_DIFF = Sql("UPDATE body SET diff = NULL WHERE tenant = :tenant AND id = :body")
_SET_RECORD = Sql(
    """UPDATE record SET thread = :thread, base = :base, keyframe = :keyframe, key = :key, cost = :cost
    WHERE tenant = :tenant AND tree = :tree AND id = :id""",
)
_LIST = Sql("INSERT INTO sweep (tenant, tree, id) VALUES (:tenant, :tree, :id) ON CONFLICT DO NOTHING")
_ENTOMB = Sql(
    sqlite=(
        "DELETE FROM body WHERE tenant = :tenant AND id = :body",
        "UPDATE record SET body = NULL WHERE tenant = :tenant AND tree = :tree AND id = :id",
    ),
    postgres="""WITH gone AS (DELETE FROM body WHERE tenant = :tenant AND id = :body)
        UPDATE record SET body = NULL
        WHERE tenant = :tenant AND tree = :tree AND id = :id""",
)
_FORGET = [
    Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND thread = :thread")
    for table in ("tag", "write", "label", "space", "pin", "thread")
]
_OF_KIND = Sql("SELECT id FROM record WHERE tenant = :tenant AND tree = :tree AND thread = :thread AND kind = :kind")
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :head_hash WHERE tenant = :tenant AND thread = :thread")
_COUNT = Sql(
    f"""SELECT count(*) FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.body IS NOT NULL
    AND {NOT_SWEPT}"""
)
_LISTED = Sql("SELECT tree, id FROM sweep WHERE tenant = :tenant ORDER BY tree, id LIMIT :limit")
_COUNT_LISTED = Sql("SELECT count(*) FROM sweep WHERE tenant = :tenant")
_ANY_IN_TREE = Sql("SELECT id, body FROM record WHERE tenant = :tenant AND tree = :tree ORDER BY id LIMIT :limit")
_IS_ANY = Sql("SELECT count(*) FROM (SELECT 1 FROM sweep WHERE tenant = :tenant LIMIT 1) AS found")


def _each(text: str) -> Sql:
    """A statement on many records at once, given as JSON: one is faster than hundreds, and others wait for it."""
    return Sql(
        sqlite=text.format(ids="SELECT value FROM json_each(:ids)"),
        postgres=text.format(ids="SELECT v::bigint FROM json_array_elements_text(:ids::json) v"),
    )


_LIST_MANY = Sql(
    sqlite="""INSERT INTO sweep (tenant, tree, id) SELECT :tenant, :tree, value FROM json_each(:ids) WHERE true
        ON CONFLICT DO NOTHING""",
    postgres="""INSERT INTO sweep (tenant, tree, id)
        SELECT :tenant::bigint, :tree::bigint, v::bigint FROM json_array_elements_text(:ids::json) v
        ON CONFLICT DO NOTHING""",
)
_THESE = _each("SELECT id, body FROM record WHERE tenant = :tenant AND tree = :tree AND id IN ({ids})")
_UNLIST = _each("DELETE FROM sweep WHERE tenant = :tenant AND tree = :tree AND id IN ({ids})")
_REMOVE_BODIES = _each("DELETE FROM body WHERE tenant = :tenant AND id IN ({ids})")
_REMOVE = _each("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id IN ({ids})")


def prune(
    tenant: int,
    thread: int,
    name: str,
    keep: int,
    progress: Progress | None = None,
    *,
    since: int | None = None,
    rules: Mapping[int, Rule] | None = None,
) -> Flow[Thinned]:
    """Keep the newest `keep` records of a thread's line, and all from the record `since` on. `rules`: how much other
    threads of its tree keep; all they have, if nothing is said."""
    done = yield from write(partial(prune_tree, tenant, thread, name, keep, since, rules), solo=True)
    yield from sweep(tenant, progress)
    return done


def delete(
    tenant: int,
    name: str,
    thread: int | None,
    progress: Progress | None = None,
    *,
    idle_since: int | None = None,
    force: bool = False,
) -> Flow[int]:
    """Remove a thread and every record that no other thread needs; with `idle_since`, only if it was not written to
    from then on and has no pin. How many records went. Raises Pinned, unless `force`."""
    removed = yield from write(partial(_delete, tenant, name, thread, idle_since, force=force), solo=True)
    yield from sweep(tenant, progress)
    return removed


def sweep(tenant: int, progress: Progress | None = None) -> Flow[None]:
    """Remove what is listed, in batches, until nothing is; also what an earlier process left half done."""
    removed = 0
    while True:
        gone, left = yield from write(partial(_sweep_some, tenant, count=progress is not None))
        removed += gone
        if progress is not None:
            progress(removed, removed + left)
        if not left:
            return


class Thinned(NamedTuple):
    """What a prune did: how many records went, how many got their full text, and why older ones stay, with how many."""

    removed: int
    rebased: int
    kept: dict[str, int]


def prune_tree(
    tenant: int, thread: int, name: str, keep: int, since: int | None, rules: Mapping[int, Rule] | None
) -> Program[Thinned]:
    """A prune as far as it is decided: what goes is listed, and what stays does not need it any more."""
    row, others = yield from lock_tree(tenant, name, thread)
    nodes = yield from nodes_of(tenant, row.tree)
    plan, labels, own = yield from choose(tenant, nodes, row, others, keep, since, rules)
    yield from rearrange(tenant, row.tree, nodes, plan)
    yield from drop_all(labels, tenant)
    for other, record in inherited(nodes, row, others, own, plan):
        # Kept for this fork alone: it goes when the fork goes.
        found = yield from record_in(tenant, row.tree, record)
        yield Batch(_store(tenant, found._replace(thread=other)))
    pins = {pin.record for pin in (yield from pins_in(tenant, row.tree))}
    return Thinned(checkpoints_in(nodes, plan), len(plan.rebase), why_kept(nodes, row, others, keep, plan, pins))


def lock_tree(
    tenant: int, name: str, thread: int | None
) -> Generator[Batch, list[Rows], tuple[ThreadRow, list[ThreadRow]]]:
    """A thread and all others of its tree, locked."""
    row = yield from find_thread(tenant, name, thread)
    threads = {found.thread: found for found in (yield from threads_in_tree(tenant, row.tree, lock=True))}
    own = threads.pop(row.thread, None)
    if own is None:  # deleted while we waited
        raise no_thread(name, row.thread)
    return own, list(threads.values())


def _delete(
    tenant: int, name: str, thread: int | None, idle_since: int | None = None, *, force: bool = False
) -> Program[int]:
    row, others = yield from lock_tree(tenant, name, thread)
    if idle_since is not None and row.updated_at >= idle_since:
        return 0
    pins = [pin.name for pin in (yield from pins_in(tenant, row.tree)) if pin.thread == row.thread]
    if pins and not force:
        if idle_since is not None:
            return 0
        raise pinned(name, pins)
    return (yield from remove_threads(tenant, row.tree, [row], others))


def remove_threads(
    tenant: int, tree: int, doomed: list[ThreadRow], others: list[ThreadRow]
) -> Generator[Batch, list[Rows], int]:
    """Remove threads of a tree whose threads are locked; the `others` stay, with all that they need."""
    yield Batch(*(statement(tenant=tenant, thread=row.thread) for row in doomed for statement in _FORGET))
    if not others:
        [[(count,)], _] = yield Batch(_COUNT(tenant=tenant, tree=tree), _LIST(tenant=tenant, tree=tree, id=0))
        return int(count)
    nodes = yield from nodes_of(tenant, tree)
    plan = yield from choose_for(tenant, tree, nodes, others)
    yield from rearrange(tenant, tree, nodes, plan)
    return checkpoints_in(nodes, plan)


def remove_labelled(tenant: int, name: str, doomed: Container[tuple[int, bytes]]) -> Flow[int]:
    """Remove labels of a thread (namespace and id), what is pending on them, and their records unless something else
    needs these. Also records that lost their label to another one. How many records went."""
    removed = yield from write(partial(_remove_labelled, tenant, name, doomed), solo=True)
    yield from sweep(tenant)
    return removed


def _remove_labelled(tenant: int, name: str, doomed: Container[tuple[int, bytes]]) -> Program[int]:
    row, others = yield from lock_tree(tenant, name, None)
    labels = yield from labels_in(tenant, [row.thread])
    pins = {pin.record for pin in (yield from pins_in(tenant, row.tree))}
    gone = [label for label in labels if (label.space, label.id) in doomed and label.record not in pins]
    kept = [label for label in labels if (label.space, label.id) not in doomed or label.record in pins]
    nodes = yield from nodes_of(tenant, row.tree)
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
    needed = yield from needed_by(tenant, nodes, others)
    needed.update(label.record for label in kept)
    needed |= pins | (yield from bases_of_writes(tenant, [row.thread]))
    dead = removed - needed - {head}
    plan = make_plan(nodes, nodes.keys() - dead)
    yield from rearrange(tenant, row.tree, nodes, plan)
    yield from drop_all(gone, tenant)
    if head != row.head:
        yield from set_head(tenant, row, head)
    return checkpoints_in(nodes, plan)


def _by_id(label: LabelRow) -> bytes:
    return label.id


def _unlabelled(tenant: int, row: ThreadRow, labelled: set[int]) -> Generator[Batch, list[Rows], set[int]]:
    [rows] = yield Batch(_OF_KIND(tenant=tenant, tree=row.tree, thread=row.thread, kind=LABELLED_KIND))
    return {record for (record,) in rows} - labelled


def set_head(tenant: int, row: ThreadRow, head: int | None) -> Generator[Batch, list[Rows], None]:
    found = (yield from record_in(tenant, row.tree, head)) if head is not None else None
    yield Batch(
        _SET_HEAD(tenant=tenant, thread=row.thread, head=head, head_hash=found.hash if found is not None else None)
    )


def drop_all(labels: list[LabelRow], tenant: int) -> Generator[Batch, list[Rows], None]:
    for start in range(0, len(labels), _BATCH):
        yield Batch(*drop_labels(tenant, labels[start : start + _BATCH]))


def rearrange(tenant: int, tree: int, nodes: dict[int, Node], plan: Plan) -> Generator[Batch, list[Rows], None]:
    yield Batch(_NEXT_GENERATION(tenant=tenant, tree=tree))
    gone = {*plan.remove, *plan.entomb}
    moved = {nodes[record].key for record in plan.rebase}
    changed, drops = yield from release(tenant, tree, nodes.values(), gone, moved)
    if changed:
        nodes = yield from nodes_of(tenant, tree)
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
    if drops:
        yield Batch(*drops)
    if plan.remove:
        yield Batch(_LIST_MANY(tenant=tenant, tree=tree, ids=_json(plan.remove)))


def record_in(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], Record]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record))
    if not rows:
        raise Damaged(f"checkpoint {show_id(record)} is missing; run `perdure store verify`")
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
    full = compress_full(loaded.data)
    yield Batch(
        _SET_FULL(tenant=tenant, body=old.body, full_text=full),
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
                _SET_DIFF(tenant=tenant, body=following.body, diff=diff),
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
        following = yield from record_in(tenant, tree, waiting.pop())
        after = [] if following.keyframe else dependants.get(following.id, ())
        waiting.extend(after)
        if not after:
            ends.append(following)
    # An older end first: a newer one then only adds what lies beyond the place where they part.
    for end in sorted(ends):
        chain = yield from read_chain(tenant, tree, end.base if end.keyframe and end.base else end.id)
        found = chain.diffs(loaded.key_data) if chain is not None else None
        if chain is None or found is None:
            raise Damaged(f"checkpoint {show_id(end.id)} has lost its base", checkpoints=(show_id(end.id),))
        ids, diffs = list(chain.ids), list(found)
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
                line.append(((yield from record_in(tenant, tree, ids[at])), diffs[at], decoded[at]))
        lines.append(line)
    return lines


def _unlink(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], None]:
    found = yield from record_in(tenant, tree, record)
    yield Batch(
        _DROP_DIFF(tenant=tenant, body=found.body),
        _store(tenant, found._replace(base=None)),
    )


def _store(tenant: int, record: Record) -> Statement:
    return _SET_RECORD(
        thread=record.thread,
        base=record.base,
        keyframe=record.keyframe,
        key=record.key,
        cost=record.cost,
        tenant=tenant,
        tree=record.tree,
        id=record.id,
    )


def _sweep_some(tenant: int, *, count: bool) -> Program[tuple[int, int]]:
    """Remove a batch of listed records. How many went, how many are left (at least)."""
    [listed] = yield Batch(_LISTED(tenant=tenant, limit=_SWEPT_AT_ONCE))
    if not listed:
        return 0, 0
    tree = listed[0][0]
    if listed[0][1] == 0:  # the whole tree
        [found] = yield Batch(_ANY_IN_TREE(tenant=tenant, tree=tree, limit=_SWEPT_AT_ONCE))
        packs = 0 if found else (yield from drop_packs(tenant, tree))
        done = [] if found or packs else [0]
    else:
        done = [record for other, record in listed if other == tree]
        [found] = yield Batch(_THESE(tenant=tenant, tree=tree, ids=_json(done)))
    this = {"tenant": tenant, "tree": tree}
    statements = [_UNLIST(**this, ids=_json(done))] if done else []
    if found:
        bodies = [body for _, body in found if type(body) is int]  # a damaged one names nothing
        statements += [
            _REMOVE_BODIES(tenant=tenant, ids=_json(bodies)),
            _REMOVE(**this, ids=_json([record for record, _ in found])),
        ]
    answers = yield Batch(*statements, (_COUNT_LISTED if count else _IS_ANY)(tenant=tenant))
    return len(found), answers[-1][0][0]


def _json(numbers: list[int]) -> str:
    return orjson.dumps(numbers).decode()
