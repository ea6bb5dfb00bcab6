"""The declaration of the runs domain, which `storage/domains.py` imports.

Lower layers call its functions without knowing runs: retention asks which threads must stay, and deleting a thread
deletes the runs that belong to it. The functions import their modules late, because opening a store imports this one.
"""

from __future__ import annotations

from perdure.log.removals import noticing_removals
from perdure.runs.journal.rows import OPEN, TASK
from perdure.runs.tables import COUNTS, DUE_RUNS, TABLES
from perdure.storage.domains import Domain
from perdure.storage.program import Batch, Flow, Program, Sql

_BUSY = Sql(
    f"""SELECT DISTINCT r.root FROM run r JOIN thread t ON t.tenant = r.tenant AND t.thread = r.root
    WHERE t.tenant = :tenant AND t.tree = :tree AND r.function LIKE '{TASK}%'
        AND r.status IN ({", ".join(f"'{status}'" for status in OPEN)})"""
)


def _held_threads(tenant: int) -> Flow[dict[str, int]]:
    from perdure.runs.maintenance.held_threads import held_threads

    return held_threads(tenant)


def busy_threads(tenant: int, tree: int) -> Program[set[int]]:
    """Return the threads whose graphs have an unfinished task. They must not be changed."""
    [rows] = yield Batch(_BUSY(tenant=tenant, tree=tree))
    return {thread for (thread,) in rows}


def _thread_deleted(tenant: int, thread: int) -> Flow[int]:
    from perdure.runs.journal.thread_runs import drop_of_thread

    return drop_of_thread(tenant, thread)


DOMAIN = Domain(
    "runs",
    TABLES,
    (DUE_RUNS, COUNTS, noticing_removals("run")),
    held_threads=_held_threads,
    busy_threads=busy_threads,
    thread_prefix="run:",
    thread_deleted=_thread_deleted,
)
