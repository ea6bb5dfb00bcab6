"""The part of a thread's handle for pins, retention and erasing a checkpoint.

Setting a retention removes nothing. `store.ops.compact()` applies it, daily if a worker runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Literal

from perdure.errors import NotFound, UsageError
from perdure.log import erase, pins
from perdure.log import retention as policies
from perdure.log.gc_plan import PinRow
from perdure.log.ids import parse_id, show_id
from perdure.log.retention import UNCHANGED, Retention, Unchanged
from perdure.storage.program import Flow, Sql, change, fetch, read, write
from perdure.storage.twins import awaited, blocking
from perdure.threads import flows
from perdure.threads.actions import noted
from perdure.threads.checks import check_name
from perdure.threads.context import Cursor, Handle, StoreContext
from perdure.threads.models import Checkpoint, moment
from perdure.values.durations import Duration

_COPIES_MAX = 100
_COPIES = Sql(
    """SELECT kind, place, max(at) FROM copy WHERE tenant IS NULL OR tenant = :tenant
    GROUP BY kind, place ORDER BY max(at) DESC LIMIT :limit"""
)


@dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint that retention never removes."""

    name: str
    checkpoint: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Erased:
    """The counts of what was erased. `may_remain` names, in sentences, each place that may still hold the data."""

    checkpoints: int
    at: datetime
    may_remain: tuple[str, ...]
    threads: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    versions: int = 0  # of items of memory
    namespaces: int = 0  # of memory, each with its name and policy


def checkpoint_id(checkpoint: Checkpoint | str | None) -> int | None:
    """Return the number of a checkpoint or of its id; None for None."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Checkpoint):
        return parse_id(checkpoint.id)
    if isinstance(checkpoint, str):
        return parse_id(checkpoint)
    raise UsageError(f"expected a checkpoint or its id, not {type(checkpoint).__name__}")


def remains(ctx: StoreContext, tenant: int, full: bool) -> Flow[tuple[str, ...]]:
    """Return a sentence for each place that erasing does not reach."""
    kept = [
        f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} made {moment(at):%Y-%m-%d %H:%M} UTC: {place}"
        for kind, place, at in (yield from fetch(_COPIES, tenant=tenant, limit=_COPIES_MAX))
    ]
    if ctx.driver.dialect == "postgres":
        if not full:
            kept.append(
                "free space in PostgreSQL's files, until new rows are written over it: full=True (`--full`) rewrites "
                "the tables"
            )
        kept.append(
            "samples that PostgreSQL's planner took (pg_statistic), of tables that are empty now or that belong to "
            "another role: autovacuum replaces them in time"
        )
        kept.append("PostgreSQL's write-ahead log, its archive, its replicas and its own backups")
    kept.append("whatever else copied the files: snapshots of the disk, blocks that the file system has not used again")
    return tuple(kept)


def _pin(row: PinRow) -> Pin:
    return Pin(row.name, show_id(row.record), moment(row.at))


# --- the handle


class ThreadRetention(Handle):
    """The part of a thread's handle for pins, retention and erasing."""

    _cursor: Cursor

    @blocking
    def pin(self, checkpoint: Checkpoint | str | None = None, *, name: str, who: str | None = None) -> Flow[Pin]:
        """Keep a checkpoint (default: the head) until `unpin(name)`, whatever the retention.

        A thread with a pin does not expire, and is deleted only with `force=True`. Erasing ignores pins. `who` is
        recorded in `store.ops.actions()`, as in `unpin`.
        """
        record, name = checkpoint_id(checkpoint), check_name(name, "pin")
        tenant, row = yield from flows.locate(self._context, self._cursor)
        op = partial(pins.add_pin, tenant, row.name, row.thread, name, record, self._context.clock_us())
        about = f"thread {row.name}"
        return _pin((yield from noted(self._context, who, "pin", about, write(op), name=name)))

    apin = awaited(pin)

    @blocking
    def unpin(self, name: str, *, who: str | None = None) -> Flow[None]:
        """Remove a pin. Raises NotFound."""
        name = check_name(name, "pin")
        tenant, row = yield from flows.locate(self._context, self._cursor)
        dropping = change(pins.DROP(tenant=tenant, thread=row.thread, name=name))
        if name not in [pin.name for pin in (yield from read(partial(pins.pins_of, tenant, row.thread)))]:
            raise NotFound(f"thread {row.name!r} has no pin {name!r}: thread.pins() lists them")
        yield from noted(self._context, who, "unpin", f"thread {row.name}", dropping, name=name)

    aunpin = awaited(unpin)

    @blocking
    def pins(self) -> Flow[list[Pin]]:
        """Return the thread's pins, oldest first."""
        tenant, row = yield from flows.locate(self._context, self._cursor)
        return [_pin(pin) for pin in (yield from read(partial(pins.pins_of, tenant, row.thread)))]

    apins = awaited(pins)

    @blocking
    def retention(
        self,
        *,
        threads: Duration | Literal["inherit"] | Unchanged | None = UNCHANGED,
        checkpoints: int | Literal["inherit"] | Unchanged | None = UNCHANGED,
        checkpoint_age: Duration | Literal["inherit"] | Unchanged | None = UNCHANGED,
    ) -> Flow[Retention]:
        """Set the retention of this thread where arguments are passed, and return the one in effect.

        A thread's own setting takes precedence over the store's. `threads` is how long the thread is kept after its
        last write ("30d" or a timedelta). `checkpoints` is how many of its newest are kept. `checkpoint_age` is how
        long each is kept; the newest stays. None keeps all for ever; "inherit" returns to the store's setting.
        `store.ops.compact()` applies it.
        """
        named = {"threads": threads, "checkpoints": checkpoints, "checkpoint_age": checkpoint_age}
        inherited = [name for name, value in named.items() if value == "inherit"]
        fields = policies.fields_from({name: value for name, value in named.items() if name not in inherited})
        tenant, row = yield from flows.locate(self._context, self._cursor)
        if fields or inherited:
            yield from write(partial(policies.write_own, tenant, row.name, row.thread, fields, inherited))
        return Retention.of(*(yield from read(partial(policies.read_own, tenant, row.thread))))

    aretention = awaited(retention)

    @blocking
    def erase(self, checkpoint: Checkpoint | str, *, full: bool = False) -> Flow[Erased]:
        """Erase the state, note and metadata of one checkpoint for good, in all threads that share it.

        Its hash stays, because later checkpoints are checked against it. Pins do not prevent erasing. SQLite rewrites
        its file; PostgreSQL rewrites its tables only with `full`. `store.ops.erase` erases a whole thread.
        """
        ctx, record, at = self._context, checkpoint_id(checkpoint), self._context.clock_us()
        if record is None:
            raise UsageError("erase(checkpoint): say which one; store.ops.erase(thread) erases all")
        tenant = yield from flows.tenant_of(ctx, self._cursor)
        removed = 0
        try:
            _, row = yield from flows.locate(ctx, self._cursor)
            removed = yield from write(partial(erase.wipe_record, tenant, row.name, row.thread, record, at), solo=True)
            ctx.cache.forget(tenant, row.tree)
        except NotFound:  # a killed process may have wiped it already: then finish its erasing
            if (yield from read(partial(erase.marked, tenant))) is None:
                raise
        problems = yield from erase.finish(tenant, ctx.driver.dialect, full=full)
        others = "other checkpoints of the thread and its forks that say the same, and what is pending on them"
        return Erased(removed, moment(at), (*problems, *(yield from remains(ctx, tenant, full)), others))

    aerase = awaited(erase)
