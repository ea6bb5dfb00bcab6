"""A snapshot shows everything as it was: every read, after every change, until it is released."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import assert_type

import pytest
from snapshot_kit import change_everything, count, fill, remove_everything, seen

import perdure
from perdure.errors import ReadOnlyStore
from perdure.forensics import sandbox


def test_every_read_answers_as_it_did(store: perdure.Store) -> None:
    fill(store)
    before = seen(store)
    first = store.snapshot("first")
    assert seen(first) == before
    change_everything(store)
    between = seen(store)
    assert between != before
    assert seen(first) == before
    second = store.snapshot("second", note="after the change")
    remove_everything(store)
    assert seen(store) != between
    assert (seen(first), seen(second)) == (before, between)
    assert first.verify().problems == second.verify().problems == store.ops.verify().problems == ()


@pytest.mark.parametrize("store", ["memory", "postgres"], indirect=True)
def test_what_has_expired_since_is_still_in_it(store: perdure.Store) -> None:
    memory = store.memory("users")
    memory.put("code", {"fact": "1234"}, ttl_s=60)
    snapshot, now = store.snapshot("s"), store._context.clock_us()
    store._context.clock_us = lambda: now + 120_000_000
    assert memory.get("code") is None
    assert [item.key for item in snapshot.memory("users").list()] == ["code"]
    assert [item.key for item in snapshot.memory("users").search("1234")] == ["code"]


def test_its_store_is_a_store_for_code_that_takes_one(store: perdure.Store) -> None:
    snapshot = store.snapshot("s")
    with sandbox(snapshot) as box:
        for found in (assert_type(snapshot.store, perdure.Store), assert_type(box.store, perdure.Store)):
            assert isinstance(found, perdure.Store)


def test_nothing_can_be_written_to_it(store: perdure.Store) -> None:
    fill(store)
    snapshot = store.snapshot("s")
    for attempt in (
        lambda: snapshot.thread("a").save({}),
        lambda: snapshot.store.thread("new").save({}),
        lambda: snapshot.memory("users", "alice").put("k", "v"),
        lambda: snapshot.store.run(count, 1, id="r"),
        lambda: snapshot.store.delete_thread("a"),
    ):
        with pytest.raises(ReadOnlyStore, match="snapshot"):
            attempt()


def test_releasing_frees_what_only_it_could_see(store: perdure.Store) -> None:
    fill(store)
    first = store.snapshot("first")
    change_everything(store)
    second = store.snapshot("second")
    remove_everything(store)
    assert first.held_bytes() > 0
    assert second.held_bytes() > 0
    known = seen(second)
    first.release()
    assert seen(second) == known
    second.release()
    assert store.snapshots() == []
    third = store.snapshot("third")
    assert third.held_bytes() == 0
    for answer in (lambda: second.thread("a").load(), second.diff, second.mark_good):
        with pytest.raises(perdure.NotFound, match="released"):
            answer()


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("name", ["", "x" * 513, "two\nlines", "\x1b[31m", "a\0b", "\ud800", 5])
def test_a_name_is_printable_text(store: perdure.Store, name: str) -> None:
    with pytest.raises(perdure.UsageError, match="name"):
        store.snapshot(name)


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_time_to_keep_it_is_in_the_future(store: perdure.Store) -> None:
    with pytest.raises(perdure.UsageError, match="is past"):
        store.snapshot("s", keep_until=datetime.now(UTC))
    local = datetime.now() + timedelta(hours=1)  # naive times are local ones
    assert store.snapshot("s", keep_until=local).keep_until == local.astimezone(UTC)


def test_a_name_is_used_once_and_found_again(store: perdure.Store) -> None:
    snapshot = store.snapshot("s", note="v42")
    with pytest.raises(perdure.UsageError, match="already"):
        store.snapshot("s")
    snapshot.mark_good()
    found = store.get_snapshot("s")
    assert (found.note, found.good, found.taken_at) == ("v42", True, snapshot.taken_at)
    with pytest.raises(perdure.NotFound):
        store.get_snapshot("t")
