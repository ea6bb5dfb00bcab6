"""The state of a run at a step, and the changes between two steps, read without running code."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import Any

from perdure.errors import NotFound, UnknownType
from perdure.runs.calls.state import thread_name
from perdure.runs.engine import flows
from perdure.runs.engine.models import Step, entries_of, step_name, step_path
from perdure.runs.journal.entries import CHANGE, Recorded, unpack
from perdure.runs.journal.journal import SEQ_MAX, paths_in, read_journal
from perdure.runs.run_table import RunRow
from perdure.runs.tables import JOURNAL_BODY
from perdure.storage.program import Flow, Sql, fetch, read
from perdure.threads import flows as thread_flows
from perdure.threads.compare import compare
from perdure.threads.context import Cursor, StoreContext
from perdure.threads.models import Change
from perdure.values.codec import decode

_PAGE = 200
_BACKWARDS = Sql(
    """SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since AND seq <= :last
    ORDER BY seq DESC LIMIT :limit""",
    opens={2: JOURNAL_BODY.at("run", 0, 1)},
)


def state_at(ctx: StoreContext, run_id: str, step: Step | str | int | None) -> Flow[Any]:
    """Return the state after a step, or None if the run had none by then. `step=None` means the newest."""
    tenant, row = yield from flows.locate(ctx, run_id)
    is_near = step is None or (isinstance(step, Step) and step.ended_at is not None)
    if is_near and row.origin is None:  # a fork's journal has parts of other runs
        return (yield from load_state(ctx, run_id, (yield from _checkpoint_before(tenant, row, step))))
    entries = yield from read(partial(read_journal, tenant, row))
    return (yield from load_state(ctx, run_id, checkpoint_at(row, entries, step)))


def _checkpoint_before(tenant: int, row: RunRow, step: Any) -> Flow[int | None]:
    """Return `checkpoint_at` of a step that has ended, or of the newest. Reads the journal backwards from there."""
    place, last = (None, SEQ_MAX) if step is None else (_parts(step.path), step.seq)
    while True:
        params = {"tenant": tenant, "run": row.run, "since": row.since, "last": last, "limit": _PAGE}
        rows = yield from fetch(_BACKWARDS, **params)
        for seq, kind, body in rows:
            recorded = Recorded(row.run, seq, kind, unpack(body))
            leads = "." not in recorded.entry.path if place is None else _leads(recorded.entry.path, place)
            if leads and (checkpoint := _newest([recorded])) is not None:
                return checkpoint
        if len(rows) < _PAGE:
            return None
        last = rows[-1][0] - 1


def diff(ctx: StoreContext, run_id: str, a: Step | str | int, b: Step | str | int | None) -> Flow[list[Change]]:
    """Return the changes of the state from step `a` to step `b`. `b=None` means the newest."""
    old, new = (yield from state_at(ctx, run_id, a)), (yield from state_at(ctx, run_id, b))
    return compare({} if old is None else old, {} if new is None else new)


def load_state(ctx: StoreContext, run_id: str, checkpoint: int | None) -> Flow[Any]:
    """Load the state of a run at a checkpoint of its thread. Return None for None."""
    if checkpoint is None:
        return None
    try:
        _, loaded, _ = yield from thread_flows.load(ctx, Cursor(thread_name(run_id)), checkpoint, strict=True)
    except NotFound as error:
        raise NotFound(f"the state of run {run_id!r} at this step is gone: its thread was deleted or pruned") from error
    try:
        return decode(loaded.data, ctx.codec)
    except UnknownType:  # fall back to a form that needs no classes
        return decode(loaded.data, ctx.codec, raw=True)


def checkpoints_of(entries: list[Recorded]) -> list[int | None]:
    """Return `checkpoint_at` of every step, in the order of the steps."""
    known = [
        (one.seq, int((_parts(one.entry.path) or ["0"])[0]), checkpoint)
        for one in entries
        if "." not in one.entry.path and (checkpoint := _newest([one])) is not None
    ]
    checkpoints = []
    for group in paths_in(entries).values():
        group = [one for one in group if one.kind != CHANGE] or group
        last, place = max(one.seq for one in group), _parts(group[-1].entry.path)
        before = (known[at] for at in range(bisect_left(known, (last + 1,)) - 1, -1, -1))
        checkpoints.append(next((state for _, number, state in before if not place or number <= int(place[0])), None))
    return checkpoints


def checkpoint_at(row: RunRow, entries: list[Recorded], step: Step | str | int | None) -> int | None:
    """Return the checkpoint of the state that the code saw after a step: recorded with the step or before it."""
    if step is None or step == 0:
        steps = [] if step == 0 else [recorded for recorded in entries if "." not in recorded.entry.path]
        return _newest(steps)
    paths = paths_in(entries)
    path = step_path(row.id, paths, step_name(step))
    group = entries_of(paths, path)
    group = [recorded for recorded in group if recorded.kind != CHANGE] or group  # a fork's entry is a CHANGE
    last = max(recorded.seq for recorded in group)
    place = _parts(group[-1].entry.path if path in paths else path)
    return _newest([recorded for recorded in entries if recorded.seq <= last and _leads(recorded.entry.path, place)])


def _newest(entries: list[Recorded]) -> int | None:
    for recorded in reversed(entries):
        info = (recorded.entry.extra or {}).get("state") or {}
        if "c" in info:
            return int(info["c"])
    return None


def _parts(path: str) -> list[str]:
    """Return the parts of a path, or [] for an entry of the run as a whole, such as its undo."""
    path = path.partition("~")[0].partition("#")[0]
    return path.split(".") if path[:1].isdigit() else []


def _leads(path: str, place: list[str]) -> bool:
    """Return whether the code at `place` saw the state of the call at `path`.

    It did if the call is the function's own, not a branch's, and not after `place`."""
    parts = _parts(path)
    if not parts or not place:
        return len(parts) <= 1
    return len(parts) == 1 and int(parts[0]) <= int(place[0])
