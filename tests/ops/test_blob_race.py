"""Large results are stored once and collected when no run needs them. On PostgreSQL a collection may meet a writer that
takes up an old one at the same moment. The foreign key decides it: then one of the two gives way, and nothing is lost.

The tests drive the two transactions step by step, with the statements that Perdure itself sends. Without the foreign
key the same steps lose data, whichever way the writer takes up the old result: that is why it must stay.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pg_session import Session
from psycopg import errors

import perdure
from perdure.runs.journal import blobs
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_hash, drop_loose_blobs
from perdure.storage.program import Flow, Sql

BODY = b"a large result"
KEY = blob_hash(BODY)
TENANT = 1
Way = Literal["DO NOTHING", "DO UPDATE"]
WAYS: list[Way] = ["DO NOTHING", "DO UPDATE"]


class Race:
    """A store with one old result that no run needs: a collection, a writer, and somebody who watches."""

    def __init__(self, url: str, *, foreign_key: bool, way: Way) -> None:
        perdure.open(url).close()
        self.watcher, self.collection, self.writer = Session(url), Session(url), Session(url)
        [(name,)] = self.watcher.run(
            "SELECT conname FROM pg_constraint WHERE conrelid = 'run_blob'::regclass AND contype = 'f'"
        )
        if not foreign_key:
            self.watcher.run(f"ALTER TABLE run_blob DROP CONSTRAINT {name}")
        self.watcher.run(blobs._ADD, tenant=TENANT, hash=KEY, body=BODY)
        assert "ON CONFLICT (tenant, hash) DO UPDATE" in blobs._ADD.postgres
        update = "UPDATE SET hash = excluded.hash"
        self.add = blobs._ADD if way == "DO UPDATE" else Sql(blobs._ADD.postgres.replace(update, "NOTHING"))

    def take_up(self) -> None:
        self.writer.run(self.add, tenant=TENANT, hash=KEY, body=BODY)

    def refer(self) -> None:
        self.writer.run(blobs._REFER, tenant=TENANT, run=7, hash=KEY)

    @property
    def collect(self) -> dict[str, Any]:
        return {"sql": blobs._DROP_LOOSE, "tenant": TENANT, "limit": 100}

    def is_lost(self) -> bool:
        """Whether a run needs a result that is not there."""
        [(lost,)] = self.watcher.run(
            """SELECT count(*) FROM run_blob u WHERE NOT EXISTS (
            SELECT 1 FROM blob b WHERE b.tenant = u.tenant AND b.hash = u.hash)"""
        )
        return bool(lost)

    def close(self) -> None:
        for session in (self.watcher, self.collection, self.writer):
            session.close()


@pytest.fixture
def race(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Race]:
    made = Race(postgres_url, **request.param)
    yield made
    made.close()


def cases(foreign_key: bool, *ways: Way) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "race", [{"foreign_key": foreign_key, "way": way} for way in ways], indirect=True, ids=ways
    )


def take_up_while_it_is_collected(race: Race) -> None:
    """The writer locks the old row; the collection, which saw no reference when it began, waits for it; the writer
    writes its reference and commits; the collection goes on with what it saw."""
    race.writer.run("BEGIN")
    race.take_up()
    race.collection.begin_waiting(race.watcher, **race.collect)
    race.refer()
    race.writer.run("COMMIT")
    race.collection.end_waiting()


def take_up_then_collected(race: Race) -> None:
    """The writer finds the old row and does nothing; the collection removes it; the writer writes its reference."""
    race.writer.run("BEGIN")
    race.take_up()
    race.collection.run(**race.collect)
    race.refer()
    race.writer.run("COMMIT")


@cases(False, "DO UPDATE")
def test_without_the_foreign_key_a_locked_row_is_collected_all_the_same(race: Race) -> None:
    take_up_while_it_is_collected(race)
    assert race.collection.error is None
    assert race.is_lost()


@cases(False, "DO NOTHING")
def test_without_the_foreign_key_a_row_that_was_only_looked_at_is_collected(race: Race) -> None:
    take_up_then_collected(race)
    assert race.is_lost()


@cases(True, "DO UPDATE")
def test_with_the_foreign_key_the_collection_gives_way(race: Race) -> None:
    take_up_while_it_is_collected(race)
    assert isinstance(race.collection.error, errors.ForeignKeyViolation)
    assert not race.is_lost()
    assert race.watcher.run("SELECT body FROM blob") == [(BODY,)]


@cases(True, "DO NOTHING")
def test_with_the_foreign_key_a_writer_that_only_looked_is_refused(race: Race) -> None:
    """Nothing is lost, but the writer fails: so Perdure's writer locks the row."""
    with pytest.raises(errors.ForeignKeyViolation):
        take_up_then_collected(race)
    race.writer.run("ROLLBACK")
    assert not race.is_lost()


@cases(True, *WAYS)
def test_a_writer_that_comes_later_brings_it_again(race: Race) -> None:
    """The collection has removed the row and not committed yet: the writer waits, and inserts it anew."""
    race.collection.run("BEGIN")
    race.collection.run(**race.collect)
    race.writer.begin_waiting(race.watcher, race.add, tenant=TENANT, hash=KEY, body=BODY)
    race.collection.run("COMMIT")
    race.writer.end_waiting()
    assert race.writer.error is None
    race.refer()
    assert not race.is_lost()
    assert race.watcher.run("SELECT body FROM blob") == [(BODY,)]


# --- the same through Perdure


@perdure.step(name="race.large")
def large(size: int) -> bytes:
    return random.Random(1).randbytes(size)  # the same for all, and nothing that could be compressed


@perdure.durable(name="race.agent")
def agent() -> int:
    return len(large(BLOB_MIN_BYTES * 4))


@perdure.durable(name="race.waits")
def waits() -> int:
    size = len(large(BLOB_MIN_BYTES * 4))
    perdure.ask("Go on?")
    return size


def test_a_sweep_that_meets_a_run_gives_way_and_the_run_keeps_its_result(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the removal, a run takes the same result up: the sweep sees that it is needed, or runs into
    the foreign key and leaves it."""
    with perdure.open(postgres_url) as store, perdure.open(postgres_url) as other:
        store.ops.retention(runs="0s")
        store.run(agent, id="first").result()
        met: list[int] = []

        def meeting(tenant: int) -> Flow[None]:
            if not met:
                met.append(tenant)
                other.run(agent, id="second").result()
            return (yield from drop_loose_blobs(tenant))

        monkeypatch.setattr("perdure.runs.maintenance.retention.drop_loose_blobs", meeting)
        store.ops.compact()
        assert met
        assert len(store.get_run("second").steps()) == 1
        assert store.ops.verify().ok
        assert store.replay("second", agent).result == BLOB_MIN_BYTES * 4


def test_many_runs_and_sweeps_at_once_lose_nothing(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store, perdure.open(postgres_url) as other:
        store.ops.retention(runs="0s")
        stop, problems = threading.Event(), []

        def sweep() -> None:
            try:
                while not stop.is_set():
                    store.ops.sweep_runs()
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=sweep)
        thread.start()
        for number in range(40):
            (store if number % 2 else other).run(agent if number % 2 else waits, id=f"r{number}")
        stop.set()
        thread.join()
        assert problems == []
        report = store.ops.verify()
        assert report.ok, [str(problem) for problem in report.problems]
        kept = [run.id for run in store.runs(statuses="waiting", limit=None)]  # no sweep takes what is not finished
        assert len(kept) == 20
        assert all(len(store.get_run(run).steps()[0].result) == BLOB_MIN_BYTES * 4 for run in kept)
