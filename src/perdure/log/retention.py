"""The stored retention policy of a tenant, and its enforcement on threads. `store.ops.compact()` runs it.

The policy is JSON: the fields of `Retention` in microseconds, or as a count; null means for ever. Each tree is one
transaction. A thread that something needs (a pin, a graph, an open run) does not expire, and a record that one thread
keeps stays for all. Runs, memory and snapshots enforce it in their own packages.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import orjson

from perdure.errors import Damaged, Undecodable, UsageError
from perdure.log import gc
from perdure.log.gc_plan import Cut, Rule, read_tree
from perdure.log.ids import first_id
from perdure.log.thread_table import ThreadRow, find_thread, threads_in_tree
from perdure.storage.domains import domains
from perdure.storage.events import event
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, dry_write, fetch, read, write
from perdure.values.durations import check_duration

_log = logging.getLogger("perdure")
Fields = dict[str, int | None]  # the stored fields of a policy
OF_A_THREAD = ("threads", "checkpoints", "checkpoint_age")
_MAY_BE_ZERO = ("runs", "memory_history")
Unchanged = Literal["unchanged"]
UNCHANGED: Unchanged = "unchanged"
_PAGE = 500
_NAMES_MAX = 100
_GET = Sql("SELECT value FROM meta WHERE key = :key")
_SET = Sql("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = :value")
_DROP = Sql("DELETE FROM meta WHERE key = :key")
_GET_OWN = Sql("SELECT retention FROM thread WHERE tenant = :tenant AND thread = :thread")
_SET_OWN = Sql("UPDATE thread SET retention = :retention WHERE tenant = :tenant AND thread = :thread")
_THREADS = Sql(
    """SELECT tree, thread, name, updated_at, retention FROM thread
    WHERE tenant = :tenant AND (tree, thread) > (:tree, :thread) AND (:all = 1 OR retention IS NOT NULL)
    ORDER BY tree, thread LIMIT :limit"""
)
_OVERVIEW = Sql("SELECT count(*), coalesce(max(head), 0) FROM thread WHERE tenant = :tenant")
_RECORDS = Sql("SELECT count(*), min(id) FROM record WHERE tenant = :tenant AND tree = :tree AND body IS NOT NULL")
_OWN = Sql("SELECT thread, retention FROM thread WHERE tenant = :tenant AND tree = :tree")
# Reasons to keep an expired thread: pins, or pending writes on its head, which a waiting or interrupted graph leaves.
_NEEDED = Sql(
    """SELECT EXISTS (SELECT 1 FROM pin p WHERE p.tenant = :tenant AND p.thread = :thread),
    EXISTS (SELECT 1 FROM label l JOIN write w
        ON w.tenant = l.tenant AND w.thread = l.thread AND w.space = l.space AND w.id = l.id
        WHERE l.tenant = :tenant AND l.thread = :thread AND l.record = :head)"""
)
_BYTES = Sql(
    """SELECT CAST(coalesce(sum(coalesce(length(b.diff), 0) + coalesce(length(b.full_text), 0)), 0) AS bigint)
    FROM record r JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree"""
)


# --- the policy


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a store keeps its data. None means for ever.

    `threads`: a thread is deleted this long after its last write. `checkpoints`: each thread keeps this many of its
    newest checkpoints. `checkpoint_age`: a checkpoint is removed this long after it was saved; the newest of a thread
    stays. `runs`: a finished run keeps its journal this long; its result stays. `memory`: an item that is
    not pinned expires this long after it was put. `memory_history`: replaced and deleted items stay this long. Both
    apply to namespaces without a policy of their own. `snapshots`: a snapshot is released after this long, unless it is
    marked as good or has a `keep_until`.
    """

    threads: timedelta | None = None
    checkpoints: int | None = None
    checkpoint_age: timedelta | None = None
    runs: timedelta | None = None
    memory: timedelta | None = None
    memory_history: timedelta | None = timedelta(days=30)
    snapshots: timedelta | None = None
    own: tuple[str, ...] = ()  # the fields that the thread overrides; the others are the store's

    @classmethod
    def of(cls, tenants: Fields, own: Mapping[str, int | None] | None = None) -> Retention:
        """Build the policy from the stored fields of a tenant and those that a thread overrides."""
        spans = {
            name: value if name == "checkpoints" or value is None else timedelta(microseconds=value)
            for name, value in {**tenants, **(own or {})}.items()
        }
        return cls(**spans, own=tuple(own or ()))  # type: ignore[arg-type]


# The fields, with what each does, as `perdure retention` prints it.
RULES = {
    "threads": "delete a thread this long after its last write",
    "checkpoints": "keep this many of the newest checkpoints of each thread",
    "checkpoint_age": "remove a checkpoint this long after it was saved; the newest of a thread stays",
    "runs": "keep the journal of a finished run this long; its result stays",
    "memory": "let an item that is not pinned expire this long after it was put",
    "memory_history": "keep replaced and deleted versions of items this long",
    "snapshots": "release a snapshot after this long, unless it is marked good or has a date of its own",
}
FIELDS = tuple(RULES)
_DEFAULTS = {(name, None) for name in FIELDS if name != "memory_history"} | {("memory_history", 30 * 86_400_000_000)}


def fields_from(named: Mapping[str, Any]) -> Fields:
    """Convert a caller's values to stored fields, leaving out UNCHANGED ones. Raise UsageError for a wrong one."""
    fields: Fields = {}
    for name, value in named.items():
        if value == UNCHANGED:
            continue
        if value is None:
            fields[name] = None
        elif name != "checkpoints":
            fields[name] = check_duration(value, name, zero=name in _MAY_BE_ZERO) // timedelta(microseconds=1)
        elif type(value) is int and 1 <= value < 2**62:
            fields[name] = value
        else:
            raise UsageError(f"checkpoints={value!r}: a count of 1 or more; None keeps all")
    return fields


def fields_of(text: str | None) -> Fields:
    """Parse the fields of a stored policy. Raise Damaged if it cannot be read."""
    if text is None:
        return {}
    try:
        fields = orjson.loads(text)
        read_fields = {name: fields[name] for name in FIELDS if name in fields}
    except (ValueError, TypeError) as error:
        raise Damaged(f"a retention policy cannot be read ({error}); set it again") from error
    if not all(value is None or (type(value) is int and value >= 0) for value in read_fields.values()):
        raise Damaged("a retention policy holds something else than counts; set it again")
    return read_fields


def _key(tenant: int) -> str:
    return f"retention {tenant}"


def read_policy(tenant: int) -> Program[Fields]:
    """Return the fields of a tenant's policy that differ from the defaults."""
    [rows] = yield Batch(_GET(tenant=tenant, key=_key(tenant)))
    return fields_of(rows[0][0] if rows else None)


def write_policy(tenant: int, fields: Fields) -> Program[Fields]:
    """Set fields of a tenant's policy. Return all fields that differ from the defaults."""
    merged = (yield from read_policy(tenant)) | fields
    unlike = {name: value for name, value in merged.items() if (name, value) not in _DEFAULTS}
    where = {"tenant": tenant, "key": _key(tenant)}
    yield Batch(_SET(**where, value=orjson.dumps(unlike).decode()) if unlike else _DROP(**where), last=True)
    return unlike


def read_own(tenant: int, thread: int) -> Program[tuple[Fields, Fields]]:
    """Return the fields of a tenant's policy, and those that a thread overrides."""
    tenants = yield from read_policy(tenant)
    [rows] = yield Batch(_GET_OWN(tenant=tenant, thread=thread), last=True)
    return tenants, fields_of(rows[0][0] if rows else None)


def write_own(tenant: int, name: str, thread: int, fields: Fields, inherited: Iterable[str]) -> Program[None]:
    """Set fields that a thread overrides, and drop those in `inherited`. The others stay."""
    row = yield from find_thread(tenant, name, thread, lock=True)
    [[(before,)]] = yield Batch(_GET_OWN(tenant=tenant, thread=row.thread))
    merged = {field: value for field, value in (fields_of(before) | fields).items() if field not in inherited}
    text = orjson.dumps(merged).decode() if merged else None
    yield Batch(_SET_OWN(tenant=tenant, thread=row.thread, retention=text), last=True)


# --- acting on them


@dataclass
class Removed:
    """What retention removed, or would remove in a dry run."""

    threads: int = 0
    checkpoints: int = 0
    held: int = 0  # expired threads that something needs
    bytes: int = 0  # of the bodies; only a dry run counts them
    names: list[str] = field(default_factory=list)  # of the removed threads, up to 100
    numbers: list[int] = field(default_factory=list)
    damaged: int = 0  # trees that could not be read

    def add(self, other: Removed) -> None:
        self.threads += other.threads
        self.checkpoints += other.checkpoints
        self.held += other.held
        self.bytes += other.bytes
        self.names += other.names[: _NAMES_MAX - len(self.names)]


class _Work(NamedTuple):
    """The parameters of an enforcement, the same for all trees."""

    tenant: int
    policy: Fields
    now: int
    newest: int  # the greatest head before the journals were read: later records stay
    held: Mapping[str, int]  # by a thread's name: the oldest record that open work needs
    dry_run: bool

    def rule(self, text: str | None, updated_at: int) -> tuple[bool, Rule | None]:
        """Return whether a thread has expired, and which checkpoints it keeps: None for all. `text`: its own policy."""
        rules = self.policy | fields_of(text)
        idle, count, age = (rules.get(name) for name in OF_A_THREAD)
        rule = None
        if count is not None or age is not None:
            rule = Rule(count, oldest=first_id(self.now - age) if age is not None else 0)
        return idle is not None and updated_at < self.now - idle, rule


def enforce(tenant: int, now: int, *, dry_run: bool, progress: Progress | None = None) -> Flow[Removed]:
    """Remove the threads and checkpoints beyond the policy. A dry run only reports them."""
    total = Removed()
    policy = yield from read(partial(read_policy, tenant))
    [(count, newest)] = yield from fetch(_OVERVIEW, tenant=tenant)
    held: dict[str, int] = {}
    for domain in domains():
        of_domain = (yield from domain.held_threads(tenant)) if domain.held_threads is not None else {}
        for name, record in of_domain.items():
            held[name] = min(record, held.get(name, record))
    work = _Work(tenant, policy, now, newest, held, dry_run)
    after, done, last = (0, 0), 0, 0
    while True:
        trees, rows = yield from read(partial(_due, work, after))
        for tree in sorted(trees):
            if tree != last:  # a tree may have threads on two pages
                total.add((yield from _enforce_tree(work, tree, total)))
            last = tree
        done += len(rows)
        if progress is not None and rows:
            progress(done, max(done, count))
        if len(rows) < _PAGE:
            return total
        after = rows[-1][:2]


def _due(work: _Work, after: tuple[int, int]) -> Program[tuple[list[int], Rows]]:
    """Return the trees of a page of threads that may have something to remove, and the page. A cheap estimate."""
    params = {
        "tree": after[0],
        "thread": after[1],
        "all": int(any(work.policy.get(name) for name in OF_A_THREAD)),
        "limit": _PAGE,
    }
    [rows] = yield Batch(_THREADS(tenant=work.tenant, **params))
    due: dict[int, None] = {}
    ruled: dict[int, list[Rule]] = {}
    for tree, _, _, updated_at, text in rows:
        expired, rule = work.rule(text, updated_at)
        if expired:
            due[tree] = None
        elif rule is not None:
            ruled.setdefault(tree, []).append(rule)
    counted = [tree for tree in ruled if tree not in due]
    if counted:
        counts = yield Batch(*(_RECORDS(tenant=work.tenant, tree=tree) for tree in counted))
        for tree, [(count, oldest)] in zip(counted, counts, strict=True):
            if any(count > (rule.keep or count) or (count > 1 and oldest < rule.oldest) for rule in ruled[tree]):
                due[tree] = None
    return list(due), rows


def _enforce_tree(work: _Work, tree: int, total: Removed) -> Flow[Removed]:
    try:
        if work.dry_run:
            return (yield from dry_write(partial(_cut_tree, work, tree)))
        done = yield from write(partial(_cut_tree, work, tree), solo=True)
    except (Damaged, Undecodable) as error:  # continue with the other trees
        total.damaged += 1
        _log.warning(
            "the tree of thread number %d is damaged and was passed over: run `perdure store repair`",
            tree,
            extra=event("retention.damaged", tree=tree, error=type(error).__name__),
        )
        return Removed()
    if done.checkpoints or done.threads:
        yield from gc.tell_domains(work.tenant, done.numbers)
    return done


def _cut_tree(work: _Work, number: int) -> Program[Removed]:
    """Delete the expired threads of a tree, and remove older checkpoints of the others."""
    tenant, done = work.tenant, Removed()
    threads = yield from threads_in_tree(tenant, number, lock=True)
    [rows] = yield Batch(_OWN(tenant=tenant, tree=number))
    own: dict[int, str | None] = dict(rows)
    busy: set[int] = set()
    for domain in domains():
        if domain.busy_threads is not None:
            busy |= yield from domain.busy_threads(tenant, number)
    keep: dict[int, Rule] = {}
    doomed: list[ThreadRow] = []
    for row in threads:
        if any(domain.thread_prefix and row.name.startswith(domain.thread_prefix) for domain in domains()):
            continue  # its domain removes it
        expired, rule = work.rule(own.get(row.thread), row.updated_at)
        if expired:
            needed = row.thread in busy or row.name in work.held or (yield from _is_needed(tenant, row))
            done.held += needed
            if not needed:
                doomed.append(row)
                continue
        if rule is not None and row.thread not in busy:
            since = min(work.newest + 1, work.held.get(row.name, work.newest + 1))
            keep[row.thread] = rule._replace(since=since)
    before = (yield from _bytes(tenant, number)) if work.dry_run else 0
    if doomed and len(doomed) == len(threads):
        done.checkpoints = (yield from gc.remove_tree(tenant, doomed)).removed
        done.bytes = before
    elif doomed or keep:
        tree = yield from read_tree(tenant, number, threads)
        cut = Cut([row.thread for row in doomed], keep)
        done.checkpoints = (yield from gc.collect(tree, cut)).removed
        done.bytes = max(0, before - (yield from _bytes(tenant, number))) if work.dry_run else 0
    done.threads, done.numbers = len(doomed), [row.thread for row in doomed]
    done.names = [row.name for row in doomed[:_NAMES_MAX]]
    return done


def _is_needed(tenant: int, row: ThreadRow) -> Generator[Batch, list[Rows], bool]:
    [rows] = yield Batch(_NEEDED(tenant=tenant, thread=row.thread, head=row.head if row.head is not None else -1))
    return any(rows[0])


def _bytes(tenant: int, tree: int) -> Generator[Batch, list[Rows], int]:
    [[(size,)]] = yield Batch(_BYTES(tenant=tenant, tree=tree))
    return int(size)
