"""Schedules in snapshots, transfers, encrypted stores and the doctor's list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import new_database
from doctor_kit import said, text_of
from schedule_kit import job, let_pass, work

import perdure
from perdure.testing.postgres_server import PostgresServer

HOUR = 3600


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def test_a_snapshot_shows_them_and_a_restore_repeats_nothing(store: perdure.Store) -> None:
    store.schedule("tick", job, every="1h", catch_up="last")
    store.schedule("gone", job, "0 7 * * *")
    snap = store.snapshot("before")
    let_pass(store, HOUR)
    work(store)
    assert [str(change) for change in snap.diff() if change.what == "schedule"] == [], "it only started a run"
    store.schedule("tick", job, every="2h", replace=True)
    store.get_schedule("gone").delete()
    store.schedule("later", job, every="1h")
    changed = [change for change in snap.diff() if change.what == "schedule"]
    assert list(map(str, changed)) == ["- schedule gone", "+ schedule later", "~ schedule tick"]
    assert [change.path for change in changed[2].paths()] == [("every",), ("catch_up",)]
    assert [one.name for one in snap.schedules()] == ["gone", "tick"]
    store.restore(snap)
    assert [(one.name, str(one.every), len(one.upcoming)) for one in store.schedules()] == [
        ("gone", "None", 5),
        ("tick", "1:00:00", 5),
    ]
    work(store)
    assert len(store.runs()) == 1
    assert snap.diff()[-1].what != "schedule"


@pytest.mark.parametrize("move", [True, False])
def test_a_transferred_schedule_starts_runs_in_one_store(
    tmp_path: Path, postgres_server: PostgresServer, move: bool
) -> None:
    there = postgres_server.url(new_database(postgres_server))
    with perdure.open(tmp_path / "a.db") as source, perdure.open(there) as target:
        source.schedule("tick", job, every="1h", args=("moved",), catch_up="last")
        source.ops.transfer(there, tenant="default", move=move)
        assert [one.paused for one in (source.get_schedule("tick"), target.get_schedule("tick"))] == [move, True]
        target.get_schedule("tick").resume()
        let_pass(target, HOUR)
        work(target)
        assert target.get_run(target.runs()[0].id).result() == "moved"


def test_runs_that_wait_for_a_run_that_is_moved_begin(tmp_path: Path) -> None:
    @perdure.durable
    def waits() -> object:
        return perdure.ask("?")

    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        schedule = source.schedule("tick", waits, every="1h", overlap="queue")
        first, second, third = (schedule.trigger().id for _ in range(3))
        work(source, waits)
        source.ops.transfer(str(tmp_path / "b.db"), runs=[third], move=True)
        work(target, waits)
        assert target.get_run(third).status == "waiting"
        source.ops.transfer(str(tmp_path / "b.db"), runs=[first], move=True)
        work(source, waits)
        assert source.get_run(second).status == "waiting"


def test_runs_of_a_moved_tenant_still_take_turns(tmp_path: Path) -> None:
    @perdure.durable
    def waits() -> object:
        return perdure.ask("?")

    with perdure.open(tmp_path / "a.db") as source, perdure.open(tmp_path / "b.db") as target:
        schedule = source.schedule("tick", waits, every="1h", overlap="queue")
        ids = [schedule.trigger().id for _ in range(3)]
        work(source, waits)
        source.ops.transfer(str(tmp_path / "b.db"), tenant="default", move=True)
        work(target, waits)
        assert [target.get_run(run).status for run in ids] == ["waiting", "queued", "queued"]
        target.answer(ids[0], 1)
        work(target, waits)
        assert [target.get_run(run).status for run in ids] == ["done", "waiting", "queued"]


def test_arguments_are_encrypted_and_workers_without_the_key_leave_them(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path, keys=bytes(range(32))) as store:
        store.schedule("tick", job, every="1h", args=("Kanarienvogel",), catch_up="last")
        let_pass(store, HOUR)
        with perdure.open(path, create=False) as keyless:
            perdure.Worker(keyless, [job], all_tenants=True).run(until_idle=True)
        assert store.runs() == []
        perdure.Worker(store, [job], all_tenants=True).run(until_idle=True)
        assert store.get_run(store.runs()[0].id).result() == "Kanarienvogel"
        assert store.ops.verify().ok
    assert b"Kanarienvogel" not in b"".join(one.read_bytes() for one in tmp_path.iterdir())


def test_the_doctor_names_a_schedule_that_no_worker_fires(store: perdure.Store) -> None:
    store.schedule("nightly", job, every="1h")
    store.schedule("paused", job, every="1h").pause()
    assert "schedule" not in text_of(said(store)["runs"])
    let_pass(store, 2 * HOUR)
    assert "1 schedule due, and no worker starts the runs, such as 'nightly'" in text_of(said(store)["runs"])
