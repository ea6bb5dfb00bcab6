"""Reading a journal: all of it at once, checked against the sum in the run's row.

Every row is checked by a hash of its own. That none is missing is known of the rows that were there when the run last
left a process (parked, ended): then their number and sum are written to its row. What came later, the tail of a run
that is running or whose process was killed, may have lost its last rows unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import Damaged, JournalDamaged
from perdure.runs.journal.entries import DIGEST_MASK, Recorded, entry_digest, unpack
from perdure.runs.journal.rows import JournalSum, RunRow, value_of
from perdure.storage.columns import JOURNAL
from perdure.storage.program import Batch, Program, Rows, Sql

ROWS = Sql(
    """SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since
    ORDER BY seq LIMIT :limit""",
    opens={2: JOURNAL.at("run", 0, 1)},
    tolerant=True,
)
_SUM = Sql("SELECT entries, digest, seq FROM run WHERE tenant = :tenant AND run = :run")
_ALL = 2**62


def read_with_sum(tenant: int, row: RunRow, *, last: bool = True) -> Program[tuple[list[Recorded], JournalSum]]:
    """The entries of a run, oldest first, and what they add up to. Raises JournalDamaged. `last`: the transaction does
    nothing else."""
    # The row and its journal in one transaction: the sum is that of these rows.
    rows, sums = yield Batch(
        ROWS(tenant=tenant, run=row.run, since=row.since, limit=_ALL), _SUM(tenant=tenant, run=row.run), last=last
    )
    entries, digest = _checked(
        row, rows, JournalSum(*sums[0]) if sums else JournalSum(row.entries, row.digest, row.seq)
    )
    return entries, JournalSum(len(rows), digest, max(row.seq, rows[-1][0] if rows else 0))


def read_journal(tenant: int, row: RunRow, *, last: bool = True) -> Program[list[Recorded]]:
    """The entries of a run, oldest first."""
    return (yield from read_with_sum(tenant, row, last=last))[0]


def read_after(tenant: int, row: RunRow, after: int) -> Program[list[Recorded]]:
    """The entries that the run itself recorded with a greater number, unchecked: for readers that follow it."""
    since = max(after, row.since, row.origin_seq)
    [rows] = yield Batch(ROWS(tenant=tenant, run=row.run, since=since, limit=_ALL), last=True)
    return [Recorded(seq, kind, unpack(body)) for seq, kind, body in rows]


def _checked(row: RunRow, rows: Rows, total: JournalSum) -> tuple[list[Recorded], int]:
    """The entries behind rows, and the sum of their hashes. `total` covers those up to its last number."""
    assert total.last is not None
    found = digest = count = 0
    entries: list[Recorded] = []
    for seq, kind, body in rows:
        if type(body) is not bytes or type(kind) is not int or not 0 <= kind < 1 << 16:
            raise JournalDamaged(
                f"entry {seq} of the journal of run {row.id!r} was changed or cannot be read; nothing was run. "
                "Restore it from a backup, or fork it before the damage"
            )
        digest += entry_digest(row.run, seq, kind, body)
        if seq <= total.last:
            found, count = digest, count + 1
        entries.append(Recorded(seq, kind, unpack(body), seq > row.origin_seq))
    if count != total.entries or found & DIGEST_MASK != total.digest:
        raise JournalDamaged(
            f"the journal of run {row.id!r} does not add up: {count} entries where {total.entries} were recorded"
            f"{'' if count != total.entries else ', and one of them was changed'}; nothing was run. "
            "Restore it from a backup, or fork it before the damage"
        )
    return entries, digest & DIGEST_MASK


def paths_in(entries: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """The calls of a run in the order they began, by path; what a body emits stands alone."""
    by_path: dict[str, list[Recorded]] = {}
    for recorded in entries:
        path = recorded.entry.path
        by_path.setdefault(f"{path}@{recorded.seq}" if path.endswith("~emit") else path, []).append(recorded)
    return by_path


def outcome_of(tenant: int, row: RunRow) -> Program[bytes | None]:
    """What a finished run ended with. A missing result is never taken for None."""
    found = yield from value_of(tenant, row.run, "outcome")
    if found is None and row.status == "done":
        raise Damaged(f"the result of run {row.id!r} is missing; `perdure store verify` says what else is")
    return found
