"""A store that has snapshots can be backed up, restored and transferred."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from snapshot_kit import change_everything, fill, seen

import perdure
from perdure.ops import repair_store


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_backup_of_a_store_with_snapshots(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, empty_postgres_url: str
) -> None:
    url = str(tmp_path / "a.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    target = str(tmp_path / "b.db") if kind == "sqlite" else empty_postgres_url
    with perdure.open(url) as store:
        fill(store)
        snapshot = store.snapshot("s")
        before = seen(snapshot)
        change_everything(store)
        now = seen(store)
        store.ops.backup(str(tmp_path / "backup.db"))
    perdure.ops.restore_backup(str(tmp_path / "backup.db"), target)
    with perdure.open(target) as copy:
        assert seen(copy)["history"] == now["history"]
        if kind == "sqlite":  # a copy of the file
            assert seen(copy.get_snapshot("s")) == before
        assert seen(copy.snapshot("new"))["items"] == now["items"]
        assert copy.ops.verify().problems == ()


def test_a_repair_of_a_store_with_snapshots(tmp_path: Path) -> None:
    """That its tables are versioned is no damage. If there is some, the rows are found, but not the snapshots."""
    path, damaged = tmp_path / "a.db", tmp_path / "damaged.db"
    with perdure.open(path) as store:
        for number in range(40):
            store.thread(f"t{number}").save({"n": 0, "text": "x" * 200})
        store.snapshot("s")
        for number in range(40):
            store.thread(f"t{number}").save({"n": number, "text": "y" * 200})
        expected = {info.name: store.thread(info.name).load().state for info in store.threads()}
    assert repair_store(path).place == str(path)  # nothing was wrong
    pages = bytearray(path.read_bytes())
    with apsw.Connection(str(path)) as connection:
        [(root,)] = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'thread'")
    pages[(root - 1) * 2048 : root * 2048] = bytes(2048)  # the leaves below it are found by what they look like
    damaged.write_bytes(pages)
    done = repair_store(damaged)
    assert "its snapshots: the damaged store has what can be read of them" in [note.what for note in done.lost]
    with perdure.open(done.place) as store:
        found = {info.name: store.thread(info.name).load().state for info in store.threads()}
        assert sorted(state["n"] for state in found.values()) == sorted(state["n"] for state in expected.values())
        assert len(found.keys() & expected.keys()) > 35  # the page itself had a few names
        assert store.snapshots() == []
        assert len(store.snapshot("new").threads()) == 40
