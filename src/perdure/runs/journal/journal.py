"""Reading a journal: all of it at once, a fork's with what it shares, and checked against the sum in the run's row.

Every row is checked by a hash of its own. That none is missing is known of the rows that were there when the run last
left a process (parked, ended): then their number and sum are written to its row. What came later, the tail of a run
that is running or whose process was killed, may have lost its last rows unnoticed.

A fork's own journal begins with an entry that says what it is a fork of (`FORK`), and which rows of the shared part do
not count: those that were not there yet when it was made (a parallel branch of a living run may write an earlier number
later), and those that it does again itself, such as a question that was still open.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from perdure.errors import Damaged, JournalDamaged
from perdure.runs.journal.entries import CHANGE, DIGEST_MASK, Recorded, entry_digest, unpack
from perdure.runs.journal.rows import COLUMNS, RUN_CELLS, JournalSum, RunRow, value_of
from perdure.storage.columns import JOURNAL
from perdure.storage.program import Batch, Program, Rows, Sql

_ROWS = """SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since AND seq <= :last
    ORDER BY seq"""
ROWS = Sql(_ROWS, opens={2: JOURNAL.at("run", 0, 1)}, tolerant=True)
PAGE_OF_ROWS = Sql(f"{_ROWS} LIMIT :limit", opens={2: JOURNAL.at("run", 0, 1)}, tolerant=True)
# Only what a journal adds up to, and where it was forked: what else is damaged in the row is not for here.
_SUM = Sql(f"SELECT {COLUMNS} FROM run WHERE tenant = :tenant AND run = :run", opens=RUN_CELLS, tolerant="all")
SEQ_MAX = 2**62
_ORIGINS_MAX = 1000  # forks of forks
FORK = "fork"  # the path of the entry that a fork's own journal begins with
FORK_NAME = "perdure.fork"


class Segment(NamedTuple):
    """A part of a journal that one run wrote: its rows as they are stored, and which of them count."""

    run: int
    since: int
    last: int
    rows: Rows
    entries: list[Recorded]
    digest: int  # the sum of the hashes of the rows


def read_journal(tenant: int, row: RunRow, *, after: int | None = None) -> Program[list[Recorded]]:
    """The entries of a run, oldest first: with those that it shares with the run it was forked from.

    With `after`, only its own rows with a greater number, unchecked: for whoever follows a run.
    """
    if after is not None:
        [rows] = yield Batch(ROWS(tenant=tenant, run=row.run, since=max(after, row.since), last=SEQ_MAX), last=True)
        return [Recorded(seq, kind, unpack(body)) for seq, kind, body in rows]
    segments = yield from read_segments(tenant, row, last=row.origin is None)
    return [recorded for segment in segments for recorded in segment.entries]


def read_with_sum(tenant: int, row: RunRow) -> Program[tuple[list[Recorded], JournalSum]]:
    """The same entries, and what the run's own rows add up to."""
    segments = yield from read_segments(tenant, row, last=row.origin is None)
    own = segments[-1]
    last = max((row.seq, *(seq for seq, _, _ in own.rows)))
    entries = [recorded for segment in segments for recorded in segment.entries]
    return entries, JournalSum(len(own.rows), own.digest, last)


def read_segments(tenant: int, row: RunRow, *, last: bool = False) -> Generator[Batch, list[Rows], list[Segment]]:
    """The journal as the runs that wrote it left it, oldest first. `last`: nothing else happens in the transaction."""
    # The row and its journal in one transaction: the sum is that of these rows.
    rows, runs = yield Batch(
        ROWS(tenant=tenant, run=row.run, since=row.since, last=SEQ_MAX),
        _SUM(tenant=tenant, run=row.run),
        last=last,
    )
    now = RunRow._make(runs[0]) if runs else row
    # An imported fork has what it shared as rows of its own; they still are not its doing.
    counted = JournalSum(now.entries, now.digest, now.seq)
    own, digest = _checked(row, row.run, rows, counted, own_after=row.origin_seq)
    segments = [Segment(row.run, row.since, SEQ_MAX, rows, own, digest)]
    if not last and row.origin is not None and row.since == 0:
        segments = [*(yield from _shared(tenant, row, fork_terms(own))), *segments]
    return segments


def fork_terms(own: Sequence[Recorded]) -> dict[str, Any]:
    """What the first entry of a fork's own journal says; nothing for any other run."""
    first = own[0] if own else None
    is_fork = first is not None and first.kind == CHANGE and first.entry.path == FORK
    return (first.entry.more or {}) if is_fork and first is not None else {}


def _shared(tenant: int, row: RunRow, terms: dict[str, Any]) -> Generator[Batch, list[Rows], list[Segment]]:
    """What a fork shares with its origin, and that with its own, oldest first."""
    parts: list[Segment] = []
    below = row
    for _ in range(_ORIGINS_MAX):
        if below.origin is None:
            break
        late = set(terms.get("late", ()))
        found, runs = yield Batch(
            ROWS(tenant=tenant, run=below.origin, since=below.origin_since, last=below.origin_seq),
            _SUM(tenant=tenant, run=below.origin),
        )
        if not runs:
            raise JournalDamaged(f"run {row.id!r} was forked from a run that is gone; its history cannot be read")
        rows = [one for one in found if one[0] not in late]
        sum_then = JournalSum(below.origin_entries, below.origin_digest, SEQ_MAX)
        entries, digest = _checked(row, below.origin, rows, sum_then, own_after=SEQ_MAX)
        void = set(terms.get("void", ()))
        counted = [recorded for recorded in entries if recorded.seq not in void]
        parts.append(Segment(below.origin, below.origin_since, below.origin_seq, rows, counted, digest))
        if below.origin_since > 0:
            break  # what the origin did since it began anew; what it shared before that is no part of it
        terms = fork_terms(entries)
        below = RunRow._make(runs[0])
    return parts[::-1]


def _checked(row: RunRow, run: int, rows: Rows, total: JournalSum, *, own_after: int) -> tuple[list[Recorded], int]:
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
        digest += entry_digest(run, seq, kind, body)
        if seq <= total.last:
            found, count = digest, count + 1
        entries.append(Recorded(seq, kind, unpack(body), seq > own_after))
    if count != total.entries or found & DIGEST_MASK != total.digest:
        raise JournalDamaged(
            f"the journal of run {row.id!r} does not add up: {count} entries where its row says {total.entries}"
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


__all__ = ["FORK", "FORK_NAME", "Segment", "fork_terms", "paths_in", "read_journal", "read_segments", "read_with_sum"]


def outcome_of(tenant: int, row: RunRow) -> Program[bytes | None]:
    """What a finished run ended with. A result is never taken for None because its row is gone."""
    found = yield from value_of(tenant, row.run, "outcome")
    if found is None and row.status == "done":
        raise Damaged(f"the result of run {row.id!r} is missing; `perdure store verify` says what else is")
    return found
