"""Packs that are damaged, struck at every statement, read and written meanwhile, or drawn at random."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest
import striking
from packing_kit import check, grow, pack, prose, rows, scene

import perdure
from perdure.log.pack_writer import PackResult


def test_a_keyframe_is_still_rebuilt_from_the_one_before(tmp_path: Path) -> None:
    """A keyframe keeps its difference, also after the chain before it was packed."""
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        ids = grow(store.thread("a"), 200)
        pack(store)
        states = {name: store.thread("a").load(name).state for name in ids}
    connection = apsw.Connection(path)
    keyframes = list(connection.execute("SELECT id, body FROM record WHERE keyframe = 1 AND base IS NOT NULL"))
    assert keyframes
    connection.execute("UPDATE body SET full_text = x'00' WHERE id = ?", (keyframes[-1][1],))
    connection.close()
    with perdure.open(path) as store:
        assert all(store.thread("a").load(name, strict=True).state == state for name, state in states.items())


@pytest.mark.parametrize("damage", ["data = x'00'", "data = substr(data, 1, length(data) - 9)", "gone"])
def test_a_damaged_pack_is_found_and_never_read(tmp_path: Path, damage: str) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        ids = grow(store.thread("a"), 60)
        pack(store)
    connection = apsw.Connection(path)
    connection.execute("DELETE FROM pack" if damage == "gone" else f"UPDATE pack SET {damage}")
    connection.close()
    with perdure.open(path) as store:
        assert not store.ops.verify().ok
        with pytest.raises(perdure.errors.Damaged):
            store.thread("a").load(ids[30], strict=True)


def test_a_line_that_leaves_a_pack_in_its_middle_is_followed(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread = store.thread("a")
        ids = grow(thread, 150, size=20_000)
        pack(store)
        state, parent = thread.load(ids[40]).state, ids[40]
        for number in range(10):
            parent = thread.save({**state, "side": number}, parent=parent).id
        assert thread.load(parent, strict=True).state == {**state, "side": 9}
        pack(store)
        assert thread.load(parent, strict=True).state == {**state, "side": 9}
        check(store)


def test_loads_do_not_depend_on_where_a_pack_is_said_to_belong(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        grow(store.thread("a"), 150, size=20_000)
        before = scene(store)
        pack(store)
    connection = apsw.Connection(path)
    connection.execute("UPDATE pack SET first = first + 1, last = last + 1, key = key + 1, tree = tree + 1")
    connection.close()
    with perdure.open(path) as store:
        assert scene(store) == before


def test_members_that_changed_places_are_found(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        ids = grow(store.thread("a"), 60)
        pack(store)
    connection = apsw.Connection(path)
    # The first record of the pack gets out of it: all others stand one place too far.
    first = connection.execute("SELECT min(id) FROM record WHERE body < 0").get
    connection.execute("UPDATE record SET body = NULL WHERE id = ?", (first,))
    connection.close()
    with perdure.open(path) as store, pytest.raises(perdure.errors.Damaged):
        store.thread("a").load(ids[30], strict=True)


@pytest.mark.parametrize(
    "damage", ["UPDATE body SET diff = 7", "UPDATE body SET diff = NULL", "UPDATE record SET key = 5"]
)
def test_damage_does_not_keep_others_from_being_packed(tmp_path: Path, damage: str) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        grow(store.thread("a"), 30)
        grow(store.thread("b"), 30)
    connection = apsw.Connection(path)
    [(victim, tree)] = connection.execute("SELECT id, tree FROM record WHERE keyframe = 0 ORDER BY id LIMIT 1 OFFSET 9")
    where = "id = (SELECT body FROM record WHERE id = ?)" if "body" in damage else "id = ?"
    connection.execute(f"{damage} WHERE {where}", (victim,))
    connection.close()
    with perdure.open(path) as store:
        store.threads()
        assert pack(store).records >= 29
        other = rows(store, "SELECT count(*) FROM record WHERE tree <> :tree AND body < 0", tree=tree)
        assert other[0][0] >= 29


def test_damage_keeps_no_other_thread_from_retention_and_packing(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.ops.set_retention(keep_last=30)
        for name in ("a", "b", "c"):
            grow(store.thread(name), 40)
    connection = apsw.Connection(path)
    trees = [tree for (tree,) in connection.execute("SELECT tree FROM thread ORDER BY tree")]
    connection.execute("UPDATE body SET diff = x'00' WHERE id IN (SELECT body FROM record WHERE tree = ?)", (trees[0],))
    connection.execute("UPDATE record SET body = 'x' WHERE tree = ? AND keyframe = 0", (trees[1],))
    connection.close()
    with perdure.open(path) as store:
        store._context.clock_us = lambda: time.time_ns() // 1000 + 3_600_000_000
        done = store.ops.compact()
        assert done.damaged
        assert done.checkpoints == 10
        assert len(list(store.thread("c").history())) == 30
        assert rows(store, "SELECT count(*) FROM record WHERE tree = :tree AND body < 0", tree=trees[2])[0][0] >= 8


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

    with perdure.open(url) as whole, perdure.open(url, hook=hook) as fragile:
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

    def writing(store: perdure.Store, name: str, seed: int) -> None:
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

    def reading(store: perdure.Store, seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            if saved:
                name, checkpoint = chance.choice(list(saved))
                loaded = store.thread(name).load(checkpoint, strict=True)
                assert loaded.state == saved[name, checkpoint]

    with perdure.open(url) as store, perdure.open(url, cache_bytes=0) as cold:
        grow(store.thread("old"), 5)
        cold.threads()
        writers = [threading.Thread(target=guarded, args=(writing, store, f"t{n}", n)) for n in range(3)]
        readers = [threading.Thread(target=guarded, args=(reading, cold, n)) for n in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        packed = PackResult()
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
    with perdure.open(url) as store:
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
