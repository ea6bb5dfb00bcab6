"""Streaming replication of PostgreSQL: a primary dies under load, and its standby has all that was acknowledged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Event, Thread

import psycopg
import pytest
from standby_kit import Standby, standby_of

import perdure
from perdure.errors import OutcomeUnknown, PerdureError, UsageError
from perdure.testing.postgres_server import PostgresServer

WRITERS = 4
BEFORE, AFTER = 25, 25  # acknowledged saves of each writer, before the primary dies and on the standby


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, Standby]]:
    """A primary that acknowledges a commit after its standby has applied it."""
    with PostgresServer(fsync=False) as primary, standby_of(primary) as standby:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        with psycopg.connect(primary.url(), autocommit=True) as connection:
            query = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            while connection.execute(query).fetchone() != (1,):
                time.sleep(0.005)
        yield primary, standby


class Writer(Thread):
    """Saves 1, 2, 3 … and notes each number that was acknowledged. After an error it looks, and continues."""

    def __init__(self, store: perdure.Store, name: str) -> None:
        super().__init__(name=name)
        self.thread, self.acknowledged = store.thread(name), 0
        self.warm, self.goal = Event(), BEFORE + AFTER
        self.unknown = 0

    def run(self) -> None:
        while self.acknowledged < self.goal:
            try:
                self.thread.save({"n": self.acknowledged + 1})
                self.acknowledged += 1
            except OutcomeUnknown:
                self.unknown += 1
                self._look()
            except PerdureError:
                pass  # nothing was written
            if self.acknowledged >= BEFORE:
                self.warm.set()

    def _look(self) -> None:
        """Read whether the save of unknown outcome is there, as soon as a server answers."""
        while True:
            with suppress(PerdureError):
                self.acknowledged = max(self.acknowledged, self.thread.load().state["n"])
                return


def test_no_acknowledged_save_is_lost_when_the_primary_dies(pair: tuple[PostgresServer, Standby]) -> None:
    primary, standby = pair
    hosts = f"{primary.host}:{primary.port},{standby.url('').split('@')[1].rstrip('/')}"
    url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
    with perdure.open(url, durability="replicated", timeout_s=5) as store:
        writers = [Writer(store, f"writer-{number}") for number in range(WRITERS)]
        for writer in writers:
            writer.start()
        assert all(writer.warm.wait(60) for writer in writers)
        primary.kill()
        acknowledged = {writer.name: writer.acknowledged for writer in writers}
        with perdure.open(standby.url("postgres"), read_only=True) as replica:
            for name, least in acknowledged.items():  # on the standby before anybody promotes it
                assert least <= replica.thread(name).load().state["n"] <= least + 1
        standby.promote()
        for writer in writers:
            writer.join(60)
            numbers = [one.state["n"] for one in store.thread(writer.name).history()]
            assert numbers == [*range(writer.goal, 0, -1)]  # each number once: none lost, none twice
        assert store.ops.verify().ok


def test_a_file_has_no_standby() -> None:
    with pytest.raises(UsageError, match="PostgreSQL"):
        perdure.open(":memory:", durability="replicated")
