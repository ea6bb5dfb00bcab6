"""A difference names every thread, run and item that changed, nothing else, and where it changed."""

from __future__ import annotations

import pytest
from snapshot_kit import asks, change_everything, count, fill

import perdure


def told(changes: list[perdure.snapshots.SnapshotChange]) -> list[str]:
    return sorted(map(str, changes))


def test_what_changed_since(store: perdure.Store) -> None:
    fill(store)
    store.thread("same").save({"n": 0})
    first = store.snapshot("first")
    assert first.diff() == []
    change_everything(store)
    expected = [
        "+ item users/bob/x",
        "+ run later",
        "+ thread b",
        "- item users/alice/seat",
        "- run done",
        "~ item users/alice/drink",
        "~ run waits",
        "~ thread a",
    ]
    assert told(first.diff()) == sorted(expected)
    second = store.snapshot("second")
    store.thread("c").save({})
    store.delete_thread("b")
    assert told(first.diff(second)) == told(first.diff("second")) == sorted(expected)
    assert told(second.diff()) == ["+ thread c", "- thread b"]
    with pytest.raises(perdure.UsageError, match="older"):
        second.diff(first)


def test_down_to_paths(store: perdure.Store) -> None:
    store.thread("a").save({"n": 1, "list": [1, 2]})
    store.memory("m").put("k", {"fact": "old"})
    snapshot = store.snapshot("s")
    store.thread("a").save({"n": 2, "list": [1, 2, 3]})
    store.memory("m").put("k", {"fact": "new"})
    [thread, item] = snapshot.diff()
    assert [str(change) for change in thread.paths()] == ["~ ['n']: 1 -> 2", "+ ['list'][2] = 3"]
    assert [str(change) for change in item.paths()] == ["~ ['fact']: 'old' -> 'new'"]


def test_the_steps_of_a_run_that_only_continued(store: perdure.Store) -> None:
    store.run(asks, id="waits")
    snapshot = store.snapshot("s")
    store.run(count, 1, id="other")
    assert told(snapshot.diff()) == ["+ run other"]
    store.answer("waits", "aisle")
    store.run(asks, id="waits")
    [change] = [change for change in snapshot.diff() if change.kind == "changed"]
    assert any("done" in str(found) for found in change.paths())
