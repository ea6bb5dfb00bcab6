"""Promoting a replica: it becomes a store of its own, in a new era, in which no process of the source can write."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial

import orjson

from perdure.errors import UsageError
from perdure.ops.store import Store
from perdure.regions.replication import STATE, triggers
from perdure.runs.journal.rows import FINISHED
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.storage.store_tables import STORE
from perdure.threads.models import moment
from perdure.transfers.fencing import fence_old_processes

# A round of replication that is being written ends first.
_LOCK = Sql(sqlite="SELECT 1", postgres="LOCK TABLE meta IN EXCLUSIVE MODE")
# The run's own row does not count the entries of a run that is running.
_CUT = Sql(
    f"""UPDATE run SET cut = 1 + coalesce(
        (SELECT max(seq) FROM journal j WHERE j.tenant = run.tenant AND j.run = run.run), 0)
    WHERE status NOT IN {FINISHED!r}"""
)
_ACCEPT = ("DROP TRIGGER replica_{0}_{1}", "DROP TRIGGER replica ON {0}")


@dataclass(frozen=True, slots=True)
class Promoted:
    """The store that a target has become."""

    taken_at: datetime  # what was committed in the source later is not in it
    era: int
    requeued: int  # runs that had been running: a worker resumes them


def promote(target: Store) -> Promoted:
    """Make a replica a store of its own, in a new era: no process that used the source can write to it."""
    ctx = target._context
    done: Promoted = drive(ctx.driver.capabilities.base, write(partial(_promote, ctx.clock_us()), solo=True))
    return done


def _promote(now: int) -> Program[Promoted]:
    [_, state] = yield Batch(_LOCK(), STATE(tenant=None))
    if not state:
        raise UsageError("this store is no replica: it takes writes already")
    held = orjson.loads(state[0][0])
    if "token" not in held:
        raise UsageError("this replica holds nothing yet: its first `perdure store replicate` was not finished")
    requeued = yield from fence_old_processes("", now)
    *_, [(_, era)] = yield Batch(*triggers(*_ACCEPT), _CUT(tenant=None), STORE(tenant=None))
    return Promoted(moment(held["at"]), int(era), requeued)
