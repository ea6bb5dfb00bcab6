"""Reading a journal: all of it at once, a fork's with what it shares, and checked against the sum in the run's row."""

from __future__ import annotations

from collections.abc import Generator

from holdfast.errors import JournalDamaged
from holdfast.runs.entries import DIGEST_MASK, Recorded, entry_digest, unpack
from holdfast.runs.rows import BY_NUMBER, RunRow
from holdfast.storage.program import Batch, Program, Rows, Sql

_ROWS = Sql(
    """SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since AND seq <= :last
    ORDER BY seq"""
)
_SEQ_MAX = 2**62
_ORIGINS_MAX = 1000  # forks of forks


def read_journal(tenant: int, row: RunRow, *, after: int | None = None) -> Program[list[Recorded]]:
    """The entries of a run, oldest first: with those that it shares with the run it was forked from.

    With `after`, only its own rows with a greater number, unchecked: for whoever follows a run.
    """
    if after is not None:
        [rows] = yield Batch(_ROWS(tenant=tenant, run=row.run, since=max(after, row.since), last=_SEQ_MAX), last=True)
        return [Recorded(seq, kind, unpack(body)) for seq, kind, body in rows]
    # The row and its journal in one transaction: the sum is that of these rows.
    shared = (yield from _shared(tenant, row)) if row.origin is not None else []
    rows, runs = yield Batch(
        _ROWS(tenant=tenant, run=row.run, since=row.since, last=_SEQ_MAX),
        BY_NUMBER(tenant=tenant, run=row.run),
        last=True,
    )
    now = RunRow._make(runs[0]) if runs else row
    return shared + _checked(row, row.run, rows, now.entries, now.digest, own=True)


def _shared(tenant: int, row: RunRow) -> Generator[Batch, list[Rows], list[Recorded]]:
    """What a fork shares with its origin, and that with its own, oldest first."""
    parts: list[list[Recorded]] = []
    below = row
    for _ in range(_ORIGINS_MAX):
        if below.origin is None:
            break
        rows, runs = yield Batch(
            _ROWS(tenant=tenant, run=below.origin, since=below.origin_since, last=below.origin_seq),
            BY_NUMBER(tenant=tenant, run=below.origin),
        )
        if not runs:
            raise JournalDamaged(f"run {row.id!r} was forked from a run that is gone; its history cannot be read")
        parts.append(_checked(row, below.origin, rows, below.origin_entries, below.origin_digest, own=False))
        below = RunRow._make(runs[0])
    return [recorded for part in reversed(parts) for recorded in part]


def _checked(row: RunRow, run: int, rows: Rows, count: int, total: int, *, own: bool) -> list[Recorded]:
    found = 0
    entries: list[Recorded] = []
    for seq, kind, body in rows:
        found += entry_digest(run, seq, kind, body)
        entries.append(Recorded(seq, kind, unpack(body), own))
    if len(rows) != count or found & DIGEST_MASK != total:
        raise JournalDamaged(
            f"the journal of run {row.id!r} does not add up: {len(rows)} entries where its row says {count}"
            f"{'' if len(rows) != count else ', and one of them was changed'}; nothing was run. "
            "Restore it from a backup, or fork it before the damage"
        )
    return entries
