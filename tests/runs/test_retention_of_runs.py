"""What is removed of finished runs, and when; what never goes: unfinished runs, and what a fork or a family needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from workshop import until, working

import perdure
from perdure.errors import NotFound, RunError, UsageError
from perdure.ops.operations import Operations
from perdure.runs.journal.blobs import BLOB_MIN_BYTES, blob_statements, drop_loose_blobs
from perdure.runs.maintenance import retention
from perdure.runs.workers import worker as worker_module
from perdure.storage.program import Batch, Program, Sql, Transaction, drive

HISTORY = ("journal", "ask", "answer", "mail", "run_blob")


@perdure.step
def note(text: str) -> str:
    return text


@perdure.step
def large(seed: int) -> bytes:
    """More than fits a row, and cannot be compressed."""
    import random

    return random.Random(seed).randbytes(BLOB_MIN_BYTES * 2)


@perdure.effect(name="retained.book")
def book(what: str) -> str:
    return what


@perdure.durable
def chat(text: str) -> str:
    answer = perdure.ask("And?", options=["yes", "no"])
    perdure.receive("news", timeout_s=0)
    return note(text) + str(answer)


@perdure.durable
def plain(text: str) -> str:
    return note(text)


@perdure.durable
def booked(text: str) -> str:
    return book(text)


@perdure.durable
def heavy(seed: int) -> int:
    return len(large(seed))


@perdure.durable
def parent(text: str) -> Any:
    return perdure.spawn(plain, text, id=f"child of {text}").result()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[perdure.Store]:
    """Finished runs keep their journals no time at all."""
    url = str(tmp_path / "a.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url, durability="normal") as store:
        store.ops.retention(runs="0s")
        yield store


def count(store: perdure.Store, table: str, run: str | None = None) -> int:
    """How many rows there are of a run, or of all."""
    where = "" if run is None else " WHERE run = (SELECT run FROM run WHERE id = :id)"

    def op() -> Program[int]:
        [rows] = yield Batch(Sql(f"SELECT count(*) FROM {table}{where}")(id=run), last=True)
        return int(rows[0][0])

    found: int = store._context.driver.run(Transaction(op))
    return found


def test_the_journal_goes_and_the_result_stays(store: perdure.Store) -> None:
    run = store.run(chat, "hello", id="a")
    store.send("a", "news")
    store.answer("a", "yes", who="maria")
    assert run.result() == "helloyes"
    assert all(count(store, table) for table in ("journal", "ask", "answer", "mail"))
    assert store.ops.sweep_runs() == 1
    assert [count(store, table) for table in HISTORY] == [0] * len(HISTORY)
    assert run.refresh().status == "done"
    assert run.steps() == []
    assert store.run(chat, "hello", id="a").result() == "helloyes"
    assert store.ops.sweep_runs() == 0


def test_a_journal_stays_as_long_as_it_should(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.ops.retention(runs="60s")
        now = [1_700_000_000_000_000]
        store._context.clock_us = lambda: now[0]
        run = store.run(plain, "a", id="a")
        now[0] += 59_999_999
        assert store.ops.sweep_runs() == 0
        assert len(run.steps()) == 1
        now[0] += 1
        assert store.ops.sweep_runs() == 1
        assert run.steps() == []


def test_without_a_retention_everything_stays(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        run = store.run(plain, "a", id="a")
        assert store.ops.sweep_runs() == 0
        assert len(run.steps()) == 1


@pytest.mark.parametrize("status", ["waiting", "queued", "paused"])
def test_an_unfinished_run_keeps_everything(store: perdure.Store, status: str) -> None:
    run = store.run(chat, "hello", id="a")
    if status == "paused":
        run.pause()
    elif status == "queued":
        run.resume()
    assert run.refresh().status == status
    before = [count(store, table) for table in HISTORY]
    assert store.ops.sweep_runs() == 0
    assert [count(store, table) for table in HISTORY] == before


def test_a_run_that_is_being_undone_is_unfinished(store: perdure.Store) -> None:
    run = store.run(booked, "flight", id="a")
    assert run.undo() == "queued"
    assert store.ops.sweep_runs() == 0
    perdure.Worker(store).run(until_idle=True)
    assert run.refresh().status == "undone"
    assert store.ops.sweep_runs() == 1


def test_what_is_not_on_record_any_more_cannot_be_undone(store: perdure.Store) -> None:
    """And is not said to be."""
    run = store.run(booked, "flight", id="a")
    store.ops.sweep_runs()
    with pytest.raises(RunError, match="cannot be undone"):
        run.undo()
    assert run.refresh().status == "done"


def test_a_run_that_an_operator_cancelled_goes_too(store: perdure.Store) -> None:
    """He may have used a handle that knows nothing of the retention."""
    run = store.run(chat, "hello", id="a")
    assert run.cancel() == "cancelled"
    assert store.ops.sweep_runs() == 1
    assert count(store, "journal") == 0


def test_what_a_fork_shares_stays_until_the_fork_goes(store: perdure.Store) -> None:
    run = store.run(chat, "hello", id="a")
    store.answer("a", "yes")
    run.result()
    fork = store.fork("a", id="b", at=None)
    assert fork.refresh().status == "queued"
    assert store.ops.sweep_runs() == 0
    assert fork.result() == "helloyes"
    assert store.ops.sweep_runs() == 2  # the fork first, and then what it shared
    assert count(store, "journal") == 0
    assert fork.result() == run.result() == "helloyes"


def test_a_family_goes_as_one(store: perdure.Store) -> None:
    """Undoing the parent would need the child's journal."""

    @perdure.durable
    def waits(text: str) -> str:
        result = perdure.spawn(plain, text, id="child").result()
        perdure.ask("And?")
        return str(result)

    run = store.run(waits, "x", id="family")
    assert store.get_run("child").status == "done"
    assert store.ops.sweep_runs() == 0
    store.answer("family", "yes")
    assert run.result() == "x"
    assert store.ops.sweep_runs() == 2
    assert count(store, "journal") == 0


def test_a_large_result_goes_with_the_last_run_that_has_it(store: perdure.Store) -> None:
    for name in ("a", "b"):
        store.run(heavy, 1, id=name).result()
    store.run(heavy, 2, id="c").result()
    assert count(store, "blob") == 2
    store.delete_run("a")
    assert count(store, "blob") == 2
    store.delete_run("b")
    assert count(store, "blob") == 1
    store.ops.sweep_runs()
    assert count(store, "blob") == 0


def test_a_large_result_that_somebody_is_about_to_need_is_not_swept(postgres_url: str) -> None:
    """A sweep that comes between the look whether it is there, and the reference to it."""
    body = b"x" * BLOB_MIN_BYTES
    with perdure.open(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as watch:
        tenant = drive(store._context.driver, store._context.ensure_tenant())
        sweep = threading.Thread(target=drive, args=(store._context.driver, drop_loose_blobs(tenant)))
        blocked = b"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

        def add(*parts: int) -> Program[None]:
            yield Batch(*(blob_statements(tenant, 1, body)[part] for part in parts), last=True)

        def hook(step: str) -> None:
            if step == "statement:1":
                sweep.start()
                until(lambda: not sweep.is_alive() or (watch.execute(blocked).fetchone() or (0,))[0])

        store._context.driver.run(Transaction(partial(add, 0), write=True))
        with perdure.open(postgres_url, hook=hook) as slow:
            slow._context.driver.run(Transaction(partial(add, 0, 1), write=True))
        sweep.join()
        assert count(store, "blob") == count(store, "run_blob") == 1


def test_a_sweep_that_was_interrupted_is_taken_up(store: perdure.Store) -> None:
    """Killed after any of its transactions: what is left can be read, and the next sweep removes it."""
    for cut in range(1, 8):
        run = store.run(chat, f"hello {cut}", id=f"r{cut}")
        store.answer(f"r{cut}", "yes")
        run.result()
        flow = Operations.sweep_runs.__wrapped__(store.ops)  # type: ignore[attr-defined]
        transaction = next(flow)
        try:
            for _ in range(cut):
                transaction = flow.send(store._context.driver.run(transaction))
        except StopIteration:
            pass
        flow.close()
        assert run.result() == f"hello {cut}yes"
        assert len(run.steps()) in (0, 3)
        store.ops.sweep_runs()
        assert [count(store, table) for table in HISTORY] == [0] * len(HISTORY)


def test_many_entries_go_in_bounded_transactions(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_BATCH", 7)

    @perdure.durable
    def many(number: int) -> int:
        return sum(len(note(str(one))) for one in range(number))

    store.run(many, 20, id="a").result()
    assert store.ops.sweep_runs() == 1
    assert count(store, "journal") == 0


# --- deleting


def test_a_deleted_run_is_gone_and_its_id_is_free(store: perdure.Store) -> None:
    run = store.run(chat, "hello", id="a")
    store.answer("a", "yes")
    run.result()
    store.delete_run("a")
    assert [count(store, table) for table in (*HISTORY, "run", "run_value")] == [0] * (len(HISTORY) + 2)
    with pytest.raises(NotFound):
        store.get_run("a")
    with pytest.raises(NotFound):
        store.delete_run("a")
    assert store.run(plain, "other", id="a").result() == "other"


def test_what_is_still_needed_is_not_deleted(store: perdure.Store) -> None:
    run = store.run(chat, "hello", id="a")
    with pytest.raises(UsageError, match="is not finished"):
        store.delete_run("a")
    store.answer("a", "yes")
    run.result()
    store.fork("a", id="b")
    with pytest.raises(UsageError, match="its fork 'b'"):
        store.delete_run("a")

    @perdure.durable
    def waits(text: str) -> None:
        perdure.spawn(plain, text, id="child").result()
        perdure.ask("And?")

    store.run(waits, "x", id="family")
    with pytest.raises(UsageError, match="its parent 'family' is not finished"):
        store.delete_run("child")


async def test_the_async_twins(store: perdure.Store) -> None:
    run = await store.arun(plain, "a", id="a")
    await run.aresult()
    assert await asyncio.to_thread(store.ops.sweep_runs) == 1
    await store.adelete_run("a")
    with pytest.raises(NotFound):
        await store.aget_run("a")


# --- daily maintenance


def test_one_worker_does_the_daily_maintenance(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.run(plain, "a", id="a").result()
    monkeypatch.setattr(worker_module, "_MAINTENANCE_FIRST_S", 0.0)
    with working(perdure.Worker(store, poll_s=0.01)):
        until(lambda: count(store, "journal") == 0)
    store.run(plain, "later", id="c").result()
    ctx = store._context
    tenant = drive(ctx.driver, ctx.ensure_tenant())
    assert drive(ctx.driver, retention.daily_maintenance(tenant, ctx.clock_us)) is None  # it was done today
    assert count(store, "journal") == 1


def test_the_daily_maintenance_is_for_every_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_MAINTENANCE_FIRST_S", 0.0)
    with perdure.open(str(tmp_path / "a.db")) as store:
        for name in ("acme", "beta"):
            store.tenant(name).ops.retention(runs="0s")
            store.tenant(name).run(plain, name, id="a").result()
        with working(perdure.Worker(store, all_tenants=True, poll_s=0.01)):
            until(lambda: count(store, "journal") == 0)


def test_a_turn_is_a_day_by_the_stores_clock(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.ops.retention(runs="0s")
        now = [1_700_000_000_000_000]
        ctx = store._context
        ctx.clock_us = lambda: now[0]
        tenant = drive(ctx.driver, ctx.ensure_tenant())

        def turn() -> bool:
            return drive(ctx.driver, retention.daily_maintenance(tenant, ctx.clock_us)) is not None

        assert turn()
        now[0] += 3_600_000_000
        assert not turn()
        now[0] += 22 * 3_600_000_000
        assert turn()
        now[0] -= 365 * 86_400_000_000  # the clock was wrong: nobody waits for a year
        assert turn()


def test_space_is_given_back_when_there_is_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FREE_PAGES_MIN", 10)
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        store.ops.retention(runs="0s")
        for number in range(20):
            store.run(heavy, number).result()
        ctx = store._context
        tenant = drive(ctx.driver, ctx.ensure_tenant())
        done = drive(ctx.driver, retention.daily_maintenance(tenant, ctx.clock_us))
        assert done is not None
        assert done.runs == 20
    assert path.stat().st_size < BLOB_MIN_BYTES * 5


def test_tenants_keep_to_themselves(store: perdure.Store) -> None:
    other = store.tenant("other")
    other.run(plain, "a", id="a").result()
    assert store.ops.sweep_runs() == 0
    assert len(other.get_run("a").steps()) == 1
