"""`thread.line(namespace)`: checkpoints under ids of the caller, the port of adapters."""

from __future__ import annotations

import pytest

import perdure


def test_states_are_found_by_the_callers_ids_and_listed_newest_first(store: perdure.Store) -> None:
    line = store.thread("a").line()
    for number in range(60):
        line.save({"n": number}, id=f"{number:03}", parent=f"{number - 1:03}" if number else None)
    fresh = store.thread("a").line()
    newest, old = fresh.load(), fresh.load("007")
    assert newest is not None
    assert old is not None
    assert (newest.id, newest.state, old.state) == ("059", {"n": 59}, {"n": 7})
    assert fresh.load("unknown") is None
    assert [each.id for each in fresh.history()] == [f"{number:03}" for number in range(59, -1, -1)]
    assert [each.state["n"] for each in fresh.history(before="003", limit=2)] == [2, 1]
    assert store.thread("a").load().state == {"n": 59}  # the thread's head
    assert store.ops.verify().ok


def test_namespaces_are_lines_of_their_own_that_leave_the_head_alone(store: perdure.Store) -> None:
    thread = store.thread("a")
    thread.line().save({"main": 1}, id="1")
    inner = thread.line("inner")
    assert inner.load() is None
    inner.save({"inner": 1}, id="1")
    inner.save({"inner": 2}, id="2", parent="1")
    assert [each.state for each in inner.history()] == [{"inner": 2}, {"inner": 1}]
    assert [each.state for each in thread.line().history()] == [{"main": 1}]
    assert thread.load().state == {"main": 1}


def test_an_id_that_is_saved_again_is_replaced(store: perdure.Store) -> None:
    line = store.thread("a").line()
    line.save({"n": 1}, id="1")
    line.save({"n": 2}, id="1")
    assert [each.state for each in line.history()] == [{"n": 2}]


def test_exclusive_refuses_a_second_writer(store: perdure.Store) -> None:
    first, second = store.thread("a").line(), store.thread("a").line()
    first.save({"n": 1}, id="1")
    first.save({"n": 2}, id="2", parent="1", exclusive=True)
    with pytest.raises(perdure.Conflict):
        second.save({"n": "late"}, id="2b", parent="1", exclusive=True)
    assert [each.id for each in second.history()] == ["2", "1"]


def test_attachments_come_before_or_after_their_checkpoint_and_the_first_stays(store: perdure.Store) -> None:
    line = store.thread("a").line()
    line.attach("1", "early", [1])
    line.save({}, id="1")
    line.attach("1", "early", [2])
    line.attach("1", "late", "x")
    line.attach("1", "late", "y" * 10_000, replace=True)
    found = line.load("1")
    assert found is not None
    assert found.attachments == {"early": [1], "late": "y" * 10_000}


async def test_async_is_the_same(url: str) -> None:
    async with perdure.open(url) as store:
        line = store.thread("a").line("inner")
        await line.asave({"n": 1}, id="1")
        await line.aattach("1", "k", 1)
        found = await line.aload()
        assert found is not None
        assert (found.id, found.state, found.attachments) == ("1", {"n": 1}, {"k": 1})
        assert [each async for each in line.ahistory()] == [found]
