"""Cold differences packed together: what is loaded, listed, pruned and verified stays the same, whatever happens.

A scene is a thread with keyframes, branches, lost races and forks. Each test compares every checkpoint's state, hash
and parent before and after.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
import striking

import holdfast as hf
from holdfast.log.packing import Packed, pack_tenant, pack_tree
from holdfast.storage.program import Batch, Program, Sql, Transaction, drive

ALL_COLD = 2**61
WORDS = [f"word{number:04}" for number in range(3000)]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str) -> Iterator[hf.Store]:
    with hf.open(url) as opened:
        yield opened


def prose(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def grow(thread: hf.Thread, count: int, seed: int = 1, size: int = 2000) -> list[str]:
    """Checkpoints of a state that grows, with edits in its middle."""
    chance = random.Random(seed)
    state: dict[str, Any] = {"text": prose(chance, size), "log": [], "n": 0}
    ids = []
    for number in range(count):
        state["n"] = number
        state["log"].append(prose(chance, 30))
        if number % 7 == 0:
            state["log"][chance.randrange(len(state["log"]))] = prose(chance, 30)
        ids.append(thread.save(state, note=f"step {number}").id)
    return ids


def branched(store: hf.Store) -> None:
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


def scene(store: hf.Store) -> dict[str, Any]:
    """Everything that can be seen of all threads."""
    seen: dict[str, Any] = {}
    for info in store.threads(limit=None):
        thread = store.thread(info.name)
        for tip in thread.branches():
            for checkpoint in thread.history(start=tip.id, limit=None):
                loaded = thread.load(checkpoint.id, strict=True)
                seen[f"{info.name} {checkpoint.id}"] = (loaded.state, loaded._record.hash, loaded.parent, loaded.note)
    return seen


def rows(store: hf.Store, text: str, **params: Any) -> list[Any]:
    def program() -> Program[list[Any]]:
        [found] = yield Batch(Sql(text)(**params))
        return found

    return list(store._context.driver.run(Transaction(program)))


def pack(store: hf.Store) -> Packed:
    """Everything, however new it is, and whatever was looked at before."""
    tenant = store._context.known_tenant
    assert tenant is not None
    driver, total = store._context.driver, Packed()
    for (tree,) in rows(store, "SELECT DISTINCT tree FROM thread WHERE tenant = :tenant", tenant=tenant):
        total = total.plus(drive(driver, pack_tree(tenant, tree, ALL_COLD)))
    return total


def check(store: hf.Store) -> None:
    report = store.verify()
    assert report.ok, report.problems


def test_a_packed_store_shows_the_same(store: hf.Store) -> None:
    branched(store)
    before, bytes_before = scene(store), store.stats().difference_bytes
    packed = pack(store)
    assert packed.records > 150
    assert scene(store) == before
    check(store)
    assert store.stats().difference_bytes < 0.9 * bytes_before
    sizes = [count for (count,) in rows(store, "SELECT count(*) FROM record WHERE body < 0 GROUP BY body")]
    assert max(sizes) <= 64
    assert packed.packs == len(sizes)


def test_packing_again_changes_nothing(store: hf.Store) -> None:
    branched(store)
    pack(store)
    dumped = rows(store, "SELECT * FROM pack ORDER BY pack")
    assert pack(store) == Packed()
    assert rows(store, "SELECT * FROM pack ORDER BY pack") == dumped


def test_writers_go_on_after_a_packing_and_small_packs_grow_together(store: hf.Store) -> None:
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
    assert rows(store, "SELECT count(*) FROM pack") == [(1,)]


def test_a_hot_handle_does_not_notice(store: hf.Store) -> None:
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


def test_a_lost_race_on_a_packed_line_becomes_a_branch(store: hf.Store) -> None:
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
def test_pruning_takes_packs_apart(store: hf.Store, keep: int) -> None:
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


def test_deleting_leaves_no_pack_behind(store: hf.Store) -> None:
    branched(store)
    pack(store)
    forked = {key: value for key, value in scene(store).items() if key.startswith("fork")}
    store.delete("a")
    assert {key: value for key, value in scene(store).items() if key.startswith("fork")} == forked
    check(store)
    store.delete("fork")
    store.delete("small")
    for table in ("record", "body", "pack", "sweep"):
        assert rows(store, f"SELECT count(*) FROM {table}") == [(0,)], table


def test_a_keyframe_is_still_rebuilt_from_the_one_before(tmp_path: Path) -> None:
    """A keyframe keeps its difference, also after the chain before it was packed."""
    path = str(tmp_path / "a.db")
    with hf.open(path) as store:
        ids = grow(store.thread("a"), 200)
        pack(store)
        states = {name: store.thread("a").load(name).state for name in ids}
    connection = apsw.Connection(path)
    keyframes = list(connection.execute("SELECT id, body FROM record WHERE keyframe = 1 AND base IS NOT NULL"))
    assert keyframes
    connection.execute("UPDATE body SET full_text = x'00' WHERE id = ?", (keyframes[-1][1],))
    connection.close()
    with hf.open(path) as store:
        assert all(store.thread("a").load(name, strict=True).state == state for name, state in states.items())


@pytest.mark.parametrize("damage", ["data = x'00'", "data = substr(data, 1, length(data) - 9)", "checksum = 1", "gone"])
def test_a_damaged_pack_is_found_and_never_read(tmp_path: Path, damage: str) -> None:
    path = str(tmp_path / "a.db")
    with hf.open(path) as store:
        ids = grow(store.thread("a"), 60)
        pack(store)
    connection = apsw.Connection(path)
    connection.execute("DELETE FROM pack" if damage == "gone" else f"UPDATE pack SET {damage}")
    connection.close()
    with hf.open(path) as store:
        assert not store.verify().ok
        with pytest.raises(hf.Damaged):
            store.thread("a").load(ids[30], strict=True)


def test_members_that_changed_places_are_found(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with hf.open(path) as store:
        ids = grow(store.thread("a"), 60)
        pack(store)
    connection = apsw.Connection(path)
    # The first record of the pack gets out of it: all others stand one place too far.
    first = connection.execute("SELECT min(id) FROM record WHERE body < 0").get
    connection.execute("UPDATE record SET body = NULL WHERE id = ?", (first,))
    connection.close()
    with hf.open(path) as store, pytest.raises(hf.Damaged):
        store.thread("a").load(ids[30], strict=True)


@pytest.mark.parametrize("count", [2, 9, 65, 66, 73, 130])
def test_no_record_loses_the_start_of_its_stream(store: hf.Store, count: int) -> None:
    """What is too little for a pack of its own stays readable."""
    grow(store.thread("a"), count, size=4000)
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)


def test_a_large_difference_in_the_middle_stays_by_itself(store: hf.Store) -> None:
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


def test_what_compresses_well_is_packed_too(store: hf.Store) -> None:
    """Packs are bounded by what a load must hold, not by what is stored."""
    thread, chance = store.thread("a"), random.Random(1)
    base = prose(chance, 100_000)
    for number in range(39):
        thread.save({"text": base, "n": number, "filler": "x" * (100_000 + number)})
    before = scene(store)
    pack(store)
    assert pack(store) == Packed()
    assert scene(store) == before
    check(store)


def test_a_branch_from_the_middle_of_a_pack(store: hf.Store) -> None:
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


def test_small_packs_whose_branches_are_gone(store: hf.Store) -> None:
    thread = store.thread("a")
    state: dict[str, Any] = {"text": prose(random.Random(1), 4000), "log": []}
    for part in range(3):
        for number in range(30):
            state["log"].append(f"{part} {number}")
            thread.save(state)
        store.thread("a").fork(name=f"fork {part}").save({**state, "fork": part})
        pack(store)
    for part in range(3):
        store.delete(f"fork {part}")
        pack(store)
    thread.save({**state, "end": 1})
    before = scene(store)
    pack(store)
    assert scene(store) == before
    check(store)


def test_what_a_prune_took_apart_is_packed_the_next_time(store: hf.Store) -> None:
    """Though nobody has written to the thread since."""
    tenant_of = store._context
    grow(store.thread("a"), 100)
    grow(store.thread("b"), 3)
    tenant = tenant_of.known_tenant
    assert tenant is not None
    later = tenant_of.clock_us() + 600_000_000
    assert drive(tenant_of.driver, pack_tenant(tenant, later)).records > 90
    assert drive(tenant_of.driver, pack_tenant(tenant, later + 600_000_000)) == Packed()
    store.thread("a").prune(keep=50)
    assert drive(tenant_of.driver, pack_tenant(tenant, later + 1_200_000_000)).records > 8
    check(store)


def test_a_clock_that_was_ahead_does_not_end_packing(store: hf.Store) -> None:
    context = store._context
    grow(store.thread("b"), 3)
    tenant = context.known_tenant
    assert tenant is not None
    drive(context.driver, pack_tenant(tenant, ALL_COLD))
    grow(store.thread("a"), 50)
    assert drive(context.driver, pack_tenant(tenant, context.clock_us() + 600_000_000)).records > 40


@pytest.mark.parametrize(
    "damage", ["UPDATE body SET diff = 7", "UPDATE body SET diff = NULL", "UPDATE record SET key = 5"]
)
def test_damage_does_not_keep_others_from_being_packed(tmp_path: Path, damage: str) -> None:
    path = str(tmp_path / "a.db")
    with hf.open(path) as store:
        grow(store.thread("a"), 30)
        grow(store.thread("b"), 30)
    connection = apsw.Connection(path)
    [(victim, tree)] = connection.execute("SELECT id, tree FROM record WHERE keyframe = 0 ORDER BY id LIMIT 1 OFFSET 9")
    where = "id = (SELECT body FROM record WHERE id = ?)" if "body" in damage else "id = ?"
    connection.execute(f"{damage} WHERE {where}", (victim,))
    connection.close()
    with hf.open(path) as store:
        store.threads()
        assert pack(store).records >= 29
        other = rows(store, "SELECT count(*) FROM record WHERE tree <> :tree AND body < 0", tree=tree)
        assert other[0][0] >= 29


def test_damage_keeps_no_other_thread_from_retention_and_packing(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with hf.open(path) as store:
        store.set_retention(keep_last=30)
        for name in ("a", "b", "c"):
            grow(store.thread(name), 40)
    connection = apsw.Connection(path)
    trees = [tree for (tree,) in connection.execute("SELECT tree FROM thread ORDER BY tree")]
    connection.execute("UPDATE body SET diff = x'00' WHERE id IN (SELECT body FROM record WHERE tree = ?)", (trees[0],))
    connection.execute("UPDATE record SET body = 'x' WHERE tree = ? AND keyframe = 0", (trees[1],))
    connection.close()
    with hf.open(path) as store:
        store._context.clock_us = lambda: time.time_ns() // 1000 + 3_600_000_000
        done = store.compact()
        assert done.damaged
        assert done.checkpoints == 10
        assert len(list(store.thread("c").history())) == 30
        assert rows(store, "SELECT count(*) FROM record WHERE tree = :tree AND body < 0", tree=trees[2])[0][0] >= 8


def test_what_was_in_the_way_is_packed_the_next_time(store: hf.Store) -> None:
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
                answer = context.driver.run(transaction)
            except Exception as error:
                transaction = flow.throw(error)
                answer = context.driver.run(transaction)
    except StopIteration:
        assert pruned
    assert drive(context.driver, pack_tenant(tenant, later + 600_000_000)).records > 20
    check(store)


def test_joining_packs_saves_bytes(store: hf.Store) -> None:
    thread = store.thread("a")
    for part in range(3):
        grow(thread, 9, seed=part, size=3000) if part == 0 else [
            thread.save({**thread.load().state, "n": [part, number]}) for number in range(9)
        ]
        assert pack(store).saved_bytes > -200


@pytest.mark.parametrize("name", ["v1", "langgraph-v1"])
def test_stores_of_earlier_versions(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store.db"
    path.write_bytes((Path(__file__).parents[1] / "data" / name / "store.db").read_bytes())
    with hf.open(str(path)) as store:
        store.threads()
        before = store.verify()
        assert before.ok
        pack(store)
        after = store.verify()
        assert after.ok, after.problems
        assert after.checkpoints == before.checkpoints


class Fault(Exception):
    """What strikes."""


def test_a_fault_at_every_statement_loses_nothing(url: str) -> None:
    """Struck at each point in turn, each time on a copy: what was packed until then stays packed."""
    struck_at: list[int] = [0]
    points: list[str] = []

    def hook(point: str) -> None:
        points.append(point)
        if len(points) == struck_at[0]:
            raise Fault

    with hf.open(url) as whole, hf.open(url, hook=hook) as fragile:
        for at in striking.points("packing"):
            struck_at[0] = 0
            plain, struck = whole.tenant(f"copy {at}"), fragile.tenant(f"copy {at}")
            ids = grow(plain.thread("a"), 40, size=60)
            side = plain.thread("a")
            side.save({**side.load(ids[20]).state, "side": 1}, parent=ids[20])
            before = scene(plain)
            struck.threads()  # so that the tenant is known, and only packing is struck
            points.clear()
            struck_at[0] = at
            try:
                pack(struck)
            except Fault:
                assert scene(plain) == before, points
                check(plain)
                struck_at[0] = 0
                pack(struck)
                check(plain)
            else:
                break
        assert at > 20


def test_readers_and_writers_beside_a_packing(url: str) -> None:
    """Threads that save, branch, load and prune while everything is packed again and again."""
    failures: list[BaseException] = []
    saved: dict[tuple[str, str], Any] = {}
    stop = threading.Event()

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)
            stop.set()

    def writing(store: hf.Store, name: str, seed: int) -> None:
        chance, thread = random.Random(seed), store.thread(name)
        state: dict[str, Any] = {"text": prose(chance, 300), "log": []}
        for number in range(120):
            if stop.is_set():
                return
            state = {**state, "log": [*state["log"], prose(chance, 20)][-60:], "n": number}
            saved[name, thread.save(state).id] = state
            if number % 40 == 39:
                side = store.thread(name)
                older = chance.choice([key for key in list(saved) if key[0] == name])[1]
                branch = {**side.load(older).state, "branch": number}
                saved[name, side.save(branch, parent=older).id] = branch

    def reading(store: hf.Store, seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            if saved:
                name, checkpoint = chance.choice(list(saved))
                loaded = store.thread(name).load(checkpoint, strict=True)
                assert loaded.state == saved[name, checkpoint]

    with hf.open(url) as store, hf.open(url, cache_bytes=0) as cold:
        grow(store.thread("old"), 5)
        cold.threads()
        writers = [threading.Thread(target=guarded, args=(writing, store, f"t{n}", n)) for n in range(3)]
        readers = [threading.Thread(target=guarded, args=(reading, cold, n)) for n in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        packed = Packed()
        while any(writer.is_alive() for writer in writers) and not stop.is_set():
            packed = packed.plus(pack(store))
        stop.set()
        for thread in (*writers, *readers):
            thread.join()
        assert not failures, failures[0]
        packed = packed.plus(pack(store))
        assert packed.records > 0
        check(store)
        for (name, checkpoint), state in saved.items():
            assert cold.thread(name).load(checkpoint, strict=True).state == state


def test_random_histories_survive_packing_pruning_and_packing(url: str) -> None:
    with hf.open(url) as store:
        for seed in range(6):
            chance = random.Random(seed)
            name = f"r{seed}"
            states: dict[str, Any] = {}
            thread = store.thread(name)
            state: dict[str, Any] = {"text": prose(chance, 100 * seed), "log": []}
            for number in range(90):
                move = chance.random()
                if states and move < 0.15:
                    parent = chance.choice(list(states))
                    state = {**states[parent], "b": number}
                    states[store.thread(name).save(state, parent=parent).id] = state
                elif move < 0.2:
                    state = {"text": prose(chance, 50), "log": []}
                    thread = store.thread(name)
                    if states:
                        thread.load()
                    states[thread.save(state).id] = state
                else:
                    state = {**state, "log": [*state["log"], prose(chance, 10)], "n": number}
                    thread = store.thread(name)
                    if states:
                        thread.load()
                    states[thread.save(state).id] = state
                if move > 0.93:
                    pack(store)
            pack(store)
            for checkpoint, expected in states.items():
                assert store.thread(name).load(checkpoint, strict=True).state == expected
            store.thread(name).prune(keep=chance.randint(1, 40))
            for tip in store.thread(name).branches():
                assert store.thread(name).load(tip.id, strict=True).state == states[tip.id]
        check(store)
