"""The flows behind the handles of runs: begin, claim, read, cancel, answer. No I/O and no user code here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import orjson

from perdure.errors import Archived, JournalDamaged, NotFound, RunMismatch, UsageError
from perdure.log.archived import check_archived
from perdure.runs.calls import asks, messages
from perdure.runs.calls.children import has_undone
from perdure.runs.calls.tags import check_tags, tags_text
from perdure.runs.engine.claims import Claim, Hold
from perdure.runs.engine.models import Step, step_name, step_path
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.engine.waiting import PersonTask, is_in_doubt, tasks_in, waits_for_run
from perdure.runs.execution.instrumentation import active_span, count_event
from perdure.runs.functions.inputs import digest
from perdure.runs.functions.specs import DurableSpec, find_durable, said_version
from perdure.runs.journal import control, families, rows
from perdure.runs.journal.blobs import read_blob
from perdure.runs.journal.entries import compress
from perdure.runs.journal.families import family
from perdure.runs.journal.journal import paths_in, read_journal
from perdure.runs.journal.keyed import check_same_work
from perdure.runs.journal.rows import FINISHED, TASK, NewRun
from perdure.runs.run_table import TEAM, RunInfo, RunRow
from perdure.storage.program import Flow, read, write
from perdure.threads.checks import check_name, check_priority, check_text
from perdure.threads.context import StoreContext
from perdure.threads.external_rows import Retired
from perdure.threads.externals import referring
from perdure.values.external import encode_noting, keys_of

BUCKETS = 10_000  # a deployment's canary gets a share of them


def no_run(run_id: str) -> NotFound:
    return NotFound(f"there is no run {run_id!r} in this store for this tenant; `perdure runs` lists them")


def tenant_of(ctx: StoreContext, run_id: str) -> Flow[int]:
    tenant = yield from ctx.tenant()
    if tenant is None:
        raise no_run(run_id)
    return tenant


def exists(ctx: StoreContext, run_id: str) -> Flow[bool]:
    """Return whether there is a run with this id, also if it is archived."""
    try:
        yield from locate(ctx, run_id)
    except NotFound as error:
        return isinstance(error, Archived)
    return True


def locate(ctx: StoreContext, run_id: str) -> Flow[tuple[int, RunRow]]:
    """Return the tenant's number and the run's row. Raises NotFound, Archived."""
    tenant = yield from tenant_of(ctx, run_id)
    row = yield from read(partial(rows.find, tenant, run_id))
    if row is None or row.status == "exported":  # an exported run may be half restored from an archive
        yield from read(partial(check_archived, tenant, "run", run_id))
    if row is None:
        raise no_run(run_id)
    return tenant, row


def new_run(
    ctx: StoreContext,
    spec: DurableSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run_id: str | None,
    queue: str,
    priority: int,
    wake_at: int = 0,
    *,
    tags: Mapping[str, str | int] | None = None,
    here: bool,
) -> NewRun:
    """Return the fields of a new run. Its arguments are encoded here, on the caller's thread.

    With `here=False` the run gets the deployed version of its function, if there is a deployment.
    """
    text, values = spec.binder.encoded(args, kwargs, ctx.codec)
    name = check_name(run_id, "run") if run_id is not None else f"{spec.name}-{ctx.entropy(6).hex()}"
    return NewRun(
        name,
        spec.name,
        spec.version,
        compress(text),
        digest(text),
        ctx.entropy(16),
        check_name(queue, "queue"),
        check_priority(priority),
        wake_at=wake_at,
        bucket=None if here else int.from_bytes(ctx.entropy(4)) % BUCKETS,
        tags=tags_text(check_tags(tags)),
        trace=active_span(),
        values=values,
    )


def begin(ctx: StoreContext, new: NewRun, hold: Hold | None = None) -> Flow[tuple[int, RunRow, Claim | None]]:
    """Create a run, or find the one with its id. Return the tenant, the row, and this process's claim or None.

    With `hold` this process claims a new run; without, the run is queued. Raises RunMismatch if the id belongs to a run
    of another function or with other arguments.
    """
    return (yield from referring(ctx, new.values, partial(_begin, ctx, new, hold)))


def _begin(ctx: StoreContext, new: NewRun, hold: Hold | None) -> Flow[tuple[int, RunRow, Claim | None]]:
    tenant = yield from ctx.ensure_tenant()
    runtime = runtime_of(ctx)
    owner, lease = (None, 0) if hold is None else (runtime.owner.text, runtime.lease_us)
    claim = None if hold is None else hold.enter(tenant, new.id, 1)
    op = partial(rows.create, tenant, new, now=ctx.clock_us(), owner=owner, lease=lease)
    try:
        row, is_new = yield from write(op)
    except Retired:
        if hold is not None and claim is not None:
            hold.drop(claim)
        raise
    except NotFound:
        yield from read(partial(check_archived, tenant, "run", new.id))
        raise
    if hold is not None and claim is not None and not is_new:
        hold.drop(claim)
        claim = None
    if not is_new:
        check_same_work(row, new)
    return tenant, row, claim


def check_version(row: RunRow, spec: DurableSpec) -> None:
    """Raise RunMismatch if an unfinished run began with another version of the code. Workers skip such runs."""
    if row.version != spec.version and row.status not in FINISHED:
        raise RunMismatch(
            f"run {row.id!r} began with {said_version(row.version)} of {row.function}, and this process has "
            f"{said_version(spec.version)}: resume it with the code that it began with, or fork it to this one"
        )


def try_claim(
    ctx: StoreContext, tenant: int, row: RunRow, hold: Hold, *, again: bool = False
) -> Flow[tuple[RunRow, Claim] | None]:
    """Claim a run that is due, or whose owner is dead or late. Return None if it cannot be claimed.

    `again` also claims a stuck run, and one that waits for a verdict on an effect in doubt: its code, including
    `reconcile`, may have changed.
    """
    if row.status in FINISHED or row.status == "paused" or (row.status == "stuck" and not again):
        return None
    runtime = runtime_of(ctx)
    dead = runtime.is_left(tenant, row)
    claim = hold.enter(tenant, row.id, row.fence + 1)
    op = partial(
        rows.claim,
        tenant,
        row.run,
        fence=row.fence,
        owner=runtime.owner.text,
        lease=runtime.lease_us,
        now=ctx.clock_us(),
        early=row.status == "stuck" or (again and row.status == "waiting" and is_in_doubt(row)),
        dead=dead,
    )
    claimed = yield from write(op)
    if claimed is None:
        hold.drop(claim)
        return None
    if row.status == "running":
        count_event("taken_over")
    return claimed, claim


def next_in_family(
    ctx: StoreContext, tenant: int, root: int, due: list[RunRow], hold: Hold
) -> Flow[tuple[RunRow, DurableSpec, Claim] | None]:
    """Claim a due run of a family whose function this process knows, children first. Return None if there is none.

    The caller keeps `due`, the rows that were read and not yet tried, so that thousands of children are not read again
    for each claim. If another process has claimed a run since, its fence has changed and the claim fails.
    """
    before, runtime = families.NEWEST, runtime_of(ctx)
    while True:
        while due:
            row = due.pop()
            spec = find_durable(row.function)
            if (
                spec is None
                or row.version != spec.version
                or (row.status == "running" and runtime.owns(row.owner) and not runtime.is_left(tenant, row))
            ):
                continue
            claimed = yield from try_claim(ctx, tenant, row, hold)
            if claimed is not None:
                return claimed[0], spec, claimed[1]
        page = yield from read(partial(family, families.DUE, tenant, root, before, ctx.clock_us()))
        if not page:
            return None
        before = page[-1].run
        due += reversed(page)


def tasks_of_people(ctx: StoreContext, tenant: int, row: RunRow) -> Flow[list[PersonTask]]:
    """Return what a person has to do before a run, or a run that it waits for, can continue."""
    info = RunInfo.of(row)
    infos = [info]
    if waits_for_run(info):
        infos = [
            RunInfo.of(member) for member in (yield from read(partial(family, families.PARKED, tenant, row.root, -1)))
        ]
    return [task for one in infos for task in tasks_in(ctx.driver, one)]


def bodies_of(tenant: int, keys: Iterable[bytes]) -> Flow[dict[bytes, bytes]]:
    """Return large results by their hashes, as stored. Raises JournalDamaged."""
    bodies: dict[bytes, bytes] = {}
    for key in keys:
        bodies[key] = yield from read(partial(read_blob, tenant, key))
    return bodies


def check_no_task(row: RunRow) -> None:
    """Raise UsageError for a run that only its graph can resume."""
    if row.function.startswith(TASK):
        raise UsageError(
            f"run {row.id!r} stands for a task of a graph: it continues when the graph is run, and is deleted when "
            "its thread is deleted"
        )


def check_no_member(row: RunRow, action: str) -> None:
    """Raise UsageError for what a team, or a member of one, cannot do as a run."""
    if row.turn is not None or row.function == TEAM:
        raise UsageError(
            f"run {row.id!r} is a member of a team, or stands for one: it cannot be {action}. "
            "`perdure team` takes teams back, and `team.leave()` removes a member"
        )


def request(ctx: StoreContext, run_id: str, wish: str) -> Flow[str]:
    tenant, row = yield from locate(ctx, run_id)
    check_no_task(row)
    if wish in ("undo", "cancel", "end"):
        check_no_member(row, "undone" if wish == "undo" else "cancelled, or its messages would wait for ever")
    has_ended = row.status in ("failed", "cancelled")
    if wish == "undo" and has_ended and (yield from has_undone(tenant, row, ctx.codec)):
        return row.status  # nothing is left to undo
    if wish in ("cancel", "end"):
        return (yield from _cancel(ctx, tenant, row, wish))
    return (yield from write(partial(control.ask_for, tenant, row.run, wish, ctx.clock_us())))


def _cancel(ctx: StoreContext, tenant: int, row: RunRow, wish: str) -> Flow[str]:
    try:
        status = yield from write(partial(control.ask_for, tenant, row.run, wish, ctx.clock_us()))
        yield from cancel_children(ctx, tenant, row, wish=wish)
        if status == "queued":
            status = yield from write(partial(control.end_cancelled, tenant, row.run, ctx.clock_us()))
    except JournalDamaged as error:
        raise JournalDamaged(
            f"run {row.id!r} is not cancelled, because it is not known what there is to undo: {error}. "
            f"`perdure run cancel {row.id} --no-undo` ends it all the same, and undoes nothing"
        ) from error
    return status


def whole_family(ctx: StoreContext, run_id: str) -> Flow[list[RunRow]]:
    """Return the family that a run belongs to, the oldest run first."""
    tenant, row = yield from locate(ctx, run_id)
    members: list[RunRow] = []
    after = -1
    while page := (yield from read(partial(family, families.WHOLE, tenant, row.root, after))):
        members += page
        after = page[-1].run
    return members


def cancel_children(
    ctx: StoreContext, tenant: int, row: RunRow, write: Callable[..., Any] = write, *, wish: str = "cancel"
) -> Flow[None]:
    """Cancel the unfinished descendants of a run. The run itself passes its fenced `write`.

    Parents are asked before their children: otherwise a parent's code could catch the end of a child and continue.
    After the children, each parent is ended that has nothing to undo, neither of its own nor in its children.
    """
    children: dict[int | None, list[int]] = {}
    after = -1
    while page := (yield from read(partial(family, families.OPEN, tenant, row.root, after))):
        after = page[-1].run
        for one in page:
            children.setdefault(one.parent, []).append(one.run)
    todo, parents = [row.run], []
    while todo:
        for run in children.get(todo.pop(), ()):
            yield from write(partial(control.ask_for, tenant, run, wish, ctx.clock_us()))
            todo.append(run)
            if run in children:
                parents.append(run)
    for run in reversed(parents):
        yield from write(partial(control.end_cancelled, tenant, run, ctx.clock_us()))


def list_asks(ctx: StoreContext, run_id: str | None, everything: bool, limit: int) -> Flow[list[tuple[Any, ...]]]:
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    return (yield from read(partial(asks.list_asks, tenant, run_id, everything=everything, limit=limit)))


def answer(
    ctx: StoreContext, run_id: str, path: str, value: Any, who: str, *, verdict: bool = False
) -> Flow[asks.AnswerReceipt]:
    check_text(path, "a step's path")
    check_name(who, "person")
    tenant = yield from tenant_of(ctx, run_id)
    op = partial(asks.give, tenant, run_id, path, value, who, ctx.codec, ctx.clock_us(), verdict=verdict)
    return (yield from write(op))


def send(ctx: StoreContext, run_id: str, value: Any, topic: str, key: str | None) -> Flow[None]:
    messages.check_topic(topic)
    if key is not None:
        check_name(key, "key")
    tenant = yield from tenant_of(ctx, run_id)
    text, values = encode_noting(value, ctx.codec)
    chance, now = ctx.entropy(12).hex(), ctx.clock_us()
    header = None if key is None else orjson.dumps({"nonce": chance})
    chosen = chance if key is None else key
    put = partial(messages.put_mail, tenant, run_id, topic, chosen, compress(text), now, header=header)
    yield from referring(ctx, values, partial(write, partial(put, keys=keys_of(values))))


def path_of(ctx: StoreContext, run_id: str, step: Step | str | int) -> Flow[str]:
    """Return the path of a step named by its path, its number or a Step."""
    if isinstance(step, Step | str):
        return step.path if isinstance(step, Step) else step
    tenant, row = yield from locate(ctx, run_id)
    return step_path(run_id, paths_in((yield from read(partial(read_journal, tenant, row)))), step_name(step))


def resolve(
    ctx: StoreContext, run_id: str, step: Step | str | int, verdict: dict[str, Any], who: str
) -> Flow[asks.AnswerReceipt]:
    """Settle an effect in doubt by answering the open question of its step. Raises NotFound if there is none."""
    path = yield from path_of(ctx, run_id, step)
    check_text(path, "a step's path")
    tenant, _ = yield from locate(ctx, run_id)
    asked = yield from read(partial(asks.doubt_at, tenant, run_id, path))
    if asked is not None:
        return (yield from answer(ctx, run_id, asked, verdict, who, verdict=True))
    raise NotFound(
        f"step {path!r} of run {run_id!r} is not in doubt: no person is asked about it; `perdure questions` lists those"
    )
