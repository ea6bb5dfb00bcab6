"""A backup under load is the store at one commit; one that is killed leaves the one before it."""

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
from backup_kit import fill
from copy_kit import acknowledged, query
from soak import SOAK

import perdure
from perdure.log.ids import parse_id
from perdure.testing.processes import ForkServer

KIT = Path(copy_kit.__file__)
BACKUPS = 3 if SOAK else 1


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


def test_a_backup_under_load_is_the_store_at_one_commit(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    with perdure.open(url) as store, Load(url, tmp_path) as load:
        load.wait_for(30)
        backups = []
        for number in range(4):
            before = load.acknowledged()
            store.ops.backup(tmp_path / f"b{number}")
            backups.append(before)
            load.wait_for(30 * (number + 2))
        load.stop()
        for number, before in enumerate(backups):
            with perdure.open(tmp_path / f"b{number}") as made:
                if options:  # PostgreSQL: what was visible in the snapshot is known from the copy alone
                    ids = query(made, "SELECT id FROM record")
                    visible = f"id IN ({', '.join(str(record) for (record,) in ids)})"
                else:  # SQLite has one writer at a time: the numbers of bodies are the order of the commits
                    visible = f"body <= {query(made, 'SELECT max(body) FROM record')[0][0]}"
            expected = query(store, f"SELECT tree, id, hash FROM record WHERE {visible} ORDER BY tree, id")
            heads = query(
                store,
                f"""SELECT thread, max(id) FROM record r WHERE {visible} AND NOT EXISTS (
                    SELECT 1 FROM record c WHERE c.tenant = r.tenant AND c.tree = r.tree AND c.parent = r.id
                        AND c.thread = r.thread AND {visible})
                GROUP BY thread HAVING count(*) = 1 ORDER BY thread""",
            )
            where = options | ({"schema": f"restored{number}"} if options else {})
            to = place if options else f"{place}{number}"
            assert perdure.ops.restore_backup(tmp_path / f"b{number}", to, **where).ok
            with perdure.open(to, **where) as copy:
                assert query(copy, "SELECT tree, id, hash FROM record ORDER BY tree, id") == expected
                there = {record for _, record, _ in expected}
                assert {parse_id(checkpoint) for _, checkpoint in before} <= there
                found: dict[int, int] = dict(query(copy, "SELECT thread, head FROM thread"))
                assert all(found[thread] == head for thread, head in heads)
                assert query(copy, "SELECT count(*) FROM body") == [(len(expected),)]


def test_a_backup_while_threads_are_pruned_is_whole(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere
    with perdure.open(url) as store, Load(url, tmp_path, writers=2, pruners=1) as load:
        load.wait_for(60)
        for number in range(BACKUPS):
            store.ops.backup(tmp_path / f"b{number}")
            load.wait_for(60 * (number + 2))
        load.stop()
    for number in range(BACKUPS):
        where = options | ({"schema": f"restored{number}"} if options else {})
        restored = perdure.ops.restore_backup(
            tmp_path / f"b{number}", place if options else f"{place}{number}", **where
        )
        assert restored.report.problems == ()
        assert restored.report.checkpoints > 20


# --- kills


@pytest.fixture(scope="module")
def savers() -> Iterator[ForkServer]:
    with ForkServer("copy_kit:backup_slowly") as fork_server:
        yield fork_server


def test_a_backup_that_is_killed_leaves_nothing_at_its_place(url: str, tmp_path: Path, savers: ForkServer) -> None:
    with perdure.open(url, durability="normal") as store:
        for number in range(20):
            store.thread("x").save({"blob": os.urandom(500_000).hex(), "n": number})
        for after in range(1, 5, 1 if SOAK else 2):
            child = savers.start(url, str(tmp_path / "b"))
            for number, said in enumerate(child.lines(), 1):
                assert said != "done", "too fast to be killed"
                if number >= after:
                    break
            child.kill()
            assert not (tmp_path / "b").exists()
        store.thread("x").save({"n": "after"})
        store.ops.backup(tmp_path / "b")
        assert not [name for name in os.listdir(tmp_path) if ".part" in name]
        assert store.ops.test_backup(tmp_path / "b").report.checkpoints == 21


def test_the_restored_store_is_there_whole_or_not_at_all_if_its_restoration_is_interrupted(
    url: str, elsewhere: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    place, options = elsewhere

    class Interrupted(Exception):
        pass

    with perdure.open(url) as store:
        fill(store)
        store.ops.backup(tmp_path / "b")

    def interrupt(done: int, total: int) -> None:
        if done >= total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        perdure.ops.restore_backup(tmp_path / "b", place, progress=interrupt, **options)
    if not options:
        assert not Path(place).exists()
    assert not [name for name in os.listdir(tmp_path) if ".part" in name]
    assert perdure.ops.restore_backup(tmp_path / "b", place, **options).ok


def test_a_late_write_of_an_owner_from_before_the_restoration_is_refused(tmp_path: Path, postgres_url: str) -> None:
    """The worst case: a server is restored in place, and a process that never noticed goes on with its run. Its step is
    not recorded; it has to claim the run again, as anybody may, and to do the step again."""
    import psycopg

    calls: list[int] = []
    with perdure.open(postgres_url) as store:

        @perdure.step(name="is restored meanwhile")
        def restored_meanwhile() -> int:
            calls.append(len(calls))
            if len(calls) == 1:
                store.ops.backup(tmp_path / "b")
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    connection.execute("DROP SCHEMA perdure CASCADE")
                perdure.ops.restore_backup(tmp_path / "b", postgres_url)
            return len(calls)

        @perdure.durable(name="runs over a restoration")
        def body() -> int:
            return restored_meanwhile()

        assert store.run(body, id="r").result() == 2
        assert calls == [0, 1]
        assert query(store, "SELECT status, entries FROM run") == [("done", 1)]
        assert store.ops.verify().ok
