"""Stepping through what led to a failure: at each step of a run its result, the state, what changed in it, and why.

Everything comes from the journal and the states of the run at a snapshot; no code of the run is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from perdure.errors import JournalDamaged, NotFound
from perdure.runs.calls.evidence import traceback_text
from perdure.runs.calls.failures import error_text
from perdure.runs.engine import flows, reading
from perdure.runs.engine.models import Step
from perdure.runs.history.state_history import checkpoints_of, load_state
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import INTENT, Recorded, decompress
from perdure.runs.journal.journal import outcome_of, paths_in, read_journal
from perdure.runs.journal.rows import ENVIRONMENT, value_of
from perdure.runs.run_table import RunInfo, RunRow
from perdure.snapshots.handle import Snapshot
from perdure.storage.program import Flow, drive, read
from perdure.threads.compare import compare
from perdure.threads.context import StoreContext
from perdure.threads.models import Change
from perdure.values.codec import decode
from perdure.values.secrets import redacted


@dataclass(frozen=True)
class Frame:
    """A step of a run, and the state of the run when it had ended."""

    step: Step
    arguments: Any  # of an effect, as they were recorded
    state: Any  # None: there was none yet, or it was pruned
    changes: list[Change]  # of the state, since the step before had ended
    context: Mapping[str, Any] | None  # what the prompt was made of, if the step says so: see `context_of`
    traceback: str | None  # of its failure


@dataclass(frozen=True)
class Incident:
    """The steps that led to the end of a run. Iterating over it yields its frames, the first step first."""

    run: RunInfo
    error: str | None
    traceback: str | None
    environment: Mapping[str, Any] | None  # of the process in which it failed, with its hash
    _steps: list[tuple[Step, list[Recorded], int | None]] = field(repr=False)
    _context: StoreContext = field(repr=False)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Frame]:
        return (frame for frame, _ in self._frames())

    def blame(self, path: str, good: Incident | None = None) -> list[Frame]:
        """Return the steps that changed a path of the state ("cart.0.price"), the first one first.

        `good` is a run of the same steps that went well. With it, return the steps after which the path differs.
        """
        pairs = self._frames() if good is None else zip(self, (frame.state for frame in good), strict=False)
        return [frame for frame, other in pairs if _differences(_at(other, path), _at(frame.state, path))]

    def _frames(self) -> Iterator[tuple[Frame, Any]]:
        """Yield the frames, each with the state before it."""
        before: Any = {}
        state = at = None
        for step, entries, checkpoint in self._steps:
            if checkpoint != at:
                at = checkpoint
                try:
                    state = drive(self._context.driver, load_state(self._context, self.run.id, at))
                except NotFound:  # pruned
                    state = None
            yield _frame(self._context, step, entries, before, state), before
            before = before if at is None else state


def incident(snap: Snapshot, run: str) -> Incident:
    """Return the steps that led to the end of a run, or to where it was when the snapshot was taken."""
    ctx = snap.store._context
    return drive(ctx.driver, _incident(ctx, run))


def context_of(value: Any) -> Mapping[str, Any] | None:
    """Return the manifest in a recorded value: of a `Prompt`, or of `perdure.emit({"context": …})`."""
    for name in ("manifest", "context") if isinstance(value, Mapping) else ():
        if isinstance(value.get(name), Mapping):
            return dict(value[name])
    return None


def _incident(ctx: StoreContext, run_id: str) -> Flow[Incident]:
    tenant, row = yield from flows.locate(ctx, run_id)
    entries = yield from read(partial(read_journal, tenant, row))
    steps = yield from reading.steps(ctx, run_id, "small")
    described = yield from _outcome(ctx, tenant, row)
    environment: dict[str, Any] | None = None
    key = described.get("environment") or (yield from read(partial(value_of, tenant, row.run, ENVIRONMENT)))
    if isinstance(key, bytes):
        environment = {"hash": key.hex()}
        try:
            environment |= orjson.loads(decompress((yield from read(partial(read_blob, tenant, key)))))
        except JournalDamaged:  # or swept with the journal
            pass
    frames = list(zip(steps, paths_in(entries).values(), checkpoints_of(entries), strict=True))
    error = redacted(error_text(described)) if described else None
    return Incident(RunInfo.of(row), error, traceback_text(described), environment, frames, ctx)


def _outcome(ctx: StoreContext, tenant: int, row: RunRow) -> Flow[dict[str, Any]]:
    """Return the error that a run ended with, or is stuck with; {} if it has none."""
    if row.status not in ("failed", "stuck", "undone"):
        return {}
    text = yield from read(partial(outcome_of, tenant, row))
    if text is None:  # it is stuck without its key
        waiting = orjson.loads(row.waiting or "{}")
        return {"type": waiting.get("type", ""), "text": waiting.get("error", "")}
    outcome = decode(decompress(text), ctx.codec)
    return outcome if isinstance(outcome, dict) else {}


def _frame(ctx: StoreContext, step: Step, entries: list[Recorded], before: Any, state: Any) -> Frame:
    texts = [one.entry.value for one in entries if one.kind == INTENT and one.entry.value is not None]
    errors = [(one.entry.extra or {}).get("error") for one in entries]
    tracebacks = [text for error in errors if isinstance(error, dict) and (text := traceback_text(error))]
    return Frame(
        replace(step, error=step.error and redacted(step.error)),
        decode(decompress(texts[0]), ctx.codec, raw=True) if texts else None,
        state,
        _differences(before, state),
        context_of(step.result),
        tracebacks[-1] if tracebacks else None,
    )


def _differences(before: Any, after: Any) -> list[Change]:
    """Compare two states. Return [] if one of them is not known."""
    return [] if before is None or after is None or before is after else compare(before, after)


def _at(state: Any, path: str) -> list[Any] | None:
    """Return the values at a path of a state. There may be several, because a key may itself contain dots."""
    return None if state is None else list(_values(state, f"{path}."))


def _values(value: Any, path: str) -> Iterator[Any]:
    if not path:
        yield value
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in pairs:
        if path.startswith(f"{key}."):
            yield from _values(inner, path.removeprefix(f"{key}."))
