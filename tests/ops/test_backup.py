"""A backup is the store at one point of its commit order, also under load; what is restored is that, and settled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import copy_kit
import pytest
from copy_kit import acknowledged, everything, grown, make_thread, query, tables

import holdfast
from holdfast import Damaged, Store, UsageError
from holdfast.log.ids import parse_id
from holdfast.ops.copies import backup_sqlite
from holdfast.testing.processes import Nursery

KIT = Path(copy_kit.__file__)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "source.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def elsewhere(url: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Where to restore to: another file, or another schema of the same database."""
    return (url, {"schema": "restored"}) if url.startswith("postgres") else (str(tmp_path / "restored.db"), {})


@holdfast.step(name="copied step")
def add(a: int, b: int) -> int:
    return a + b


@holdfast.durable(name="copied run")
def run_of(n: int) -> int:
    total = 0
    for number in range(n):
        total = add(total, number)
    return total


@holdfast.durable(name="copied question")
def asking() -> str:
    return str(holdfast.ask("Go on?", options=["yes", "no"]))


def fill(store: Store) -> None:
    """Something of every sort, of two tenants."""
    make_thread(store, count=40)
    store.thread("rich").prune(keep=15)
    store.tenant("acme").thread("theirs", metadata={"user": "bob"}).save({"blob": "x" * 5000})
    store.run(run_of, 12, id="done")
    store.start(run_of, 3, id="queued")
    store.run(asking, id="asks")


# --- there and back


def test_a_restored_store_has_every_row_of_the_source(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    told: list[tuple[int, int]] = []
    with holdfast.open(url) as store:
        fill(store)
        before = tables(store)
        done = store.backup(tmp_path / "b", progress=lambda a, b: told.append((a, b)))
        [row] = query(store, "SELECT id, sort, place, tenant, stamp, bytes, restored_at FROM copy")
    assert row == (done.id, "backup", str(tmp_path / "b"), None, done.stamp, done.bytes, None)
    assert done.bytes == (tmp_path / "b").stat().st_size
    restored = holdfast.restore(tmp_path / "b", place, **options)
    assert restored.ok
    assert (restored.backup, restored.tenants, restored.report.runs) == (done.id, 2, 3)
    with holdfast.open(place, **options) as store:
        after = tables(store)
        assert without_settling(after) == without_settling(before)
        assert store.get_run("done").result() == sum(range(12))
        store.answer("asks", "yes")
        assert store.run(asking, id="asks").result() == "yes"
        store.thread("rich").save({"goes": "on"})
        store.thread("new").save({"a": 1})
        assert store.run(run_of, 5, id="new").result() == 10
        assert store.verify().ok


def without_settling(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Without what a restoration changes on purpose."""
    plain = {name: list(rows) for name, rows in found.items()}
    plain["thread"] = [(*row[:6], *row[7:]) for row in plain["thread"]]
    plain["run"] = [(*row[:19], *row[20:]) for row in plain["run"]]
    return plain


@pytest.mark.parametrize("source", ["sqlite", "postgres"])
def test_a_backup_of_one_database_is_restored_into_the_other(source: str, tmp_path: Path, postgres_url: str) -> None:
    here, there = str(tmp_path / "a.db"), postgres_url
    if source == "postgres":
        here, there = there, here
    with holdfast.open(here) as store:
        fill(store)
        expected, before = everything(store, "rich"), tables(store)
        store.backup(tmp_path / "b")
    assert holdfast.restore(tmp_path / "b", there).ok
    with holdfast.open(there) as store:
        assert everything(store, "rich") == expected
        after = tables(store)
        for name in ("record", "body", "journal", "run_value", "tag", "tenant", "ask"):
            assert sorted(after[name], key=repr) == sorted(before[name], key=repr)
        store.answer("asks", "no")
        assert store.run(asking, id="asks").result() == "no"
        for number in range(50):
            store.thread("rich").save(grown(number))
        store.thread("new").save({"a": 1})
        assert store.verify().ok


def test_a_backup_is_a_store_itself_and_replaced_by_the_next_one(tmp_path: Path) -> None:
    with holdfast.open(str(tmp_path / "a.db")) as store:
        store.thread("x").save({"n": 1})
        first = store.backup(tmp_path / "b.db")
        store.thread("x").save({"n": 2})
        second = store.backup(tmp_path / "b.db")
        assert second.stamp > first.stamp
        with pytest.raises(UsageError, match="the store itself"):
            store.backup(tmp_path / "a.db")
        (tmp_path / "other").write_text("mine")
        with pytest.raises(UsageError, match="no backup"):
            store.backup(tmp_path / "other")
        with holdfast.open(str(tmp_path / "b.db"), create=False) as copy:
            assert copy.thread("x").load().state == {"n": 2}
            assert copy.verify().ok
        with pytest.raises(UsageError, match="opened as one"):
            store.backup(tmp_path / "b.db")
    with holdfast.open(str(tmp_path / "c.db")) as other:
        with pytest.raises(UsageError, match="is a store"):
            other.backup(tmp_path / "a.db")
        with pytest.raises(UsageError, match="folder"):
            other.backup(tmp_path / "nowhere" / "b")
    assert not [name for name in os.listdir(tmp_path) if ".part" in name]


def test_a_store_in_memory_can_be_backed_up(tmp_path: Path) -> None:
    with holdfast.open(":memory:") as store:
        store.thread("x").save({"n": 1})
        store.backup(tmp_path / "b.db")
    with holdfast.open(str(tmp_path / "b.db")) as copy:
        assert copy.thread("x").load().state == {"n": 1}


async def test_the_async_twins_do_the_same(url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    place, options = elsewhere
    async with holdfast.open(url) as store:
        await store.thread("x").asave({"n": 1})
        done = await store.abackup(tmp_path / "b")
        tried = await store.atry_restore(tmp_path / "b")
    restored = await holdfast.arestore(tmp_path / "b", place, **options)
    assert done.id == tried.backup == restored.backup
    assert restored.report.checkpoints == tried.report.checkpoints == 1


# --- trying a restoration


def test_a_restoration_is_tried_in_a_temporary_place_and_remembered(url: str, tmp_path: Path) -> None:
    with holdfast.open(url) as store:
        fill(store)
        done = store.backup(tmp_path / "b")
        tried = store.try_restore(tmp_path / "b")
        assert tried.ok
        assert tried.report.checkpoints == sum(store.tenant(name).verify().checkpoints for name in ("default", "acme"))
        [(at,)] = query(store, f"SELECT restored_at FROM copy WHERE id = '{done.id}'")
        assert at > done.at.timestamp() * 1e6
        if url.startswith("postgres"):
            schemas = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'holdfast_restore%'"
            assert query(store, schemas) == [(0,)]
    assert not [name for name in os.listdir(tmp_path) if "restore" in name]


def test_what_is_encrypted_stays_so_in_a_backup_and_not_in_an_export(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    keys = bytes(range(32))
    with holdfast.open(url, keys=keys) as store:
        for number in range(20):
            store.thread("x", metadata={"who": "Wilhelmina"}).save(
                {"n": number, "word": "Rumpelstiltskin"}, note="Wilhelmina"
            )
        store.backup(tmp_path / "b")
        assert store.try_restore(tmp_path / "b").ok
        store.export_thread("x", tmp_path / "x")
        expected = everything(store, "x")
    for secret in (b"Rumpelstiltskin", b"Wilhelmina"):
        assert secret not in (tmp_path / "b").read_bytes()
    assert holdfast.restore(tmp_path / "b", place, keys=keys, **options).ok
    with holdfast.open(place, keys=keys, **options) as there:
        assert everything(there, "x") == expected
    with holdfast.open(str(tmp_path / "plain.db")) as plain:
        plain.import_thread(tmp_path / "x")
        assert everything(plain, "x") == expected
        assert plain.verify().ok
        plain.export_thread("x", tmp_path / "y")
    with holdfast.open(place, keys=keys, **options) as there:
        there.import_thread(tmp_path / "y", name="came back")
        assert everything(there, "came back")["checkpoints"] == expected["checkpoints"]
        assert there.verify().ok


# --- where it may not go


def test_a_place_that_is_not_empty_is_refused(url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    place, options = elsewhere
    with holdfast.open(url) as store:
        store.thread("x").save({"n": 1})
        store.backup(tmp_path / "b")
    with holdfast.open(place, **options):
        pass  # an empty store
    assert holdfast.restore(tmp_path / "b", place, **options).ok
    with holdfast.open(place, **options) as there:
        there.thread("x").save({"n": 2})
    with pytest.raises(UsageError, match="not empty"):
        holdfast.restore(tmp_path / "b", place, **options)
    with holdfast.open(place, **options) as there:
        assert there.thread("x").load().state == {"n": 2}


def test_force_replaces_a_file_that_nobody_has_open(tmp_path: Path) -> None:
    place = str(tmp_path / "there.db")
    with holdfast.open(str(tmp_path / "a.db")) as store:
        store.thread("x").save({"n": 1})
        store.backup(tmp_path / "b")
    with holdfast.open(place) as there:
        for number in range(100):
            there.thread("y").save(grown(number))
        with pytest.raises(UsageError, match="in use"):
            holdfast.restore(tmp_path / "b", place, force=True)
        assert there.thread("y").load().state == grown(99)
    assert holdfast.restore(tmp_path / "b", place, force=True).ok
    with holdfast.open(place) as there:
        assert [info.name for info in there.threads()] == ["x"]
        there.thread("x").save({"n": 2})
    (tmp_path / "mine.txt").write_text("not a database, but somebody's")
    with pytest.raises(UsageError, match="no SQLite file"):
        holdfast.restore(tmp_path / "b", str(tmp_path / "mine.txt"), force=True)
    with pytest.raises(UsageError, match="not into memory"):
        holdfast.restore(tmp_path / "b", ":memory:")
    with pytest.raises(UsageError, match="no backup"):
        holdfast.restore(tmp_path / "mine.txt", place)


def test_a_damaged_backup_is_refused_or_told_of(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    with holdfast.open(url) as store:
        fill(store)
        store.backup(tmp_path / "b")
        whole = (tmp_path / "b").read_bytes()
        bad = tmp_path / "bad"
        for at in range(100, len(whole), max(1, len(whole) // 12)):
            for damaged in (whole[:at], whole[:at] + bytes(60) + whole[at + 60 :]):
                bad.write_bytes(damaged)
                if damaged == whole:
                    continue
                try:
                    found = holdfast.restore(bad, place, **options)
                except (UsageError, Damaged, holdfast.StoreError):
                    continue
                # What verify does not look at: free pages of SQLite's.
                assert not url.startswith("postgres")
                assert found.report.problems or found.ok
                for end in ("", "-wal", "-shm", "-lock", "-lock-next"):
                    Path(place + end).unlink(missing_ok=True)
        assert holdfast.restore(tmp_path / "b", place, **options).ok


# --- settling


def test_runs_that_were_running_go_on_in_the_restored_store_and_their_old_owners_cannot_write(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    seen: list[Any] = []
    with holdfast.open(url) as store:

        @holdfast.step(name="backs itself up")
        def back_up() -> int:
            seen.append(1)
            if len(seen) == 1:
                store.backup(tmp_path / "b")
            return 7

        @holdfast.durable(name="backed up in the middle")
        def body() -> int:
            return add(1, 2) + back_up()

        assert store.run(body, id="r").result() == 10
        fence = query(store, "SELECT max(fence) FROM run")[0][0]
    restored = holdfast.restore(tmp_path / "b", place, **options)
    assert restored.requeued == 1
    with holdfast.open(place, **options) as there:
        [(status, owner, found)] = query(there, "SELECT status, owner, fence FROM run")
        assert (status, owner) == ("queued", None)
        assert found > fence + 1000
        assert there.run(body, id="r").result() == 10
        assert len(seen) == 2
        assert there.verify().ok


def test_numbers_given_out_after_the_backup_are_not_given_out_again(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A handle of a thread that was made after the backup must not write into a new thread of the restored store."""
    place, options = elsewhere
    with holdfast.open(url) as store:
        store.thread("x").save({"n": 1})
        store.backup(tmp_path / "b")
        late = [store.thread(f"late {n}").save({"n": n})._record.thread for n in range(5)]
        generation = query(store, "SELECT generation FROM thread WHERE name = 'x'")
        [(identity,)] = query(store, "SELECT value FROM meta WHERE key = 'store'")
    holdfast.restore(tmp_path / "b", place, **options)
    with holdfast.open(place, **options) as there:
        assert there.thread("new").save({"n": 1})._record.thread not in late
        assert query(there, "SELECT generation FROM thread WHERE name = 'x'")[0][0] > generation[0][0] + 1000
        assert query(there, "SELECT value FROM meta WHERE key = 'store'") == [(identity,)]
        assert query(there, "SELECT value FROM meta WHERE key = 'era'") == [("1",)]


# --- under load


class Load:
    """Processes that write to a store without pause."""

    def __init__(self, url: str, folder: Path, *, writers: int = 2, pruners: int = 0) -> None:
        self.told = [folder / f"told {n}" for n in range(writers)]
        plans = [("write", f"own {n}", str(told)) for n, told in enumerate(self.told)]
        plans += [("prune", "", str(folder / f"pruned {n}")) for n in range(pruners)]
        self.pruned = [folder / f"pruned {n}" for n in range(pruners)]
        self._children = [
            subprocess.Popen([sys.executable, str(KIT), what, url, *rest], stderr=subprocess.PIPE)
            for what, *rest in plans
        ]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def acknowledged(self) -> list[list[str]]:
        return [line for told in self.told for line in acknowledged(told)]

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while any(len(acknowledged(told)) < count for told in self.told) or not all(p.exists() for p in self.pruned):
            assert time.monotonic() < deadline, "the writers do not write"
            for child in self._children:
                assert child.poll() is None, f"a writer has died: {self._said(child)}"
            time.sleep(0.01)

    @staticmethod
    def _said(child: subprocess.Popen[bytes]) -> str:
        assert child.stderr is not None
        return child.stderr.read().decode(errors="replace")

    def stop(self) -> None:
        while self._children:
            child = self._children.pop()
            child.kill()
            child.communicate()


@pytest.mark.parametrize("way", ["frozen", "pages"])
def test_a_backup_under_load_is_the_store_at_one_commit(
    url: str, way: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_sqlite, "_FROZEN_MIN_BYTES", 0 if way == "frozen" else 1 << 60)
    place, options = elsewhere
    with holdfast.open(url) as store, Load(url, tmp_path) as load:
        load.wait_for(30)
        backups = []
        for number in range(4):
            before = load.acknowledged()
            backups.append((store.backup(tmp_path / f"b{number}"), before))
            load.wait_for(30 * (number + 2))
        load.stop()
        for number, (backup, before) in enumerate(backups):
            visible = f"stamp <= {backup.stamp}"
            if backup.snapshot is not None:
                visible = f"pg_visible_in_snapshot(stamp::text::xid8, '{backup.snapshot}')"
            expected = query(store, f"SELECT tree, id, hash FROM record WHERE {visible} ORDER BY tree, id")
            heads = query(
                store,
                f"""SELECT thread, max(id) FROM record r WHERE {visible} AND NOT EXISTS (
                    SELECT 1 FROM record c WHERE c.tenant = r.tenant AND c.tree = r.tree AND c.parent = r.id
                        AND c.thread = r.thread AND {visible.replace("stamp", "c.stamp", 1)})
                GROUP BY thread HAVING count(*) = 1 ORDER BY thread""",
            )
            where = options | ({"schema": f"restored{number}"} if options else {})
            to = place if options else f"{place}{number}"
            assert holdfast.restore(tmp_path / f"b{number}", to, **where).ok
            with holdfast.open(to, **where) as copy:
                assert query(copy, "SELECT tree, id, hash FROM record ORDER BY tree, id") == expected
                there = {record for _, record, _ in expected}
                assert {parse_id(checkpoint) for _, checkpoint in before} <= there
                found: dict[int, int] = dict(query(copy, "SELECT thread, head FROM thread"))
                assert all(found[thread] == head for thread, head in heads)
                assert query(copy, "SELECT count(*) FROM body") == [(len(expected),)]
                if backup.snapshot is None:
                    assert max(query(copy, "SELECT max(stamp) FROM record")) == max(
                        query(store, f"SELECT max(stamp) FROM record WHERE {visible}")
                    )


def test_a_backup_while_threads_are_pruned_is_whole(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_sqlite, "_FROZEN_MIN_BYTES", 0)
    place, options = elsewhere
    with holdfast.open(url) as store, Load(url, tmp_path, writers=2, pruners=1) as load:
        load.wait_for(60)
        for number in range(3):
            store.backup(tmp_path / f"b{number}")
            load.wait_for(60 * (number + 2))
        load.stop()
    for number in range(3):
        where = options | ({"schema": f"restored{number}"} if options else {})
        restored = holdfast.restore(tmp_path / f"b{number}", place if options else f"{place}{number}", **where)
        assert restored.report.problems == ()
        assert restored.report.checkpoints > 20


def test_a_reader_that_holds_the_log_does_not_keep_a_backup_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the log cannot be brought into the file, and the copy is made page by page."""
    import apsw

    monkeypatch.setattr(backup_sqlite, "_FROZEN_MIN_BYTES", 0)
    path = str(tmp_path / "a.db")
    with holdfast.open(path) as store:
        store.thread("x").save({"n": 1})
        reader = apsw.Connection(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM record").fetchall()
        for number in range(30):
            store.thread("x").save(grown(number))
        with backup_sqlite._frozen(store._context.driver) as frozen:  # type: ignore[arg-type]
            assert frozen is None
        store.backup(tmp_path / "b.db")
        reader.close()
        with backup_sqlite._frozen(store._context.driver) as frozen:  # type: ignore[arg-type]
            assert frozen is not None
    with holdfast.open(str(tmp_path / "b.db")) as copy:
        assert copy.thread("x").load().state == grown(29)


# --- kills


@pytest.fixture(scope="module")
def savers() -> Iterator[Nursery]:
    with Nursery("copy_kit:backup_slowly") as nursery:
        yield nursery


def test_a_backup_that_is_killed_leaves_the_one_before_it(url: str, tmp_path: Path, savers: Nursery) -> None:
    with holdfast.open(url, durability="normal") as store:
        for number in range(40):
            store.thread("x").save({"blob": os.urandom(500_000).hex(), "n": number})
        first = store.backup(tmp_path / "b")
        whole = (tmp_path / "b").read_bytes()
        for after in range(1, 5):
            child = savers.start(url, str(tmp_path / "b"))
            for number, said in enumerate(child.lines(), 1):
                assert said != "done", "too fast to be killed"
                if number >= after:
                    break
            child.kill()
            assert (tmp_path / "b").read_bytes() == whole
        store.thread("x").save({"n": "after"})
        second = store.backup(tmp_path / "b")
        assert second.id != first.id
        assert not [name for name in os.listdir(tmp_path) if ".part" in name]
        assert store.try_restore(tmp_path / "b").report.checkpoints == 41


def test_the_restored_store_is_there_whole_or_not_at_all_if_its_restoration_is_interrupted(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere

    class Interrupted(Exception):
        pass

    with holdfast.open(url) as store:
        fill(store)
        store.backup(tmp_path / "b")

    def interrupt(done: int, total: int) -> None:
        if done >= total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        holdfast.restore(tmp_path / "b", place, progress=interrupt, **options)
    if not options:
        assert not Path(place).exists()
    assert not [name for name in os.listdir(tmp_path) if ".part" in name]
    assert holdfast.restore(tmp_path / "b", place, **options).ok


def test_a_late_write_of_an_owner_from_before_the_restoration_is_refused(tmp_path: Path, postgres_url: str) -> None:
    """The worst case: a server is restored in place, and a process that never noticed goes on with its run. Its step is
    not recorded; it has to claim the run again, as anybody may, and to do the step again."""
    import psycopg

    calls: list[int] = []
    with holdfast.open(postgres_url) as store:

        @holdfast.step(name="is restored meanwhile")
        def restored_meanwhile() -> int:
            calls.append(len(calls))
            if len(calls) == 1:
                store.backup(tmp_path / "b")
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    connection.execute("DROP SCHEMA holdfast CASCADE")
                holdfast.restore(tmp_path / "b", postgres_url)
            return len(calls)

        @holdfast.durable(name="runs over a restoration")
        def body() -> int:
            return restored_meanwhile()

        assert store.run(body, id="r").result() == 2
        assert calls == [0, 1]
        assert query(store, "SELECT status, entries FROM run") == [("done", 1)]
        assert store.verify().ok
