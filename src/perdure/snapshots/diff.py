"""What changed between a snapshot and now, or a later snapshot: which threads, runs, items, deployments; where in them.

A row that changed has its old form in the past and its new one in the table, or in a later past: two index reads for
each table, whatever the store's size. Contents are compared only where rows differ and contents may not: in what a
restore has written. The states themselves are read when a change is asked for its paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from perdure.errors import Damaged, NotFound
from perdure.log.envelopes import ENVELOPE
from perdure.log.reading import Loaded, read_state
from perdure.log.thread_table import ThreadRow, metadata_of, thread_or_stub
from perdure.memory.labels import labels_of, unescaped
from perdure.memory.rows import OPENS, ROW_COLUMNS, ItemRow
from perdure.runs.calls.state import thread_name
from perdure.runs.domain import TABLES
from perdure.runs.journal.rows import TASK
from perdure.runs.maintenance.deployments import deployments
from perdure.storage.columns import THREAD_METADATA
from perdure.storage.program import Batch, Flow, Program, Sql, adrive, drive, either, read
from perdure.threads.compare import compare
from perdure.threads.context import StoreContext
from perdure.threads.models import Change
from perdure.transfers.threads import thread_digest

if TYPE_CHECKING:
    from perdure.snapshots.store import SnapshotStore

T = TypeVar("T")
NOW = 2**62  # later than every snapshot
Kind = Literal["added", "removed", "changed"]
MOVING = ("queued", "running", "waiting")  # what becomes of such a run is up to workers
RUN_TABLES = [table for table in TABLES if "run" in table.key and table.name != "run"]


@dataclass(frozen=True, slots=True)
class SnapshotChange:
    """A thread, a run, an item of memory or a function's deployment that is not as it was; or what a restore does to
    it."""

    what: Literal["thread", "run", "item", "deployment"]
    kind: Literal["added", "removed", "changed", "bring back", "set back", "delete"]  # the last three: a restore
    name: str  # of the thread, the run's id, the item's key, the function
    namespace: tuple[str, ...] = ()  # of an item
    _states: Callable[[SnapshotChange], tuple[Any, Any]] | None = field(default=None, repr=False, compare=False)

    def paths(self) -> list[Change]:
        """Where the states differ. Reads both."""
        return compare(*self._states(self)) if self._states is not None else []

    @property
    def sign(self) -> str:
        """`+`, `-`, `~`; of a restore the kind itself."""
        return {"added": "+", "removed": "-", "changed": "~"}.get(self.kind, self.kind)

    def __str__(self) -> str:
        return f"{self.sign} {self.what} {'/'.join((*self.namespace, self.name))}"


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern with `*` and `?` stands for a name."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


# --- by their rows


def _changed(table: str, columns: str, where: str = "1 = 1", **opens: Any) -> tuple[Sql, Sql]:
    """The rows that S sees and T does not, and those that T sees and S does not."""
    old = f"""SELECT {columns} FROM {table}_past c
        WHERE tenant = :tenant AND stamp <= :s AND died > :s AND died <= :t AND {where}"""
    now = f"tenant = :tenant AND stamp > :s AND stamp <= :t AND {where}"
    new = f"""SELECT {columns} FROM {table} c WHERE {now}
        UNION ALL SELECT {columns} FROM {table}_past c WHERE {now} AND died > :t"""
    return Sql(old, **opens), Sql(new, **opens)


_KIND = "(SELECT r.kind FROM record r WHERE r.tenant = c.tenant AND r.tree = c.tree AND r.id = c.head)"
_THREADS = _changed("thread", f"name, thread, head, metadata, {_KIND}", opens={3: THREAD_METADATA.at(1)}, tolerant=True)
_RUNS = _changed("run", "id, run, status, request, entries, digest", f"function NOT LIKE '{TASK}%'")
_ITEMS = _changed(
    "memory_item", f"{ROW_COLUMNS}, space", "ended_at IS NULL AND gone IS NULL", opens=OPENS, tolerant=True
)
_DEPLOYMENTS = _changed("deployment", "function, version, canary, share, since, run_after, reverted")
# Pending writes, and checkpoints beside the head, do not touch the thread's row.
_LINES = (*_changed("label", "DISTINCT thread"), *_changed("write", "DISTINCT thread"))
_NAME = Sql(
    """SELECT name FROM thread WHERE tenant = :tenant AND thread = :thread
    UNION SELECT name FROM thread_past WHERE tenant = :tenant AND thread = :thread"""
)
# A step of a run that is running does not touch the run's row.
_STEPS = Sql(
    " UNION ".join(
        f"""SELECT r.id FROM {table} r WHERE r.tenant = :tenant AND r.status = 'running' AND r.stamp <= :t {seen}
            AND r.function NOT LIKE '{TASK}%' AND EXISTS (SELECT 1 FROM journal j
                WHERE j.tenant = r.tenant AND j.run = r.run AND j.stamp > :s AND j.stamp <= :t)"""
        for table, seen in (("run", ""), ("run_past", "AND r.died > :t"))
    )
)
_SPACES = Sql(
    """SELECT space, path FROM memory_space WHERE tenant = :tenant
    UNION SELECT space, path FROM memory_space_past WHERE tenant = :tenant"""
)
_OF_RUN = [_changed(table.name, ", ".join(table.columns), "run = :run") for table in RUN_TABLES]


class Candidate(NamedTuple):
    """A change, by the rows. `unsure`: contents may be equal (`compare_thread`)."""

    change: SnapshotChange
    unsure: bool = False


def candidates(tenant: int, s: int, t: int, times: tuple[int, int]) -> Program[list[Candidate]]:
    """What T sees otherwise than S does, T being later; NOW for the store as it is. `times`: their clocks, by which
    items have expired."""
    at = {"tenant": tenant, "s": s, "t": t}
    statements = (*_THREADS, *_RUNS, *_ITEMS, *_DEPLOYMENTS, *_LINES, _STEPS)
    *found, steps = yield Batch(*(sql(**at) for sql in statements))
    made = yield from _threads(tenant, _paired(*found[:2]), {number for rows in found[8:] for (number,) in rows})
    made += yield from _runs(at, _paired(*found[2:4]), {name for (name,) in steps})
    if found[4] or found[5]:
        spaces: dict[int, str] = dict((yield Batch(_SPACES(tenant=tenant)))[0])
        items = [
            [
                ((spaces[space], item.key), item)
                for *row, space in rows
                if (item := ItemRow._make((*row, ""))).is_there(now)
            ]
            for rows, now in zip(found[4:6], times, strict=True)
        ]
        made += [
            Candidate(SnapshotChange("item", kind, unescaped(key), labels_of(path)))
            for (path, key), kind in _kinds(_paired(*items), lambda row: said(row[1]))
        ]
    made += [
        Candidate(SnapshotChange("deployment", kind, name))
        for name, kind in _kinds(_paired(*found[6:8]), lambda row: row)
    ]
    order = ("thread", "run", "item", "deployment")
    return sorted(made, key=lambda each: (order.index(each.change.what), each.change.namespace, each.change.name))


_Pairs = dict[Any, tuple[Any, Any]]  # what S sees and what T sees, None: nothing


def _paired(old: Iterable[Any], new: Iterable[Any]) -> _Pairs:
    """The rows of two times, by their first column."""
    then, now = {row[0]: row for row in old}, {row[0]: row for row in new}
    return {key: (then.get(key), now.get(key)) for key in then | now}


def _kinds(pairs: _Pairs, content: Callable[[Any], Any]) -> Iterator[tuple[Any, Kind]]:
    """What was added, removed, or has another content."""
    for key, (old, new) in pairs.items():
        if old is None or new is None:
            yield key, "added" if old is None else "removed"
        elif content(old) != content(new):
            yield key, "changed"


def _threads(tenant: int, pairs: _Pairs, lines: set[int]) -> Program[list[Candidate]]:
    made: list[Candidate] = []
    for name, kind in _kinds(pairs, lambda row: row[1:4]):
        old, new = pairs[name]
        unsure = kind == "changed" and (old[1] != new[1] or new[4] in ("restore", None))
        made.append(Candidate(SnapshotChange("thread", kind, name), unsure))
        lines -= {row[1] for row in (old, new) if row is not None}
    found = (yield Batch(*(_NAME(tenant=tenant, thread=number) for number in lines))) if lines else []
    more = {name for rows in found for (name,) in rows} - {candidate.change.name for candidate in made}
    made += [Candidate(SnapshotChange("thread", "changed", name), unsure=True) for name in more]
    return [candidate for candidate in made if not candidate.change.name.startswith(thread_name(""))]


def _runs(at: dict[str, int], pairs: _Pairs, steps: set[str]) -> Program[list[Candidate]]:
    kinds = dict(_kinds(pairs, lambda row: (row[1], "open" if row[2] in MOVING else row[2], *row[3:])))
    kinds |= {name: "changed" for name in steps if name not in kinds}
    for name, (_, new) in pairs.items():
        if name not in kinds:  # its lease was renewed, it was answered, it was rewound: what it holds may be the same
            found = yield Batch(*(sql(**at, run=new[1]) for pair in _OF_RUN for sql in pair))
            if any(set(old) != set(new) for old, new in zip(found[::2], found[1::2], strict=True)):
                kinds[name] = "changed"
    return [Candidate(SnapshotChange("run", kind, name)) for name, kind in kinds.items()]


def said(row: ItemRow | None) -> Any:
    """What an item says, in whichever version."""
    return None if row is None else (row.body, row.kind, row.pinned, row.valid_from, row.valid_to)


# --- by their contents


class ThreadAt(NamedTuple):
    """A thread at one time: its row, its state if it has one, and whether it has labels or pending writes."""

    row: ThreadRow
    state: Loaded | None
    labelled: bool


class ComparedThread(NamedTuple):
    """A thread at two times."""

    then: ThreadAt | None  # None: it was not there
    same: bool  # its state and metadata; and all of it, if it counts as a whole
    whole: bool = False  # it has labels, or is another one of the same name


_LABELLED = Sql(
    """SELECT 1 FROM label WHERE tenant = :tenant AND thread = :thread
    UNION ALL SELECT 1 FROM write WHERE tenant = :tenant AND thread = :thread LIMIT 1"""
)


def read_at(ctx: StoreContext, op: Callable[[], Program[T]]) -> Flow[T]:
    """What a program reads in another store: at a snapshot."""
    return either(lambda: drive(ctx.driver, read(op)), lambda: adrive(ctx.driver, read(op)))


def compare_thread(past: StoreContext, live: StoreContext, tenant: int, name: str) -> Flow[ComparedThread]:
    """Whether a thread holds the same at two times. Raises Damaged if what it was cannot be read."""
    then = yield from read_at(past, partial(_look, tenant, name))
    now = yield from read_at(live, partial(_look, tenant, name, tolerant=True))
    if then is None or now is None:
        return ComparedThread(then, then is now, whole=True)
    if now.row.thread != then.row.thread or then.labelled or now.labelled or then.state is None:
        before = yield from read_at(past, partial(thread_digest, tenant, name))
        after = yield from read_at(live, partial(thread_digest, tenant, name))
        return ComparedThread(then, before == after, whole=True)
    same = now.state is not None and now.state.data == then.state.data
    return ComparedThread(then, same and metadata_of(now.row) == metadata_of(then.row))


def _look(tenant: int, name: str, *, tolerant: bool = False) -> Program[ThreadAt | None]:
    """`tolerant`: a state that is damaged is none."""
    row = yield from thread_or_stub(tenant, name)
    if row is None:
        return None
    [labelled] = yield Batch(_LABELLED(tenant=tenant, thread=row.thread))
    state = None
    if not labelled and row.head is not None:
        try:
            state = yield from read_state(tenant, row.tree, row.head)
        except Damaged:
            if not tolerant:
                raise
    return ThreadAt(row, state, bool(labelled))


def changes_of(
    past: StoreContext, live: StoreContext, tenant: int, found: Sequence[Candidate]
) -> Flow[list[SnapshotChange]]:
    """The changes without those of threads that hold the same at both times."""
    changes = []
    for change, unsure in found:
        try:
            same = unsure and (yield from compare_thread(past, live, tenant, change.name)).same
        except Damaged:
            same = False
        if not same:
            changes.append(change)
    return changes


# --- their states


def states_of(before: SnapshotStore, after: SnapshotStore, change: SnapshotChange) -> tuple[Any, Any]:
    """What a change is about, as values: a thread's states, a run's status and steps, an item's values."""
    return _state(before, change), _state(after, change)


def _state(store: SnapshotStore, change: SnapshotChange) -> Any:
    try:
        if change.what == "thread":
            point = store.thread(change.name).load()
            state = None if point is None else point.state
            return {key: state[key] for key in state if key != ENVELOPE} if isinstance(state, dict) else state
        if change.what == "run":
            run = store.get_run(change.name)
            return {"status": run.status, "steps": {f"{step.number} {step.name}": step.result for step in run.steps()}}
    except NotFound:
        return None
    if change.what == "deployment":
        found = store._run(deployments(store._context))
        return next((asdict(one) for one in found if one.function == change.name), None)
    item = store.memory(*change.namespace).get(change.name)
    return None if item is None else item.value
