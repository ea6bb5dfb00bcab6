"""Remove records: prune a thread's line, delete a thread. No live record ever loses its base.

One transaction decides what to remove and removes it. Chains that lose a base are encoded again (`rechain.py`), records
that are only parents of live ones become tombstones, and all others are deleted. No hash changes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from functools import partial
from typing import NamedTuple

import orjson

from perdure.errors import Damaged, NotFound, UsageError
from perdure.log.gc_plan import (
    Cut,
    Plan,
    Rule,
    Tree,
    find_roots,
    kept_without,
    line_of,
    make_plan,
    read_thread_alone,
    read_tree,
    shares_with,
)
from perdure.log.ids import show_id
from perdure.log.labels import MAIN, drop_labels, labels_of_runs, reset_space_head
from perdure.log.pins import refuse_pinned
from perdure.log.reading import RECORD
from perdure.log.rechain import built_on, rewrite_chain
from perdure.log.records import Record, record_of
from perdure.log.thread_table import (
    ThreadRow,
    find_thread,
    has_forks,
    names_of,
    next_generation,
    no_thread,
    pass_on_forks,
    threads_in_tree,
)
from perdure.storage.domains import domains
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, Statement, read, write

_BATCH = 500

_UNLINK = Sql(
    sqlite=(
        "UPDATE body SET diff = NULL WHERE tenant = :tenant AND id = :body",
        "UPDATE record SET base = NULL WHERE tenant = :tenant AND tree = :tree AND id = :id",
    ),
    postgres="""WITH b AS (UPDATE body SET diff = NULL WHERE tenant = :tenant AND id = :body)
        UPDATE record SET base = NULL WHERE tenant = :tenant AND tree = :tree AND id = :id""",
)
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
_SET_HEAD = Sql("UPDATE thread SET head = :head, head_hash = :head_hash WHERE tenant = :tenant AND thread = :thread")
_COUNT = Sql("SELECT count(*) FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL")
_IN_TREE = "WHERE tenant = :tenant AND tree = :tree"
_REMOVE_TREE = (
    Sql(f"DELETE FROM body WHERE tenant = :tenant AND id IN (SELECT body FROM record {_IN_TREE})"),
    Sql(f"DELETE FROM record {_IN_TREE}"),
)
_REMOVE_BODIES = Sql("DELETE FROM body WHERE tenant = :tenant AND id IN {numbers:ids}")
_REMOVE = Sql("DELETE FROM record WHERE tenant = :tenant AND tree = :tree AND id IN {numbers:ids}")


class Collected(NamedTuple):
    """The result of a removal.

    `removed`: checkpoints that were removed. `rebased`: kept checkpoints that got their full text. `kept`: checkpoints
    beyond a rule that had to stay."""

    removed: int
    rebased: int = 0
    kept: int = 0


def prune(tenant: int, name: str, thread: int | None, keep: int | None, *, oldest: int = 0) -> Flow[Collected]:
    """Remove all but the newest `keep` records of each line of a thread, and those before `oldest`."""

    def program() -> Program[Collected]:
        row, tree = yield from lock_thread(tenant, name, thread)
        return (yield from collect(tree, Cut(keep={row.thread: Rule(keep, oldest=oldest)})))

    return (yield from write(program, solo=True))


def delete(tenant: int, name: str, thread: int | None, *, force: bool = False) -> Flow[int]:
    """Remove a thread and every record that no other thread needs. Return how many records were removed.

    Raise Pinned if it has pins, unless `force`."""

    def program() -> Program[tuple[int, int]]:
        row, tree = yield from lock_thread(tenant, name, thread, all_goes=True)
        if not force:
            yield from refuse_pinned(tenant, row)
        return row.thread, (yield from collect(tree, Cut(threads=[row.thread]))).removed

    number, removed = yield from write(program, solo=True)
    yield from tell_domains(tenant, [number])
    return removed


def delete_runs(tenant: int, runs: Collection[bytes]) -> Flow[None]:
    """Remove the labels that an adapter's runs have made, their pending writes, and records that nothing else needs.

    A thread without anything left is deleted."""
    labels = yield from read(partial(labels_of_runs, tenant, runs))
    for number in sorted({label.thread for label in labels}):
        gone = yield from write(partial(_delete_runs, tenant, number, runs), solo=True)
        yield from tell_domains(tenant, gone)


def _delete_runs(tenant: int, number: int, runs: Collection[bytes]) -> Program[list[int]]:
    """Delete the runs' labels in one thread. Return the deleted threads."""
    try:
        row, tree = yield from lock_thread(tenant, "", number)
    except NotFound:
        return []
    pins = {pin.record for pin in tree.pins}
    labels = yield from labels_of_runs(tenant, runs)
    doomed = [label for label in labels if label.thread == number and label.record not in pins]
    if doomed and not kept_without(tree, row, set(doomed)):
        yield from collect(tree, Cut(threads=[number]))
        return [number]
    if doomed:
        yield from collect(tree, Cut(labels=doomed))
    return []


def tell_domains(tenant: int, threads: Iterable[int]) -> Flow[None]:
    """Call each domain's `thread_deleted`, so that it removes its data of deleted threads."""
    for thread in threads:
        for domain in domains():
            if domain.thread_deleted is not None:
                yield from domain.thread_deleted(tenant, thread)


def lock_thread(
    tenant: int, name: str, thread: int | None, *, all_goes: bool = False
) -> Generator[Batch, list[Rows], tuple[ThreadRow, Tree]]:
    """Lock a thread for a removal, and read all records that the removal may affect.

    A fork without forks of its own is read alone, because the threads that wrote its shared records keep them.
    Otherwise the whole tree is locked and read. `all_goes`: do not read the records of a tree's only thread."""
    row = yield from find_thread(tenant, name, thread)
    if row.source is not None and not (yield from has_forks(tenant, row.thread)):
        row = yield from find_thread(tenant, name, row.thread, lock=True)
        tree = yield from read_thread_alone(tenant, row)
        others = shares_with(tree)
        # Check again under the lock: a fork may have been made, or a thread that it shares records with deleted.
        if not (yield from has_forks(tenant, row.thread)) and len((yield from names_of(tenant, others))) == len(others):
            return row, tree
    row, threads = yield from lock_tree(tenant, name, row.thread)
    if all_goes and len(threads) == 1:
        return row, Tree(tenant, row.tree, {row.thread: row}, {})
    return row, (yield from read_tree(tenant, row.tree, threads))


def lock_tree(
    tenant: int, name: str, thread: int | None
) -> Generator[Batch, list[Rows], tuple[ThreadRow, list[ThreadRow]]]:
    """Lock all threads of a thread's tree. Return the thread and all of them."""
    row = yield from find_thread(tenant, name, thread)
    threads = yield from threads_in_tree(tenant, row.tree, lock=True)
    for one in threads:
        if one.thread == row.thread:
            return one, threads
    raise no_thread(name, row.thread)  # deleted while this transaction waited for the lock


def remove_threads(
    tenant: int, threads: list[ThreadRow], doomed: list[ThreadRow]
) -> Generator[Batch, list[Rows], Collected]:
    """Remove some threads of a tree. All its threads must be locked."""
    if len(doomed) == len(threads):
        return (yield from remove_tree(tenant, doomed))
    tree = yield from read_tree(tenant, doomed[0].tree, threads)
    return (yield from collect(tree, Cut(threads=[row.thread for row in doomed])))


def remove_tree(tenant: int, threads: list[ThreadRow]) -> Generator[Batch, list[Rows], Collected]:
    """Remove a tree with all its threads, without reading its records."""
    scope = {"tenant": tenant, "tree": threads[0].tree}
    [[(count,)], *_] = yield Batch(
        _COUNT(**scope), *_forget(tenant, threads), *(statement(**scope) for statement in _REMOVE_TREE)
    )
    return Collected(int(count))


def _forget(tenant: int, threads: Iterable[ThreadRow]) -> list[Statement]:
    statements: list[Statement] = []
    for row in threads:
        statements += [pass_on_forks(tenant, row.thread), *(of(tenant=tenant, thread=row.thread) for of in _FORGET)]
    return statements


def collect(tree: Tree, cut: Cut) -> Generator[Batch, list[Rows], Collected]:
    """Remove all records that do not live after a cut. Every removal of single records ends here.

    Runs in the transaction that has locked the tree's threads. If there is nothing to remove, nothing changes, not even
    the generation."""
    doomed = [row for row in tree.threads.values() if row.thread in cut.threads]
    if len(doomed) == len(tree.threads) and not tree.alone:
        return (yield from remove_tree(tree.tenant, doomed))
    live, rebuilt = yield from find_roots(tree, cut)
    if cut.erase in live:
        raise UsageError(
            f"checkpoint {show_id(cut.erase or 0)} was not erased: later checkpoints are rebuilt from it, or from what "
            "is attached to it. Erase those first, the newest first, or the whole thread"
        )
    if doomed:
        yield Batch(*_forget(tree.tenant, doomed))
    plan = make_plan(tree.nodes, live, cut.erase, tree.shared)
    gone = plan.gone
    stay = [row for row in tree.threads.values() if row.thread not in cut.threads]
    labels = [
        label
        for row in stay
        for label in tree.labels.get(row.thread, ())
        if label.record in gone or (label in cut.labels and label.record not in rebuilt)
    ]
    if plan or labels:
        unlabelled: dict[int, set[int]] = {}
        for label in labels:
            unlabelled.setdefault(label.thread, set()).add(label.record)
        moved = (yield from rearrange(tree, plan)).union(unlabelled)
        # Writers of any thread may have an erased state in memory.
        yield Batch(next_generation(tree.tenant, moved if cut.erase is None else tree.threads))
        for start in range(0, len(labels), _BATCH):
            yield Batch(*drop_labels(tree.tenant, labels[start : start + _BATCH]))
        for row in stay:
            yield from _move_heads(tree, row, gone, unlabelled.get(row.thread, set()))
    kept = 0
    for one, rule in cut.keep.items():
        line = line_of(tree.nodes, tree.threads[one].head)
        kept += sum(record not in gone for record in line[len(rule.kept(line)) :])
    return Collected(sum(tree.nodes[record].body is not None for record in gone), len(plan.rebase), kept)


def _move_heads(tree: Tree, row: ThreadRow, gone: set[int], unlabelled: set[int]) -> Generator[Batch, list[Rows], None]:
    """Move each head whose record was removed to the newest remaining record of its line."""
    lost = gone | unlabelled
    spaces = [space for space in tree.spaces.get(row.thread, ()) if space.head in lost]
    if spaces:
        yield Batch(*(reset_space_head(tree.tenant, space) for space in spaces))
    if row.head in lost:
        labels = tree.labels.get(row.thread, ())
        lost = lost.union(label.record for label in labels if label.space != MAIN)
        left = [record for record in line_of(tree.nodes, row.head) if record not in lost]
        left += sorted({*tree.own[row.thread], *(label.record for label in labels)} - lost, reverse=True)
        head = left[0] if left else None
        head_record = (yield from record_in(tree.tenant, tree.tree, head)) if head is not None else None
        hash_ = head_record.hash if head_record is not None else None
        yield Batch(_SET_HEAD(tenant=tree.tenant, thread=row.thread, head=head, head_hash=hash_))


def rearrange(tree: Tree, plan: Plan) -> Generator[Batch, list[Rows], set[int]]:
    """Encode the records that are built on removed ones again, make tombstones, and delete the others.

    Return the threads whose records were changed or removed."""
    tenant, nodes = tree.tenant, tree.nodes
    scope = {"tenant": tenant, "tree": tree.tree}
    gone, shared = plan.gone, tree.shared
    live = {node.id for node in nodes.values() if node.body is not None and node.id not in gone}
    rewritten = built_on(nodes, {*plan.rebase, *gone}, live) - shared
    for key in sorted({nodes[record].key for record in rewritten}):
        yield from rewrite_chain(tenant, tree.tree, key, nodes, live, rewritten)
    unlinked = set(plan.unlink) | {
        node.id
        for node in nodes.values()
        if node.keyframe and node.base in rewritten and node.id in live and node.id not in shared
    }
    statements = [_UNLINK(**scope, id=record, body=nodes[record].body) for record in sorted(unlinked)]
    statements += [_ENTOMB(**scope, id=record, body=nodes[record].body) for record in plan.entomb]
    if plan.remove:
        bodies = [body for record in plan.remove if (body := nodes[record].body) is not None]
        statements += [
            _REMOVE_BODIES(tenant=tenant, ids=_json(bodies)),
            _REMOVE(**scope, ids=_json(plan.remove)),
        ]
    for start in range(0, len(statements), _BATCH):
        yield Batch(*statements[start : start + _BATCH])
    return {nodes[record].thread for record in gone | rewritten | unlinked}


def record_in(tenant: int, tree: int, record: int) -> Generator[Batch, list[Rows], Record]:
    [rows] = yield Batch(RECORD(tenant=tenant, tree=tree, id=record))
    if not rows:
        raise Damaged(f"checkpoint {show_id(record)} is missing; run `perdure store verify`")
    return record_of(rows[0])


def _json(numbers: list[int]) -> str:
    return orjson.dumps(numbers).decode()
