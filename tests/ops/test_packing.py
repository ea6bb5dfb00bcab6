"""Cold differences packed together: what is loaded, listed, pruned and verified stays the same, whatever happens.

A scene is a thread with keyframes, branches, lost races and forks. Each test compares every checkpoint's state, hash
and parent before and after.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from packing_kit import ALL_COLD, check, grow, pack, prose, rows, scene

import perdure
from perdure.log.pack_writer import PackResult, pack_tenant
from perdure.storage.program import drive


def branched(store: perdure.Store) -> None:
    """Branches in the middle of a chain, a lost race, a fork that goes on, a second thread."""
    thread = store.thread("a")
    ids = grow(thread, 150)
    for parent in (ids[3], ids[70], ids[70], ids[149]):
        side = store.thread("a")
        state = side.load(parent).state
        for number in range(5):
            state["side"] = [parent, number]
            parent = side.save(state, parent=parent).id
    racer, winner = store.thread("a"), store.thread("a")
    state = racer.load().state
    winner.load()
    winner.save({**state, "won": True})
    assert not racer.save({**state, "won": False}).is_head
    fork = thread.fork(ids[100], name="fork")
    grow(fork, 40, seed=2)
    grow(store.thread("small"), 3, size=5)


def test_a_packed_store_shows_the_same(store: perdure.Store) -> None:
    branched(store)
    before, bytes_before = scene(store), store.ops.stats().difference_bytes
    packed = pack(store)
    assert packed.records > 150
    assert scene(store) == before
    check(store)
    assert store.ops.stats().difference_bytes < 0.9 * bytes_before
    sizes = [count for (count,) in rows(store, "SELECT count(*) FROM record WHERE body < 0 GROUP BY body")]
    assert max(sizes) <= 64
    assert packed.packs == len(sizes)


def test_packing_again_changes_nothing(store: perdure.Store) -> None:
    branched(store)
    pack(store)
    dumped = rows(store, "SELECT * FROM pack ORDER BY pack")
    assert pack(store) == PackResult()
    assert rows(store, "SELECT * FROM pack ORDER BY pack") == dumped


def test_writers_continue_after_a_packing(store: perdure.Store) -> None:
    thread, other = store.thread("a"), store.thread("a")
    grow(thread, 20)
    other.load()
    for number in range(6):
        pack(store)
        state = thread.load().state
        thread.save({**state, "round": number})  # its stream was taken apart
        thread.save({**state, "round": number, "again": True})
        other.load()
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)
    assert rows(store, "SELECT count(*) FROM pack") == [(2,)]


def test_a_hot_handle_does_not_notice(store: perdure.Store) -> None:
    """The same handle saves before and after, without loading in between: its stream ends, its line does not."""
    thread = store.thread("a")
    grow(thread, 50)
    state = thread.load().state
    for number in range(5):
        pack(store)
        saved = thread.save({**state, "n": number, "log": [*state["log"], "x" * 200]})
        assert saved.is_head
    check(store)
    assert thread.load(strict=True).state["n"] == 4


def test_a_lost_race_on_a_packed_line_becomes_a_branch(store: perdure.Store) -> None:
    winner, loser = store.thread("a"), store.thread("a")
    grow(winner, 40)
    state = loser.load().state
    winner.save({**state, "who": "winner"})
    pack(store)
    saved = loser.save({**state, "who": "loser"})
    assert not saved.is_head
    assert loser.load(saved.id, strict=True).state["who"] == "loser"
    check(store)


@pytest.mark.parametrize("keep", [1, 30, 100])
def test_pruning_takes_packs_apart(store: perdure.Store, keep: int) -> None:
    branched(store)
    pack(store)
    before = scene(store)
    store.thread("a").prune(keep=keep)
    after = scene(store)
    assert after
    # A parent that went is a parent still: only what is listed may be fewer.
    assert all(before[key] == value for key, value in after.items())
    assert {key for key in before if key.startswith("fork")} <= after.keys()
    check(store)
    pack(store)
    assert scene(store) == after
    check(store)


def test_deleting_leaves_no_pack_behind(store: perdure.Store) -> None:
    branched(store)
    pack(store)
    forked = {key: value for key, value in scene(store).items() if key.startswith("fork")}
    store.delete_thread("a")
    assert {key: value for key, value in scene(store).items() if key.startswith("fork")} == forked
    check(store)
    store.delete_thread("fork")
    store.delete_thread("small")
    for table in ("record", "body", "pack"):
        assert rows(store, f"SELECT count(*) FROM {table}") == [(0,)], table


@pytest.mark.parametrize("count", [2, 9, 65, 66, 73, 130])
def test_no_record_loses_the_start_of_its_stream(store: perdure.Store, count: int) -> None:
    """What is too little for a pack of its own stays readable."""
    grow(store.thread("a"), count, size=4000)
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)


def test_a_large_difference_in_the_middle_stays_by_itself(store: perdure.Store) -> None:
    thread, chance = store.thread("a"), random.Random(1)
    state: dict[str, Any] = {"text": prose(chance, 200_000), "log": []}
    for number in range(40):
        state["log"].append(prose(chance, 20))
        if number == 20:
            state["noise"] = chance.randbytes(600_000)
        thread.save(state)
    before = scene(store)
    assert pack(store).records >= 30
    assert scene(store) == before
    check(store)


def test_what_compresses_well_is_packed_too(store: perdure.Store) -> None:
    """Packs are bounded by what a load must hold, not by what is stored."""
    thread, chance = store.thread("a"), random.Random(1)
    base = prose(chance, 100_000)
    for number in range(39):
        thread.save({"text": base, "n": number, "filler": "x" * (100_000 + number)})
    before = scene(store)
    pack(store)
    assert pack(store) == PackResult()
    assert scene(store) == before
    check(store)


def test_a_branch_from_the_middle_of_a_pack(store: perdure.Store) -> None:
    thread = store.thread("a")
    ids = grow(thread, 20)
    pack(store)
    side = store.thread("a")
    side.save({**side.load(ids[10]).state, "side": True}, parent=ids[10])
    state = thread.load().state
    for number in range(12):
        thread.save({**state, "more": number})
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)
    pack(store)
    assert scene(store) == before


def test_small_packs_whose_branches_are_gone(store: perdure.Store) -> None:
    thread = store.thread("a")
    state: dict[str, Any] = {"text": prose(random.Random(1), 4000), "log": []}
    for part in range(3):
        for number in range(30):
            state["log"].append(f"{part} {number}")
            thread.save(state)
        store.thread("a").fork(name=f"fork {part}").save({**state, "fork": part})
        pack(store)
    for part in range(3):
        store.delete_thread(f"fork {part}")
        pack(store)
    thread.save({**state, "end": 1})
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)


def test_what_a_prune_took_apart_is_packed_the_next_time(store: perdure.Store) -> None:
    """Though nobody has written to the thread since."""
    tenant_of = store._context
    grow(store.thread("a"), 100)
    grow(store.thread("b"), 3)
    tenant = tenant_of.known_tenant
    assert tenant is not None
    later = tenant_of.clock_us() + 600_000_000
    assert drive(tenant_of.driver, pack_tenant(tenant, later)).records > 80
    assert drive(tenant_of.driver, pack_tenant(tenant, later + 600_000_000)) == PackResult()
    store.thread("a").prune(keep=50)
    assert drive(tenant_of.driver, pack_tenant(tenant, later + 1_200_000_000)).records > 8
    check(store)


def test_a_clock_that_was_ahead_does_not_end_packing(store: perdure.Store) -> None:
    context = store._context
    grow(store.thread("b"), 3)
    tenant = context.known_tenant
    assert tenant is not None
    drive(context.driver, pack_tenant(tenant, ALL_COLD))
    grow(store.thread("a"), 50)
    assert drive(context.driver, pack_tenant(tenant, context.clock_us() + 600_000_000)).records > 40


def test_what_was_in_the_way_is_packed_the_next_time(store: perdure.Store) -> None:
    """A prune between looking and storing: the thread is idle then, and must not be forgotten."""
    context = store._context
    grow(store.thread("a"), 100)
    tenant = context.known_tenant
    assert tenant is not None
    later = context.clock_us() + 600_000_000
    flow = pack_tenant(tenant, later)
    answer: Any = None
    pruned = False
    try:
        while True:
            transaction = flow.send(answer)
            if transaction.write and "_store" in repr(transaction.op) and not pruned:
                store.thread("a").prune(keep=60)
                pruned = True
            try:
                answer = transaction.perform(context.driver)
            except Exception as error:
                transaction = flow.throw(error)
                answer = transaction.perform(context.driver)
    except StopIteration:
        assert pruned
    assert drive(context.driver, pack_tenant(tenant, later + 600_000_000)).records > 20
    check(store)
