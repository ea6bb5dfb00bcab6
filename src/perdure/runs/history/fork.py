"""Forks: a new run that shares another run's history up to a step and continues from there.

A fork copies nothing: its journal begins with an entry that names the shared segments (`journal.py`). Calls that were
open at that point are not shared. A question is asked again, and an effect without a recorded end counts as not begun,
unless the fork keeps the keys. Forking past an effect requires `keys=`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from perdure.errors import JournalDamaged, NotFound, RunMismatch, UsageError
from perdure.log.archived import check_archived
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.engine.flows import check_no_member, check_no_task, no_run, tenant_of
from perdure.runs.engine.models import Step, entries_of, step_name, step_path
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import find_durable
from perdure.runs.journal import rows, values
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_statements, out_of_line, refer_statement
from perdure.runs.journal.entries import (
    CHANGE,
    DIGEST_MASK,
    DONE,
    INTENT,
    NOTE,
    SPAWN,
    VALUE,
    WAIT,
    Entry,
    Recorded,
    compress,
    decompress,
    entry_digest,
    pack,
)
from perdure.runs.journal.journal import ADD_ENTRY, FORK, FORK_NAME, Journal, Segment, paths_in, read_whole
from perdure.runs.journal.kinds import kind_of
from perdure.runs.journal.rows import JournalRow, NewRun
from perdure.runs.journal.standing import END, UNDO
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, write
from perdure.threads.checks import check_name
from perdure.threads.context import StoreContext
from perdure.threads.flows import _fork as fork_thread
from perdure.values.codec import encode

Keys = Literal["new", "same"]
APPROVE = "~approve"
_SET_SUM = Sql("UPDATE run SET entries = :count, digest = :digest, seq = :last WHERE tenant = :tenant AND run = :run")
# Whether a child run or one of its descendants ran an effect.
_CHILD_EFFECTS = Sql(
    """WITH RECURSIVE family (run) AS (
        SELECT run FROM run WHERE tenant = :tenant AND id = :child
        UNION SELECT r.run FROM family f CROSS JOIN run r
            WHERE r.tenant = :tenant AND r.root = :root AND r.parent = f.run)
    SELECT 1 FROM family f CROSS JOIN journal j
    WHERE j.tenant = :tenant AND j.run = f.run AND j.kind = :intent LIMIT 1"""
)


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The arguments of a fork, checked as far as possible without the journal."""

    source: str
    at: str | int | None
    id: str
    changes: dict[str | int, bytes]
    keys: Keys | None

    def digest(self) -> bytes:
        """Return a digest that identifies the request: the same request under the same id is the same fork."""
        parts = (self.source, self.at, self.keys, sorted((str(step), text) for step, text in self.changes.items()))
        return digest(msgspec.msgpack.encode(parts))


def fork_request(
    ctx: StoreContext,
    source: str,
    at: Step | str | int | None,
    run_id: str | None,
    changes: Mapping[Any, Any] | None,
    keys: str | None,
) -> ForkRequest:
    """Check and encode the arguments of a fork, on the caller's thread. Raises UsageError or Unstorable."""
    if keys not in (None, "new", "same"):
        raise UsageError(f'fork(keys={keys!r}): "new" or "same"')
    if changes is not None and not isinstance(changes, Mapping):
        raise UsageError(f"fork(changes=…) takes a mapping of steps to results, not {type(changes).__name__}")
    texts = {step_name(step): compress(encode(value, ctx.codec)) for step, value in (changes or {}).items()}
    name = check_name(run_id, "run") if run_id is not None else f"{source[:480]}-fork-{ctx.entropy(4).hex()}"
    return ForkRequest(source, None if at is None else step_name(at), name, texts, keys)  # type: ignore[arg-type]


def fork(ctx: StoreContext, request: ForkRequest) -> Flow[tuple[str, str]]:
    """Create the fork, or find the one that the same request created. Return its id and its status."""
    tenant = yield from tenant_of(ctx, request.source)
    op = partial(_fork, tenant, request, ctx.entropy(16), ctx.clock_us())
    return (yield from write(op, solo=True))


def _fork(tenant: int, request: ForkRequest, incarnation: bytes, now: int) -> Program[tuple[str, str]]:
    sources, taken = yield Batch(rows.BY_ID(tenant=tenant, id=request.source), rows.BY_ID(tenant=tenant, id=request.id))
    if not sources:
        yield from check_archived(tenant, "run", request.source)
        raise no_run(request.source)
    if taken:
        yield from _check_same(tenant, RunRow._make(taken[0]), request)
        return request.id, RunRow._make(taken[0]).status
    check_no_task(RunRow._make(sources[0]))
    check_no_member(RunRow._make(sources[0]), "forked")
    number = RunRow._make(sources[0]).run
    # Lock the source: continue_as_new could drop the history that the fork is going to share.
    [locked], args = yield Batch(rows.LOCK(tenant=tenant, run=number), rows.ARGS_OF(tenant=tenant, run=number))
    if not args:
        raise JournalDamaged(f"the arguments of run {request.source!r} are gone; restore it from a backup")
    source = RunRow._make(locked)
    if source.status == "exported":
        raise UsageError(f"run {request.source!r} was exported: it continues in another store; fork it there")
    journal = yield from read_whole(tenant, source)
    plan = _plan(source, journal, request)
    keys = request.keys or ("new" if not (yield from _needs_keys(tenant, source, plan)) else None)
    if keys is None:
        raise _say_keys(source, plan)
    segments = _segments(plan, keys)
    new = _new_run(source, plan, segments, request, keys, args[0][0], incarnation)
    yield from _write(tenant, source.run, new, plan, segments, request, keys, now)
    return request.id, "queued"


# --- the shared history


@dataclass(slots=True)
class ForkPlan:
    """Where the fork begins, and which entries before that point it shares."""

    at: str | int | None
    point: int  # the seq of the last shared entry; 0 shares nothing
    journal: Journal  # the source's journal
    shared: dict[str, list[Recorded]]  # by path
    after: list[Recorded]
    changed: list[Recorded]  # replaced results, if the source is itself a fork with changes
    changes: dict[str, bytes]


def _plan(source: RunRow, journal: Journal, request: ForkRequest) -> ForkPlan:
    entries = journal.entries
    paths = paths_in(entries)
    end = next((recorded.seq for recorded in entries if recorded.entry.path == END), None)
    point = _point(source, paths, entries, request.at, end)
    shared = paths_in([recorded for recorded in entries if recorded.seq <= point])
    for path, group in shared.items():
        undone = paths.get(UNDO + path)
        if undone is not None and any(recorded.kind == INTENT for recorded in group):
            raise UsageError(
                f"run {source.id!r} has undone step {path} ({group[0].entry.name}): a fork that shares it would count "
                f"on what no longer exists. Fork before it: at={_before(shared, path)!r}"
            )
    after = [recorded for recorded in entries if recorded.seq > point]
    changed = {
        recorded.entry.path: recorded for recorded in after if recorded.kind == CHANGE and recorded.entry.path in shared
    }
    changes = {}
    for step, text in request.changes.items():
        path = step_path(source.id, paths, step)
        _check_changeable(source, path, shared.get(path))
        changes[path] = text
        changed.pop(path, None)
    return ForkPlan(request.at, point, journal, shared, after, list(changed.values()), changes)


def _point(
    source: RunRow,
    paths: dict[str, list[Recorded]],
    entries: list[Recorded],
    at: str | int | None,
    end: int | None,
) -> int:
    """Return the seq of the last shared entry."""
    if at == 0:
        return 0
    if at is None:
        last = [recorded.seq for recorded in entries if end is None or recorded.seq < end]
        return max(last, default=0)
    path = step_path(source.id, paths, at)
    point = max(recorded.seq for recorded in entries_of(paths, path) if recorded.kind != CHANGE)
    if end is not None and point >= end:
        raise UsageError(f"step {at!r} of run {source.id!r} belongs to its undoing: fork at a step before that")
    return point


def _before(shared: dict[str, list[Recorded]], path: str) -> str | int:
    names = [name for name in shared if not name.endswith(APPROVE)]
    place = names.index(path)
    return names[place - 1] if place else 0


def _check_changeable(source: RunRow, path: str, group: list[Recorded] | None) -> None:
    if group is None:
        raise UsageError(
            f"fork(changes={{{path!r}: …}}): the fork does not keep this step of run {source.id!r}, so there is "
            "nothing to change; it will be run"
        )
    first, kind = group[0], kind_of(group[0].entry.name)
    known = (kind is None or kind.is_changeable) and first.kind not in (NOTE, SPAWN)
    has_result = any(recorded.kind in (DONE, CHANGE, INTENT) for recorded in group) or _is_question(first)
    if not known or not (has_result or (first.kind == VALUE and first.entry.value is not None)):
        raise UsageError(f"fork(changes={{{path!r}: …}}): {first.entry.name} has no result that could be another one")


def _is_question(recorded: Recorded) -> bool:
    kind = kind_of(recorded.entry.name)
    return kind is not None and kind.settled_by == "answer"


def _is_open(group: list[Recorded]) -> bool:
    return not any(recorded.kind in (DONE, CHANGE) for recorded in group)


def _open_effects(plan: ForkPlan) -> list[str]:
    return [
        path
        for path, group in plan.shared.items()
        if path not in plan.changes and _is_open(group) and any(recorded.kind == INTENT for recorded in group)
    ]


def _needs_keys(tenant: int, source: RunRow, plan: ForkPlan) -> Generator[Batch, list[Rows], bool]:
    """Return whether the caller must choose the keys: effects were open at the point, or came after it."""
    if _open_effects(plan) or any(recorded.kind == INTENT for recorded in plan.after):
        return True
    for recorded in plan.after:
        if recorded.kind == SPAWN:
            child = (recorded.entry.extra or {}).get("child")
            [effects] = yield Batch(_CHILD_EFFECTS(tenant=tenant, child=child, root=source.root, intent=INTENT))
            if effects:
                return True
    return False


def _say_keys(source: RunRow, plan: ForkPlan) -> UsageError:
    effects = dict.fromkeys(
        [plan.shared[path][0].entry.name for path in _open_effects(plan)]
        + [recorded.entry.name for recorded in plan.after if recorded.kind in (INTENT, SPAWN)]
    )
    return UsageError(
        f"run {source.id!r} ran effects after this step ({', '.join(effects)}), and the fork may run them again. "
        'Choose its idempotency keys: keys="new" makes new ones, so that receivers do it again; keys="same" keeps '
        "them, so that receivers that honour keys answer as before and do nothing twice"
    )


def _dropped(plan: ForkPlan, keys: Keys) -> set[int]:
    """Return the seqs of entries before the point that are not shared, because the fork does these calls again."""
    dropped = [] if keys == "same" else _open_effects(plan)
    seqs: set[int] = set()
    for path, group in plan.shared.items():
        effect = path.removesuffix(APPROVE)
        # An approval is for one request, so an effect that is repeated needs a new approval.
        unused = path.endswith(APPROVE) and keys == "new" and _is_open(plan.shared.get(effect, []))
        asking = group[0].kind == WAIT and _is_question(group[0]) and _is_open(group)
        if path not in plan.changes and (path in dropped or unused or asking):
            seqs |= {recorded.seq for recorded in group}
    return seqs


def _segments(plan: ForkPlan, keys: Keys) -> list[Segment]:
    """Return the segments that the fork shares, with the number and the digest of their rows."""
    dropped = _dropped(plan, keys)
    segments = []
    for run, since, last, *_ in plan.journal.segments:
        upto = min(last, plan.point)
        some = [row for row in plan.journal.rows if since < row[0] <= upto and row[0] not in dropped]
        if some:
            # Skip missing seqs too, not only dropped ones: a parallel branch may still write them.
            skip = sorted(set(range(since + 1, upto + 1)) - {row[0] for row in some})
            total = sum(entry_digest(run, *row) for row in some) & DIGEST_MASK
            segments.append(Segment(run, since, upto, skip, len(some), total))
    return segments


# --- the fork's rows


def _new_run(
    source: RunRow,
    plan: ForkPlan,
    segments: list[Segment],
    request: ForkRequest,
    keys: Keys,
    args: bytes,
    incarnation: bytes,
) -> NewRun:
    spec = find_durable(source.function)
    return NewRun(
        request.id,
        source.function,
        source.version if spec is None else spec.version,  # it continues with the code of this process
        args,
        digest(decompress(args)),  # not source.input: continue_as_new may have changed the arguments
        incarnation if keys == "new" else source.incarnation,
        source.queue,
        source.priority,
        origin=segments[-1].run if segments else source.run,
        origin_seq=plan.point,
        tags=source.tags,
    )


def _write(
    tenant: int,
    source: int,
    new: NewRun,
    plan: ForkPlan,
    segments: list[Segment],
    request: ForkRequest,
    keys: Keys,
    now: int,
) -> Generator[Batch, list[Rows], None]:
    is_new = yield from rows.insert(tenant, new, now=now)
    if not is_new:
        raise RunMismatch(f"a run with the id {new.id!r} was made at the same time; choose another id")
    run = (yield from rows.look_up_all(tenant, [new.id]))[new.id].run
    about = {"of": request.source, "at": plan.at, "keys": keys, "request": request.digest(), "shared": segments}
    entries = [Entry(FORK, FORK_NAME, now, extra=about), *(recorded.entry for recorded in plan.changed)]
    statements = [values.COPY(tenant=tenant, run=run, origin=source)]
    statements += [
        refer_statement(tenant, run, recorded.entry.extra["blob"])
        for recorded in plan.changed
        if recorded.entry.extra and "blob" in recorded.entry.extra
    ]
    for path, text in plan.changes.items():
        entry = _changed(plan.shared[path], text, now)
        if len(text) >= BLOB_MIN_BYTES:
            statements += blob_statements(tenant, run, text)
            entry = out_of_line(entry)
        entries.append(entry)
    lines = [JournalRow(seq, CHANGE, pack(entry)) for seq, entry in enumerate(entries, plan.point + 1)]
    statements += [ADD_ENTRY(tenant=tenant, run=run, **line._asdict()) for line in lines]
    total = sum(entry_digest(run, *line) for line in lines) & DIGEST_MASK
    statements.append(_SET_SUM(tenant=tenant, run=run, count=len(lines), digest=total, last=lines[-1].seq))
    yield Batch(*statements)
    yield from _fork_states(tenant, new.id, plan, request, now)


def _changed(group: list[Recorded], text: bytes, now: int) -> Entry:
    """Return an entry that replaces the recorded result of a call. Its change of the state is kept."""
    first = group[0].entry
    last = next((recorded.entry for recorded in reversed(group) if recorded.kind in (DONE, CHANGE)), first)
    kept = {name: value for name, value in (last.extra or {}).items() if name == "state"}
    return Entry(first.path, first.name, now, first.args_hash, last.attempt, text, kept or None)


def _fork_states(
    tenant: int, run_id: str, plan: ForkPlan, request: ForkRequest, now: int
) -> Generator[Batch, list[Rows], None]:
    """Fork the thread with the source's states, so that the fork continues them. It copies nothing."""
    shared = sorted((one for group in plan.shared.values() for one in group), key=lambda recorded: recorded.seq)
    states = ((recorded.entry.extra or {}).get("state") or {} for recorded in reversed(shared))
    checkpoint = next((state["c"] for state in states if state.get("c") is not None), None)
    if checkpoint is None:
        return
    names = (thread_name(request.source), thread_name(run_id))
    try:
        yield from fork_thread(tenant, names[0], None, checkpoint, names[1], {RUN_KEY: run_id}, now)
    except NotFound:
        pass  # the source's states were deleted, so the fork begins without any


def _check_same(tenant: int, row: RunRow, request: ForkRequest) -> Generator[Batch, list[Rows], None]:
    """Raise RunMismatch if the run that has the id is not this fork."""
    entries = (yield from read_whole(tenant, row)).entries
    first = next((recorded for recorded in entries if recorded.own), None)
    if first is None or first.entry.path != FORK or (first.entry.extra or {}).get("request") != request.digest():
        raise RunMismatch(f"there is a run {row.id!r} already, and it is not this fork; choose another id")
