"""`snapshot.diff()`: what changed since a snapshot, or up to a later one.

`changed_rows` finds them by two index reads of each table, whatever the store's size: the old form of a changed row is
in the past table, and its new form is in the table or in a later past. A restore writes rows anew with old contents, so
`same_threads` then compares contents. States are read only by `SnapshotChange.paths()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import orjson

from perdure.errors import Archived, Damaged, NotFound, UsageError
from perdure.log.envelopes import ENVELOPE
from perdure.log.reading import Loaded, read_state
from perdure.log.tables import THREAD_METADATA
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.memory.labels import labels_of, unescaped
from perdure.memory.rows import OPENS, ROW_COLUMNS, ItemRow
from perdure.runs.calls.state import thread_name
from perdure.runs.journal.rows import TASK
from perdure.runs.maintenance.deployments import deployments
from perdure.runs.schedules.rows import DEFINITION
from perdure.runs.tables import PARTS, SCHEDULE
from perdure.snapshots.cutting import has_changed_beside, head_at
from perdure.snapshots.rows import SnapshotRow, check_kept
from perdure.storage.program import Batch, Flow, Program, Sql, adrive, drive, either, read, side_by_side
from perdure.threads.compare import compare
from perdure.threads.context import StoreContext
from perdure.threads.models import Change
from perdure.transfers.threads import thread_digest

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.snapshots.instants import Instant

K = TypeVar("K")
T = TypeVar("T")
_NOW = 2**62  # later than every snapshot
AT_ONCE = 50  # threads or items, in one transaction
Subject = Literal["thread", "run", "item", "deployment", "schedule"]
ORDER: tuple[Subject, ...] = get_args(Subject)  # of a difference; within a subject by namespace and name
Kind = Literal["added", "removed", "changed"]
MOVING = ("queued", "running", "waiting")  # what becomes of such a run is up to workers


class ComparedStates:
    """A subject that differs between two stores, and how its states differ."""

    __slots__ = ()
    what: Subject
    name: str
    namespace: tuple[str, ...]
    _stores: Sequence[Store | Instant]

    def paths(self, *, raw: bool = False) -> list[Change]:
        """Compare the states of both times: where they differ. Reads both.

        `raw` compares the readable form, which needs none of your classes."""
        return compare(*(_state(store, self.what, self.name, self.namespace, raw) for store in self._stores))

    async def apaths(self, *, raw: bool = False) -> list[Change]:
        """`paths`, awaited: it reads on a thread."""
        import asyncio  # late: most processes need none of it

        return await asyncio.to_thread(self.paths, raw=raw)


@dataclass(frozen=True, slots=True)
class SnapshotChange(ComparedStates):
    """A thread, a run, an item of memory, a function's deployment or a schedule that is not as it was."""

    what: Subject
    kind: Kind
    name: str  # of the thread, the run's id, the item's key, the function, of the schedule
    namespace: tuple[str, ...] = ()  # of an item
    _stores: tuple[Store, ...] = field(default=(), repr=False, compare=False)  # before and after

    @property
    def cursor(self) -> str:
        """Its place in the difference: `snapshot.diff(after=cursor)` continues after it."""
        return orjson.dumps([self.what, *self.namespace, self.name]).decode()

    @property
    def sign(self) -> str:
        """The kind as one character: `+`, `-` or `~`."""
        return {"added": "+", "removed": "-", "changed": "~"}[self.kind]

    def __str__(self) -> str:
        return f"{self.sign} {self.what} {'/'.join((*self.namespace, self.name))}"


def matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern.replace("[", "[[]"))


# --- by their rows


def _changed(table: str, columns: str, where: str = "1 = 1", **opens: Any) -> tuple[Sql, Sql]:
    """Select the rows that only the older snapshot (S) sees, and those that only the later one (T) sees."""
    old = f"""SELECT {columns} FROM {table}_past c
        WHERE tenant = :tenant AND stamp <= :s AND died > :s AND died <= :t AND {where}"""
    now = f"tenant = :tenant AND stamp > :s AND stamp <= :t AND {where}"
    new = f"""SELECT {columns} FROM {table} c WHERE {now}
        UNION ALL SELECT {columns} FROM {table}_past c WHERE {now} AND died > :t"""
    return Sql(old, **opens), Sql(new, **opens)


def _found_by(key: str, table: str, column: str) -> str:
    """Select a column of another table by a shared key, from the past if the row is gone."""
    row = f"SELECT x.{column} FROM {table}{{}} x WHERE x.tenant = c.tenant AND x.{key} = c.{key} LIMIT 1"
    return f"coalesce(({row.format('')}), ({row.format('_past')}))"


_KIND = "(SELECT r.kind FROM record r WHERE r.tenant = c.tenant AND r.tree = c.tree AND r.id = c.head)"
_THREADS = _changed("thread", f"name, thread, head, metadata, {_KIND}", opens={3: THREAD_METADATA.at(1)}, tolerant=True)
_RUNS = _changed("run", "id, run, status, request, entries, digest", f"function NOT LIKE '{TASK}%'")
_ITEMS = _changed(
    "memory_item",
    f"{ROW_COLUMNS}, {_found_by('space', 'memory_space', 'path')}",
    "ended_at IS NULL AND gone IS NULL",
    opens=OPENS,
    tolerant=True,
)
_DEPLOYMENTS = _changed("deployment", "function, version, canary, share, since, run_after, reverted")
# Without its position: a schedule that has only started runs has not changed.
_SCHEDULES = _changed(
    "schedule", f"name, {', '.join(DEFINITION)}, paused", opens=SCHEDULE.opens(("name", *DEFINITION)), tolerant=True
)
# Pending writes, and checkpoints beside the head, do not touch the thread's row.
_OF_LINE = f"DISTINCT {_found_by('thread', 'thread', 'name')}"
_LINES = (_changed("label", _OF_LINE), _changed("write", _OF_LINE))
# A step of a run that is running does not touch the run's row.
_STEPS = Sql(
    " UNION ".join(
        f"""SELECT r.id FROM {table} r WHERE r.tenant = :tenant AND r.status = 'running' AND r.stamp <= :t {seen}
            AND r.function NOT LIKE '{TASK}%' AND EXISTS (SELECT 1 FROM journal j
                WHERE j.tenant = r.tenant AND j.run = r.run AND j.stamp > :s AND j.stamp <= :t)"""
        for table, seen in (("run", ""), ("run_past", "AND r.died > :t"))
    )
)
_OF_RUN = [_changed(table.name, ", ".join(table.names), "run = :run") for table in PARTS]


def changed_rows(
    tenant: int, then: SnapshotRow, later: SnapshotRow | None, now: int
) -> Program[tuple[list[SnapshotChange], set[str]]]:
    """Return what differs between a snapshot and a later one, or the store as it is (None).

    Also return the names of changed threads that may hold the same (`same_threads`). Items have expired by `now`.
    """
    for one in (then, later):
        if one is not None:
            one.check()
            yield from check_kept(one.token)
    at = {"tenant": tenant, "s": then.epoch, "t": _NOW if later is None else later.epoch}
    pairs = (_THREADS, _RUNS, _ITEMS, _DEPLOYMENTS, _SCHEDULES, *_LINES)
    *answers, steps = yield Batch(*(sql(**at) for pair in pairs for sql in pair), _STEPS(**at))
    threads, runs, items, deployed, scheduled, *lines = zip(answers[::2], answers[1::2], strict=True)
    thread_kinds, maybe_same = _threads(
        _paired(*threads), {name for line in lines for rows in line for (name,) in rows}
    )
    run_kinds = yield from _runs(at, _paired(*runs), {name for (name,) in steps})
    there = [
        [item for item in map(ItemRow._make, rows) if item.is_there(clock)]
        for rows, clock in zip(items, (then.taken_at, now), strict=True)
    ]
    item_kinds = _kinds(_paired(*there, key=lambda item: (labels_of(item.path), unescaped(item.key))), item_content)
    changes = [SnapshotChange("thread", kind, name) for name, kind in sorted(thread_kinds.items())]
    changes += [SnapshotChange("run", kind, name) for name, kind in sorted(run_kinds.items())]
    changes += [SnapshotChange("item", kind, key, namespace) for (namespace, key), kind in sorted(item_kinds.items())]
    changes += [SnapshotChange("deployment", kind, name) for name, kind in sorted(_kinds(_paired(*deployed)).items())]
    changes += [SnapshotChange("schedule", kind, name) for name, kind in sorted(_kinds(_paired(*scheduled)).items())]
    return changes, maybe_same


_Pairs = dict[Any, tuple[Any, Any]]  # what S sees and what T sees, None: nothing


def _paired(old: Iterable[Any], new: Iterable[Any], *, key: Callable[[Any], Any] = itemgetter(0)) -> _Pairs:
    then, now = {key(row): row for row in old}, {key(row): row for row in new}
    return {each: (then.get(each), now.get(each)) for each in then | now}


def _kinds(pairs: _Pairs, content: Callable[[Any], Any] = tuple) -> dict[Any, Kind]:
    """Return the keys that were added or removed, or have another content."""
    kinds: dict[Any, Kind] = {}
    for key, (old, new) in pairs.items():
        if old is None or new is None or content(old) != content(new):
            kinds[key] = kind_of(old, new)
    return kinds


def kind_of(then: object, now: object) -> Kind:
    return "added" if then is None else "removed" if now is None else "changed"


def _threads(pairs: _Pairs, lines: set[Any]) -> tuple[dict[str, Kind], set[str]]:
    """Return the changed threads, and the names of those that may hold the same.

    They may if a restore wrote them, or if only their lines have changed.
    """
    kinds = _kinds(pairs, lambda row: row[1:4])
    maybe_same = lines - kinds.keys() - {None}
    for name, kind in kinds.items():
        old, new = pairs[name]
        if kind == "changed" and (old[1] != new[1] or new[4] in ("restore", None)):
            maybe_same.add(name)
    kinds |= dict.fromkeys(maybe_same, "changed")
    of_runs = {name for name in kinds if name.startswith(thread_name(""))}
    return {name: kind for name, kind in kinds.items() if name not in of_runs}, maybe_same - of_runs


def _runs(at: dict[str, int], pairs: _Pairs, steps: set[str]) -> Program[dict[str, Kind]]:
    kinds = _kinds(pairs, lambda row: (row[1], "open" if row[2] in MOVING else row[2], *row[3:]))
    kinds |= dict.fromkeys(steps - kinds.keys(), "changed")
    for name in pairs.keys() - kinds.keys():  # its lease was renewed, it was answered or rewound: it may hold the same
        answers = yield Batch(*(sql(**at, run=pairs[name][1][1]) for pair in _OF_RUN for sql in pair))
        if any(set(old) != set(new) for old, new in zip(answers[::2], answers[1::2], strict=True)):
            kinds[name] = "changed"
    return kinds


def item_content(item: ItemRow | None) -> Any:
    """Return the content of an item's version, without its number and its times."""
    return item and (item.body, item.kind, item.pinned, item.valid_from, item.valid_to)


def changes_after(changes: Sequence[SnapshotChange], cursor: str | None) -> Sequence[SnapshotChange]:
    """Return the changes that come after a cursor, in their order. The change of the cursor need not be there."""
    if cursor is None:
        return changes
    try:
        what, *namespace, name = orjson.loads(cursor)
        place = (ORDER.index(what), tuple(namespace), name)
        return [one for one in changes if (ORDER.index(one.what), one.namespace, one.name) > place]
    except (ValueError, TypeError):
        raise UsageError(f"after={cursor!r}: the `cursor` of the last change of a page") from None


def in_pages(changes: Sequence[SnapshotChange], limit: int | None) -> Iterator[Sequence[SnapshotChange]]:
    """Yield all changes at once, or in pieces of `limit`."""
    size = max(limit or len(changes), 1)
    return (changes[at : at + size] for at in range(0, len(changes), size))


# --- by their contents


class ThreadAt(NamedTuple):
    row: ThreadRow
    labelled: bool  # it has labels or pending writes, as an adapter's have: it counts as a whole
    state: Loaded | None  # of its head, unless it is labelled or damaged
    content: Any  # what is compared: its state and metadata, or a digest of all of it; an error equals nothing


LABELLED = Sql(
    """SELECT 1 FROM label WHERE tenant = :tenant AND thread = :thread
    UNION ALL SELECT 1 FROM write WHERE tenant = :tenant AND thread = :thread LIMIT 1"""
)


def read_at(ctx: StoreContext, op: Callable[[], Program[T]]) -> Flow[T]:
    """Run a reading program in another store, such as a snapshot."""
    return either(lambda: drive(ctx.driver, read(op)), lambda: adrive(ctx.driver, read(op)))


def both_times(
    past: StoreContext,
    live: StoreContext,
    of: Sequence[K],
    then: Callable[[K], Program[T]],
    now: Callable[[K], Program[T]] | None = None,
) -> Flow[list[tuple[T, T]]]:
    """Run a reading program for each of `of`: `then` in the past, and `now`, or the same, in the live store."""
    before = yield from read_at(past, lambda: side_by_side([then(each) for each in of]))
    after = yield from read_at(live, lambda: side_by_side([(now or then)(each) for each in of]))
    return list(zip(before, after, strict=True))


def thread_at(
    tenant: int, name: str, *, at: int | None = None, by_head: bool = False, since: int | None = None
) -> Program[ThreadAt | None]:
    """Return a thread now, or as it was at an instant; None if there is none.

    `by_head`: it is its newest checkpoint, also if it has labels. Without a checkpoint it does not count as there.
    `since`: it differs from what it was then also if something was added beside that checkpoint."""
    row = yield from thread_or_stub(tenant, name)
    if row is not None and at is not None:
        row = row._replace(head=None if row.created_at > at else (yield from head_at(tenant, row, at)))
    if row is None or (by_head and row.head is None):
        return None
    [labelled] = yield Batch(LABELLED(tenant=tenant, thread=row.thread))
    try:
        is_whole = labelled and not by_head
        state = None if is_whole or row.head is None else (yield from read_state(tenant, row.tree, row.head))
        content: Any = (state.data, metadata_of(row)) if state else (yield from thread_digest(tenant, name))
        if since is not None and labelled and (yield from has_changed_beside(tenant, row.thread, since)):
            content = (content, since)
        return ThreadAt(row, bool(labelled), state, content)
    except Damaged as error:
        return ThreadAt(row, bool(labelled), None, error)


def same_content(then: ThreadAt | None, now: ThreadAt | None) -> bool:
    return bool((then and then.content) == (now and now.content))


def same_threads(past: StoreContext, live: StoreContext, tenant: int, names: Iterable[str]) -> Flow[set[str]]:
    """Return the names of the threads that hold the same at both times."""
    same: set[str] = set()
    for some in in_batches(sorted(names)):
        pairs = yield from both_times(past, live, some, partial(thread_at, tenant))
        same |= {name for name, pair in zip(some, pairs, strict=True) if same_content(*pair)}
    return same


def in_batches(all_of_them: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield batches for one transaction each."""
    return (all_of_them[at : at + AT_ONCE] for at in range(0, len(all_of_them), AT_ONCE))


# --- their states


def _state(store: Any, subject: Subject, name: str, namespace: tuple[str, ...], raw: bool) -> Any:
    """Return a thread's state, a run's status and steps, an item's value, a deployment or the definition of a schedule.

    None if it is not there.
    """
    try:
        if subject == "thread":
            point = store.thread(name).load(raw=raw)
            state = None if point is None else point.state
            return {key: state[key] for key in state if key != ENVELOPE} if isinstance(state, dict) else state
        if subject == "run":
            run = store.get_run(name)
            return {"status": run.status, "steps": {f"{step.number} {step.name}": step.result for step in run.steps()}}
    except (NotFound, Archived):
        return None
    if subject == "deployment":
        deployed = store._run(deployments(store._context))
        return next((asdict(one) for one in deployed if one.function == name), None)
    if subject == "schedule":
        shown = ("function", "cron", "every", "timezone", "queue", "priority", "overlap", "catch_up", "paused")
        matching = (one for one in store.schedules(limit=None) if one.name == name)
        return next(({key: getattr(one, key) for key in shown} for one in matching), None)
    item = store.memory(*namespace, raw=raw).get(name)
    return None if item is None else item.value
