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
from perdure.runs.calls.evidence import redacted, traceback_text
from perdure.runs.calls.failures import error_text
from perdure.runs.engine import flows
from perdure.runs.engine.models import RunInfo, Step
from perdure.runs.history.state_history import checkpoints_of, load_state
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import INTENT, Recorded, decompress
from perdure.runs.journal.journal import outcome_of, paths_in, read_journal
from perdure.runs.journal.rows import RunRow
from perdure.snapshots.handle import Snapshot
from perdure.storage.program import Flow, drive, read
from perdure.threads.compare import compare
from perdure.threads.context import StoreContext
from perdure.threads.models import Change
from perdure.values.codec import decode


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
    """What led to the end of a run: iterating over it gives its frames, the first step first."""

    run: RunInfo
    error: str | None
    traceback: str | None
    environment: Mapping[str, Any] | None  # of the process in which it failed, with its hash
    _steps: list[tuple[Step, list[Recorded], int | None]] = field(repr=False)
    _context: StoreContext = field(repr=False)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Frame]:
        ctx = self._context
        state: Any = {}
        at = None
        for step, entries, checkpoint in self._steps:
            changes: list[Change] = []
            if checkpoint != at:
                before, at = state, checkpoint
                try:
                    state = drive(ctx.driver, load_state(ctx, self.run.id, checkpoint))
                except NotFound:  # pruned
                    state = None
                changes = [] if before is None or state is None else compare(before, state)
            yield _frame(ctx, step, entries, None if at is None else state, changes)

    def blame(self, path: str, good: Incident | None = None) -> list[Frame]:
        """The steps that changed a path of the state ("cart.0.price"), the first one first. With `good`, a run of the
        same steps that went well: the steps after which the path is not as it was there."""
        if good is None:
            return [frame for frame in self if _touches(frame.changes, path)]
        pairs = ((frame, other.state) for frame, other in zip(self, good, strict=False))
        known = ((frame, state) for frame, state in pairs if frame.state is not None and state is not None)
        return [frame for frame, state in known if _touches(compare(state, frame.state), path)]


def incident(snap: Snapshot, run: str) -> Incident:
    """What led to the end of a run, or to where it was, as a snapshot has it."""
    ctx = snap.store._context
    return drive(ctx.driver, _incident(ctx, run))


def context_of(value: Any) -> Mapping[str, Any] | None:
    """The manifest of a context in a recorded value: that of a `Prompt`, or what code emitted as
    `perdure.emit({"context": …})`."""
    for name in ("manifest", "context") if isinstance(value, Mapping) else ():
        if isinstance(value.get(name), Mapping):
            return dict(value[name])
    return None


def _incident(ctx: StoreContext, run_id: str) -> Flow[Incident]:
    tenant, row = yield from flows.locate(ctx, run_id)
    entries = yield from read(partial(read_journal, tenant, row))
    steps = yield from flows.steps(ctx, run_id, False)
    described = yield from _outcome(ctx, tenant, row)
    environment: dict[str, Any] | None = None
    if isinstance(key := described.get("environment"), bytes):
        environment = {"hash": key.hex()}
        try:
            environment |= orjson.loads(decompress((yield from read(partial(read_blob, tenant, key)))))
        except JournalDamaged:  # or swept with the journal
            pass
    found = list(zip(steps, paths_in(entries).values(), checkpoints_of(entries), strict=True))
    error = redacted(error_text(described)) if described else None
    return Incident(RunInfo.of(row), error, traceback_text(described), environment, found, ctx)


def _outcome(ctx: StoreContext, tenant: int, row: RunRow) -> Flow[dict[str, Any]]:
    """The error that a run ended with, or is stuck with."""
    if row.status not in ("failed", "stuck", "rolled_back"):
        return {}
    text = yield from read(partial(outcome_of, tenant, row))
    if text is None:  # it is stuck without its key
        what = orjson.loads(row.waiting or "{}")
        return {"type": what.get("type", ""), "text": what.get("error", "")}
    found = decode(decompress(text), ctx.codec)
    return found if isinstance(found, dict) else {}


def _frame(ctx: StoreContext, step: Step, entries: list[Recorded], state: Any, changes: list[Change]) -> Frame:
    texts = [one.entry.value for one in entries if one.kind == INTENT and one.entry.value is not None]
    errors = [(one.entry.extra or {}).get("error") for one in entries]
    tracebacks = [text for error in errors if isinstance(error, dict) and (text := traceback_text(error))]
    return Frame(
        replace(step, error=step.error and redacted(step.error)),
        decode(decompress(texts[0]), ctx.codec, raw=True) if texts else None,
        state,
        changes,
        context_of(step.result),
        tracebacks[-1] if tracebacks else None,
    )


def _touches(changes: list[Change], path: str) -> bool:
    """Whether changes make another value of what is at a path. A key may itself have dots."""
    wanted = f"{path}."
    for change in changes:
        place = "".join(f"{part}." for part in change.path)
        below = wanted.removeprefix(place)
        is_above = wanted.startswith(place) and (_has(change.before, below) or _has(change.after, below))
        if is_above or place.startswith(wanted):
            return True
    return False


def _has(value: Any, path: str) -> bool:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    inside = (_has(inner, path.removeprefix(f"{key}.")) for key, inner in pairs if path.startswith(f"{key}."))
    return not path or any(inside)
