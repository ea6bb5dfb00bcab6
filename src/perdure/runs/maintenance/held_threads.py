"""The records of threads that retention must keep, because an unfinished run has saved them and may be resumed.

A run's journal names the threads and records that it saved. While the run is unfinished, such a thread is kept from the
oldest of these records on.
"""

from __future__ import annotations

from perdure.errors import JournalDamaged
from perdure.runs.calls.saving import NAME
from perdure.runs.journal.entries import DONE, unpack
from perdure.runs.journal.journal import PAGE_OF_ROWS, SEQ_MAX
from perdure.runs.journal.rows import OPEN, TASK
from perdure.storage.program import Flow, Rows, Sql, fetch

_PAGE = 200
_WINDOW = 1000  # journal rows at a time
_OPEN = ", ".join(f"'{status}'" for status in OPEN)
_UNFINISHED = Sql(
    f"""SELECT run, since, origin, origin_seq FROM run WHERE tenant = :tenant AND run > :after
    AND status IN ({_OPEN}) AND function NOT LIKE '{TASK}%' ORDER BY run LIMIT :limit"""
)
_ORIGIN = Sql("SELECT origin, origin_seq FROM run WHERE tenant = :tenant AND run = :run")
_ORIGINS_MAX = 1000  # forks of forks


def held_threads(tenant: int) -> Flow[dict[str, int]]:
    """Return the oldest record that an unfinished run has saved to each thread, by the thread's name."""
    held: dict[str, int] = {}
    after = 0
    while page := (yield from fetch(_UNFINISHED, tenant=tenant, after=after, limit=_PAGE)):
        for run, since, *shared in page:
            after = run
            yield from _look_through(tenant, run, since, SEQ_MAX, held)
            origins: Rows = [tuple(shared)]
            for _ in range(_ORIGINS_MAX):  # the shared history of a fork
                if not origins or origins[0][0] is None:
                    break
                [(origin, last)] = origins
                yield from _look_through(tenant, origin, 0, last, held)
                origins = yield from fetch(_ORIGIN, tenant=tenant, run=origin)
    return held


def _look_through(tenant: int, run: int, since: int, last: int, held: dict[str, int]) -> Flow[None]:
    scope = {"tenant": tenant, "run": run, "last": last}
    while page := (yield from fetch(PAGE_OF_ROWS, **scope, since=since, limit=_WINDOW)):
        for seq, kind, body in page:
            since = seq
            name, record = _saved(kind, body)
            if name is not None:
                held[name] = min(record, held.get(name, record))


def _saved(kind: int, body: bytes) -> tuple[str | None, int]:
    if kind != DONE:
        return None, 0
    try:
        entry = unpack(body)
    except JournalDamaged:
        return None, 0  # verify reports it
    extra = entry.extra or {}
    return (str(extra["thread"]), int(extra["saved"][0])) if entry.name == NAME and "saved" in extra else (None, 0)
