"""The index of a large namespace is stored for other processes: it changes what a search reads, never what it finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import perdure
from perdure.memory import stored_indexes
from perdure.memory.arrays import large_array
from perdure.memory.models import Item
from perdure.memory.scopes import searcher_of
from perdure.memory.segments import IndexRow, IndexSegment
from perdure.storage.sqlite.opening import VOLATILE

KEY = bytes(range(32))
QUERY = "fish tree stone"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_indexes, "ITEMS_MIN", 40)
    monkeypatch.setattr(stored_indexes, "_PART_BYTES", 1000)


def letters(texts: list[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrst"] for text in texts]


def fill(store: perdure.Store, first: int = 0, count: int = 60) -> None:
    words = ("fish", "bird", "tree", "stone", "river")
    items = {
        f"k{n}": {"text": f"{words[n % 5]} {words[n % 3]} secretive {n}", "n": n} for n in range(first, first + count)
    }
    store.memory("u", "ann").put_many(items, kind="even" if first % 2 == 0 else "odd")
    store.memory("u", "bob").put(f"b{first}", "fish")


def shown(items: list[Item]) -> list[Any]:
    return [(item.namespace, item.key, item.version, item.score) for item in items]


def found(store: perdure.Store) -> list[Any]:
    hits = [store.memory(*labels).search(QUERY, limit=200) for labels in (("u", "ann"), ("u",))]
    return [shown(each) for each in (*hits, store.memory("u").search(QUERY, kind="even", limit=5))]


def loaded(store: perdure.Store) -> int:
    """How many namespaces a search has read from stored indexes, or stored."""
    return len(searcher_of(store._context).stored)


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("keys", [None, KEY], ids=["plain", "encrypted"])
def test_a_process_that_loads_an_index_finds_what_one_finds_that_reads_every_item(
    url: str, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(**options: Any) -> perdure.Store:
        return perdure.open(url, keys=keys, embedder=letters, **options)

    with opened() as store, opened() as other, opened() as late:
        fill(store)
        before = found(store)
        assert loaded(store) == 1
        assert found(other) == before
        fill(other, 60, 5)  # fewer than are worth storing again
        other.memory("u", "ann").delete("k3")
        other.memory("u", "ann").put("k4", "tree stone")
        after = found(other)
        assert found(late) == after
        assert loaded(late) == 1
        monkeypatch.setattr(stored_indexes, "ITEMS_MIN", 10_000)
        with opened() as fresh:
            assert found(fresh) == after
            assert loaded(fresh) == 0


def _damage(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with apsw.Connection(f"{path}{VOLATILE}") as connection:
            connection.execute(statement)

    return damage


def _older(path: Path) -> None:
    shutil.copy(path.with_suffix(".old"), path)


DAMAGES = {
    "a body": _damage(
        "UPDATE memory_index SET body = substr(body, 1, 10) || x'00' || substr(body, 12) WHERE number = 1"
    ),
    "a part is missing": _damage("DELETE FROM memory_index WHERE number = 1"),
    "the last part is missing": _damage(
        "DELETE FROM memory_index WHERE number = (SELECT max(number) FROM memory_index)"
    ),
    "a type": _damage("UPDATE memory_index SET body = 'text' WHERE number = 0"),
    "another generation": _damage("UPDATE memory_index SET generation = generation + 1"),
    "another history": _damage("UPDATE memory_index SET at = at + 1"),
    "a store from a backup": _older,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_index_that_is_damaged_or_of_another_history_is_built_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        fill(store)
    shutil.copy(path, path.with_suffix(".old"))
    with perdure.open(path) as store:
        fill(store, 20, 100)
        found(store)
        assert loaded(store) == 1
    damage(path)
    with perdure.open(path) as store:
        if damage is _older:
            fill(store, 40, 101)
        listed = {item.key for item in store.memory("u", "ann").list(limit=None) if "fish" in item.value["text"]}
        assert {item.key for item in store.memory("u", "ann").search("fish", limit=1000)} == listed


def test_erased_items_are_in_no_stored_index(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        fill(store)
        found(store)
        assert b"k17" in Path(f"{path}{VOLATILE}").read_bytes() + Path(f"{path}{VOLATILE}-wal").read_bytes()
        store.memory("u", "ann").erase("k17")
        assert b"k17" not in b"".join(file.read_bytes() for file in tmp_path.glob(f"a.db{VOLATILE}*"))
        found(store)
    with perdure.open(path) as store:
        assert "k17" not in str(found(store))


def test_retention_drops_stored_indexes_that_hold_what_it_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        fill(store)
        found(store)
        memory = store.memory("u", "ann")
        memory.policy(history="0s")
        memory.delete("k17")
        store.ops.compact()
        with apsw.Connection(f"{path}{VOLATILE}") as connection:
            assert list(connection.execute("SELECT 1 FROM memory_index")) == []


def test_the_arrays_of_a_loaded_index_are_aligned_so_that_numpy_does_not_copy_them() -> None:
    rows = [IndexRow(1, (7, "odd"), b"\1\2\3\4\5", bytes(12), "k", 3), IndexRow(2, (7, "b"), b"\1\2\3\4\5\6\7\7")]
    segment = IndexSegment.build(rows, 3)
    loaded = IndexSegment.loaded(bytearray(b"".join(segment.dumped())), 7)
    assert loaded is not None
    for name in ("ids", "at", "terms", "items", "densities", "kinds", "total", "more_items"):
        array = getattr(loaded, name)
        assert array.flags.aligned
        assert array.tolist() == getattr(segment, name).tolist()
    assert all(array.flags.aligned for array in (*loaded.vectors, *loaded.more))


def test_a_read_only_store_and_a_snapshot_write_no_index(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        fill(store)
        snapshot = store.snapshot("s")
        assert len(snapshot.memory("u", "ann").search("fish", limit=5)) == 5
    with perdure.open(path, read_only=True) as store:
        found(store)
    assert not Path(f"{path}{VOLATILE}").exists()


def test_a_kernel_without_huge_pages_has_large_arrays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)  # an advice that no kernel knows
    assert large_array((1000, 256), "i2").sum() == 0
