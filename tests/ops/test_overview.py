"""What an overview of a store shows: queues, workers, activity, tenants, and whether anything has changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import perdure
from perdure.errors import UsageError
from perdure.ops import overview

_opened: list[perdure.Store] = []


@perdure.durable
def looks() -> list[tuple[str, int]]:
    return [(worker.owner, worker.runs) for worker in _opened[0].ops.workers()]


def test_queues_workers_and_tenants(url: str) -> None:
    with perdure.open(url) as store, perdure.open(url, read_only=True) as reader:
        _opened[:] = [reader]
        store.start(looks, queue="slow")
        perdure.Worker(store, [looks], queues=perdure.Queue("limited", concurrency=3)).run(until_idle=True)
        [(owner, count)] = store.run(looks).result()
        assert (count, bool(owner)) == (1, True)
        assert reader.ops.workers() == []
        assert [(queue.name, queue.statuses, queue.concurrency) for queue in reader.ops.queues()] == [
            ("default", {"done": 1}, None),
            ("limited", {}, 3),
            ("slow", {"queued": 1}, None),
        ]
        slow = reader.ops.queues()[2]
        assert (slow.due, slow.oldest_due_at) == (1, store.runs(queue="slow")[0].changed_at)
        assert [(queue.due, queue.oldest_due_at) for queue in reader.ops.queues()[:2]] == [(0, None), (0, None)]
    for tenant in ("a", "b"):
        with perdure.open(url, tenant=tenant) as store:
            store.thread("t").save({})
            assert (store.ops.queues()[1:], store.ops.workers()) == ([], [])
            assert store.ops.tenants(after="a") == ["b", "default"][tenant == "a" :]
            assert store.ops.tenants(limit=1) == ["a"]


async def test_the_version_changes_with_every_commit_and_only_then(url: str) -> None:
    async with perdure.open(url) as store, perdure.open(url, read_only=True) as reader:
        for change in (lambda: store.start(looks), lambda: store.thread("t").save({"n": 1}), lambda: None):
            before = reader.version(), store.version()
            changed = change() is not None
            after = await reader.aversion(), store.version()
            assert [old != new for old, new in zip(before, after, strict=True)] == [changed, changed]
    with perdure.open(":memory:") as store:
        empty = store.version()
        store.thread("t").save({"n": 1})
        assert store.version() != empty


def test_a_version_of_before_does_not_come_back_when_the_store_is_opened_again(url: str) -> None:
    """Or a page that was loaded then would never see the commits between."""
    versions = []
    with perdure.open(url) as store:
        for number in range(20):
            store.thread("t").save({"n": number})
            with perdure.open(url, read_only=True) as reader:
                versions.append(reader.version())
    assert len(set(versions)) == 20


def test_activity_counts_runs_and_threads_by_interval(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with perdure.open(url) as store:
        assert [len(store.ops.activity()), store.ops.activity()[0].runs] == [60, {}]
        _opened[:] = [store]
        for n in range(3):
            store.start(looks, id=str(n))
            store.thread(str(n)).save({})
        store.run(looks)
        old, new = store.ops.activity(since=datetime.now(UTC) - timedelta(days=1), intervals=2)
        assert (old.runs, old.threads, new.runs, new.threads) == ({}, 0, {"queued": 3, "done": 1}, 3)
        assert (old.ended, new.ended) == ({}, {"done": 1})
        assert new.at - old.at == pytest.approx(timedelta(hours=12), abs=timedelta(seconds=1))
        monkeypatch.setattr(overview, "COUNTED_MAX", 2)
        assert store.ops.activity(intervals=2) == []  # older ones in the last interval were not counted
        with pytest.raises(UsageError, match="past"):
            store.ops.activity(since=datetime.now(UTC) + timedelta(days=1))
