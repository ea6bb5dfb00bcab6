"""The values that run handles return: a run's state, its steps, questions and events. Frozen, and without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from perdure.errors import NotFound, UsageError
from perdure.runs.calls import calls, recorded_values, saga, saving  # noqa: F401  # importing them declares their call kinds
from perdure.runs.calls.asks import AskSpec
from perdure.runs.calls.failures import error_text
from perdure.runs.journal.entries import (
    CHANGE,
    DONE,
    FAILED,
    INTENT,
    NOTE,
    SPAWN,
    VALUE,
    WAIT,
    Entry,
    Recorded,
    decompress,
)
from perdure.runs.journal.journal import paths_in
from perdure.runs.journal.kinds import Waiting, kind_of
from perdure.runs.journal.rows import RunRow
from perdure.values.codec import decode
from perdure.values.registry import Codec

_TIMES = ("deadline", "due", "answered_at")  # fields of `Entry.extra` stored in microseconds


def moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)


def noted(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an entry's extra fields with times as datetimes; None if it has none."""
    if extra is None:
        return None
    return {name: moment(value) if name in _TIMES and type(value) is int else value for name, value in extra.items()}


@dataclass(frozen=True)
class RunInfo:
    """The state of a run when it was read."""

    id: str
    function: str
    version: str
    status: str
    queue: str
    priority: int
    waiting_for: Waiting | None
    wake_at: datetime | None
    attempts: int  # how often it was claimed
    created_at: datetime
    changed_at: datetime
    is_fork: bool
    is_child: bool
    request: str | None
    is_due: bool  # True: what it waited for has come, and a worker may claim it

    @classmethod
    def of(cls, row: RunRow) -> RunInfo:
        waiting = row.status in ("waiting", "stuck", "paused", "queued")
        return cls(
            row.id,
            row.function,
            row.version,
            row.status,
            row.queue,
            row.priority,
            Waiting.of(row.waiting),
            moment(row.wake_at) if waiting and 0 < row.wake_at < 2**60 else None,
            row.fence,
            moment(row.created_at),
            moment(row.changed_at),
            row.origin is not None,
            row.parent is not None,
            row.request,
            row.status == "waiting" and row.wake_at == 0,
        )


@dataclass(frozen=True)
class Step:
    """One journaled call of a run."""

    number: int
    path: str
    name: str
    kind: str  # step, effect, undo, ask, sleep, receive, send, spawn, value, emit …
    status: str  # done, failed, in doubt, waiting, retrying
    attempts: int
    started_at: datetime
    ended_at: datetime | None
    result: Any = None
    error: str | None = None
    key: str | None = None
    shared: bool = False  # True in a fork: recorded by the run that it was forked from
    seq: int = 0
    note: dict[str, Any] | None = None
    result_bytes: int | None = None  # stored size of a large result; `steps(large=False)` leaves its value out


@dataclass(frozen=True)
class Question:
    """A question of a run to a person."""

    run: str
    path: str
    kind: str  # question, approval, doubt
    text: str
    options: list[Any] | None
    schema: dict[str, Any] | None
    approvers: list[str] | None
    quorum: int
    asked_at: datetime
    deadline: datetime | None
    status: str
    answers: tuple[tuple[str, Any, datetime], ...]
    key: str | None = None
    step: str | None = None
    reason: str | None = None  # for a doubt: why `reconcile` could not decide


@dataclass(frozen=True)
class Event:
    """Something that happened in a run: a journal entry, or a chunk that a generator step streams live."""

    kind: str  # intent, done, failed, value, wait, note, spawn, chunk, status
    path: str
    name: str
    value: Any
    at: datetime
    seq: int | None = None


def question_of(row: tuple[Any, ...], codec: Codec) -> Question:
    run, path, kind, question, terms_text, asked_at, deadline, status, _answer, answers = row
    terms = msgspec.json.decode(terms_text, type=AskSpec)
    given = tuple((who, decode(decompress(value), codec, raw=True), moment(at)) for who, value, at in answers)
    return Question(
        run,
        path,
        kind,
        question,
        terms.options,
        terms.schema,
        terms.approvers,
        terms.quorum,
        moment(asked_at),
        None if deadline is None else moment(deadline),
        status,
        given,
        terms.key,
        terms.step or path,
        terms.reason,
    )


def _kind(entries: Sequence[Recorded]) -> str:
    first = entries[0]
    if first.entry.path.startswith("undo:"):
        return "undo"
    if first.kind == SPAWN:
        return "spawn"
    if (kind := kind_of(first.entry.name)) is not None:
        return kind.shown_as or kind.name.removeprefix("perdure.")
    if any(recorded.kind == INTENT or "approved" in (recorded.entry.extra or {}) for recorded in entries):
        return "effect"
    return "value" if first.kind == VALUE else "step"


def _status(entries: Sequence[Recorded]) -> str:
    last = entries[-1]
    extra = last.entry.extra or {}
    if last.kind in (DONE, CHANGE):
        return "failed" if "error" in extra else "done"
    if last.kind == INTENT or (last.kind == WAIT and "doubt" in extra):
        return "in doubt"
    return {FAILED: "retrying", WAIT: "waiting", SPAWN: "done", VALUE: "done", NOTE: "done"}.get(last.kind, "done")


def value_text(entry: Entry, bodies: Mapping[bytes, bytes]) -> bytes | None:
    """Return the text of an entry's value, from the entry or from its blob; None if `bodies` lacks that blob."""
    stored = bodies.get(blob_in(entry) or b"") if entry.value is None else entry.value
    return None if stored is None else decompress(stored)


def blob_in(entry: Entry) -> bytes | None:
    """Return the hash of an entry's large result; None if it has none."""
    return entry.extra.get("blob") if entry.extra else None


def step_name(step: Any) -> str | int:
    """Return the path or number of a step. Raises UsageError if it is not a path, a number or a Step."""
    if isinstance(step, Step):
        return f"{step.path}@{step.seq}" if step.path.endswith("~emit") else step.path
    if isinstance(step, str) or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
        return step
    raise UsageError(f"a step is its path, its number or a Step of run.steps(), not {step!r}")


def entries_of(paths: dict[str, list[Recorded]], path: str) -> list[Recorded]:
    """Return the entries of a call; for a gather, those of all its branches."""
    if path in paths:
        return paths[path]
    return [recorded for other, group in paths.items() if other.startswith(path + ".") for recorded in group]


def step_path(run_id: str, paths: dict[str, list[Recorded]], step: str | int) -> str:
    """Return the path of a step named by its path or number. Raises NotFound if the run has no such step."""
    if isinstance(step, int):
        if not 1 <= step <= len(paths):
            raise NotFound(f"run {run_id!r} has {len(paths)} steps so far, and no step number {step}")
        return list(paths)[step - 1]
    if not entries_of(paths, step):
        raise NotFound(f"run {run_id!r} has no step {step!r} so far; `perdure steps {run_id}` lists them")
    return step


def steps_of(
    entries: Sequence[Recorded], codec: Codec, sizes: Mapping[bytes, int], bodies: Mapping[bytes, bytes]
) -> list[Step]:
    """Return the calls of a run in the order they began.

    `sizes` and `bodies` are those of large results, by hash.
    """
    found = []
    for number, group in enumerate(paths_in(entries).values(), 1):
        last, first = group[-1], group[0]
        ended = last.kind in (DONE, CHANGE, VALUE, NOTE, SPAWN)
        keys = [
            recorded.entry.extra["key"] for recorded in group if recorded.entry.extra and "key" in recorded.entry.extra
        ]
        errors = [
            r.entry.extra["error"] for r in group if r.entry.extra and isinstance(r.entry.extra.get("error"), dict)
        ]
        text = value_text(last.entry, bodies) if ended else None
        found.append(
            Step(
                number,
                first.entry.path,
                first.entry.name,
                _kind(group),
                _status(group),
                max(recorded.entry.attempt for recorded in group),
                moment(first.entry.at - (first.entry.duration_us if first.kind in (DONE, FAILED) else 0)),
                moment(last.entry.at) if ended else None,
                None if text is None else decode(text, codec, raw=True),
                error_text(errors[-1])
                if errors and (last.kind not in (DONE, CHANGE) or "error" in (last.entry.extra or {}))
                else None,
                keys[0] if keys else None,
                not last.own,
                last.seq,
                {k: v for k, v in (noted(last.entry.extra) or {}).items() if k not in ("error", "key", "blob")} or None,
                sizes.get(blob_in(last.entry) or b"") if ended else None,
            )
        )
    return found
