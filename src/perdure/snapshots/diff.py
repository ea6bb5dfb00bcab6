"""What changed between a snapshot and now, or a later snapshot: which threads, runs and items, and where in them.

A row that changed has its old form in the past and its new one in the table, or in a later past: two index reads for
each table, whatever the store's size. The states themselves are read only when a change is asked for its paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.memory.labels import labels_of, unescaped
from perdure.storage.columns import THREAD_METADATA
from perdure.storage.program import Batch, Program, Sql
from perdure.threads.compare import compare
from perdure.threads.models import Change

NOW = 2**62  # later than every snapshot


@dataclass(frozen=True, slots=True)
class SnapshotChange:
    """A thread, a run or an item of memory that is not as it was."""

    what: Literal["thread", "run", "item"]
    kind: Literal["added", "removed", "changed"]
    name: str  # of the thread, the run's id, the item's key
    namespace: tuple[str, ...] = ()  # of an item
    _states: Callable[[SnapshotChange], tuple[Any, Any]] | None = field(default=None, repr=False, compare=False)

    def paths(self) -> list[Change]:
        """Where the states differ. Reads both."""
        return compare(*self._states(self)) if self._states is not None else []

    def __str__(self) -> str:
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.kind]
        return f"{sign} {self.what} {'/'.join((*self.namespace, self.name))}"


def _changed(table: str, key: str, shown: str, alive: str = "1 = 1", **opens: Any) -> tuple[Sql, Sql]:
    """The rows that S sees and T does not, and those that T sees and S does not: key, name, what tells them apart."""
    columns = f"{key} AS number, {shown}"
    old = f"""SELECT {columns} FROM {table}_past
        WHERE tenant = :tenant AND stamp <= :s AND died > :s AND died <= :t AND {alive}"""
    now = f"tenant = :tenant AND stamp > :s AND stamp <= :t AND {alive}"
    new = f"""SELECT {columns} FROM {table} WHERE {now}
        UNION ALL SELECT {columns} FROM {table}_past WHERE {now} AND died > :t"""
    return Sql(old, **opens), Sql(new, **opens)


_THREADS = _changed(
    "thread", "thread", "name, head, metadata, generation", opens={3: THREAD_METADATA.at(0)}, tolerant=True
)
_RUNS = _changed("run", "run", "id, status, seq, fence")
_ITEMS = _changed("memory_item", "id", "key, space, version", "ended_at IS NULL AND gone IS NULL")
# A step of a run that was running writes to the journal alone.
_STEPS = Sql(
    """SELECT DISTINCT r.run, r.id FROM run r JOIN journal j ON j.tenant = r.tenant AND j.run = r.run
    WHERE r.tenant = :tenant AND r.stamp <= :s AND r.status = 'running' AND j.stamp > :s AND j.stamp <= :t"""
)
_SPACES = Sql(
    """SELECT space, path FROM memory_space WHERE tenant = :tenant
    UNION SELECT space, path FROM memory_space_past WHERE tenant = :tenant"""
)


def changes_between(tenant: int, s: int, t: int) -> Program[list[SnapshotChange]]:
    """What T sees otherwise than S does, T being later; NOW for the store as it is."""
    at = {"tenant": tenant, "s": s, "t": t}
    *found, steps = yield Batch(*(sql(**at) for pair in (_THREADS, _RUNS, _ITEMS) for sql in pair), _STEPS(**at))
    threads = _paired({row[0]: row for row in found[0]}, {row[0]: row for row in found[1]})
    runs = _paired({row[0]: row for row in found[2]}, {row[0]: row for row in found[3]})
    changes = [SnapshotChange("thread", kind, row[1]) for kind, row in threads if not row[1].startswith("run:")]
    changes += [SnapshotChange("run", kind, row[1]) for kind, row in runs]
    changes += [SnapshotChange("run", "changed", name) for _, name in steps]
    items = _paired({row[2:0:-1]: row for row in found[4]}, {row[2:0:-1]: row for row in found[5]})
    spaces: dict[int, str] = dict((yield Batch(_SPACES(tenant=tenant)))[0]) if items else {}
    changes += [SnapshotChange("item", kind, unescaped(row[1]), labels_of(spaces[row[2]])) for kind, row in items]
    return changes


def _paired(old: dict[Any, Any], new: dict[Any, Any]) -> list[tuple[Literal["added", "removed", "changed"], Any]]:
    found: list[tuple[Literal["added", "removed", "changed"], Any]] = []
    found += [("removed", row) for key, row in old.items() if key not in new]
    found += [("changed", row) for key, row in new.items() if key in old and row[1:] != old[key][1:]]
    found += [("added", row) for key, row in new.items() if key not in old]
    return found
