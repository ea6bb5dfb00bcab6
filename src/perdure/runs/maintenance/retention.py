"""Retention of runs: removal of the journals of finished runs, and deletion of whole runs on request.

The sweep writes the end of the journal's time (`Retention.runs`) to `keep_until`. The run's row, arguments and outcome
stay, so the same id still gives the same result. What an unfinished run, a relative or a fork needs is never removed.
The run's row is marked first, so after a crash the next sweep continues.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple

from perdure.errors import Archived, Pinned, UsageError
from perdure.log import gc
from perdure.log.archived import drop_stubs
from perdure.log.pins import refuse_pinned
from perdure.log.retention import read_policy
from perdure.log.thread_table import metadata_of, try_thread
from perdure.runs.calls.state import RUN_KEY, thread_name
from perdure.runs.engine import flows
from perdure.runs.journal import claiming, rows, thread_runs
from perdure.runs.journal.blobs import drop_loose_blobs
from perdure.runs.journal.entries import unpack
from perdure.runs.journal.rows import FINISHED
from perdure.runs.journal.values import DROP_HISTORY
from perdure.runs.run_table import RUN, RunRow
from perdure.runs.streams import rows as streams
from perdure.runs.tables import INTENT, JOURNAL_BODY, PARTS
from perdure.storage.program import Batch, Flow, Program, Rows, Sql, change, dry_write, fetch, maintain, read, write
from perdure.threads.context import StoreContext

DAY_US = 86_400_000_000
_PAGE = 100
_BATCH = 500
_FREE_PAGES_MIN = 2_000  # with fewer free pages, rewriting the file is not worth it
_OVER = ", ".join(f"'{status}'" for status in FINISHED)

# Affects runs that finished since the last sweep, and all finished ones if the policy has changed.
_DATE = Sql(
    f"""UPDATE run SET keep_until = changed_at + CAST(:keep AS bigint) WHERE tenant = :tenant AND run IN (
        SELECT run FROM run WHERE tenant = :tenant AND status IN ({_OVER}) AND entries > 0
        AND coalesce(keep_until, -1) <> coalesce(changed_at + CAST(:keep AS bigint), -1) LIMIT :limit) RETURNING run"""
)
_IS_NEEDED = f"""(EXISTS (SELECT 1 FROM run f WHERE f.tenant = r.tenant AND f.origin = r.run)
    OR EXISTS (SELECT 1 FROM run o WHERE o.tenant = r.tenant AND o.root = r.root AND o.run <> r.run
        AND (o.status NOT IN ({_OVER}) OR o.keep_until > {{now}} OR (o.keep_until IS NULL AND o.entries > 0))))"""
_DUE = Sql(
    f"""SELECT r.run FROM run r WHERE r.tenant = :tenant AND r.keep_until <= (SELECT {{now}})
    AND r.status IN ({_OVER}) AND NOT {_IS_NEEDED} ORDER BY r.run LIMIT :limit"""
)
# Checked again under the row's lock, because a fork may have been made meanwhile.
_LOCK = Sql("SELECT r.run FROM run r WHERE r.tenant = :tenant AND r.run = :run {for_update}")
_EMPTY = Sql(
    f"""UPDATE run AS r SET entries = 0, digest = 0, since = seq, origin = NULL, origin_seq = 0
    WHERE r.tenant = :tenant AND r.run = :run AND r.keep_until <= {{now}} AND r.status IN ({_OVER}) AND NOT {_IS_NEEDED}
    RETURNING run"""
)
_FORKS = Sql("SELECT id FROM run WHERE tenant = :tenant AND origin = :run LIMIT 1")
_PARENT = Sql("SELECT id, status FROM run WHERE tenant = :tenant AND run = :run")
_CONDEMN = Sql(
    f"""UPDATE run SET entries = 0, digest = 0, since = seq, origin = NULL, origin_seq = 0, keep_until = 0
    WHERE tenant = :tenant AND run = :run AND status IN ({_OVER}) RETURNING run"""
)
_DROP_ENTRIES = Sql(
    """DELETE FROM journal WHERE tenant = :tenant AND run = :run AND seq IN (
        SELECT seq FROM journal WHERE tenant = :tenant AND run = :run ORDER BY seq LIMIT :limit) RETURNING seq"""
)
_DROP_REST = [
    DROP_HISTORY,
    *(
        Sql(f"DELETE FROM {table} WHERE tenant = :tenant AND run = :run")
        for table in ("answer", "ask", "mail", "run_blob")
    ),
]
_MEMBERS = Sql("SELECT run, id FROM run WHERE tenant = :tenant AND turn IS NOT NULL AND turn > 1 ORDER BY run")
_OLD_MAIL = """m.tenant = :tenant AND m.run = :run AND m.state IN (1, 3, 4) AND m.at < :before AND m.seq < (
    SELECT max(n.seq) FROM mail n WHERE n.tenant = :tenant AND n.run = :run AND n.topic = '' AND n.state = 1)"""
_DROP_MAIL = Sql(
    f"""DELETE FROM mail WHERE tenant = :tenant AND run = :run AND seq IN (
        SELECT m.seq FROM mail m WHERE {_OLD_MAIL} ORDER BY m.seq LIMIT :limit) RETURNING seq"""
)
_OLDEST_STATE = Sql(
    f"""SELECT min(k.record), (SELECT count(*) FROM mail m WHERE {_OLD_MAIL}) FROM mail k
    WHERE k.tenant = :tenant AND k.run = :run
        AND NOT EXISTS (SELECT 1 FROM mail m WHERE {_OLD_MAIL} AND m.seq = k.seq)"""
)
_OLDEST_TURN = Sql("SELECT min(taken_turn) FROM mail WHERE tenant = :tenant AND run = :run AND state = 1")
_INTENTS = Sql(
    f"""SELECT seq, body FROM journal WHERE tenant = :tenant AND run = :run AND kind = {INTENT}
    AND seq <= (SELECT r.since FROM run r WHERE r.tenant = :tenant AND r.run = :run) ORDER BY seq LIMIT :limit""",
    opens={1: JOURNAL_BODY.at("run", 0, "kind")},
)
_DROP_INTENTS = Sql("DELETE FROM journal WHERE tenant = :tenant AND run = :run AND seq <= :seq AND kind = :kind")
_SWEPT = Sql("UPDATE run SET keep_until = NULL WHERE tenant = :tenant AND run = :run")
_DROP_RUN = [Sql(f"DELETE FROM {table.name} WHERE tenant = :tenant AND run = :run") for table in (*PARTS, RUN)]
# Only one of many workers takes the day's turn.
_TURN = Sql(
    """INSERT INTO meta (key, value) VALUES (:key, CAST({now} AS text))
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
        WHERE CAST(meta.value AS bigint) <= CAST(excluded.value AS bigint) - :every
            OR CAST(meta.value AS bigint) > CAST(excluded.value AS bigint)
    RETURNING key"""
)
_SPACE = Sql(
    sqlite="SELECT f.freelist_count, p.page_count FROM pragma_freelist_count AS f, pragma_page_count AS p",
    postgres="SELECT 0, 0",
)


class DailyMaintenance(NamedTuple):
    """What a day's maintenance removed."""

    runs: int  # runs whose journals were removed
    threads: int = 0  # expired threads
    checkpoints: int = 0


def sweep_runs(tenant: int, clock_us: Callable[[], int]) -> Flow[int]:
    """Remove the expired journals of finished runs and what only they needed. Return the number of runs."""
    while (yield from write(partial(_date, tenant))):
        pass
    swept = yield from thread_runs.sweep(tenant, clock_us())
    yield from streams.sweep(tenant, clock_us())
    yield from _sweep_mail(tenant, clock_us())
    while runs := (yield from write(partial(_empty_some, tenant, clock_us()))):
        for run in runs:
            yield from _drop_history(tenant, run)
            yield from change(_SWEPT(tenant=tenant, run=run))
        swept += len(runs)
    yield from drop_loose_blobs(tenant)
    return swept


def _sweep_mail(tenant: int, now: int) -> Flow[None]:
    """Remove messages that members of teams took, with states and intents of those turns, when their time is over.

    The newest message stays: it names the state that a rewind by one turn needs. What waits, or is dead, stays too.
    States go first: a rewind to a turn whose message is gone must not find the first state, and take it for the turn's.
    """
    keep = yield from read(partial(_kept_us, tenant))
    if keep is not None:
        for run, run_id in (yield from fetch(_MEMBERS, tenant=tenant)):
            key = {"tenant": tenant, "run": run, "before": now - keep}
            [(oldest, count)] = yield from fetch(_OLDEST_STATE, **key)
            if oldest is not None and count:
                yield from _prune_states(tenant, run_id, oldest)
            while len((yield from change(_DROP_MAIL(**key, limit=_BATCH)))) == _BATCH:
                pass
            yield from _sweep_intents(tenant, run)


def _prune_states(tenant: int, run_id: str, oldest: int) -> Flow[None]:
    """Remove the checkpoints of a member before `oldest`. Those that are pinned stay."""
    name = thread_name(run_id)
    thread = yield from read(partial(try_thread, tenant, name))
    if thread is not None:
        yield from gc.prune(tenant, name, thread.thread, None, oldest=oldest)


def _sweep_intents(tenant: int, run: int) -> Flow[None]:
    """Remove the intents of turns whose messages are gone: no rewind can ask for them."""
    [(oldest,)] = yield from fetch(_OLDEST_TURN, tenant=tenant, run=run)
    while oldest is not None:
        page = yield from fetch(_INTENTS, tenant=tenant, run=run, kind=INTENT, limit=_BATCH)
        old = [seq for seq, body in page if (unpack(body).extra or {}).get("turn", oldest) < oldest]
        if not old:
            return
        yield from change(_DROP_INTENTS(tenant=tenant, run=run, seq=old[-1], kind=INTENT))


def _kept_us(tenant: int) -> Program[int | None]:
    return (yield from read_policy(tenant)).get("runs")


def would_sweep(tenant: int, now: int) -> Flow[int]:
    """Return how many runs `sweep_runs` would sweep. Make its decisions in one transaction and roll it back."""

    def program() -> Program[int]:
        while (yield from _date(tenant)):
            pass
        swept = yield from thread_runs.drop_due(tenant, now)
        while runs := (yield from _empty_some(tenant, now)):
            yield Batch(*(_SWEPT(tenant=tenant, run=run) for run in runs))
            swept += len(runs)
        return swept

    return (yield from dry_write(program))


def _date(tenant: int) -> Program[bool]:
    """Set `keep_until` of some finished runs by the current policy. Return whether there may be more."""
    keep = (yield from read_policy(tenant)).get("runs")
    [dated] = yield Batch(_DATE(tenant=tenant, keep=keep, limit=_BATCH))
    return len(dated) == _BATCH


def _empty_some(tenant: int, now: int) -> Program[list[int]]:
    """Mark some expired runs as having no journal, and return them. A swept fork frees its origin for the next call."""
    [due] = yield Batch(_DUE(tenant=tenant, now=now, limit=_PAGE))
    emptied: list[int] = []
    for (run,) in due:
        _, done = yield Batch(_LOCK(tenant=tenant, run=run), _EMPTY(tenant=tenant, run=run, now=now))
        emptied += [run] if done else []
    return emptied


def _drop_history(tenant: int, run: int, *, force: bool = False) -> Flow[None]:
    yield from _drop_states(tenant, run, force)
    while len((yield from change(_DROP_ENTRIES(tenant=tenant, run=run, limit=_BATCH)))) == _BATCH:
        pass
    yield from change(*(sql(tenant=tenant, run=run) for sql in _DROP_REST))
    yield from streams.forget_run(tenant, run)


def _drop_states(tenant: int, run: int, force: bool) -> Flow[None]:
    """Delete the thread with a run's states, except what the thread of a fork needs.

    If one of its checkpoints is pinned, the whole thread stays, unless `force`."""
    row = yield from read(partial(rows.numbered, tenant, run))
    if row is None:
        return
    name = thread_name(row.id)
    thread = yield from read(partial(try_thread, tenant, name))
    if thread is not None and metadata_of(thread).get(RUN_KEY) == row.id:
        try:
            yield from gc.delete(tenant, name, thread.thread, force=force)
        except Pinned:
            pass


# --- one run


def delete_run(
    ctx: StoreContext,
    run_id: str,
    *,
    force: bool = False,
    first: Callable[[], Generator[Batch, list[Rows], None]] | None = None,
) -> Flow[None]:
    """Delete a finished run and all its records.

    Raises UsageError if it is unfinished or still needed. Raises Pinned if one of its states is pinned, unless `force`.
    `first` runs in the transaction that makes these checks, after them."""
    try:
        tenant, row = yield from flows.locate(ctx, run_id)
    except Archived:  # the archive stays; deleting the stub frees the id
        tenant = yield from flows.tenant_of(ctx, run_id)
        yield from write(partial(drop_stubs, tenant, "run", run_id))
        return
    yield from write(partial(_condemn, tenant, row, force, first))
    yield from _drop_history(tenant, row.run, force=force)
    yield from change(*(sql(tenant=tenant, run=row.run) for sql in _DROP_RUN))
    yield from drop_loose_blobs(tenant)


def _condemn(
    tenant: int, row: RunRow, force: bool, first: Callable[[], Generator[Batch, list[Rows], None]] | None
) -> Program[None]:
    yield Batch(_LOCK(tenant=tenant, run=row.run))
    thread = yield from try_thread(tenant, thread_name(row.id))
    if thread is not None and not force:
        yield from refuse_pinned(tenant, thread)
    forks, parents, condemned = yield Batch(
        _FORKS(tenant=tenant, run=row.run),
        _PARENT(tenant=tenant, run=row.parent if row.parent is not None else -1),
        rows.BY_NUMBER(tenant=tenant, run=row.run),
    )
    if forks:
        raise UsageError(
            f"run {row.id!r} cannot be deleted: its fork {forks[0][0]!r} shares its history; delete that first"
        )
    if parents and parents[0][1] not in FINISHED:
        raise UsageError(
            f"run {row.id!r} cannot be deleted: its parent {parents[0][0]!r} is not finished and may need it"
        )
    if condemned and RunRow._make(condemned[0]).status not in FINISHED:
        raise UsageError(f"run {row.id!r} is not finished: `perdure run cancel {row.id}` first, then delete it")
    if first is not None:
        yield from first()
    yield Batch(_CONDEMN(tenant=tenant, run=row.run), last=True)


# --- daily maintenance


def daily_maintenance(
    tenant: int,
    clock_us: Callable[[], int],
    work: Callable[[int], Flow[DailyMaintenance]] | None = None,
) -> Flow[DailyMaintenance | None]:
    """Do a tenant's daily maintenance, and reclaim space if much of the file is free.

    `work` replaces `maintain_tenant` if the store has more to do than runs. Return None if it is already done today."""
    every = DAY_US - DAY_US // 24  # less than a day, so that the time of day does not drift
    turn = _TURN(tenant=tenant, key=f"maintenance {tenant}", now=clock_us(), every=every)
    if not (yield from change(turn)):
        return None
    done = yield from (work(tenant) if work is not None else maintain_tenant(tenant, clock_us))
    [(free, pages)] = yield from fetch(_SPACE)
    if free >= _FREE_PAGES_MIN and free * 4 >= pages:  # rewriting the file blocks all writers, so it must be worth it
        yield from maintain("reclaim")
    return done


def maintain_tenant(tenant: int, clock_us: Callable[[], int]) -> Flow[DailyMaintenance]:
    """Do the daily maintenance of runs alone."""
    return DailyMaintenance((yield from sweep_runs(tenant, clock_us)))


def all_tenants() -> Flow[list[tuple[int, str]]]:
    tenants: list[tuple[int, str]] = []
    while page := (yield from read(partial(claiming.tenants, tenants[-1][0] if tenants else 0, _PAGE))):
        tenants += page
    return tenants
