"""A replica is the source at one instant, whatever happens in between; promoted, it is a store of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count as count_up
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from doctor_kit import raw
from region_kit import POINTS
from snapshot_kit import change_everything, count, fill, look_up, remove_everything, seen
from soak import SOAK

import perdure
from perdure.errors import Conflict, DiskFull, NotFound, ReadOnlyStore, UsageError
from perdure.regions import promote, replicate, replication
from perdure.runs.maintenance import retention
from perdure.storage.program import Sql
from perdure.testing.processes import ForkServer
from perdure.transfers.whole import set_counters

Pair = tuple[perdure.Store, perdure.Store]


@perdure.durable
def makes_a_large_result() -> bytes:
    return look_up(1) * random.Random(1).randbytes(300_000)


@pytest.fixture(params=["sqlite", "encrypted", "postgres", "sqlite-postgres"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """A source and an empty target."""
    kind, keys = request.param, bytes(32) if request.param == "encrypted" else None
    first, second, options = places(request, tmp_path, kind)
    with perdure.open(first, keys=keys) as source, perdure.open(second, keys=keys, **options) as target:
        yield source, target


def places(request: pytest.FixtureRequest, folder: Path, kind: str) -> tuple[str, str, dict[str, Any]]:
    """Two URLs, and the options of the second."""
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        return url, url, {"schema": "other"}
    second = request.getfixturevalue("postgres_url") if kind == "sqlite-postgres" else str(folder / "b.db")
    return str(folder / "a.db"), second, {}


def test_a_replica_holds_what_the_source_held(pair: Pair) -> None:
    source, target = pair
    fill(source)
    replicate(source, target)
    assert seen(target) == seen(source)
    change_everything(source)
    replicate(source, target)
    assert seen(target) == seen(source)
    assert target.ops.verify().ok
    remove_everything(source)
    source.tenant("another").thread("t").save({"n": 1})
    replicate(source, target)
    assert seen(target) == seen(source)
    point = target.tenant("another").thread("t").load()
    assert point is not None
    assert point.state == {"n": 1}
    assert replicate(source, target).written == 0
    assert len(source.snapshots()) == 1


@pytest.mark.parametrize("pair", ["sqlite-postgres"], indirect=True)
def test_a_temporary_table_does_not_open_a_replica(pair: Pair, postgres_url: str) -> None:
    """PostgreSQL looks for a table among the temporary ones first, unless it is named with its schema."""
    source, target = pair
    source.thread("a").save({"n": 1})
    replicate(source, target)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("SET search_path = perdure; CREATE TEMP TABLE meta (key text, value text)")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            other.execute("DELETE FROM thread")
        found = other.execute("SELECT has_function_privilege('public', 'perdure.refuse_write()', 'EXECUTE')").fetchone()
        assert found == (False,)
    source.thread("a").save({"n": 2})
    replicate(source, target)
    assert seen(target) == seen(source)


@pytest.mark.parametrize("pair", ["sqlite", "postgres"], indirect=True)
def test_a_restore_that_a_replica_refuses_leaves_no_snapshot(pair: Pair) -> None:
    source, target = pair
    source.thread("a").save({"n": 1})
    replicate(source, target)
    snapshot = target.snapshot()
    source.thread("a").save({"n": 2})
    replicate(source, target)
    with pytest.raises(ReadOnlyStore):
        target.restore(snapshot)
    assert [one.name for one in target.snapshots()] == ["snapshot-1"]


@pytest.mark.parametrize("pair", ["sqlite", "postgres"], indirect=True)
def test_beside_writers_a_replica_is_the_source_at_one_instant(pair: Pair) -> None:
    source, target = pair
    fill(source)
    ended = Event()

    def work(name: str) -> None:
        for number in count_up():
            source.thread(name).save({"n": number})
            source.memory("users", "alice").put("drink", {"fact": f"{name} {number}"})
            source.run(count, 1, id=f"{name}-{number}")
            if number % 3 == 2:
                source.delete_run(f"{name}-{number - 1}")
                source.thread(name).prune(keep=2)
            if ended.is_set():
                return

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, name) for name in ("a", "b")]
        try:
            for _ in range(3):
                replicate(source, target)
                [held] = source.snapshots()
                assert seen(target) == seen(held.store)
        finally:
            ended.set()
        for one in working:
            one.result()
    replicate(source, target)
    assert seen(target) == seen(source)
    assert target.ops.verify().ok


@pytest.mark.parametrize("pair", ["sqlite", "postgres"], indirect=True)
def test_what_is_erased_in_the_source_goes_from_the_replica(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair
    fill(source)
    source.run(makes_a_large_result, id="large")
    for number in range(4):
        source.thread("secret").save({"n": number})
        source.thread("partly").save({"n": number})
    replicate(source, target)
    kept = target.snapshot("of the replica")
    source.ops.erase("secret")
    source.ops.erase_run("done")
    source.thread("partly").erase(list(source.thread("partly").history())[2])
    real = retention._drop_history

    def replicate_first(*args: Any, **options: Any) -> Any:
        replicate(source, target)  # it is decided that the run is erased, and its rows are there
        return real(*args, **options)

    monkeypatch.setattr(retention, "_drop_history", replicate_first)
    source.ops.erase_run("large")
    replicate(source, target)
    assert seen(target) == seen(source)
    assert target.ops.verify().ok
    assert counts(target) == counts(source)
    with pytest.raises(NotFound):
        kept.thread("secret").load(strict=True)
    with pytest.raises(NotFound):
        kept.get_run("large").steps()


def counts(store: perdure.Store) -> dict[str, int]:
    from perdure.storage.domains import versioned_tables
    from perdure.storage.program import Batch, Program, Sql, drive, read

    def look() -> Program[dict[str, int]]:
        rows = yield Batch(*(Sql(f"SELECT count(*) FROM {name}")() for name in versioned_tables()))
        return dict(zip(versioned_tables(), (int(row[0][0]) for row in rows), strict=True))

    return drive(store._context.driver.capabilities.base, read(look))


@pytest.mark.parametrize("pair", ["sqlite", "postgres"], indirect=True)
def test_only_replicating_writes_to_a_replica(pair: Pair) -> None:
    source, target = pair
    fill(source)
    replicate(source, target)
    for write in (
        lambda: target.thread("a").save({"n": 7}),
        lambda: target.thread("new").save({"n": 7}),
        lambda: target.start(count, 2, id="new"),
        lambda: target.memory("users", "alice").put("x", {"fact": "x"}),
        lambda: target.delete_thread("a"),
        lambda: target.answer("waits", "aisle"),
        lambda: target.tenant("new").thread("t").save({"n": 1}),
    ):
        with pytest.raises(ReadOnlyStore, match=": this store is a replica: it takes no writes until"):
            write()
    assert seen(target) == seen(source)


@pytest.mark.parametrize("pair", ["sqlite", "postgres"], indirect=True)
def test_a_promoted_replica_is_a_store_of_its_own(pair: Pair) -> None:
    source, target = pair
    with pytest.raises(UsageError, match="no replica"):
        promote(target)
    fill(source)
    taken = replicate(source, target).taken_at
    source.thread("a").save({"n": "too late"})
    done = promote(target)
    assert (done.taken_at, done.era) == (taken, 1)
    change_everything(target)
    assert target.ops.verify().ok
    with perdure.open(":memory:", keys=source.ops._keys()) as third:  # and it can be replicated in its turn
        replicate(target, third)
        assert seen(third) == seen(target)
    for first, second in ((source, target), (target, source)):  # neither continues the other any more
        with pytest.raises(UsageError, match="not empty"):
            replicate(first, second)


def test_a_promotion_waits_for_the_round_that_is_written(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        perdure.open(":memory:") as source,
        perdure.open(postgres_url) as target,
        psycopg.connect(postgres_url, autocommit=True) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        replicate(source, target)
        fill(source)
        promoting: list[Any] = []

        def promote_meanwhile(number: int) -> Any:
            promoting.append(pool.submit(promote, target))
            while server.execute(waits).fetchone() is None:
                pass
            return set_counters(number)

        monkeypatch.setattr(replication, "set_counters", promote_meanwhile)
        done = replicate(source, target)
        assert promoting[0].result().taken_at == done.taken_at
        assert seen(target) == seen(source)
        change_everything(target)


def test_two_processes_that_replicate_to_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one must not release the snapshot that the target has got from the other."""
    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        fill(source)
        replicate(source, target)
        list_snapshots, listed = perdure.Store.snapshots, count_up()

        def overtaken(store: perdure.Store) -> Any:
            if next(listed) == 1:  # the target holds the new snapshot, the old one is about to be released
                replicate(source, target)
            return list_snapshots(store)

        with monkeypatch.context() as patch:
            patch.setattr(perdure.Store, "snapshots", overtaken)
            replicate(source, target)
        source.thread("a").save({"n": 7})
        replicate(source, target)
        assert seen(target) == seen(source)


def test_rounds_that_fail_leave_no_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is full for days must not fill the source."""
    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        fill(source)
        replicate(source, target)
        [held] = source.snapshots()
        change_everything(source)
        pages = raw(target, "PRAGMA page_count")[0][0]
        with monkeypatch.context() as patch:
            patch.setattr(replication, "PATIENCE", Sql(f"PRAGMA max_page_count = {pages}"))
            for number in range(3):
                source.thread("b").save({"random": random.Random(number).randbytes(100_000)})
                with pytest.raises(DiskFull):
                    replicate(source, target)
        assert [snap.name for snap in source.snapshots()] == [held.name]
        assert raw(target, "PRAGMA max_page_count = 1000000")
        replicate(source, target)
        assert seen(target) == seen(source)


@pytest.mark.parametrize("pair", ["sqlite"], indirect=True)
def test_only_an_empty_store_becomes_a_target(pair: Pair) -> None:
    source, target = pair
    with pytest.raises(UsageError, match="the same store"):
        replicate(source, source)
    fill(source)
    target.thread("mine").save({"n": 1})
    with pytest.raises(UsageError, match="not empty"):
        replicate(source, target)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_anywhere_the_next_round_continues(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    first, second, options = places(request, tmp_path, kind)
    with perdure.open(first) as source, ForkServer("region_kit:replicate_and_die") as fork_server:
        fill(source)
        before = None
        for point in (*POINTS[:2], *POINTS):  # in the first round, then in later ones
            list(fork_server.start(first, second, options, point).lines())
            with perdure.open(second, **options) as target:
                if before is not None:
                    assert seen(target) == (seen(source) if point == "release" else before), point
                replicate(source, target)
                assert len(source.snapshots()) == 1
                before = seen(target)
                assert before == seen(source)
            source.thread("a").save({"killed": point})
            source.memory("users", "alice").put("drink", {"fact": point})


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_anywhere_a_promotion_is_whole_or_did_not_begin(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    first, second, options = places(request, tmp_path, kind)
    at, kills = 1, 0
    with ForkServer("region_kit:promote_and_die") as fork_server:
        with perdure.open(first) as source, perdure.open(second, **options) as target:
            fill(source)
            replicate(source, target)
        while not list(fork_server.start(second, options, at).lines()):
            at, kills = at + 1 + at // (4 if SOAK else 2), kills + 1
            with perdure.open(first) as source, perdure.open(second, **options) as target:
                try:
                    target.thread("new").save({"n": kills})
                except ReadOnlyStore:  # still a replica: it is replicated to as before
                    assert replicate(source, target).written == 0
                    continue
            break
    assert kills > 2
    with perdure.open(second, **options) as target:
        target.thread("new").save({"n": 0})
        with pytest.raises(perdure.UsageError, match="no replica"):
            promote(target)
        assert target.ops.verify().ok


def test_a_failover_that_lost_the_snapshot_is_detected(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        fill(source)
        replicate(source, target)
        source.ops.backup(tmp_path / "standby.db")  # it is behind by what follows
        source.thread("a").save({"n": "lost"})
        replicate(source, target)
        with perdure.open(tmp_path / "standby.db") as standby:
            standby.snapshot("of the same epoch")
            epochs = [store.snapshots()[0]._row.epoch for store in (source, standby)]
            assert epochs[0] == epochs[1]
            with pytest.raises(Conflict, match="does not have the snapshot that the target holds"):
                replicate(standby, target)
        with closing(perdure.open(tmp_path / "c.db")) as another:
            another.thread("t").save({"n": 1})
            with pytest.raises(Conflict, match="the source is another store"):
                replicate(another, target)
        assert replicate(source, target).written == 0


def test_a_round_is_compared_in_pages(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.regions.replication.PAGE_ROWS", 2)
    source, target = pair
    for number in range(3):
        source.tenant(f"tenant {number}").thread("t").save({"n": number})
        source.thread(f"secret {number}").save({"n": number})
        source.thread(f"kept {number}").save({"n": number})
    replicate(source, target)
    source.ops.erase("secret 0")
    source.ops.erase("secret 2")
    source.thread("secret 2").save({"n": "another"})  # its name is free when it is written
    replicate(source, target)
    names = sorted(info.name for info in target.threads())
    assert names == ["kept 0", "kept 1", "kept 2", "secret 1", "secret 2"]
    assert target.thread("secret 2").load().state == {"n": "another"}
