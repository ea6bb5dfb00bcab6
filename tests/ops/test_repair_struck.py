"""Repair of files with damaged pages, of encrypted stores, of what is hardly a store any more."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from repair_kit import Scene, Scenes, build

import perdure
from perdure.storage import migrate
from perdure.storage.sqlite.opening import PAGE_BYTES
from perdure.testing.postgres_server import PostgresServer

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


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_repair_that_ends_in_the_middle_leaves_no_copy(
    scenes: Scenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = scenes.new(database)
    damage(scene)
    before = scene.loadable()

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("perdure.ops.repair.repair.verify_all", struck)
        with pytest.raises(KeyboardInterrupt):
            scene.repair()
    done = scene.repair()
    assert {problem.run for problem in done.report.problems} == {"asks"}
    assert before <= scene.loadable(done)
    assert scene.loadable() == before


# --- pages


def break_pages(scene: Scene) -> None:
    """A page of the log's rows, and what is free of the file's first page."""
    data = bytearray(Path(scene.url).read_bytes())
    [(root,)] = scene.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'body'")
    at = (root - 1) * PAGE_BYTES
    data[at : at + 8] = bytes(8)
    Path(scene.url).write_bytes(data)


def test_a_file_with_damaged_pages_is_rebuilt_while_another_has_it_open(scenes: Scenes) -> None:
    scene = scenes.new("sqlite")
    with perdure.open(scene.url) as store:
        store.thread("a").load()
        break_pages(scene)
        damaged = Path(scene.url).read_bytes()
        done = scene.repair()
        assert any("rebuilt from its pages" in note.what for note in done.repaired)
        assert scene.loadable(done) == scene.states.keys()
        assert not perdure.ops.repair_store(done.place).changed
        assert Path(scene.url).read_bytes() == damaged


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
    assert not list(Path(scene.url).parent.glob(".*.part*"))


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


def root_of(scene: Scene, name: str) -> int:
    [(root,)] = scene.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,))
    return int(root)


def page(data: bytes, number: int) -> bytes:
    return data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES]


def child(data: bytes, number: int, place: int) -> int:
    """A page below an inner page."""
    start = (100 if number == 1 else 0) + 12 + 2 * place
    offset = int.from_bytes(page(data, number)[start : start + 2], "big")
    return int.from_bytes(page(data, number)[offset : offset + 4], "big")


def no_tenants(scene: Scene, data: bytes) -> tuple[int, bytes]:
    return root_of(scene, "tenant"), bytes(PAGE_BYTES)


def tenant_not_utf8(scene: Scene, data: bytes) -> tuple[int, bytes]:
    root = root_of(scene, "tenant")
    return root, page(data, root).replace(b"default", b"\xaeefault")


def tenant_with_another_number(scene: Scene, data: bytes) -> tuple[int, bytes]:
    root = root_of(scene, "tenant")
    return root, page(data, root).replace(b"\x01\x03\x00\x1bdefault", b"\x46\x03\x00\x1bdefault")


def thread_with_another_name(scene: Scene, data: bytes) -> tuple[int, bytes]:
    root = root_of(scene, "thread")
    return root, page(data, root).replace(b"long", b"lonf")


def two_trees_with_the_same_pages(scene: Scene, data: bytes) -> tuple[int, bytes]:
    return root_of(scene, "counter"), page(data, root_of(scene, "body"))


def rows_of_another_table(scene: Scene, data: bytes) -> tuple[int, bytes]:
    """Rows of the list of tables that have the numbers of good rows."""
    return child(data, root_of(scene, "body"), 0), page(data, child(data, 1, 1))


def changed(data: bytes, at: int, before: int, after: int) -> tuple[int, bytes]:
    """The page with another byte at a place in the file."""
    assert data[at] == before
    number, place = at // PAGE_BYTES + 1, at % PAGE_BYTES
    content = bytearray(page(data, number))
    content[place] = after
    return number, bytes(content)


def link(scene: Scene, data: bytes) -> tuple[int, int, bytes]:
    """The first record after a keyframe: where its tree and the columns after it are; where its header is; its salt."""
    [(tree, record, parent, salt)] = scene.execute(
        """SELECT r.tree, r.id, r.parent, b.salt FROM record r JOIN thread t ON t.thread = r.thread
        JOIN body b ON b.id = r.body WHERE t.name = 'long' AND r.keyframe = 0 ORDER BY r.id LIMIT 1"""
    )
    number = bytes([tree])
    at = data.index(number + record.to_bytes(8, "big") + number + parent.to_bytes(8, "big"))
    return at, data.rindex(bytes([9, 1, 6, 1, 6, 6, 8, 6]), 0, at), salt


def link_in_another_tree(scene: Scene, data: bytes) -> tuple[int, bytes]:
    at, _, _ = link(scene, data)
    return changed(data, at, data[at], 35)


def link_with_a_value_of_no_kind(scene: Scene, data: bytes) -> tuple[int, bytes]:
    """`keyframe` is of a kind that SQLite reserves and reads as NULL, which the table refuses."""
    _, header, _ = link(scene, data)
    return changed(data, header + 6, 8, 10)


def difference_before_a_value_that_is_cut_off(scene: Scene, data: bytes) -> tuple[int, bytes]:
    _, _, salt = link(scene, data)
    return changed(data, data.index(salt) - 1, 0, 1)


def thread_whose_row_has_no_name(scene: Scene, data: bytes) -> tuple[int, bytes]:
    start = (root_of(scene, "thread") - 1) * PAGE_BYTES
    return changed(data, data.index(bytes([9, 1, 1, 21, 17]), start) + 3, 21, 0)


PAGES = [
    no_tenants,
    tenant_not_utf8,
    tenant_with_another_number,
    thread_with_another_name,
    two_trees_with_the_same_pages,
    rows_of_another_table,
    link_in_another_tree,
    link_with_a_value_of_no_kind,
    difference_before_a_value_that_is_cut_off,
    thread_whose_row_has_no_name,
]


@pytest.mark.parametrize("damaged", PAGES, ids=lambda damaged: damaged.__name__)
def test_what_sqlite_still_finds_survives_a_rebuild(scenes: Scenes, tmp_path: Path, damaged: Any) -> None:
    scene = scenes.new("sqlite")
    data = Path(scene.url).read_bytes()
    number, content = damaged(scene, data)
    assert content != page(data, number)
    at = (number - 1) * PAGE_BYTES
    for path in (scene.url, tmp_path / "look.db"):
        Path(path).write_bytes(data[:at] + content + data[at + PAGE_BYTES :])
    before = scene.at(str(tmp_path / "look.db")).loadable()
    assert before
    scene.check(scene.repair(), before)


def index_of_a_wrong_kind(scene: Scene, data: bytes) -> tuple[int, bytes]:
    return root_of(scene, "memory_item_version"), page(data, root_of(scene, "memory_vector"))


def migrations_of_another_table(scene: Scene, data: bytes) -> tuple[int, bytes]:
    return root_of(scene, "migration"), page(data, child(data, 1, 1))


def vectors_of_another_table(scene: Scene, data: bytes) -> tuple[int, bytes]:
    return root_of(scene, "memory_vector"), page(data, child(data, root_of(scene, "body"), 1))


@pytest.mark.parametrize(
    "damaged",
    [index_of_a_wrong_kind, migrations_of_another_table, vectors_of_another_table],
    ids=lambda damaged: damaged.__name__,
)
def test_damage_that_sqlite_does_not_report_is_repaired(scenes: Scenes, tmp_path: Path, damaged: Any) -> None:
    scene = scenes.new("sqlite")
    data = Path(scene.url).read_bytes()
    number, content = damaged(scene, data)
    at = (number - 1) * PAGE_BYTES
    Path(scene.url).write_bytes(data[:at] + content + data[at + PAGE_BYTES :])
    assert scene.execute("PRAGMA integrity_check") == [("ok",)]
    done = scene.repair()
    assert done.changed
    scene.check(done, set(scene.states))
    with scene.open(done) as store:
        store.memory("notes").put("a", {"text": "b"})


# --- not a store


@pytest.mark.parametrize("kind", ["text", "our schema as text", "random", "empty", "zeros", "another's"])
def test_what_never_was_a_store_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.db"
    if kind == "another's":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE thread (tenant, name)")
            connection.execute("INSERT INTO thread VALUES (1, 'a')")
            connection.commit()
    else:
        ours = "".join(migration.adds for migration in migrate.migrations("sqlite")).encode()
        contents = {"text": b"notes\n" * 4000, "our schema as text": ours, "empty": b"", "zeros": bytes(1 << 16)}
        path.write_bytes(contents.get(kind, random.Random(7).randbytes(1 << 20)))
    before = path.read_bytes()
    with pytest.raises(perdure.errors.OpenError, match="not a Perdure store"):
        perdure.ops.repair_store(str(path))
    assert {name for name in os.listdir(tmp_path) if "-lock" not in name} == {"a.db"}
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
    done = perdure.ops.repair_store(str(tmp_path / "b.db"))
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
        assert not perdure.ops.repair_store(scene.url, keys=KEY).changed
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
    assert any("an id was removed" in note.what for note in done.repaired)
    assert any("pending write" in note.what for note in done.repaired)
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
