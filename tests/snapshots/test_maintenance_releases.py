"""Maintenance releases the snapshots whose time is over, and no other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import perdure


def test_maintenance_releases_what_has_expired(store: perdure.Store) -> None:
    store.ops.compact()  # of a store that never had one
    store.thread("a").save({"n": 1})
    now = datetime.now(UTC)
    over = store.snapshot("over", keep_until=now + timedelta(hours=1))
    store.thread("a").save({"n": 2})
    store.snapshot("later", keep_until=now + timedelta(days=1))
    store.snapshot("for good")
    store._context.clock_us = lambda: int((now + timedelta(hours=2)).timestamp() * 1_000_000)
    store.ops.compact(dry_run=True)
    assert len(store.snapshots()) == 3
    store.ops.compact()
    assert [snapshot.name for snapshot in store.snapshots()] == ["for good", "later"]
    with pytest.raises(perdure.NotFound):
        over.thread("a").load()
