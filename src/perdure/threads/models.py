"""What the public API hands out: checkpoints, threads' descriptions, comparisons, reports.

Plain data. A checkpoint of `history()` loads its state when `state` or `astate()` asks for it.
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

if TYPE_CHECKING:  # imported by what verifies
    from perdure.log.verify import Findings
    from perdure.threads.thread import Thread

_UNSET: Any = object()


def moment(at_us: int) -> datetime:
    """A stored time as an aware datetime, in UTC, exact to the microsecond."""
    seconds, microseconds = divmod(at_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def _decoded(record: Record) -> dict[str, Any]:
    try:
        return dict(orjson.loads(record.metadata or "{}"))
    except (ValueError, TypeError) as error:
        raise Damaged(f"the metadata of checkpoint {show_id(record.id)} is damaged ({error})") from error


class Checkpoint:
    """One saved state: its id, its place in the history, its note; the state itself when asked for."""

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
        #: whether it was the thread's newest when this object was made; False after a save: it became a branch
        self.is_head: bool = is_head
        #: damaged checkpoints that `load` had to pass over to reach this one, newest first
        self.skipped: tuple[str, ...] = skipped
        self._record = record
        self._metadata: dict[str, Any] | None = None
        self._state = state
        self._source = source  # loads the state when it is asked for

    @property
    def id(self) -> str:
        """Its name: 13 characters that sort by time."""
        return show_id(self._record.id)

    @property
    def parent(self) -> str | None:
        """The id of the checkpoint that it follows; None for a thread's first."""
        return show_id(self._record.parent) if self._record.parent is not None else None

    @property
    def step(self) -> int:
        """How many checkpoints came before it on its line."""
        return self._record.step

    @property
    def at(self) -> datetime:
        """When it was saved, in UTC."""
        return moment(self._record.at)

    @property
    def note(self) -> str | None:
        return self._record.note

    @property
    def metadata(self) -> dict[str, Any]:
        """What was saved with it. Raises Damaged if that is no JSON any more; `verify` notices every change."""
        if self._metadata is None:
            self._metadata = _decoded(self._record) if self._record.metadata else {}
        return self._metadata

    @property
    def kind(self) -> str:
        """How it came about: "state" (save), "update" or "rollback"."""
        return self._record.kind

    @property
    def size_bytes(self) -> int:
        """How long its state is as JSON text."""
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
            )
        except (ValueError, OverflowError, OSError) as error:  # not JSON, or a time that no calendar has
            raise Damaged(f"the row of thread {row.name!r} is damaged ({error}); run `perdure store verify`") from error


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two states. `path` leads to it: keys of mappings, positions in lists."""

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
    """Something `verify` found wrong."""

    thread: str
    checkpoint: str | None
    what: str
    run: str | None = None  # whose journal, questions or results it is about

    def __str__(self) -> str:
        where = f"{self.thread} {self.checkpoint}" if self.checkpoint else self.thread
        return f"{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` looked at, and what it found."""

    threads: int
    checkpoints: int
    problems: tuple[Problem, ...] = ()
    runs: int = 0
    versions: int = 0  # of items of memory

    @classmethod
    def of(cls, findings: Iterable[Findings]) -> Report:
        threads = checkpoints = 0
        problems: list[Problem] = []
        for found in findings:
            threads += found.threads
            checkpoints += found.records
            problems += [
                Problem(thread, show_id(record) if record is not None else None, what)
                for thread, record, what in found.problems
            ]
        return cls(threads, checkpoints, tuple(problems))

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune or a delete removed, how many checkpoints had to be given a full text of their own, and how many
    older ones stay because a pin, a fork or a later checkpoint needs them."""

    removed: int
    rebased: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """How much a tenant keeps, in figures. Bytes are those of the stored bodies, as compressed."""

    threads: int
    checkpoints: int
    keyframes: int
    difference_bytes: int
    keyframe_bytes: int
    state_bytes: int = field(metadata={"doc": "what storing every state in full as JSON would take"})
    pending_bytes: int = 0  # what is attached to checkpoints of lines
    runs: int = 0
    run_bytes: int = 0  # journals, arguments and results of runs

    @property
    def stored_bytes(self) -> int:
        return self.difference_bytes + self.keyframe_bytes + self.pending_bytes

    @property
    def ratio(self) -> float:
        return self.state_bytes / self.stored_bytes if self.stored_bytes else 1.0
