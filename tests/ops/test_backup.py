"""A backup is the store at one point of its commit order, also under load; what is restored is that, and settled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
import pytest
from backup_kit import add, asking, fill, run_of
from copy_kit import everything, grown, query, tables

import perdure
from perdure import UsageError
from perdure.errors import Damaged

# --- there and back


def test_a_restored_store_has_every_row_of_the_source(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    told: list[tuple[int, int]] = []
    with perdure.open(url) as store:
        fill(store)
        before = tables(store)
        done = store.ops.backup(tmp_path / "b", progress=lambda a, b: told.append((a, b)))
        [row] = query(store, "SELECT id, kind, place, tenant, bytes, restored_at FROM copy")
    assert row == (done.id, "backup", str(tmp_path / "b"), None, done.bytes, None)
    assert done.bytes == (tmp_path / "b").stat().st_size
    restored = perdure.ops.restore_backup(tmp_path / "b", place, **options)
    assert restored.ok
    assert (restored.backup, restored.tenants, restored.report.runs) == (done.id, 2, 3)
    with perdure.open(place, **options) as store:
        after = tables(store)
        assert without_settling(after) == without_settling(before)
        assert store.get_run("done").result() == sum(range(12))
        store.answer("asks", "yes")
        assert store.run(asking, id="asks").result() == "yes"
        store.thread("rich").save({"goes": "on"})
        store.thread("new").save({"a": 1})
        assert store.run(run_of, 5, id="new").result() == 10
        assert store.ops.verify().ok


def without_settling(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Without what a restoration changes on purpose."""
    plain = {name: list(rows) for name, rows in found.items()}
    plain["thread"] = [(*row[:7], *row[8:]) for row in plain["thread"]]  # generation
    plain["run"] = [(*row[:15], *row[16:]) for row in plain["run"]]  # fence
    return plain


@pytest.mark.parametrize("source", ["sqlite", "postgres"])
def test_a_backup_of_one_database_is_restored_into_the_other(source: str, tmp_path: Path, postgres_url: str) -> None:
    here, there = str(tmp_path / "a.db"), postgres_url
    if source == "postgres":
        here, there = there, here
    with perdure.open(here) as store:
        fill(store)
        expected, before = everything(store, "rich"), tables(store)
        store.ops.backup(tmp_path / "b")
    assert perdure.ops.restore_backup(tmp_path / "b", there).ok
    with perdure.open(there) as store:
        assert everything(store, "rich") == expected
        after = tables(store)
        for name in ("record", "body", "journal", "run_value", "tag", "tenant", "ask"):
            assert sorted(after[name], key=repr) == sorted(before[name], key=repr)
        store.answer("asks", "no")
        assert store.run(asking, id="asks").result() == "no"
        for number in range(50):
            store.thread("rich").save(grown(number))
        store.thread("new").save({"a": 1})
        assert store.ops.verify().ok


def test_a_backup_is_a_store_itself_and_replaces_nothing(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.thread("x").save({"n": 1})
        store.ops.backup(tmp_path / "b.db")
        for taken in ("a.db", "b.db"):
            with pytest.raises(UsageError, match="exists already"):
                store.ops.backup(tmp_path / taken)
        with pytest.raises(UsageError, match="folder"):
            store.ops.backup(tmp_path / "nowhere" / "b")
        with perdure.open(str(tmp_path / "b.db"), create=False) as copy:
            assert copy.thread("x").load().state == {"n": 1}
            assert copy.ops.verify().ok
    assert not [name for name in os.listdir(tmp_path) if ".part" in name]


def test_a_store_in_memory_can_be_backed_up(tmp_path: Path) -> None:
    with perdure.open(":memory:") as store:
        store.thread("x").save({"n": 1})
        store.ops.backup(tmp_path / "b.db")
    with perdure.open(str(tmp_path / "b.db")) as copy:
        assert copy.thread("x").load().state == {"n": 1}


# --- trying a restoration


def test_a_restoration_is_tried_in_a_temporary_place_and_remembered(url: str, tmp_path: Path) -> None:
    with perdure.open(url) as store:
        fill(store)
        done = store.ops.backup(tmp_path / "b")
        tried = store.ops.test_backup(tmp_path / "b")
        assert tried.ok
        assert tried.report.checkpoints == sum(
            store.tenant(name).ops.verify().checkpoints for name in ("default", "acme")
        )
        [(at,)] = query(store, f"SELECT restored_at FROM copy WHERE id = '{done.id}'")
        assert at > done.at.timestamp() * 1e6
    assert not [name for name in os.listdir(tmp_path) if "restore" in name]


def test_what_is_encrypted_stays_so_in_a_backup_and_a_transfer_uses_the_targets_keys(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    keys = bytes(range(32))
    with perdure.open(url, keys=keys) as store:
        for number in range(20):
            store.thread("x", metadata={"who": "Wilhelmina"}).save(
                {"n": number, "word": "Rumpelstiltskin"}, note="Wilhelmina"
            )
        store.ops.backup(tmp_path / "b")
        assert store.ops.test_backup(tmp_path / "b").ok
        store.ops.transfer(tmp_path / "plain.db", threads=["x"])
        store.ops.transfer(tmp_path / "other.db", threads=["x"], keys=bytes(32))
        expected = everything(store, "x")
    for secret in (b"Rumpelstiltskin", b"Wilhelmina"):
        assert secret not in (tmp_path / "b").read_bytes()
    assert perdure.ops.restore_backup(tmp_path / "b", place, keys=keys, **options).ok
    with perdure.open(place, keys=keys, **options) as there:
        assert everything(there, "x") == expected
    with perdure.open(str(tmp_path / "plain.db")) as plain:
        assert everything(plain, "x") == expected
        assert plain.ops.verify().ok
    with perdure.open(str(tmp_path / "other.db"), keys=bytes(32)) as other:
        assert everything(other, "x") == expected
    assert b"Wilhelmina" not in (tmp_path / "other.db").read_bytes()


# --- where it may not go


def test_a_place_that_is_not_empty_is_refused(url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    place, options = elsewhere
    with perdure.open(url) as store:
        store.thread("x").save({"n": 1})
        store.ops.backup(tmp_path / "b")
    with perdure.open(place, **options) as there:
        there.thread("x").save({"n": 2})
    with pytest.raises(UsageError, match=r"not empty|exists already"):
        perdure.ops.restore_backup(tmp_path / "b", place, **options)
    with perdure.open(place, **options) as there:
        assert there.thread("x").load().state == {"n": 2}
    with pytest.raises(UsageError, match="not into memory"):
        perdure.ops.restore_backup(tmp_path / "b", ":memory:")
    (tmp_path / "gone.db-wal").touch()
    with pytest.raises(UsageError, match="move it away"):
        perdure.ops.restore_backup(tmp_path / "b", tmp_path / "gone.db")
    (tmp_path / "mine.txt").write_text("not a database, but somebody's")
    with pytest.raises(UsageError, match="no backup"):
        perdure.ops.restore_backup(tmp_path / "mine.txt", tmp_path / "new.db")


def test_a_damaged_backup_is_refused_or_told_of(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    with perdure.open(url) as store:
        fill(store)
        store.ops.backup(tmp_path / "b")
        whole = (tmp_path / "b").read_bytes()
        bad = tmp_path / "bad"
        for at in range(100, len(whole), max(1, len(whole) // 12)):
            for damaged in (whole[:at], whole[:at] + bytes(60) + whole[at + 60 :]):
                bad.write_bytes(damaged)
                if damaged == whole:
                    continue
                try:
                    found = perdure.ops.restore_backup(bad, place, **options)
                except (UsageError, Damaged, perdure.errors.StoreError):
                    continue
                # The damage hit bytes of the file that hold nothing.
                assert found.report.problems or found.ok
                if url.startswith("postgres"):
                    with psycopg.connect(url, autocommit=True) as connection:
                        connection.execute("DROP SCHEMA restored CASCADE")
                for end in ("", "-wal", "-shm", "-lock", "-lock-next"):
                    Path(place + end).unlink(missing_ok=True)
        assert perdure.ops.restore_backup(tmp_path / "b", place, **options).ok


# --- settling


def test_runs_that_were_running_go_on_in_the_restored_store_and_their_old_owners_cannot_write(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    seen: list[Any] = []
    with perdure.open(url) as store:

        @perdure.step(name="backs itself up")
        def back_up() -> int:
            seen.append(1)
            if len(seen) == 1:
                store.ops.backup(tmp_path / "b")
            return 7

        @perdure.durable(name="backed up in the middle")
        def body() -> int:
            return add(1, 2) + back_up()

        assert store.run(body, id="r").result() == 10
        fence = query(store, "SELECT max(fence) FROM run")[0][0]
    restored = perdure.ops.restore_backup(tmp_path / "b", place, **options)
    assert restored.requeued == 1
    with perdure.open(place, **options) as there:
        [(status, owner, found)] = query(there, "SELECT status, owner, fence FROM run")
        assert (status, owner) == ("queued", None)
        assert found > fence + 1000
        assert there.run(body, id="r").result() == 10
        assert len(seen) == 2
        assert there.ops.verify().ok


def test_numbers_given_out_after_the_backup_are_not_given_out_again(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A handle of a thread that was made after the backup must not write into a new thread of the restored store."""
    place, options = elsewhere
    with perdure.open(url) as store:
        store.thread("x").save({"n": 1})
        store.ops.backup(tmp_path / "b")
        late = [store.thread(f"late {n}").save({"n": n})._record.thread for n in range(5)]
        generation = query(store, "SELECT generation FROM thread WHERE name = 'x'")
        [(identity,)] = query(store, "SELECT value FROM meta WHERE key = 'store'")
    perdure.ops.restore_backup(tmp_path / "b", place, **options)
    with perdure.open(place, **options) as there:
        assert there.thread("new").save({"n": 1})._record.thread not in late
        assert query(there, "SELECT generation FROM thread WHERE name = 'x'")[0][0] > generation[0][0] + 1000
        assert query(there, "SELECT value FROM meta WHERE key = 'store'") == [(identity,)]
        assert query(there, "SELECT value FROM meta WHERE key = 'era'") == [("1",)]


@pytest.mark.parametrize("kind", ["backup", "bundle"])
def test_erasing_names_a_copy_whose_process_was_killed_when_it_was_in_its_place(kind: str, tmp_path: Path) -> None:
    url, place = tmp_path / "a.db", tmp_path / "copy"

    def hook(point: str) -> None:
        if place.exists():
            raise InterruptedError(point)

    with perdure.open(url, hook=hook) as store:
        store.thread("alice").save({})
        with pytest.raises(InterruptedError):
            store.ops.backup(place) if kind == "backup" else store.snapshot("s").export(place)
    with perdure.open(url) as store:
        assert any(f"unfinished {kind}" in one and str(place) in one for one in store.ops.erase("alice").may_remain)
        assert store.ops.health().last_backup_at is None
