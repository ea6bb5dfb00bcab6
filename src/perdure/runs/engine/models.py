"""The values that run handles return: steps, questions and events (`RunInfo` is in `run_table.py`). Without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from perdure.errors import NotFound, UsageError
from perdure.runs.calls import calls, recorded_values, saga, saving  # noqa: F401  # importing them declares their call kinds
from perdure.runs.calls.asks import AskSpec, arguments_in
from perdure.runs.calls.evidence import traceback_text
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
from perdure.runs.journal.kinds import kind_of
from perdure.threads.models import moment
from perdure.values.codec import decode
from perdure.values.registry import Codec

ENDED = (DONE, CHANGE, VALUE, NOTE, SPAWN)  # kinds of entries after which a call has ended
_TIMES = ("deadline", "due", "answered_at")  # fields of `Entry.extra` stored in microseconds


def noted(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an entry's extra fields with times as datetimes; None if it has none."""
    if extra is None:
        return None
    return {name: moment(value) if name in _TIMES and type(value) is int else value for name, value in extra.items()}


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
    result_bytes: int | None = None  # stored size of a large result, which `steps(values="small")` leaves out
    arguments: dict[str, Any] | None = None  # of an effect
    traceback: str | None = None  # of the error
    cursor: str = ""  # in pages: `steps(after=cursor)` continues after it


@dataclass(frozen=True)
class Question:
    """A question of a run, or of a graph's thread, to a person."""

    run: str  # its id; of a graph: the name of the thread
    path: str  # the step; of a graph: the id of the interrupt
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
    effect: str | None = None  # of an approval or a doubt: the name of the effect
    arguments: dict[str, Any] | None = None  # its arguments, secrets masked; of a graph: what the interrupt shows
    thread: str | None = None  # of a graph's `interrupt()`: the thread that it is in; None: a run asks


EventKind = Literal[
    "intent", "done", "failed", "value", "wait", "emit", "spawn", "change", "chunk", "reset", "lost", "status"
]


@dataclass(frozen=True)
class Event:
    """Something that happened in a run: an entry of its journal, or a chunk of a step that runs.

    `kind` is one of intent, done, failed, value, wait, emit, spawn, change (entries), chunk, reset, lost (of a step
    that runs) and status (the last event). After a `reset`, discard the chunks of `path` so far. `lost` says how many
    chunks are missing. The value of `done` is the result, which replaces the step's chunks.
    """

    kind: EventKind
    path: str
    name: str
    value: Any
    at: datetime
    seq: int | None = None  # of an entry: its number in the journal
    cursor: str = ""  # `run.stream(after=cursor)` continues after this event, in any process


def question_of(row: tuple[Any, ...], codec: Codec) -> Question:
    run, path, kind, question, terms_text, asked_at, deadline, status, _answer, answer_rows = row
    terms = msgspec.json.decode(terms_text, type=AskSpec)
    answers = tuple((who, decode(decompress(value), codec, raw=True), moment(at)) for who, value, at in answer_rows)
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
        answers,
        terms.key,
        terms.step or path,
        terms.reason,
        terms.effect,
        arguments_in(terms, codec),
    )


def kind_shown(first: Recorded, *, is_effect: bool) -> str:
    """Return the kind of a call, from its first entry and from whether an entry of it is of an effect."""
    if first.entry.path.startswith("undo:"):
        return "undo"
    if first.kind == SPAWN:
        return "spawn"
    if (kind := kind_of(first.entry.name)) is not None:
        return kind.shown_as or kind.name.removeprefix("perdure.")
    return "effect" if is_effect else "value" if first.kind == VALUE else "step"


def is_of_effect(recorded: Recorded) -> bool:
    return recorded.kind == INTENT or "approved" in (recorded.entry.extra or ())


def status_shown(last: Recorded) -> str:
    """Return the status of a call, from its last entry."""
    extra = last.entry.extra or ()
    if last.kind in (DONE, CHANGE):
        return "failed" if "error" in extra else "done"
    if last.kind == INTENT or (last.kind == WAIT and "doubt" in extra):
        return "in doubt"
    return {FAILED: "retrying", WAIT: "waiting"}.get(last.kind, "done")


def began_at(first: Recorded) -> int:
    """Return when a call began, in microseconds, from its first entry."""
    return first.entry.at - (first.entry.duration_us if first.kind in (DONE, FAILED) else 0)


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
        return step.path
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
    entries: Sequence[Recorded],
    codec: Codec,
    sizes: Mapping[bytes, int],
    bodies: Mapping[bytes, bytes],
    *,
    values: bool = True,
) -> list[Step]:
    """Return the calls of a run in the order they began. With `values=False` nothing is decoded.

    `sizes` and `bodies` are those of large results, by hash.
    """
    groups = enumerate(paths_in(entries).values(), 1)
    return [_step_of(number, group, codec, sizes, bodies, values) for number, group in groups]


def _step_of(
    number: int,
    group: list[Recorded],
    codec: Codec,
    sizes: Mapping[bytes, int],
    bodies: Mapping[bytes, bytes],
    values: bool,
) -> Step:
    last, first = group[-1], group[0]
    ended = last.kind in ENDED
    extras = [recorded.entry.extra for recorded in group if recorded.entry.extra]
    errors = [extra["error"] for extra in extras if isinstance(extra.get("error"), dict)]
    if last.kind in (DONE, CHANGE) and "error" not in (last.entry.extra or {}):
        errors = []
    text = value_text(last.entry, bodies) if ended and values else None
    intents = [recorded.entry.value for recorded in group if recorded.kind == INTENT and values]
    noted_extra = noted(last.entry.extra) or {}
    return Step(
        number,
        first.entry.path,
        first.entry.name,
        kind_shown(first, is_effect=any(map(is_of_effect, group))),
        status_shown(last),
        max(recorded.entry.attempt for recorded in group),
        moment(began_at(first)),
        moment(last.entry.at) if ended else None,
        None if text is None else decode(text, codec, raw=True),
        error_text(errors[-1]) if errors else None,
        next((extra["key"] for extra in extras if "key" in extra), None),
        not last.own,
        last.seq,
        {k: v for k, v in noted_extra.items() if k not in ("error", "key", "blob")} or None,
        sizes.get(blob_in(last.entry) or b"") if ended else None,
        decode(decompress(intents[0]), codec, raw=True) if intents and intents[0] is not None else None,
        traceback_text(errors[-1]) if errors else None,
    )
