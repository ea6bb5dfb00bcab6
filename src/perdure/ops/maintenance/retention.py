"""What retention removes, tree by tree: threads that have expired, and checkpoints beyond the newest ones.

A thread does not expire while it has a pin, while a graph or a run that is not finished needs it, and its records stay
where a fork needs them. A dry run is the same work on a tree in one transaction that is rolled back.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from perdure.errors import Damaged, NotFound, PerdureError, Undecodable
from perdure.log import gc, retention_policy
from perdure.log.gc_plan import (
    Node,
    Rule,
    checkpoints_in,
    choose,
    kept_for_others,
    nodes_of,
)
from perdure.log.retention_policy import Fields
from perdure.log.thread_table import ThreadRow, threads_in_tree
from perdure.runs.journal import adapter_tasks
from perdure.runs.maintenance.held_threads import HAS_TASKS
from perdure.storage.domains import domains
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, read, write

_log = logging.getLogger("perdure")
_PAGE = 500
_BAD = (Damaged, Undecodable)  # of one thread: the others have their turn all the same
_NAMES_MAX = 100
# The threads that keep the states of runs are left out: they go with the journals of their runs.
_THREADS = """SELECT t.tree, t.thread, t.name, t.updated_at, t.head, t.retention FROM thread t
    WHERE t.tenant = :tenant AND (t.tree, t.thread) > (:tree, :thread) {where} AND NOT (t.name LIKE 'run:%' AND EXISTS (
        SELECT 1 FROM run r WHERE r.tenant = t.tenant AND r.id = substr(t.name, 5)))
    ORDER BY t.tree, t.thread LIMIT :limit"""
_ALL = Sql(_THREADS.format(where=""))
_WITH_OWN = Sql(_THREADS.format(where="AND t.retention IS NOT NULL"))
_COUNT = Sql("SELECT count(*) FROM thread WHERE tenant = :tenant")
_NEWEST = Sql("SELECT coalesce(max(head), 0) FROM thread WHERE tenant = :tenant")
_RECORDS = Sql("SELECT count(*) FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL")
# Why a thread stays although its time is over. Writes on its newest checkpoint: a graph that waits or was broken off.
_NEEDED = Sql(
    f"""SELECT EXISTS (SELECT 1 FROM pin p WHERE p.tenant = :tenant AND p.thread = :thread), {HAS_TASKS},
    EXISTS (SELECT 1 FROM label l JOIN write w
        ON w.tenant = l.tenant AND w.thread = l.thread AND w.space = l.space AND w.id = l.id
        WHERE l.tenant = :tenant AND l.thread = :thread AND l.record = :head)"""
)
_HAS_TASKS = Sql(f"SELECT {HAS_TASKS}")
# Those whose own time is over are counted with the runs.
_TASKS = Sql(
    f"""SELECT count(*) FROM run WHERE tenant = :tenant AND root = :thread AND {adapter_tasks.IS_TASK}
    AND NOT (coalesce(keep_until, {2**62}) <= {{now}} AND status = 'done')"""
)
_BODY_BYTES = Sql(
    """SELECT r.id, coalesce(length(b.diff), 0) + coalesce(length(b.full_text), 0)
    FROM record r JOIN body b ON b.tenant = r.tenant AND b.id = r.body WHERE r.tenant = :tenant AND r.tree = :tree"""
)
_PACK_BYTES = Sql("SELECT pack, length(data) FROM pack WHERE tenant = :tenant AND tree = :tree")


@dataclass
class Gone:
    """What was removed, or would be."""

    threads: int = 0
    checkpoints: int = 0
    tasks: int = 0  # of graphs, with their threads
    held: int = 0  # threads whose time is over, and that something needs
    bytes: int = 0  # of the bodies; counted by a dry run only
    names: list[str] = field(default_factory=list)
    damaged: int = 0  # threads that could not be looked through
    shared: int = 0  # checkpoints beyond keep_last that stay, because a fork has them

    def add(self, other: Gone) -> None:
        self.threads += other.threads
        self.checkpoints += other.checkpoints
        self.tasks += other.tasks
        self.held += other.held
        self.damaged += other.damaged
        self.shared += other.shared
        self.bytes += other.bytes
        self.names += other.names[: _NAMES_MAX - len(self.names)]

    def expired(self, name: str) -> None:
        self.threads += 1
        if len(self.names) < _NAMES_MAX:
            self.names.append(name)


class Kept(NamedTuple):
    """A thread as far as retention goes."""

    tree: int
    thread: int
    name: str
    updated_at: int
    head: int | None
    retention: str | None


class _Due(NamedTuple):
    """A thread that may have something to remove."""

    kept: Kept
    before: int | None  # expired if it was not written to since then
    keep: int | None


class _Needs:
    """What unfinished runs need, looked up when it is first asked for."""

    def __init__(self, newest: int) -> None:
        self._newest = newest  # head of all threads before the journals were read: what came later is not in question
        self._held: dict[str, int] | None = None

    def of(self, tenant: int, name: str) -> Flow[tuple[bool, int]]:
        """Whether a run needs a thread, and from which record on everything stays."""
        if self._held is None:
            self._held = {}
            for domain in domains():
                held = (yield from domain.held_threads(tenant)) if domain.held_threads is not None else {}
                for thread, record in held.items():
                    self._held[thread] = min(record, self._held.get(thread, record))
        oldest = self._held.get(name)
        return oldest is not None, min(self._newest + 1, oldest if oldest is not None else self._newest + 1)


def enforce(tenant: int, now: int, *, dry_run: bool, progress: Progress | None = None) -> Flow[Gone]:
    """Remove what retention says, or only say what that would be."""
    gone = Gone()
    policy = yield from read(partial(retention_policy.read_policy, tenant))
    everything = any(policy.values())
    total, newest = yield from read(partial(_overview, tenant))
    needs, done = _Needs(newest), 0
    after = (0, 0)
    tree: list[Kept] = []
    while True:
        page = yield from read(partial(_page, tenant, after, everything))
        ended = len(page) < _PAGE
        *whole, tree = [*_trees([*tree, *page]), []] if ended else [*_trees([*tree, *page])]
        for threads in whole:
            yield from _see_to(tenant, threads, policy, now, needs, gone, dry_run)
            done += len(threads)
            if progress is not None:
                progress(done, max(done, total))
        if ended:
            return gone
        after = (page[-1].tree, page[-1].thread)


def _page(tenant: int, after: tuple[int, int], everything: bool) -> Program[list[Kept]]:
    """Threads by tree and number, those after a place: all, or those with a policy of their own."""
    sql = _ALL if everything else _WITH_OWN
    [rows] = yield Batch(sql(tenant=tenant, tree=after[0], thread=after[1], limit=_PAGE), last=True)
    return [Kept._make(row) for row in rows]


def _trees(threads: list[Kept]) -> Iterator[list[Kept]]:
    """Threads that share records, together. They come in the order of their trees."""
    found: list[Kept] = []
    for thread in threads:
        if found and found[-1].tree != thread.tree:
            yield found
            found = []
        found.append(thread)
    if found:
        yield found


def _overview(tenant: int) -> Program[tuple[int, int]]:
    [[(count,)], [(newest,)]] = yield Batch(_COUNT(tenant=tenant), _NEWEST(tenant=tenant), last=True)
    return int(count), int(newest)


def _see_to(
    tenant: int, threads: list[Kept], policy: Fields, now: int, needs: _Needs, gone: Gone, dry_run: bool
) -> Flow[None]:
    ruled = [found for kept in threads if (found := _due(kept, policy, now)) is not None]
    due = yield from _worth_it(tenant, ruled)
    if not due:
        return
    bounds, rules = {}, {}
    for one in ruled:
        held, since = bounds[one.kept.thread] = yield from needs.of(tenant, one.kept.name)
        if one.keep is not None:
            rules[one.kept.thread] = Rule(one.keep, since)
    if dry_run:
        yield from _rehearse_tree(tenant, due, bounds, rules, now, gone)
        return
    for one in due:
        held, _ = bounds[one.kept.thread]
        try:
            done = yield from write(partial(_enforce_one, tenant, one, held, rules, now), solo=True)
        except _BAD as error:
            _pass_over(one, error, gone)
            continue
        gone.add(done)
        if done.checkpoints or done.threads:
            yield from gc.sweep(tenant)
        if done.threads:
            for domain in domains():
                if domain.thread_deleted is not None:
                    yield from domain.thread_deleted(tenant, one.kept.thread)


def _pass_over(one: _Due, error: PerdureError, gone: Gone) -> None:
    """What is damaged must not keep all others from being seen to."""
    gone.damaged += 1
    _log.warning(
        "thread %r is damaged and was passed over: run `perdure store verify`, then `perdure store repair`",
        one.kept.name,
        extra=event("retention.damaged", thread=one.kept.name, error=type(error).__name__),
    )


def _due(kept: Kept, policy: Fields, now: int) -> _Due | None:
    ttl_us, keep = retention_policy.policy(policy, retention_policy.fields_of(kept.retention))
    before = now - ttl_us if ttl_us is not None and kept.updated_at < now - ttl_us else None
    return _Due(kept, before, keep) if before is not None or keep is not None else None


def _worth_it(tenant: int, due: list[_Due]) -> Flow[list[_Due]]:
    """Those whose tree has more checkpoints than are kept, and those that have expired: a look that costs little."""
    counted = [one for one in due if one.before is None]
    if not counted:
        return due
    counts = yield from read(partial(_counts, tenant, [one.kept for one in counted]))
    few = {one.kept.thread for one, count in zip(counted, counts, strict=True) if count <= (one.keep or 0)}
    return [one for one in due if one.kept.thread not in few]


def _counts(tenant: int, threads: list[Kept]) -> Program[list[int]]:
    found: list[int] = []
    for start in range(0, len(threads), _PAGE):
        part = threads[start : start + _PAGE]
        answers = yield Batch(*(_RECORDS(tenant=tenant, tree=one.tree) for one in part))
        found += [rows[0][0] for rows in answers]
    return found


# --- one thread, the same for a dry run


def _enforce_one(tenant: int, due: _Due, held: bool, rules: Mapping[int, Rule], now: int) -> Program[Gone]:
    """Delete a thread that has expired, or remove its checkpoints beyond the newest ones. What went."""
    gone, kept = Gone(), due.kept
    try:
        if due.before is not None:
            if not held:
                [[(tasks,)]] = yield Batch(_TASKS(tenant=tenant, thread=kept.thread, now=now))
                removed = yield from _expire(tenant, kept, due.before)
                if removed is not None:
                    gone.tasks, gone.checkpoints = tasks, removed
                    gone.expired(kept.name)
                    return gone
            gone.held = 1
        if due.keep is not None:
            would = yield from _would_prune(tenant, kept, rules)
            gone.shared = would.shared
            if would.checkpoints:
                keep, since = rules[kept.thread]
                done = yield from gc.prune_tree(tenant, kept.thread, kept.name, keep, since, would.rules)
                gone.checkpoints = done.removed
    except NotFound:
        return Gone()  # another process has deleted it
    return gone


def _expire(tenant: int, kept: Kept, before: int) -> Program[int | None]:
    """Delete a thread if it is still idle and nothing needs it, decided under its lock. None: it stays."""
    row, others = yield from gc.lock_tree(tenant, kept.name, kept.thread)
    if row.updated_at >= before or (yield from _is_needed(tenant, row)):
        return None
    return (yield from gc.remove_threads(tenant, row.tree, [row], others))


def _is_needed(tenant: int, row: ThreadRow) -> Generator[Batch, list[Rows], bool]:
    [rows] = yield Batch(_NEEDED(tenant=tenant, thread=row.thread, head=row.head if row.head is not None else -1))
    return any(rows[0])


class _Would(NamedTuple):
    """What a prune would do."""

    checkpoints: int
    shared: int
    rules: Mapping[int, Rule]


def _would_prune(tenant: int, kept: Kept, rules: Mapping[int, Rule]) -> Program[_Would]:
    """What a prune would remove, if anything: it rearranges the tree even if not, and writers would notice."""
    threads = yield from threads_in_tree(tenant, kept.tree)
    rules = yield from _at_rest(tenant, threads, rules)
    row = next((thread for thread in threads if thread.thread == kept.thread), None)
    if row is None or row.thread not in rules:
        return _Would(0, 0, rules)
    nodes = yield from nodes_of(tenant, kept.tree)
    others = [thread for thread in threads if thread is not row]
    plan, _, own = yield from choose(tenant, nodes, row, others, *rules[row.thread], rules)
    return _Would(checkpoints_in(nodes, plan), kept_for_others(nodes, row, plan, own), rules)


def _at_rest(
    tenant: int, threads: list[ThreadRow], rules: Mapping[int, Rule]
) -> Generator[Batch, list[Rows], dict[int, Rule]]:
    """The rules of those threads whose graphs are done: the others keep all they have."""
    ruled = [thread.thread for thread in threads if thread.thread in rules]
    found: dict[int, Rule] = {}
    for start in range(0, len(ruled), _PAGE):
        part = ruled[start : start + _PAGE]
        answers = yield Batch(*(_HAS_TASKS(tenant=tenant, thread=thread) for thread in part))
        found |= {thread: rules[thread] for thread, [[busy]] in zip(part, answers, strict=True) if not busy}
    return found


# --- the dry run


class _Rehearsed(Exception):
    """Ends a transaction that is only a rehearsal: nothing of it stays."""

    def __init__(self, gone: Gone) -> None:
        super().__init__()
        self.gone = gone


class _Turn:
    """The thread that a rehearsal is at."""

    def __init__(self, due: _Due) -> None:
        self.due = due


def _rehearse_tree(
    tenant: int, due: list[_Due], bounds: dict[int, tuple[bool, int]], rules: Mapping[int, Rule], now: int, gone: Gone
) -> Flow[None]:
    """The same for one thread of a tree after the other, in one transaction that is rolled back. One that is damaged is
    passed over, as it is in truth: the others have their turn without it."""
    while due:
        turn = _Turn(due[0])
        try:
            yield from write(partial(_rehearse, tenant, due, bounds, rules, now, turn), solo=True)
        except _Rehearsed as done:
            gone.add(done.gone)
            return
        except _BAD as error:
            _pass_over(turn.due, error, gone)
            due = [one for one in due if one is not turn.due]


def _rehearse(
    tenant: int,
    due: list[_Due],
    bounds: dict[int, tuple[bool, int]],
    rules: Mapping[int, Rule],
    now: int,
    turn: _Turn,
) -> Program[None]:
    gone, tree = Gone(), due[0].kept.tree
    nodes = yield from nodes_of(tenant, tree)
    weights = yield from _weights(tenant, tree, nodes)
    for one in due:
        turn.due = one
        gone.add((yield from _enforce_one(tenant, one, bounds[one.kept.thread][0], rules, now)))
    left = (yield from nodes_of(tenant, tree)) if (yield from threads_in_tree(tenant, tree)) else {}
    emptied = [node.id for node in nodes.values() if node.id not in left or left[node.id].body is None]
    gone.bytes = sum(weights.get(record, 0) for record in emptied)
    raise _Rehearsed(gone)


def _weights(tenant: int, tree: int, nodes: dict[int, Node]) -> Generator[Batch, list[Rows], dict[int, int]]:
    """About how many bytes each record takes; those in a pack share it."""
    bodies, packs = yield Batch(_BODY_BYTES(tenant=tenant, tree=tree), _PACK_BYTES(tenant=tenant, tree=tree))
    weights: dict[int, int] = {record: int(size) for record, size in bodies}
    sizes: dict[int, int] = {pack: int(size) for pack, size in packs}
    members: dict[int, list[int]] = {}
    for node in nodes.values():
        if node.body is not None and node.body < 0:
            members.setdefault(-node.body, []).append(node.id)
    for pack, records in members.items():
        weights |= dict.fromkeys(records, sizes.get(pack, 0) // len(records))
    return weights
