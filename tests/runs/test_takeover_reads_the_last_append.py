"""PostgreSQL: a takeover reads every entry that its predecessor committed, also one that was being written meanwhile.

An append checks the fence by reading it. The row lock that it takes makes a claim wait for its commit: without it, the
claim could read the journal before the entry is there, and run again what is recorded a moment later.
"""

from __future__ import annotations

import threading
from functools import partial

import psycopg

import perdure
from perdure.runs.journal import rows
from perdure.runs.journal.entries import DONE, Entry, pack
from perdure.runs.journal.journal import read_journal
from perdure.runs.journal.rows import FenceToken, JournalRow
from perdure.runs.run_table import RunRow
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Transaction


@perdure.durable
def appended_to() -> None:
    pass


def _waiting_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as watcher:
        found = watcher.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND state = 'active'"
        )
        return bool((found.fetchone() or (0,))[0])


def test_a_claim_waits_for_an_append_that_is_under_way_and_reads_its_entry(postgres_url: str) -> None:
    written, may_commit = threading.Event(), threading.Event()

    def hook(step: str) -> None:
        if step == "commit":
            written.set()
            assert may_commit.wait(60)

    with perdure.open(postgres_url) as store:
        store.start(appended_to, id="r")
        driver = store._context.driver
        queued = driver.run(Transaction(partial(rows.find, 1, "r")))
        claim = partial(rows.claim, 1, queued.run, lease=30_000_000, now=0)
        first = driver.run(Transaction(partial(claim, fence=0, owner="first"), write=True))
        line = JournalRow(1, DONE, pack(Entry("1", "book", 0)))
        slow = PostgresDriver(postgres_url, hook=hook)
        try:
            append = Transaction(partial(rows.append, FenceToken(1, first.run, first.fence), [line]), write=True)
            appending = threading.Thread(target=slow.run, args=(append,))
            appending.start()
            assert written.wait(60)  # the entry is written and not committed
            taken: list[RunRow] = []
            takeover = Transaction(partial(claim, fence=first.fence, owner="second", dead=True), write=True)
            claiming = threading.Thread(target=lambda: taken.append(driver.run(takeover)))
            claiming.start()
            while not _waiting_for_a_lock(postgres_url):
                assert claiming.is_alive(), "the claim did not wait"
            assert not taken
            may_commit.set()
            appending.join(60)
            claiming.join(60)
            assert taken[0].fence == first.fence + 1
            entries = driver.run(Transaction(partial(read_journal, 1, taken[0])))
            assert [recorded.entry.name for recorded in entries] == ["book"]
            late = partial(rows.append, FenceToken(1, first.run, first.fence), [line._replace(seq=2)])
            assert driver.run(Transaction(late, write=True)) is None  # its fence has moved
        finally:
            may_commit.set()
            slow.close()
