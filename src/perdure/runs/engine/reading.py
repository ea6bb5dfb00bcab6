"""Reads of a run for people: pages of steps, one step, arguments, outcome, messages.

They run no user code and never wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal

import orjson

from perdure.errors import NotFound, UsageError
from perdure.runs.calls.children import described_end
from perdure.runs.calls.evidence import traceback_text
from perdure.runs.calls.failures import error_text
from perdure.runs.engine.flows import bodies_of, locate
from perdure.runs.engine.models import (
    ENDED,
    Step,
    began_at,
    blob_in,
    is_of_effect,
    kind_shown,
    status_shown,
    step_name,
    steps_of,
)
from perdure.runs.journal.blobs import blob_sizes
from perdure.runs.journal.entries import INTENT, SPAWN, Recorded, decompress, unpack
from perdure.runs.journal.journal import NO_CALLS, PAGE_OF_ROWS, SEQ_MAX, outcome_of, read_journal
from perdure.runs.journal.rows import COLUMNS, FINISHED, RUN_ENCRYPTED, value_of
from perdure.runs.journal.standing import UNDO
from perdure.runs.run_table import RunInfo, RunRow
from perdure.runs.tables import JOURNAL_BODY, MAIL_VALUE, TAKEN
from perdure.storage.program import Flow, Sql, fetch, read
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.codec import decode
from perdure.values.registry import Codec

Values = bool | Literal["small"]
_PAGE = 500
_ROWS_MAX = 2000  # journal rows that are read at once
_IDS = Sql("SELECT run, id FROM run WHERE tenant = :tenant AND run IN {numbers:ids}")
_FORKS = Sql(
    f"""SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND origin = :run
    ORDER BY created_at DESC, run DESC LIMIT :limit""",
    opens=RUN_ENCRYPTED,
)
_EFFECTS = Sql(
    f"""SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since
    AND kind IN ({INTENT}, {SPAWN}) ORDER BY seq""",
    opens={2: JOURNAL_BODY.at("run", 0, 1)},
)
_MESSAGES = Sql(
    "SELECT seq, value, key, topic, at, state FROM mail WHERE tenant = :tenant AND run = :run ORDER BY seq",
    opens={1: MAIL_VALUE.at("run", 2)},
)


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    status: str
    result: Any = None
    error: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Outline:
    """All calls of a run in brief, in the order they began: enough to draw them, whatever their number.

    The lists have one item for each call. Times are seconds since 1970.
    """

    kinds: list[str]
    statuses: list[str]
    started_at: list[float]
    ended_at: list[float | None]
    has_state: bool  # True: one of them recorded `perdure.state()`
    _calls: dict[str, _BriefCall] = field(repr=False)  # by path
    _read: tuple[int, int, int] = (0, 0, 0)  # the run, its `since`, and the last row that has all rows before it

    def __len__(self) -> int:
        return len(self.kinds)

    def cursor(self, number: int) -> str | None:
        """Return the cursor of a step: `steps(after=cursor)` continues after it. None for number 0."""
        if number == 0:
            return None
        if not 0 < number <= len(self):
            raise NotFound(f"the run has {len(self)} steps so far, and no step number {number}")
        places = list(self._calls.items())[:number]
        seq = places[-1][1].seq
        return " ".join((str(number), str(seq), *(path for path, call in places if call.end > seq)))


@dataclass(frozen=True)
class Message:
    """A message that was sent to a run."""

    topic: str
    value: Any
    at: datetime
    key: str
    is_received: bool


def infos(tenant: int, rows: Sequence[RunRow]) -> Flow[list[RunInfo]]:
    """Return what users see of runs, with the ids of their parents and of the runs that they were forked from."""
    numbers = sorted({number for row in rows for number in (row.parent, row.origin) if number is not None})
    pairs = (yield from fetch(_IDS, tenant=tenant, ids=orjson.dumps(numbers).decode())) if numbers else []
    ids: dict[int | None, str] = dict(pairs)
    return [
        replace(RunInfo.of(row), parent=ids.get(row.parent), origin=ids.get(row.origin))
        if row.parent is not None or row.origin is not None
        else RunInfo.of(row)
        for row in rows
    ]


def forks(ctx: StoreContext, run_id: str, limit: int | None) -> Flow[list[RunInfo]]:
    """Return the forks of a run, the newest first."""
    tenant, row = yield from locate(ctx, run_id)
    rows = yield from fetch(_FORKS, tenant=tenant, run=row.run, limit=SEQ_MAX if limit is None else limit)
    return (yield from infos(tenant, list(map(RunRow._make, rows))))


def can_undo(ctx: StoreContext, run_id: str) -> Flow[bool]:
    """Return whether a run has effects with an undo that were not undone, or children."""
    tenant, row = yield from locate(ctx, run_id)
    rows = yield from fetch(_EFFECTS, tenant=tenant, run=row.run, since=row.since)
    calls = [(kind, unpack(body)) for _, kind, body in rows]
    undone = {entry.path for _, entry in calls if entry.path.startswith(UNDO)}
    return any(
        kind == SPAWN or ((entry.extra or {}).get("undo") and UNDO + entry.path not in undone) for kind, entry in calls
    )


def steps(
    ctx: StoreContext, run_id: str, values: Values, after: Step | str | None = None, limit: int | None = None
) -> Flow[list[Step]]:
    """Return calls of a run in the order they began: all of them, or a page after a step."""
    tenant, row = yield from locate(ctx, run_id)
    if (after is None and limit is None) or row.origin is not None:  # a fork's journal has parts of other runs
        entries: list[Recorded] = yield from read(partial(read_journal, tenant, row))
        reader = _Reader(row, _Place(), SEQ_MAX)
        reader.add(entries)
        calls = yield from _placed(ctx, tenant, reader, entries, values)
        begin = _Place.of(after).number
        return calls[begin : None if limit is None else begin + limit]
    place = _Place.of(after)
    reader = _Reader(row, place, SEQ_MAX if limit is None else limit)
    while not reader.is_over:
        params = {"tenant": tenant, "run": row.run, "since": reader.seq, "last": SEQ_MAX, "limit": reader.rows}
        reader.take((yield from fetch(PAGE_OF_ROWS, **params)))
    entries = [one for group in reader.groups.values() for one in group]
    return (yield from _placed(ctx, tenant, reader, entries, values))


def outline(ctx: StoreContext, run_id: str, before: Outline | None = None) -> Flow[Outline]:
    """Return all calls of a run in brief. `before`, an earlier outline of it, saves reading its rows again."""
    tenant, row = yield from locate(ctx, run_id)
    if row.origin is not None:  # a fork's journal has parts of other runs
        return _outline(_sorted_in({}, (yield from read(partial(read_journal, tenant, row)))))
    is_same = before is not None and before._read[:2] == (row.run, row.since)
    calls, seq = (dict(before._calls), before._read[2]) if before is not None and is_same else ({}, row.since)
    whole, is_over = seq, False
    while not is_over:
        rows = yield from fetch(PAGE_OF_ROWS, tenant=tenant, run=row.run, since=seq, last=SEQ_MAX, limit=_ROWS_MAX)
        _sorted_in(calls, (Recorded(row.run, seq, kind, unpack(body)) for seq, kind, body in rows))
        for number, _, _ in rows:  # rows of parallel branches may be committed in another order
            whole += number == whole + 1
        if not rows and before is not None and seq == before._read[2] and is_same:
            return before  # nothing was recorded since
        seq, is_over = rows[-1][0] if rows else seq, len(rows) < _ROWS_MAX
    return _outline(calls, (row.run, row.since, whole))


class _BriefCall:
    """What an outline says of a call. It keeps no entry, because entries hold values."""

    __slots__ = ("at", "began_at", "end", "has_state", "kind", "seq", "status")

    def __init__(self, first: Recorded) -> None:
        self.seq, self.began_at = first.seq, began_at(first)
        self.kind, self.has_state = kind_shown(first, is_effect=is_of_effect(first)), False
        self.add(first)

    def add(self, recorded: Recorded) -> None:
        if self.kind in ("step", "value") and is_of_effect(recorded):
            self.kind = "effect"
        self.status, self.at = status_shown(recorded), recorded.entry.at
        self.end = recorded.seq if recorded.kind in ENDED else SEQ_MAX
        self.has_state = self.has_state or "state" in (recorded.entry.extra or ())


def _sorted_in(calls: dict[str, _BriefCall], entries: Iterable[Recorded]) -> dict[str, _BriefCall]:
    for recorded in entries:
        path = recorded.entry.path
        if path in calls:
            calls[path].add(recorded)
        elif path not in NO_CALLS and not (recorded.entry.extra or {}).get("retried"):
            calls[path] = _BriefCall(recorded)
    return calls


def _outline(calls: dict[str, _BriefCall], read: tuple[int, int, int] = (0, 0, 0)) -> Outline:
    if read[0]:
        calls = dict(sorted(calls.items(), key=lambda item: item[1].seq))
    every = calls.values()
    return Outline(
        [one.kind for one in every],
        [one.status for one in every],
        [one.began_at / 1e6 for one in every],
        [one.at / 1e6 if one.end < SEQ_MAX else None for one in every],
        any(one.has_state for one in every),
        calls,
        read,
    )


def _placed(
    ctx: StoreContext, tenant: int, reader: _Reader, entries: list[Recorded], values: Values
) -> Flow[list[Step]]:
    """Return the calls of a reader, with their numbers and cursors."""
    apart = list(dict.fromkeys(key for recorded in entries if (key := blob_in(recorded.entry)) is not None))
    sizes = (yield from read(partial(blob_sizes, tenant, apart))) if apart else {}
    bodies = yield from bodies_of(tenant, apart if values is True else [])
    calls = steps_of(entries, ctx.codec, sizes, bodies, values=values is not False)
    places = zip(calls, reader.cursors(), strict=True)
    return [replace(step, number=number, cursor=cursor) for step, (number, cursor) in places]


@dataclass(frozen=True)
class _Place:
    """Where a page begins: after how many steps and which journal row. `open`: the calls before it that end later."""

    number: int = 0
    seq: int = 0
    open: tuple[str, ...] = ()

    @classmethod
    def of(cls, after: Step | str | None) -> _Place:
        cursor = after.cursor if isinstance(after, Step) else after
        if cursor is None:
            return cls()
        try:
            number, seq, *paths = cursor.split(" ")
            return cls(int(number), int(seq), tuple(paths))
        except (ValueError, AttributeError):
            raise UsageError(f"after={after!r}: a Step of run.steps(), or its cursor") from None


class _Reader:
    """Collects the calls that begin after a place, with all their rows, however far apart these are."""

    def __init__(self, row: RunRow, place: _Place, limit: int) -> None:
        self._place, self._limit = place, limit
        self.seq = max(place.seq, row.since)
        self.rows = min(_ROWS_MAX, limit + 10)
        self.groups: dict[str, list[Recorded]] = {}
        self.is_over = limit == 0
        self._run = row.run
        self._ends: dict[str, int] = dict.fromkeys(place.open, SEQ_MAX)  # the last row of each call
        self._is_full = False

    def take(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Take a page of journal rows."""
        page = [Recorded(self._run, seq, kind, unpack(body)) for seq, kind, body in rows]
        self.add(page)
        self.seq = page[-1].seq if page else self.seq
        is_complete = all(end < SEQ_MAX for key, end in self._ends.items() if key in self.groups)
        self.is_over = len(page) < self.rows or (self._is_full and is_complete)

    def add(self, entries: Iterable[Recorded]) -> None:
        for recorded in entries:
            if recorded.entry.path not in NO_CALLS:
                self._add(recorded.entry.path, recorded)

    def _add(self, key: str, recorded: Recorded) -> None:
        if key in self.groups:
            self.groups[key].append(recorded)
        elif key not in self._place.open and not (recorded.entry.extra or {}).get("retried"):
            if len(self.groups) == self._limit:
                self._is_full = True
                return
            self.groups[key] = [recorded]
        self._ends[key] = recorded.seq if recorded.kind in ENDED else SEQ_MAX

    def cursors(self) -> Iterable[tuple[int, str]]:
        """Yield the number and the cursor of each call."""
        going = list(self._place.open)
        for number, (key, group) in enumerate(self.groups.items(), self._place.number + 1):
            going = [one for one in (*going, key) if self._ends[one] > group[0].seq]
            yield number, " ".join((str(number), str(group[0].seq), *going))


def step(ctx: StoreContext, run_id: str, target: Step | str | int) -> Flow[Step]:
    """Return one call of a run with its values. Raises NotFound."""
    name = step_name(target)
    after: Step | None = None
    while page := (yield from steps(ctx, run_id, False, after, _PAGE)):
        for before, one in zip((after, *page), page, strict=False):
            if name in (one.path, one.number, f"{one.path}@{one.seq}"):
                [full] = yield from steps(ctx, run_id, True, before, 1)
                return full
        after = page[-1]
    raise NotFound(f"run {run_id!r} has no step {name!r} so far; `perdure steps {run_id}` lists them")


def find_steps(ctx: StoreContext, run_id: str, text: str, limit: int) -> Flow[list[Step]]:
    """Return the first calls whose name, path, status, key or error has a text."""
    matches: list[Step] = []
    after: Step | None = None
    while len(matches) < limit and (page := (yield from steps(ctx, run_id, False, after, _PAGE))):
        said = ((one, (one.name, one.path, one.kind, one.status, one.key, one.error)) for one in page)
        matches += [one for one, parts in said if any(text.lower() in part.lower() for part in parts if part)]
        after = page[-1]
    return matches[:limit]


def arguments(ctx: StoreContext, run_id: str, raw: bool) -> Flow[dict[str, Any]]:
    """Return the arguments of a run by name. With `raw`, decoding needs no classes."""
    tenant, row = yield from locate(ctx, run_id)
    text = yield from read(partial(value_of, tenant, row.run, "args"))
    if text is None:
        raise NotFound(f"the arguments of run {run_id!r} are not on record")
    return dict(decode(decompress(text), ctx.codec, raw=raw))


def outcome(ctx: StoreContext, run_id: str, raw: bool) -> Flow[RunOutcome | None]:
    """Return how a run ended; None if it has not."""
    tenant, row = yield from locate(ctx, run_id)
    if row.status not in FINISHED:
        return None
    text = yield from read(partial(outcome_of, tenant, row))
    if row.status == "done":
        return RunOutcome("done", decode(decompress(text or b"null"), ctx.codec, raw=raw))
    described = described_end(text, ctx.codec)
    error = error_text(described) if described.get("type") else None
    return RunOutcome(row.status, None, error, traceback_text(described))


def messages(ctx: StoreContext, run_id: str) -> Flow[list[Message]]:
    """Return the messages that a run got, the oldest first."""
    tenant, row = yield from locate(ctx, run_id)
    rows = yield from fetch(_MESSAGES, tenant=tenant, run=row.run)
    return [_message(row, ctx.codec) for row in rows]


def _message(row: tuple[Any, ...], codec: Codec) -> Message:
    _, value, key, topic, at, state = row
    return Message(topic, decode(decompress(value), codec, raw=True), moment(at), key, state == TAKEN)
