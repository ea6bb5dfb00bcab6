"""`store.ops.erase()` and `erase_run()`: erase every byte of a thread or a run, and name the places that may hold it.

A run is erased in several transactions (journal, state, arguments). After a kill between them, the same call or
`store.ops.compact()` finishes the erasure.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from perdure.errors import Archived, NotFound
from perdure.log import erase
from perdure.log.archived import drop_stubs
from perdure.log.gc import tell_domains
from perdure.log.thread_table import no_thread, try_thread
from perdure.runs.calls.state import thread_name
from perdure.runs.engine import flows
from perdure.runs.journal import thread_runs
from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.maintenance.retention import delete_run
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, fetch, read, write
from perdure.storage.versions import forget
from perdure.threads import externals
from perdure.threads.actions import forget_actions
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.threads.retention import Erased, remains

# Large results, kept for snapshots, that no run refers to now, and in the past only runs that were erased.
_LOOSE_BLOBS = """tenant = :tenant AND hash NOT IN (SELECT hash FROM run_blob WHERE tenant = :tenant)
    AND hash NOT IN (SELECT hash FROM run_blob_past WHERE tenant = :tenant
        AND run NOT IN (SELECT thread FROM erased WHERE tenant = :tenant AND record = 0))"""
_TASKS = f"{thread_runs.IS_TASK} AND root IN {erase.OWNERS}"
_CHILDREN = Sql("SELECT id FROM run WHERE tenant = :tenant AND parent = :run ORDER BY run LIMIT 20")


def erase_thread(ctx: StoreContext, name: str, number: int | None, *, forks: bool, full: bool) -> Flow[Erased]:
    """Erase a thread, and its forks if `forks`. An erasure that a killed process began is finished."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        raise no_thread(name)
    at = ctx.clock_us()
    records, names, remaining = 0, [name], []
    try:
        op = partial(erase.wipe_thread, tenant, name, number, forks, at)
        wiped = yield from write(op, solo=True)
    except Archived:  # the archive is named in `may_remain`
        yield from write(partial(drop_stubs, tenant, "thread", name))
        yield from write(partial(_past_thread, tenant, name, at))
    except NotFound:
        if not (yield from write(partial(_past_thread, tenant, name, at))):
            if not (yield from _unfinished(tenant)):
                raise
            names = []
    else:
        records, names = wiped.records, [thread.name for thread in wiped.threads]
        remaining = wiped.stay
        ctx.cache.forget(tenant, wiped.tree)
        yield from tell_domains(tenant, [thread.thread for thread in wiped.threads])
    yield from forget_actions(tenant, [f"thread {one}" for one in names])
    remaining = [*(yield from finish_erasing(ctx, tenant, full)), *remaining]
    return Erased(records, moment(at), (*remaining, *(yield from remains(ctx, tenant, full))), tuple(names))


def erase_run(ctx: StoreContext, run_id: str, *, full: bool) -> Flow[Erased]:
    """Erase a finished run: arguments, journal, outcome, questions, answers, messages, large results, states."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        yield from flows.locate(ctx, run_id)  # raises NotFound
        raise AssertionError
    at = ctx.clock_us()
    remaining: list[str] = []
    names: tuple[str, ...] = ()
    try:
        _, row = yield from flows.locate(ctx, run_id)
    except Archived:
        yield from write(partial(drop_stubs, tenant, "run", run_id))
        yield from write(partial(_past_run, tenant, run_id, at))
        names = (run_id,)
    except NotFound:
        if (yield from write(partial(_past_run, tenant, run_id, at))):
            names = (run_id,)
        elif not (yield from _unfinished(tenant)):
            raise
    else:
        remaining = [
            f"run {child!r}, which it has started: erase it too"
            for (child,) in (yield from fetch(_CHILDREN, tenant=tenant, run=row.run))
        ]
        yield from delete_run(ctx, run_id, first=partial(_begin, tenant, row.run, run_id, at), force=True)
        names = (run_id,)
    yield from forget_actions(tenant, [f"run {run_id}"])
    remaining = [*(yield from finish_erasing(ctx, tenant, full)), *remaining]
    remaining.append(
        "files that the run itself has written, such as that of perdure.progress(file=…), and what effects sent out"
    )
    return Erased(0, moment(at), (*remaining, *(yield from remains(ctx, tenant, full))), runs=names)


def _unfinished(tenant: int) -> Flow[bool]:
    return (yield from read(partial(erase.marked, tenant))) is not None


def _begin(tenant: int, run: int, run_id: str, at: int) -> Generator[Batch, list[Rows], None]:
    """Mark a run and its states as erased, in the transaction that begins to delete the run."""
    yield from erase.mark(tenant, at)
    states = yield from try_thread(tenant, thread_name(run_id))
    for number in (run, *([states.thread] if states else ())):
        yield from erase.note(tenant, number, 0, 0, None, at)
    yield from _past_run(tenant, run_id, at)


def _past_thread(tenant: int, name: str, at: int) -> Program[bool]:
    """Mark threads of this name that only snapshots hold as erased. Return whether there were any.

    Such a thread was deleted or archived, or a restore replaced it.
    """
    return (yield from erase.note_past(tenant, "thread", "name = :name", at, name=name))


def _past_run(tenant: int, run_id: str, at: int) -> Program[bool]:
    noted = yield from erase.note_past(tenant, "run", "id = :id", at, id=run_id)
    return (yield from _past_thread(tenant, thread_name(run_id), at)) or noted


def finish_erasing(ctx: StoreContext, tenant: int, full: bool) -> Flow[list[str]]:
    """Finish all erasures of a tenant. Return the problems that prevented it.

    This includes what a killed process left: tasks of graphs whose threads are gone, and results that no run needs.
    """
    yield from thread_runs.sweep(tenant, ctx.clock_us())
    yield from drop_loose_blobs(tenant)
    yield from write(partial(erase.note_past, tenant, "run", _TASKS, ctx.clock_us()))
    yield from write(partial(forget, ("blob", _LOOSE_BLOBS), tenant=tenant))
    problems = yield from erase.finish(tenant, ctx.driver.dialect, full=full)
    if ctx.objects is not None:
        yield from externals.collect(ctx, tenant, grace_us=0, kept_us=0)
    elif (yield from externals.has_values(tenant)):
        problems = [*problems, "objects of large values: open the store with objects= and compact it"]
    return problems
