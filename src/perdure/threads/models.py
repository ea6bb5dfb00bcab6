"""The objects that the public API returns: checkpoints, descriptions of threads, changes, reports.

They are plain data. Only `Checkpoint` does I/O: one from `history()` loads its state on the first `state` or
`astate()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import orjson

from perdure.errors import Damaged
from perdure.log.ids import show_id
from perdure.log.records import Record
from perdure.log.thread_table import ThreadRow, metadata_of

if TYPE_CHECKING:  # `verify` is imported late, and thread.py imports this module
    from perdure.log.verify import Findings
    from perdure.threads.thread import Thread

_UNSET: Any = object()


def moment(at_us: int) -> datetime:
    """Return a stored time as an aware datetime in UTC, exact to the microsecond."""
    seconds, microseconds = divmod(at_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def _decoded(record: Record) -> dict[str, Any]:
    try:
        return dict(orjson.loads(record.metadata or "{}"))
    except (ValueError, TypeError) as error:
        raise Damaged(f"the metadata of checkpoint {show_id(record.id)} is damaged ({error})") from error


class Checkpoint:
    """One saved state: its id, its place in the history, its note and, loaded on first use, the state."""

    __slots__ = ("_metadata", "_record", "_source", "_state", "is_head", "skipped", "thread")

    def __init__(
        self,
        thread: str,
        record: Record,
        *,
        is_head: bool,
        state: Any = _UNSET,
        source: Thread | None = None,
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.thread: str = thread
        #: whether it was the thread's head when this object was created; False after a save that became a branch
        self.is_head: bool = is_head
        #: ids of the damaged checkpoints that `load` skipped to reach this one, newest first
        self.skipped: tuple[str, ...] = skipped
        self._record = record
        self._metadata: dict[str, Any] | None = None
        self._state = state
        self._source = source  # loads the state on first use

    @property
    def id(self) -> str:
        """The checkpoint's id: 13 characters that sort by time."""
        return show_id(self._record.id)

    @property
    def parent(self) -> str | None:
        """The id of the checkpoint before it, or None for the first of a thread."""
        return show_id(self._record.parent) if self._record.parent is not None else None

    @property
    def step(self) -> int:
        """The number of checkpoints before it on its line."""
        return self._record.step

    @property
    def at(self) -> datetime:
        """The time of the save, in UTC."""
        return moment(self._record.at)

    @property
    def note(self) -> str | None:
        return self._record.note

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the save. Raises Damaged if it is not JSON. Only `verify` detects every change to it."""
        if self._metadata is None:
            self._metadata = _decoded(self._record) if self._record.metadata else {}
        return self._metadata

    @property
    def kind(self) -> str:
        """The operation that saved it: "state" (save), "update" or "rollback"."""
        return self._record.kind

    @property
    def size_bytes(self) -> int:
        """The length of its state as JSON text, in bytes."""
        return self._record.size

    @property
    def state(self) -> Any:
        """The state. The first use loads it and blocks; in async code use `await checkpoint.astate()`."""
        if self._state is _UNSET:
            assert self._source is not None
            self._state = self._source.load(self.id, strict=True).state
        return self._state

    async def astate(self) -> Any:
        """`state`, awaited."""
        if self._state is _UNSET:
            assert self._source is not None
            self._state = (await self._source.aload(self.id, strict=True)).state
        return self._state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and (self.thread, self.id) == (other.thread, other.id)

    def __hash__(self) -> int:
        return hash((self.thread, self.id))

    def __repr__(self) -> str:
        note = f" {self.note!r}" if self.note else ""
        return f"<Checkpoint {self.id} step {self.step} of {self.thread!r}{note}>"


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """A thread as `store.threads()` lists it."""

    name: str
    metadata: dict[str, Any]
    head: str | None
    created_at: datetime
    updated_at: datetime
    forked_at: str | None
    cursor: str  # its place in lists: `store.threads(before=cursor)` continues after it

    @classmethod
    def of(cls, row: ThreadRow) -> ThreadInfo:
        try:
            return cls(
                name=row.name,
                metadata=metadata_of(row),
                head=show_id(row.head) if row.head is not None else None,
                created_at=moment(row.created_at),
                updated_at=moment(row.updated_at),
                forked_at=show_id(row.origin) if row.origin is not None else None,
                cursor=f"{row.updated_at}.{row.thread}",
            )
        except (ValueError, OverflowError, OSError) as error:  # not JSON, or a time out of datetime's range
            raise Damaged(f"the row of thread {row.name!r} is damaged ({error}); run `perdure store verify`") from error


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two states. `path` is its place: keys of mappings and positions in lists."""

    path: tuple[Any, ...]
    kind: Literal["added", "removed", "changed"]
    before: Any = None
    after: Any = None

    def __str__(self) -> str:
        where = "".join(f"[{part!r}]" for part in self.path) or "(the whole state)"
        match self.kind:
            case "added":
                return f"+ {where} = {self.after!r}"
            case "removed":
                return f"- {where} = {self.before!r}"
            case _:
                return f"~ {where}: {self.before!r} -> {self.after!r}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that `verify` reports."""

    thread: str
    checkpoint: str | None
    what: str
    run: str | None = None  # the run whose journal, questions or results have the problem

    def __str__(self) -> str:
        where = f"{self.thread} {self.checkpoint}" if self.checkpoint else self.thread
        return f"{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`: how much was checked, and the problems."""

    threads: int
    checkpoints: int
    problems: tuple[Problem, ...] = ()
    runs: int = 0
    versions: int = 0  # of items of memory

    @classmethod
    def of(cls, findings: Iterable[Findings]) -> Report:
        threads = checkpoints = 0
        problems: list[Problem] = []
        for part in findings:
            threads += part.threads
            checkpoints += part.records
            problems += [
                Problem(thread, show_id(record) if record is not None else None, what)
                for thread, record, what in part.problems
            ]
        return cls(threads, checkpoints, tuple(problems))

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Pruned:
    """The checkpoints that a prune or a delete has removed.

    `rebased` checkpoints got a full text of their own. `kept` older ones stay because a pin, a fork or a later
    checkpoint needs them.
    """

    removed: int
    rebased: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The amount of data that a tenant stores. Bytes are those of the stored bodies, after compression."""

    threads: int
    checkpoints: int
    keyframes: int
    difference_bytes: int
    keyframe_bytes: int
    state_bytes: int = field(metadata={"doc": "what storing every state in full as JSON would take"})
    pending_bytes: int = 0  # of values attached to checkpoints of lines
    runs: int = 0
    run_bytes: int = 0  # journals, arguments and results of runs

    @property
    def stored_bytes(self) -> int:
        return self.difference_bytes + self.keyframe_bytes + self.pending_bytes

    @property
    def ratio(self) -> float:
        return self.state_bytes / self.stored_bytes if self.stored_bytes else 1.0
