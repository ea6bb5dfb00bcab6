"""`store.ops.health()`: what it says, that it costs nothing, and that it works where little is allowed."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest
from role_kit import roles_of

import perdure
from perdure.cli import main
from perdure.log.store_size import DAY_US, HOUR_US, Sample, growth_per_day, take_sample
from perdure.ops import health
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.threads.models import moment


class Clock:
    """A clock that the test moves, in microseconds."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(store: perdure.Store) -> Clock:
    store._context.clock_us = clock = Clock()
    return clock


def execute(store: perdure.Store, text: str, **params: Any) -> list[tuple[Any, ...]]:
    def program() -> Program[list[tuple[Any, ...]]]:
        [rows] = yield Batch(Sql(text)(**params))
        return rows

    return drive(store._context.driver, write(program))


def test_of_an_empty_store_it_says_that_there_is_nothing(store: perdure.Store) -> None:
    found = store.ops.health()
    assert (found.threads, found.runs, found.unsaved, found.last_save_at) == (0, {}, (), None)
    assert (found.last_backup_at, found.growth_bytes_per_day, found.disk_full_at) == (None, None, None)
    assert (found.unsaved_changes, found.unsaved_s, found.has_retention) == (0, 0.0, False)
    assert found.bytes > 0


async def test_the_async_twin_says_the_same(url: str) -> None:
    async with perdure.open(url) as store:
        await store.thread("a").asave({})
        assert (await asyncio.to_thread(store.ops.health)).threads == 1


def test_it_knows_what_a_crash_now_would_cost(store: perdure.Store) -> None:
    ticks = iter(range(1000))
    store._context.ticks = lambda: float(next(ticks))
    first, second = store.thread("a"), store.thread("b")
    every = perdure.autosave.every(100)
    with first.autosave(every) as one, second.autosave(every) as other:
        assert store.ops.health().unsaved_changes == 0
        one["n"] = 1
        one["n"] = 2
        other["n"] = 1
        found = store.ops.health()
        assert {each.thread: each.changes for each in found.unsaved} == {"a": 2, "b": 1}
        assert found.unsaved_changes == 3
        assert found.unsaved_s == max(each.seconds for each in found.unsaved) > 0
        assert store.tenant("acme").ops.health().unsaved == ()
        one.save()
        assert store.ops.health().unsaved_changes == 1
    assert store.ops.health().unsaved == ()


def test_it_counts_threads_and_knows_the_last_save(store: perdure.Store, clock: Clock) -> None:
    for number in range(5):
        clock.now += 90_000_000
        store.thread(f"t{number}").save({"n": number})
    saved_at = clock.now
    clock.now += HOUR_US
    found = store.ops.health()
    assert (found.threads, found.last_save_at, found.at) == (5, moment(saved_at), moment(clock.now))
    assert store.tenant("acme").ops.health().threads == 0


def test_it_counts_runs_by_status_and_names_the_oldest_that_wait_and_are_stuck(store: perdure.Store) -> None:
    @perdure.durable(name="health.asks")
    def asks() -> Any:
        return perdure.ask("Really?")

    @perdure.durable(name="health.stuck")
    def stuck() -> Any:
        return print  # cannot be stored

    for number in range(3):
        store.run(asks, id=f"ask-{number}")
    store.run(stuck, id="bad")
    found = store.ops.health()
    assert found.runs == {"waiting": 3, "stuck": 1}
    assert found.oldest_waiting is not None
    assert (found.oldest_waiting.id, found.oldest_stuck and found.oldest_stuck.id) == ("ask-0", "bad")
    assert found.oldest_waiting.since == store.get_run("ask-0").refresh().changed_at


def sample(store: perdure.Store) -> None:
    """Record the size, as workers do."""
    drive(store._context.driver, take_sample(store._context.clock_us))


def test_a_sample_of_the_size_is_left_once_an_hour(store: perdure.Store, clock: Clock) -> None:
    for minutes in (0, 20, 39, 1, 59, 2):
        clock.now += minutes * 60_000_000
        sample(store)
    times = [at for (at,) in execute(store, "SELECT at FROM size_sample ORDER BY at")]
    assert [(at - times[0]) // 60_000_000 for at in times] == [0, 60, 121]


def test_growth_is_told_from_samples(store: perdure.Store, clock: Clock) -> None:
    store.thread("a").save({})
    assert store.ops.health().growth_bytes_per_day is None
    clock.now += DAY_US
    sample(store)
    young = store.ops.health()
    execute(store, "DELETE FROM size_sample")
    used = young.bytes - young.free_bytes
    for hours in range(10, 0, -1):
        execute(
            store,
            "INSERT INTO size_sample (at, bytes, free_bytes) VALUES (:at, :bytes, 0)",
            at=clock.now - hours * HOUR_US,
            bytes=used - hours * 1_000,
        )
    found = store.ops.health()
    assert found.growth_bytes_per_day == pytest.approx(24_000)


def test_a_sample_from_the_future_is_no_sample(store: perdure.Store, clock: Clock) -> None:
    clock.now += 300 * DAY_US
    sample(store)
    clock.now -= 300 * DAY_US
    for _ in range(2):
        sample(store)
        clock.now += HOUR_US
    assert len(execute(store, "SELECT at FROM size_sample")) == 2
    assert store.ops.health().growth_bytes_per_day is not None


def test_growth_is_the_line_through_the_samples() -> None:
    grown = [Sample(day * DAY_US, 1000 + 100 * day, 0) for day in range(10)]
    assert growth_per_day(grown) == pytest.approx(100)
    freed = [Sample(day * DAY_US, 5000, 200 * day) for day in range(4)]
    assert growth_per_day(freed) == pytest.approx(-200)
    assert growth_per_day(grown[:1]) is None
    assert growth_per_day([Sample(0, 1, 0), Sample(HOUR_US - 1, 2, 0)]) is None


def test_the_workers_maintenance_leaves_a_sample_too(store: perdure.Store, clock: Clock) -> None:
    worker = perdure.Worker(store, [])
    worker._maintain()
    worker._maintain()
    assert execute(store, "SELECT count(*) FROM size_sample") == [(1,)]


def test_it_says_when_the_disk_is_full_and_how_large_the_log_is(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.thread("a").save({"text": "x" * 10_000})
        found = store.ops.health()
        assert found.wal_bytes == (tmp_path / "a.db-wal").stat().st_size > 0
        assert found.disk_free_bytes
        fields = {name: getattr(found, name) for name in perdure.ops.Health.__slots__}
        free = fields["disk_free_bytes"] + fields["free_bytes"]
        full = perdure.ops.Health(**fields | {"growth_bytes_per_day": free / 10})
        assert full.disk_full_at == found.at + timedelta(days=10)
        assert perdure.ops.Health(**fields | {"growth_bytes_per_day": -5.0}).disk_full_at is None
        assert perdure.ops.Health(**fields | {"growth_bytes_per_day": 1e-9}).disk_full_at is None


def test_in_memory_there_is_no_disk() -> None:
    with perdure.open(":memory:") as store:
        store.thread("a").save({})
        found = store.ops.health()
        assert (found.wal_bytes, found.disk_free_bytes, found.threads) == (None, None, 1)


def test_it_knows_of_backups(store: perdure.Store, clock: Clock) -> None:
    for number, restored in ((1, None), (2, clock.now - 5), (3, None)):
        execute(
            store,
            """INSERT INTO copy (id, kind, place, tenant, at, bytes, restored_at)
            VALUES (:id, 'backup', 'b', NULL, :at, 1, CAST(:restored AS bigint))""",
            id=str(number),
            at=clock.now - 10 + number,
            restored=restored,
        )
    found = store.ops.health()
    assert (found.last_backup_at, found.last_restored_at) == (moment(clock.now - 7), moment(clock.now - 5))


def test_health_writes_nothing(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.thread("a").save({})

    def refused(*_: object) -> None:
        raise AssertionError("it wrote")

    with monkeypatch.context() as patch:
        patch.setattr(type(store._context.driver), "_check_write", refused, raising=False)
        assert store.ops.health().threads == 1


# --- its cost


def plan_of(store: perdure.Store, sql: Sql) -> str:
    """How the database will do it. PostgreSQL would read a small table whole, which says nothing about a large one."""
    given = {"tenant": 1, "status": "waiting"}
    params = {name: value for name, value in given.items() if f":{name}" in sql.sqlite[0]}
    explain = Sql(sqlite="EXPLAIN QUERY PLAN " + sql.sqlite[0], postgres="EXPLAIN " + sql.postgres)

    def program() -> Program[str]:
        yield Batch(Sql(sqlite="SELECT 1", postgres="SET LOCAL enable_seqscan = off")())
        [rows] = yield Batch(explain(**params))
        return "\n".join(str(row[-1]) for row in rows)

    return str(drive(store._context.driver, write(program)))


def test_no_query_reads_a_table_from_end_to_end(store: perdure.Store) -> None:
    store.thread("a").save({})
    for sql in health.QUERIES:
        plan = plan_of(store, sql)
        assert re.search(r"SEARCH (thread|run) USING|Index (Only )?Scan|Bitmap Index Scan", plan), plan
        assert not re.search(r"SCAN (thread|run)\b|Seq Scan on (thread|run)\b", plan), plan


def test_its_time_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """Counted in steps of SQLite's machine, not in seconds: a hundred times the checkpoints, the same work."""
    steps: list[int] = []
    with perdure.open(str(tmp_path / "a.db"), durability="normal") as store:
        for target in (10, 1000):
            thread = store.thread("a")
            for number in range(target):
                thread.save({"n": number})
            steps.append(counted(tmp_path / "a.db"))
    assert steps[1] <= steps[0] * 1.5


def counted(path: Path) -> int:
    """How many tens of steps the queries take."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    count = 0

    def step() -> bool:
        nonlocal count
        count += 1
        return False

    connection.set_progress_handler(step, 10)
    for sql in health.QUERIES:
        names = {"tenant": 1, "status": "waiting"}
        list(connection.execute(sql.sqlite[0], {key: names[key] for key in names if f":{key}" in sql.sqlite[0]}))
    connection.close()
    return count


# --- the command


def test_the_command_shows_it(url: str, store: perdure.Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.thread("a").save({"n": 1})
    assert main(["store", "health", "--store", url]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^last save at +just now$", said, re.MULTILINE)
    assert re.search(r"^threads +1$", said, re.MULTILINE)
    assert re.search(r"^growth bytes per day +-$", said, re.MULTILINE)
    assert re.search(r"^last backup at +-$", said, re.MULTILINE)
    assert main(["store", "health", "--store", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["threads"], found["runs"], found["unsaved_changes"]) == (1, {}, 0)
    assert found["last_save_at"].endswith("Z")


def test_the_command_names_runs_that_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @perdure.durable(name="health.asks_once")
    def asks() -> Any:
        return perdure.ask("Really?")

    url = str(tmp_path / "a.db")
    with perdure.open(url) as store:
        store.run(asks, id="trip-42")
    assert main(["store", "health", "--store", url]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^oldest waiting +trip-42, since just now$", said, re.MULTILINE)
    assert re.search(r"^disk free bytes +\d", said, re.MULTILINE)
    assert main(["store", "health", "--store", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["oldest_waiting"]["id"] == "trip-42"


def test_every_role_of_postgresql_may_ask(postgres_url: str) -> None:
    for roles in roles_of(postgres_url):
        for url in (roles.tenant("acme"), roles.app, roles.operator):
            with perdure.open(url, tenant="acme") as store:
                store.thread("a").save({"n": 1})
                found = store.ops.health()
                assert (found.threads, found.bytes > 0) == (1, True)
                store.ops.retention(checkpoints=5)
                assert store.ops.health().has_retention
