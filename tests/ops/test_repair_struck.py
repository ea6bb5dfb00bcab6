"""Repair while others use the store, killed at every statement, of encrypted stores, of files with damaged pages."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from repair_kit import Scene, Scenes, build
from striking import SOAK, points

import perdure
from perdure.storage import migrate
from perdure.storage.sqlite.opening import PAGE_BYTES
from perdure.testing.postgres import PostgresServer

KEY = bytes(range(32))
PARTS = 8


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Iterator[Scenes]:
    made = Scenes(tmp_path_factory.mktemp("scenes"), postgres_server, saves=10)
    yield made
    made.close()


def damage(scene: Scene) -> None:
    """A lost body, a lost head, a full text that can be made again, a run, tags, an orphan."""
    bodies = scene.execute("SELECT id FROM body WHERE full_text IS NOT NULL AND diff IS NOT NULL ORDER BY id")
    scene.execute("UPDATE body SET full_text = ? WHERE id = ?", (b"nothing", bodies[1][0]))
    [(body,)] = scene.execute("SELECT max(id) FROM body WHERE full_text IS NULL")
    scene.execute("UPDATE body SET salt = ? WHERE id = ?", (bytes(16), body))
    scene.execute("UPDATE thread SET head_hash = ? WHERE name = 'c'", (bytes(32),))
    scene.execute("UPDATE run SET digest = digest + 1 WHERE id = 'asks'")
    scene.execute("DELETE FROM tag")
    scene.execute("INSERT INTO body (tenant, salt, diff) VALUES (1, ?, ?)", (b"s", b"d"))


class Struck(Exception):
    """A kill, as the driver sees it."""


class Kill:
    """Raises at the n-th step of the driver."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.steps = 0

    def __call__(self, _step: str) -> None:
        self.steps += 1
        if self.steps == self.left:
            raise Struck


KILLED = [*(("sqlite", part) for part in range(PARTS if SOAK else 1)), ("postgres", 0)]


@pytest.mark.parametrize(("database", "part"), KILLED)
def test_killed_at_every_statement(
    scenes: Scenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str, part: int
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = scenes.new(database)
    damage(damaged)
    before = damaged.loadable()
    count = Kill(0)
    whole = scenes.new(database)
    damage(whole)
    reference = perdure.repair(whole.url, in_place=True, hook=count)
    wanted = whole.loadable()
    assert before <= wanted
    assert reference.lost
    every = PARTS if database == "sqlite" else max(1, count.steps // (25 if SOAK else 4))
    struck: Iterable[int] = range(1 + part, count.steps + 1, every)
    if database == "sqlite" and not SOAK:
        struck = itertools.takewhile(lambda at: at <= count.steps, points("repair"))
    for at in struck:
        scene = scenes.new(database)
        damage(scene)
        with pytest.raises((Struck, perdure.PerdureError)):
            perdure.repair(scene.url, in_place=True, durability="normal", hook=Kill(at))
        if at % 3 == 0:
            assert before <= scene.loadable(), f"lost by a kill at step {at}"
        done = perdure.repair(scene.url, in_place=True, durability="normal")
        assert {problem.run for problem in done.report.problems} == {"asks"}
        assert scene.loadable() == wanted, f"after a kill at step {at}"
        if scene.is_file:
            quarantined = Path(f"{scene.url}.quarantine.jsonl").read_text()
            assert '"table":"body"' in quarantined
            for path in Path(scene.url).parent.glob(Path(scene.url).name + "*"):
                path.unlink()


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_in_place_while_others_read_and_write(
    scenes: Scenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = scenes.new(database)
    damage(scene)
    before = scene.loadable()
    ended = threading.Event()
    failures: list[BaseException] = []
    saved: dict[str, int] = {}
    begun = threading.Barrier(3)

    def write(name: str) -> None:
        try:
            with perdure.open(scene.url, **scene.options) as store:
                thread = store.thread(name)
                state = thread.load().state
                number = 0
                begun.wait()
                while not ended.is_set() or number < 5:
                    number += 1
                    state["number"] = number
                    saved[thread.save(state).id] = number
                assert thread.load(strict=True).state["number"] == number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "p")]
    for each in threads:
        each.start()
    begun.wait()
    done = perdure.repair(scene.url, in_place=True)
    ended.set()
    for each in threads:
        each.join()
    assert not failures, failures
    assert {problem.run for problem in done.report.problems} == {"asks"}
    assert before <= scene.loadable(done)
    with scene.open() as store:
        assert [problem for problem in store.ops.verify().problems if problem.run is None] == []
        known = {at: name for name in ("a", "p") for at in saved if _has(store.thread(name), at)}
        for at, name in known.items():
            assert store.thread(name).load(at, strict=True).state["number"] == saved[at]
        assert known.keys() == saved.keys()


def _has(thread: perdure.Thread, at: str) -> bool:
    try:
        thread.load(at, strict=True)
    except perdure.NotFound:
        return False
    return True


# --- pages


def break_pages(scene: Scene) -> None:
    """A page of the log's rows, and what is free of the file's first page."""
    data = bytearray(Path(scene.url).read_bytes())
    [(root,)] = scene.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'body'")
    at = (root - 1) * PAGE_BYTES
    data[at : at + 8] = bytes(8)
    Path(scene.url).write_bytes(data)


def test_a_file_in_place_is_replaced_only_while_nobody_has_it_open(scenes: Scenes, tmp_path: Path) -> None:
    scene = scenes.new("sqlite")
    with perdure.open(scene.url) as store:
        store.thread("a").load()
        break_pages(scene)
        with pytest.raises(perdure.UsageError, match="in use"):
            perdure.repair(scene.url, in_place=True)
    damaged = Path(scene.url).read_bytes()
    done = perdure.repair(scene.url, in_place=True)
    assert done.in_place
    assert done.damaged is not None
    assert Path(done.damaged).read_bytes() == damaged
    assert any("rebuilt from its pages" in mend.what for mend in done.mended)
    assert scene.loadable() == scene.states.keys()
    assert not perdure.repair(scene.url, in_place=True).changed


def test_a_file_that_sqlite_takes_for_none_is_repaired_to_a_copy(scenes: Scenes) -> None:
    scene = scenes.new("sqlite")
    data = Path(scene.url).read_bytes()
    Path(scene.url).write_bytes(bytes(PAGE_BYTES) + data[PAGE_BYTES:])
    with pytest.raises(perdure.errors.OpenError):
        perdure.open(scene.url)
    with pytest.raises(perdure.PerdureError):
        perdure.repair(scene.url, in_place=True)
    done = scene.repair()
    assert done.report.ok
    assert scene.loadable(done) == scene.states.keys()


def test_what_is_in_the_log_is_in_the_copy(scenes: Scenes, tmp_path: Path) -> None:
    """A store that is in use: its newest commits are not in its file yet."""
    scene = scenes.new("sqlite")
    with perdure.open(scene.url) as store:
        newest = store.thread("a").save({"only": "in the log"})
        store.thread("b").save({"more": 1})
        scene.execute("UPDATE thread SET head_hash = ? WHERE name = 'b'", (bytes(32),))
        done = scene.repair()
        assert done.changed
        assert done.ok
        with scene.open(done) as copy:
            assert copy.thread("a").load(strict=True).id == newest.id
        store.thread("a").save({"goes": "on"})
    assert not list(tmp_path.glob("*.part*"))


def test_indexes_are_rebuilt(scenes: Scenes) -> None:
    scene = scenes.new("sqlite")
    [(root,)] = scene.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'run_listed'")
    data = bytearray(Path(scene.url).read_bytes())
    at = (root - 1) * PAGE_BYTES
    data[at + 3 : at + 5] = bytes(2)  # no entries
    Path(scene.url).write_bytes(data)
    done = scene.repair()
    assert done.ok
    assert done.changed
    assert scene.loadable(done) == scene.states.keys()


def test_in_place_after_a_copy_was_made(scenes: Scenes) -> None:
    scene = scenes.new("sqlite")
    with open(scene.url, "r+b") as file:
        file.seek(PAGE_BYTES * 5)
        file.write(bytes(PAGE_BYTES))
    copy = Path(scene.repair().place)
    before = copy.read_bytes()
    done = perdure.repair(scene.url, in_place=True)
    assert done.changed
    assert done.damaged is not None  # its pages, not only rows
    assert done.report.ok
    assert copy.read_bytes() == before
    assert not list(copy.parent.glob("*.mending*"))


# --- not a store


@pytest.mark.parametrize("kind", ["text", "our schema as text", "random", "empty", "zeros", "another's"])
@pytest.mark.parametrize("way", [{}, {"dry_run": True}, {"in_place": True}], ids=["copy", "dry", "in place"])
def test_what_never_was_a_store_is_left_alone(tmp_path: Path, kind: str, way: dict[str, Any]) -> None:
    path = tmp_path / "a.db"
    if kind == "another's":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE thread (tenant, name)")
            connection.execute("INSERT INTO thread VALUES (1, 'a')")
            connection.commit()
    else:
        ours = "".join(migration.text for migration in migrate.migrations("sqlite")).encode()
        contents = {"text": b"notes\n" * 4000, "our schema as text": ours, "empty": b"", "zeros": bytes(1 << 16)}
        path.write_bytes(contents.get(kind, random.Random(7).randbytes(1 << 20)))
    before = path.read_bytes()
    with pytest.raises(perdure.errors.OpenError, match="not a Perdure store"):
        perdure.repair(str(path), **way)
    assert os.listdir(tmp_path) == ["a.db"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("lost", ["header", "first page", "list of tables", "application id"])
def test_what_is_left_of_a_store_is_one(scenes: Scenes, lost: str) -> None:
    scene = scenes.new("sqlite")
    data = bytearray(Path(scene.url).read_bytes())
    if lost == "application id":
        data[68:72] = b"abcd"
    else:
        data[: 100 if lost == "header" else PAGE_BYTES] = bytes(100 if lost == "header" else PAGE_BYTES)
    if lost == "list of tables":
        for at in range(0, len(data), PAGE_BYTES):
            if b"CREATE TABLE" in data[at : at + PAGE_BYTES]:
                data[at : at + PAGE_BYTES] = bytes(PAGE_BYTES)
    Path(scene.url).write_bytes(data)
    done = scene.repair()
    assert done.report.ok
    assert len(scene.loadable(done)) >= len(scene.states) * 0.9


def test_a_store_that_is_in_its_log_only_is_one(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        store.thread("t").save({"n": 1})
        for end in ("", "-wal"):
            shutil.copy(tmp_path / f"a.db{end}", tmp_path / f"b.db{end}")
    done = perdure.repair(str(tmp_path / "b.db"))
    assert done.ok
    assert done.report.checkpoints == 1


# --- encrypted


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_an_encrypted_store(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    """Cells that do not open count as damaged. Nothing comes out in the clear."""
    monkeypatch.chdir(tmp_path)
    made = Scenes(tmp_path, postgres_server, saves=10, keys=KEY)
    try:
        scene = made.new(database)
        assert not perdure.repair(scene.url, keys=KEY).changed
        bodies = scene.execute("SELECT id, full_text FROM body WHERE full_text IS NOT NULL AND diff IS NOT NULL")
        for (body, text), at in zip(bodies[1:4], (0, 20, -1), strict=True):  # the mark, the nonce, the tag
            changed = bytearray(text)
            changed[at] ^= 1
            scene.execute("UPDATE body SET full_text = ? WHERE id = ?", (bytes(changed), body))
        [(body,)] = scene.execute("SELECT max(id) FROM body WHERE full_text IS NULL")
        scene.execute("UPDATE body SET diff = ? WHERE id = ?", (b"not encrypted", body))
        before = scene.loadable()
        done = scene.repair()
        scene.check(done, before)
        assert len(scene.loadable(done)) >= len(scene.states) - 1
        assert done.quarantine is not None
        text = Path(done.quarantine).read_text()
        assert "content" not in text.replace('"content":', "")
        assert not [line for line in text.splitlines() if '"table":"state"' in line]
        names, bodies = sorted(os.listdir(tmp_path)), scene.execute("SELECT id, full_text, diff FROM body ORDER BY id")
        target = str(tmp_path / "to.db") if scene.is_file else "to_schema"
        ways: list[dict[str, Any]] = [{}, {"dry_run": True}, {"to": target}, {"in_place": True}]
        for way in ways:
            with pytest.raises(perdure.errors.KeyMissing, match="PERDURE_KEYS"):
                perdure.repair(scene.url, **way)
        assert sorted(os.listdir(tmp_path)) == names
        assert scene.execute("SELECT id, full_text, diff FROM body ORDER BY id") == bodies
    finally:
        made.close()


# --- LangGraph's ids


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_ids_and_pending_writes_of_langgraph(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    from perdure.langgraph import PerdureSaver

    monkeypatch.chdir(tmp_path)
    url = str(tmp_path / "l.db") if database == "sqlite" else str(request.getfixturevalue("postgres_url"))
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    kept: list[Any] = []
    with PerdureSaver(url) as saver:
        for number in range(6):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"n": number, "text": "x" * 400}
            config = saver.put(config, checkpoint, {"source": "loop", "step": number, "parents": {}}, {})
            saver.put_writes(config, [("n", number + 1)], f"task-{number}")
            kept.append(config)
    scene = Scene(url)
    rows = scene.execute("SELECT id, record FROM label ORDER BY record")
    scene.execute("UPDATE label SET record = ? WHERE id = ?", (rows[4][1], rows[1][0]))
    scene.execute("DELETE FROM label WHERE id = ?", (rows[2][0],))
    scene.execute("UPDATE label SET record = 77 WHERE id = ?", (rows[3][0],))
    scene.execute("UPDATE write SET value = ? WHERE id = ?", (b"\0\0\0\0\0zz", rows[0][0]))
    done = scene.repair()
    assert done.report.ok, done.report.problems
    assert any("an id was set aside" in mend.what for mend in done.mended)
    assert any("pending write" in mend.what for mend in done.mended)
    target = done.place if scene.is_file else url
    with PerdureSaver(scene.open(done) if not scene.is_file else target) as saver:
        for number, each in enumerate(kept):
            found = saver.get_tuple(each)
            if number in (1, 2, 3):  # nothing points at another checkpoint than its own
                assert found is None
                continue
            assert found is not None
            assert found.checkpoint["channel_values"]["n"] == number
            assert [write[2] for write in found.pending_writes or ()] == ([] if number == 0 else [number + 1])


def test_a_copy_of_a_copy_is_a_store_like_any_other(tmp_path: Path) -> None:
    scene = build(str(tmp_path / "a.db"), saves=8)
    damage(scene)
    done = scene.repair()
    shutil.copy(done.place, tmp_path / "moved.db")
    with perdure.open(str(tmp_path / "moved.db")) as store:
        assert store.thread("a").save({"x": 1}).is_head
        assert [problem for problem in store.ops.verify().problems if problem.run is None] == []
