"""Workers: what they claim and in which order, what limits them, how they end, and that nothing else ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workshop import (
    Hand,
    ashort,
    asked,
    done,
    end_leases,
    errand,
    hands,
    short,
    somebody_waits,
    until,
    working,
)

import perdure
from perdure.runs.functions import specs
from perdure.storage.notifications import NoNotifications


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


# --- what is run


def test_a_worker_runs_what_is_due_sync_and_async(store: perdure.Store, tmp_path: Path) -> None:
    runs = [store.start(short, str(tmp_path), f"s{number}") for number in range(20)]
    runs += [store.start(ashort, str(tmp_path), f"a{number}") for number in range(20)]
    worker = perdure.Worker(store)
    worker.run(until_idle=True)
    assert worker.counts == {"done": 40}
    assert sorted(run.result() for run in runs) == sorted(done(tmp_path))
    assert len(done(tmp_path)) == 40


def test_only_the_queues_asked_for_are_served(store: perdure.Store, tmp_path: Path) -> None:
    for queue in ("default", "search", "mail"):
        store.start(short, str(tmp_path), queue, queue=queue)
    perdure.Worker(store, queues=("search", "mail")).run(until_idle=True)
    assert sorted(done(tmp_path)) == ["mail", "search"]


def test_the_greater_priority_first_then_the_older(store: perdure.Store, tmp_path: Path) -> None:
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)):
        store.start(short, str(tmp_path), name, priority=priority)
    perdure.Worker(store, concurrency=1).run(until_idle=True)
    assert done(tmp_path) == ["b", "e", "a", "c", "d"]


def test_priorities_hold_across_queues(store: perdure.Store, tmp_path: Path) -> None:
    store.start(short, str(tmp_path), "low", queue="one")
    store.start(short, str(tmp_path), "high", queue="two", priority=9)
    perdure.Worker(store, queues=("one", "two"), concurrency=1).run(until_idle=True)
    assert done(tmp_path) == ["high", "low"]


def test_a_delayed_start_is_not_taken_before_its_time(store: perdure.Store, tmp_path: Path) -> None:
    store.start(short, str(tmp_path), "later", delay_s=3600)
    store.start(short, str(tmp_path), "now")
    perdure.Worker(store).run(until_idle=True)
    assert done(tmp_path) == ["now"]


def test_a_sleep_that_is_over_is_gone_on_with(store: perdure.Store, tmp_path: Path) -> None:
    @perdure.durable
    def nap(folder: str) -> str:
        perdure.sleep(1.2)
        return short(folder, "awake")

    run = store.start(nap, str(tmp_path))
    with working(perdure.Worker(store, poll_s=3600)) as worker:  # it knows when the sleep is over
        assert run.result(timeout_s=60) == "awake"
    assert worker.counts == {"waiting": 1, "done": 1}


@pytest.mark.parametrize("step", ["start", "answer", "child"])
def test_a_worker_hears_of_work_at_once(store: perdure.Store, tmp_path: Path, step: str) -> None:
    """It would look by itself only after an hour."""

    @perdure.durable
    def parent(folder: str) -> Any:
        return perdure.spawn(short, folder, "child").result()

    with working(perdure.Worker(store, poll_s=3600)):
        if step == "start":
            assert store.start(short, str(tmp_path)).result(timeout_s=60) == "short"
        elif step == "answer":
            run = store.start(asked, str(tmp_path), id="a")
            until(lambda: run.refresh().status == "waiting")
            store.answer("a", "yes")
            assert run.result(timeout_s=60) == "yes"
        else:
            assert store.start(parent, str(tmp_path)).result(timeout_s=60) == "child"


def test_a_worker_without_news_looks_by_itself(
    store: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store._context.driver), "listen", lambda _: NoNotifications())
    with working(perdure.Worker(store, poll_s=0.01)):
        assert store.start(short, str(tmp_path)).result(timeout_s=60) == "short"


# --- versions and functions


def versioned(version: str | None, said: str) -> Any:
    @perdure.durable(name="versioned", version=version)
    def agent() -> str:
        return said

    return agent


def test_a_run_is_taken_only_in_its_version(store: perdure.Store, caplog: pytest.LogCaptureFixture) -> None:
    old, new = versioned("1", "old"), versioned("2", "new")
    run = store.start(old, id="a")
    worker = perdure.Worker(store, [new])
    worker.run(until_idle=True)
    assert not worker.counts
    assert run.refresh().status == "queued"
    assert "this worker has version 2 of versioned and leaves 1 due run of version 1" in caplog.text
    perdure.Worker(store, [old]).run(until_idle=True)
    assert run.result() == "old"


def test_store_run_follows_the_same_rule_until_the_run_is_finished(store: perdure.Store) -> None:
    old, new = versioned("1", "old"), versioned("2", "new")
    store.start(old, id="a")
    with pytest.raises(
        perdure.errors.RunMismatch, match="run 'a' began with version 1 of versioned, and this process has version 2"
    ):
        store.run(new, id="a")
    assert store.run(old, id="a").result() == "old"
    assert store.run(new, id="a").result() == "old"


def test_without_a_version_changed_code_resumes_the_run(store: perdure.Store) -> None:
    for how in ("worker", "store.run"):
        run = store.start(versioned(None, "old"), id=how)
        new = versioned(None, "new")
        if how == "worker":
            perdure.Worker(store, [new]).run(until_idle=True)
        else:
            store.run(new, id=how)
        assert run.result() == "new"


def test_a_version_that_comes_later_is_taken_over_from_a_dead_worker_only_by_its_like(
    url: str, store: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takeover asks for the version as well."""
    monkeypatch.setitem(specs._durables, "errand", specs._durables["errand"])  # put back afterwards
    run = store.start(errand, str(tmp_path), id="a")
    with hands(1) as (server,):
        killed = Hand(server, url)
        somebody_waits(tmp_path)
        killed.kill()
    end_leases(store)
    other = perdure.durable(name="errand", version="other")(lambda folder: "wrong")
    worker = perdure.Worker(store, [other])
    worker.run(until_idle=True)
    assert not worker.counts
    perdure.Worker(store, [errand]).run(until_idle=True)
    assert run.refresh().status == "done"


def test_functions_that_the_worker_does_not_have_are_left_alone(store: perdure.Store, tmp_path: Path) -> None:
    store.start(short, str(tmp_path), "s")
    store.start(ashort, str(tmp_path), "a")
    perdure.Worker(store, [ashort]).run(until_idle=True)
    assert done(tmp_path) == ["a"]


# --- tenants


def test_a_worker_serves_its_stores_tenant_or_all(store: perdure.Store, tmp_path: Path) -> None:
    @perdure.durable
    def thread_of(folder: str, name: str) -> str:
        return short(folder, name)

    for name in ("acme", "beta"):
        store.tenant(name).start(thread_of, str(tmp_path), name, id="same")
    perdure.Worker(store).run(until_idle=True)
    assert done(tmp_path) == []
    perdure.Worker(store.tenant("acme")).run(until_idle=True)
    assert done(tmp_path) == ["acme"]
    worker = perdure.Worker(store, all_tenants=True)
    worker.run(until_idle=True)
    assert done(tmp_path) == ["acme", "beta"]
    assert {ctx.tenant_name for ctx in worker._contexts.values()} == {"beta"}
    assert store.tenant("beta").get_run("same").result() == "beta"
