"""A difference names every thread, run and item that changed, nothing else, and where it changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
from snapshot_kit import asks, change_everything, count, fill

import perdure
from perdure.snapshots import SnapshotChange
from perdure.storage.program import Batch, Program, Sql, Statement, drive, write


def told(changes: Iterable[object]) -> list[str]:
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
    assert [str(change) for change in second.diff()] == ["- thread b", "+ thread c"], "in the order of their names"
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


def test_what_a_restore_brought_back_has_not_changed(store: perdure.Store) -> None:
    fill(store)
    line = store.thread("line").line("")
    line.save({"n": 1}, id="1")
    store.ops.deploy("f", "1")
    first = store.snapshot("first")
    change_everything(store)
    line.save({"n": 2}, id="2", parent="1")
    store.ops.deploy("f", "2")
    store.ops.deploy("g", "2")
    second = store.snapshot("second")
    done = store.restore(first, runs="rewind", keys="same")
    assert [(found.function, found.version) for found in store.ops.deployments()] == [("f", "1")]
    third = store.snapshot("third")
    assert told(first.diff()) == told(first.diff(third)) == ["+ run later"], "a run that was started since stays"
    assert store.run(asks, id="waits").status == "waiting"
    assert told(first.diff()) == ["+ run later"], "a worker looked at it: it waits for the same"
    store.restore(done.undo, runs="rewind", keys="same")
    assert second.diff() == done.undo.diff() == []
    assert told(first.diff()) == told(first.diff(second))


def test_what_does_not_touch_the_row_of_a_thread_or_run(store: perdure.Store) -> None:
    line, pending = (store.thread(name).line("") for name in ("line", "pending"))
    for each in (line, pending):
        each.save({"n": 1}, id="1")
        each.save({"n": 2}, id="2", parent="1")
    for name in ("answered", "sent"):
        store.run(asks, id=name)
    first = store.snapshot("first")
    line.save({"n": 3}, id="0", parent="1")  # beside the head
    pending.attach("2", "key", "value")
    store.answer("answered", "aisle")  # no worker has seen it
    store.send("sent", "hello", topic="t")
    expected = ["~ run answered", "~ run sent", "~ thread line", "~ thread pending"]
    assert told(first.diff()) == expected
    second = store.snapshot("second")
    store.delete_thread("line")
    assert told(first.diff(second)) == expected
    store.restore(second)
    done = store.restore(first, runs="rewind")
    assert told(done.changes) == [change.replace("~", "set back") for change in expected]
    assert first.diff() == []
    assert store.run(asks, id="answered").status == "waiting"


def test_a_step_of_a_run_that_is_running(store: perdure.Store) -> None:
    snapshots: list[perdure.snapshots.Snapshot] = []

    @perdure.step
    def look(renew: bool) -> None:
        snapshots.append(store.snapshot(f"s{len(snapshots)}"))
        if renew:  # its row changes, and says nothing of its steps
            lease = Sql("UPDATE run SET lease_until = lease_until + 1")
            drive(store._context.driver.capabilities.base, write(partial(execute, lease())))

    @perdure.durable
    def running() -> None:
        for renew in (False, False, True, False):
            look(renew)

    store.run(running, id="r")
    for before, after in pairwise(snapshots):
        assert told(before.diff(after)) == ["~ run r"]


def execute(statement: Statement) -> Program[None]:
    yield Batch(statement)


def test_the_steps_of_a_run_that_only_continued(store: perdure.Store) -> None:
    store.run(asks, id="waits")
    snapshot = store.snapshot("s")
    store.run(count, 1, id="other")
    assert told(snapshot.diff()) == ["+ run other"]
    store.answer("waits", "aisle")
    store.run(asks, id="waits")
    [change] = [change for change in snapshot.diff() if change.kind == "changed"]
    assert any("done" in str(found) for found in change.paths())


def test_an_item_that_has_expired_is_not_there(store: perdure.Store) -> None:
    snapshot, now = store.snapshot("s"), store._context.clock_us()
    store.memory("users").put("since", {"fact": "b"}, ttl_s=60)
    assert told(snapshot.diff()) == ["+ item users/since"]
    store._context.clock_us = lambda: now + 120_000_000
    assert told(snapshot.diff()) == []


def test_pages_make_up_the_whole_difference(store: perdure.Store) -> None:
    fill(store)
    first = store.snapshot("first")
    change_everything(store)
    for number in range(20):
        store.thread(f"t-{number:02}").save({})
        store.memory("m", "n").put(f"k-{number:02}", {"n": number})
    second = store.snapshot("second")
    whole = first.diff(second)
    pages: list[SnapshotChange] = []
    while page := first.diff(second, limit=7, after=pages[-1].cursor if pages else None):
        assert len(page) == min(7, len(whole) - len(pages))
        pages += page
    assert pages == whole
    assert asyncio.run(first.adiff("second", limit=3, after=whole[4].cursor)) == whole[5:8]
    assert pages[-1].paths() == whole[-1].paths()
    assert first.diff(second, limit=0) == []


def test_a_page_is_full_although_threads_hold_the_same_again(store: perdure.Store) -> None:
    for number in range(10):
        store.thread(f"t-{number}").save({"n": 0})
    first = store.snapshot("first")
    for number in range(10):
        store.thread(f"t-{number}").update({"n": 1})
    store.restore("first")
    store.thread("z").save({})
    assert [str(change) for change in first.diff(limit=1)] == ["+ thread z"]


@pytest.mark.parametrize("cursor", ["", "x", "[]", '["unknown", "a"]', "{}", 3])
def test_a_wrong_cursor_is_refused(store: perdure.Store, cursor: str) -> None:
    store.thread("a").save({})
    snapshot = store.snapshot("s")
    store.thread("b").save({})
    with pytest.raises(perdure.UsageError, match="`cursor` of the last change"):
        snapshot.diff(after=cursor)


@dataclass
class Booking:
    seat: str


async def test_paths_are_compared_without_the_classes_of_the_values(store: perdure.Store) -> None:
    thread, memory = store.thread("trip"), store.memory("users", "ann")
    perdure.register(Booking)
    thread.save({"booking": Booking("1A")})
    memory.put("seat", {"booking": Booking("1A")})
    before = store.snapshot("before")
    thread.save({"booking": Booking("2B")})
    memory.put("seat", {"booking": Booking("2B")})
    for change in await before.adiff():
        [found] = await change.apaths(raw=True)
        assert (found.path[-1], found.before, found.after) == ("seat", "1A", "2B"), found
        assert await change.apaths() == change.paths()
    for restored in (await store.arestore("before", dry_run=True)).changes:
        [found] = await restored.apaths(raw=True)
        assert (found.before, found.after) == ("2B", "1A")
