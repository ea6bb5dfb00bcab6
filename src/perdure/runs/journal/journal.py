"""Reading of journals: a whole journal at once, checked against the sum in the run's row.

Number and sum are written whenever the run leaves a process, so a missing row up to that point is noticed; a loss of
later rows is not. A fork's journal begins with an entry (`FORK`) that names the rows it shares, as segments. A segment
skips numbers that were not written yet, and calls that the fork does again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from perdure.errors import Damaged, JournalDamaged
from perdure.runs.journal.entries import DIGEST_MASK, NAMING, EntryInStore, Recorded, entry_digest, unpack
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.rows import JournalSum, value_of
from perdure.runs.run_table import RunRow
from perdure.runs.tables import JOURNAL_BODY
from perdure.storage.program import Batch, Program, Rows, Sql

_ROWS = """SELECT seq, kind, body FROM journal WHERE tenant = :tenant AND run = :run AND seq > :since AND seq <= :last
    ORDER BY seq"""
ROWS = Sql(_ROWS, opens={2: JOURNAL_BODY.at("run", 0, 1)}, tolerant=True)
PAGE_OF_ROWS = Sql(f"{_ROWS} LIMIT :limit", opens={2: JOURNAL_BODY.at("run", 0, 1)}, tolerant=True)
ADD_ENTRY = Sql(
    "INSERT INTO journal (tenant, run, seq, kind, body) VALUES (:tenant, :run, :seq, :kind, :body)",
    seals={"body": JOURNAL_BODY},
)
_SUM = Sql("SELECT entries, digest, seq FROM run WHERE tenant = :tenant AND run = :run")
SEQ_MAX = 2**62
FORK = "fork"  # the path of the entry that a fork's own journal begins with
FORK_NAME = declare(CallKind("perdure.fork", is_changeable=False)).name
NO_CALLS = (NAMING, FORK)  # paths of entries that are no calls of the code


class Segment(NamedTuple):
    """The part of a journal that one run wrote: its rows above `since` up to `last`, without those in `skip`."""

    run: int
    since: int
    last: int
    skip: list[int]
    entries: int
    digest: int


class Journal(NamedTuple):
    """A run's journal, oldest rows first, as stored rows and as entries."""

    rows: Rows
    entries: list[Recorded]
    own: JournalSum  # of the rows that the run itself wrote
    segments: list[Segment]  # those that it shares, then its own


def read_whole(tenant: int, row: RunRow, *, last: bool = False) -> Generator[Batch, list[Rows], Journal]:
    """Return the journal of a run, including shared rows. Raises JournalDamaged.

    `last` says that the transaction does nothing else.
    """
    # The sum is read in the same transaction, so that it covers these rows.
    rows, sums = yield Batch(
        ROWS(tenant=tenant, run=row.run, since=row.since, last=SEQ_MAX),
        _SUM(tenant=tenant, run=row.run),
        last=last and row.origin is None,
    )
    counted = JournalSum(*sums[0]) if sums else JournalSum(row.entries, row.digest, row.seq)
    entries, digest = _checked(row, row.run, rows, counted)
    own = JournalSum(len(rows), digest, max(row.seq, rows[-1][0] if rows else 0))
    shared = _shared(entries) if row.origin is not None else []
    if shared:
        parts = (ROWS(tenant=tenant, run=part.run, since=part.since, last=part.last) for part in shared)
        answers = yield Batch(*parts, last=last)
        before: tuple[Rows, list[Recorded]] = ([], [])
        for part, answer in zip(shared, answers, strict=True):
            skip = set(part.skip)
            some = [one for one in answer if one[0] not in skip]
            before[0].extend(some)
            before[1].extend(_checked(row, part.run, some, JournalSum(part.entries, part.digest, SEQ_MAX))[0])
        rows, entries = [*before[0], *rows], [*before[1], *entries]
    # A transferred fork has its own copies of the rows that it shared before.
    since = max(row.since, row.origin_seq) if shared else row.since
    mine = Segment(row.run, since, SEQ_MAX, [], own.entries or 0, digest)
    return Journal(rows, entries, own, [*shared, mine])


def _shared(own: list[Recorded]) -> list[Segment]:
    first = own[0].entry if own else None
    if first is None or first.path != FORK or first.extra is None:
        return []
    return [Segment(*part) for part in first.extra["shared"]]


def read_journal(tenant: int, row: RunRow) -> Program[list[Recorded]]:
    """Return the entries of a run, oldest first. Raises JournalDamaged."""
    return (yield from read_whole(tenant, row, last=True)).entries


def read_with_sum(tenant: int, row: RunRow) -> Program[tuple[list[Recorded], JournalSum]]:
    """Return the entries of a run, oldest first, and the sum of its own rows. Raises JournalDamaged."""
    return (yield from read_whole(tenant, row, last=True))[1:3]


def entries_after(tenant: int, run: int, after: int) -> Program[list[Recorded]]:
    """Return a run's own entries with numbers above `after`, for readers that follow it. The sum is not checked."""
    [rows] = yield Batch(ROWS(tenant=tenant, run=run, since=after, last=SEQ_MAX), last=True)
    return [Recorded(run, seq, kind, unpack(body)) for seq, kind, body in rows]


def read_value(tenant: int, entry: EntryInStore) -> Program[bytes]:
    """Return the value of an entry that is kept without it. Raises JournalDamaged."""
    [rows] = yield Batch(ROWS(tenant=tenant, run=entry.run, since=entry.seq - 1, last=entry.seq), last=True)
    value = unpack(rows[0][2]).value if rows and type(rows[0][2]) is bytes else None
    if value is None:
        raise JournalDamaged(
            f"the value of {entry.name} at step {entry.path} was changed or is gone; restore the run from a backup, or "
            "fork it before the damage"
        )
    return value


def _checked(row: RunRow, run: int, rows: Rows, total: JournalSum) -> tuple[list[Recorded], int]:
    """Return the entries in rows, and the sum of their hashes. Raises JournalDamaged.

    `total` covers the rows up to its last number.
    """
    assert total.last is not None
    seen = digest = count = 0
    entries: list[Recorded] = []
    for seq, kind, body in rows:
        if type(body) is not bytes or type(kind) is not int or not 0 <= kind < 1 << 16:
            raise JournalDamaged(
                f"entry {seq} of the journal of run {row.id!r} was changed or cannot be read; nothing was run. "
                "Restore it from a backup, or fork it before the damage"
            )
        digest += entry_digest(run, seq, kind, body)
        if seq <= total.last:
            seen, count = digest, count + 1
        entries.append(Recorded(run, seq, kind, unpack(body), seq > row.origin_seq))
    if count != total.entries or seen & DIGEST_MASK != total.digest:
        raise JournalDamaged(
            f"the journal of run {row.id!r} does not add up: {count} entries where {total.entries} were recorded"
            f"{'' if count != total.entries else ', and one of them was changed'}; nothing was run. "
            "Restore it from a backup, or fork it before the damage"
        )
    return entries, digest & DIGEST_MASK


def paths_in(entries: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Return the entries of a run by path, in the order the calls began."""
    by_path: dict[str, list[Recorded]] = {}
    for recorded in entries:
        path = recorded.entry.path
        if path not in NO_CALLS:
            by_path.setdefault(path, []).append(recorded)
    return by_path


def outcome_of(tenant: int, row: RunRow) -> Program[bytes | None]:
    """Return the stored outcome of a run. Raises Damaged if a run that is done has none: it is never taken for None."""
    value = yield from value_of(tenant, row.run, "outcome")
    if value is None and row.status == "done":
        raise Damaged(f"the result of run {row.id!r} is missing; `perdure store verify` says what else is")
    return value
