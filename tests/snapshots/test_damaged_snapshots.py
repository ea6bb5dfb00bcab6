"""A changed number of a version or of a snapshot is noticed: no snapshot shows another state, and every check is ok."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import perdure


@pytest.fixture
def damaged_at(tmp_path: Path) -> Path:
    """A store with two snapshots, of three states."""
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        for number, name in enumerate(("one", "two", None)):
            store.thread("t").save({"v": number})
            store.memory("u").put("k", {"v": number})
            if name:
                store.snapshot(name)
    return path


CHANGES = (
    "UPDATE snapshot SET epoch = epoch + 4 WHERE name = 'one'",
    "UPDATE snapshot SET epoch = 0 WHERE name = 'one'",
    "UPDATE epoch SET epoch = 1",
    "UPDATE epoch SET held = -1",
    "UPDATE thread_past SET died = 3 WHERE died = 2",
    "UPDATE thread_past SET stamp = 0 WHERE stamp = 2",
    "UPDATE thread SET stamp = 1",
    "UPDATE thread SET stamp = 9",
    "UPDATE memory_item_past SET died = 3 WHERE died = 2",
    "UPDATE memory_item_past SET stamp = 0 WHERE stamp = 2",
    "UPDATE memory_item SET stamp = 0 WHERE ended_at IS NULL",
    "UPDATE record SET stamp = 0 WHERE stamp = 2",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_number_is_noticed(damaged_at: Path, change: str) -> None:
    with sqlite3.connect(damaged_at) as connection:
        assert connection.execute(change).rowcount == 1
    connection.close()
    with perdure.open(damaged_at) as store:
        noticed = 0
        for number, name in enumerate(("one", "two")):
            snapshot = store.get_snapshot(name)
            report = snapshot.verify()
            noticed += not report.ok
            if report.ok:
                assert snapshot.thread("t").load().state == {"v": number}
                assert [item.value for item in snapshot.memory("u").list()] == [{"v": number}]
        assert noticed
        if "snapshot SET" in change:
            with pytest.raises(perdure.errors.Damaged, match="snapshot 'one' is damaged"):
                store.get_snapshot("one").thread("t").load()
            with pytest.raises(perdure.errors.Damaged, match="snapshot 'one' is damaged"):
                store.restore("one")
            assert not store.ops.verify().ok


async def test_what_is_as_it_was_is_ok(store: perdure.Store) -> None:
    store.thread("t").save({"v": 1})
    snapshot = store.snapshot("s")
    store.thread("t").save({"v": 2})
    store.delete_thread("t")
    store.thread("t").save({"v": 3})
    assert snapshot.verify().ok
    assert (await snapshot.averify()).ok
    assert store.ops.verify().ok
