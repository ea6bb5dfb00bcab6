"""Repair: each kind of damage alone, on both databases.

Nothing that could be loaded is lost, what is loaded is what was saved, the result verifies, and what is lost is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from repair_kit import MENDED, Scene, Scenes, build

import perdure
from perdure.cli.app import main
from perdure.log.ids import show_id
from perdure.testing.postgres_server import PostgresServer


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Iterator[Scenes]:
    made = Scenes(tmp_path_factory.mktemp("scenes"), postgres_server)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenes: Scenes) -> Scene:
    monkeypatch.chdir(tmp_path)
    made = scenes.new(request.param)
    if made.is_file:
        os.rename(made.url, tmp_path / "a.db")
        made.url = str(tmp_path / "a.db")
    return made


LONG = "keyframe = 0 AND thread = (SELECT thread FROM thread WHERE name = 'long')"


def thread_a(scene: Scene) -> int:
    return int(scene.execute("SELECT thread FROM thread WHERE name = 'a'")[0][0])


def ids(scene: Scene, where: str) -> list[tuple[int, int]]:
    """Records and their bodies, oldest first."""
    return scene.execute(f"SELECT id, body FROM record WHERE body IS NOT NULL AND {where} ORDER BY id")


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]


def set_body(scene: Scene, body: int, column: str, change: Callable[[bytes], bytes]) -> None:
    [(value,)] = scene.execute(f"SELECT {column} FROM body WHERE id = ?", (body,))
    scene.execute(f"UPDATE body SET {column} = ? WHERE id = ?", (change(bytes(value)), body))


# --- what is damaged, and how much of it is lost for good


def full_text(scene: Scene) -> None:
    for _, body in ids(scene, "keyframe = 1 AND base IS NOT NULL")[1:4]:
        set_body(scene, body, "full_text", lambda data: bytes(len(data)))


def kept_difference(scene: Scene) -> None:
    for _, body in ids(scene, "keyframe = 1 AND base IS NOT NULL")[1:4]:
        set_body(scene, body, "diff", lambda data: bytes(len(data)))


def head(scene: Scene) -> None:
    scene.execute("UPDATE thread SET head = head + 12345 WHERE name = 'a'")


def head_hash(scene: Scene) -> None:
    scene.execute("UPDATE thread SET head_hash = ? WHERE name = 'a'", (bytes(32),))


def head_of_another(scene: Scene) -> None:
    scene.execute("UPDATE thread SET head = origin WHERE name = 'b'")


def tags(scene: Scene) -> None:
    scene.execute("DELETE FROM tag")


def orphans(scene: Scene) -> None:
    scene.execute("INSERT INTO body (tenant, salt, diff) VALUES (1, ?, ?)", (b"s", b"d"))


MENDABLE = [
    full_text,
    kept_difference,
    head,
    head_hash,
    head_of_another,
    tags,
    orphans,
]


@pytest.mark.parametrize("damage", MENDABLE, ids=lambda damage: damage.__name__)
def test_what_can_be_proved_is_mended(scene: Scene, damage: Callable[[Scene], None]) -> None:
    damage(scene)
    before = scene.loadable()
    done = scene.repair()
    assert done.changed
    assert not done.lost, [str(note) for note in done.lost]
    assert scene.check(done, before) == scene.states.keys()
    with scene.open(done) as store:
        for name, at in scene.heads.items():
            assert store.thread(name).load(strict=True).id == at
        assert {info.name for info in store.threads(where={"user": "ada"})} == {"a", "b"}
        assert store.thread("c").pins()[0].checkpoint == ids_of(scene, "c")[0]
        saved = store.thread("a").save({"goes": "on"})
        assert saved.is_head
        assert store.ops.verify().ok
    assert scene.loadable() == before, "the store itself was changed"


def ids_of(scene: Scene, name: str) -> list[str]:
    return [at for thread, at in scene.states if thread == name]


# --- what cannot be saved


def a_difference(scene: Scene) -> None:
    _, body = ids(scene, f"keyframe = 0 AND thread = {thread_a(scene)}")[0]
    set_body(scene, body, "diff", lambda data: bytes(len(data)))


def a_head(scene: Scene) -> None:
    [(body,)] = scene.execute(
        "SELECT r.body FROM record r JOIN thread t ON t.head = r.id AND t.tree = r.tree WHERE t.name = 'c'"
    )
    scene.execute("UPDATE body SET salt = ? WHERE id = ?", (bytes(16), body))


def a_row(scene: Scene) -> None:
    record, _ = ids(scene, f"keyframe = 0 AND thread = {thread_a(scene)}")[2]
    scene.execute("DELETE FROM record WHERE id = ?", (record,))


def a_row_of_a_keyframe(scene: Scene) -> None:
    record, _ = ids(scene, f"keyframe = 1 AND base IS NOT NULL AND thread = {thread_a(scene)}")[2]
    scene.execute("DELETE FROM record WHERE id = ?", (record,))


def a_body(scene: Scene) -> None:
    _, body = ids(scene, f"thread = {thread_a(scene)}")[5]
    scene.execute("DELETE FROM body WHERE id = ?", (body,))


def a_note(scene: Scene) -> None:
    record, _ = ids(scene, f"thread = {thread_a(scene)} AND note IS NOT NULL")[2]
    scene.execute("UPDATE record SET note = 'nobody wrote this' WHERE id = ?", (record,))


def a_row_of_a_long_chain(scene: Scene) -> None:
    record, _ = ids(scene, LONG)[4]
    scene.execute("DELETE FROM record WHERE id = ?", (record,))


def keyframes_of_a_long_chain(scene: Scene) -> None:
    chain = ids(scene, LONG)
    for (record, _), value in zip((chain[0], chain[3], chain[-1]), ("id", "0", "key - 77777"), strict=True):
        scene.execute(f"UPDATE record SET key = {value} WHERE id = ?", (record,))


def body_pointer(scene: Scene) -> None:
    record, body = ids(scene, "keyframe = 0")[1]
    scene.execute("UPDATE record SET body = ? WHERE id = ?", (body + 1, record))


def hash_of_a_record(scene: Scene) -> None:
    record, _ = ids(scene, f"thread = {thread_a(scene)}")[7]
    scene.execute("UPDATE record SET hash = ? WHERE id = ?", (bytes(32), record))


def circles(scene: Scene) -> None:
    """Base pointers of two records at each other, and absurd sizes."""
    rows = ids(scene, f"thread = {thread_a(scene)} AND base IS NOT NULL")
    (one, _), (two, _) = rows[3], rows[4]
    scene.execute("UPDATE record SET base = ?, parent = ?, keyframe = 0 WHERE id = ?", (two, two, one))
    scene.execute("UPDATE record SET base = ?, keyframe = 0, size = 4611686018427387904 WHERE id = ?", (one, two))


def everything_of_a_thread(scene: Scene) -> None:
    for record, body in ids(scene, "tree = (SELECT tree FROM thread WHERE name = 'c')"):
        set_body(scene, body, "salt", lambda data: bytes(len(data)))
        scene.execute("UPDATE record SET note = 'x', at = 7 WHERE id = ?", (record,))


def tree_of_a_head(scene: Scene) -> None:
    scene.execute("UPDATE record SET tree = 77777 WHERE id = (SELECT head FROM thread WHERE name = 'b')")


LOSSES = [
    (a_difference, 1),
    (tree_of_a_head, 1),
    (a_head, 1),
    (a_row, 2),
    (a_row_of_a_keyframe, 99),
    (a_body, 1),
    (a_note, 1),
    (a_row_of_a_long_chain, 99),
    (keyframes_of_a_long_chain, 3),
    (body_pointer, 2),
    (hash_of_a_record, 2),
    (circles, 2),
    (everything_of_a_thread, 2),
]


@pytest.mark.parametrize(("damage", "most"), LOSSES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_saved_is_named(scene: Scene, damage: Callable[[Scene], None], most: int) -> None:
    damage(scene)
    before = scene.loadable()
    done = scene.repair()
    assert done.lost
    assert not done.ok
    after = scene.check(done, before)
    assert len(scene.states) - len(after) <= most
    again = perdure.ops.repair_store(
        done.place if scene.is_file else scene.url, to="again.db" if scene.is_file else "again", **schema_of(scene)
    )
    assert not again.changed


def schema_of(scene: Scene) -> dict[str, Any]:
    return {} if scene.is_file else {"schema": MENDED}


def test_the_history_before_a_loss_is_still_there(scene: Scene) -> None:
    a_body(scene)
    done = scene.repair()
    with scene.open(done) as store:
        history = [checkpoint.id for checkpoint in store.thread("a").history(limit=None)]
        wanted = [at for name, at in scene.states if name == "a"][:-1]  # the last is on a branch
    lost = {mend.checkpoint for mend in done.lost}
    assert history == [at for at in reversed(wanted) if at not in lost]


def test_a_lost_thread_keeps_the_metadata_that_can_be_read(scene: Scene) -> None:
    number = thread_a(scene)
    scene.execute("DELETE FROM thread WHERE name = 'a'")
    scene.execute("UPDATE tag SET value = 'x' WHERE key = 'n'")
    done = scene.repair()
    assert done.report.ok
    with scene.open(done) as store:
        assert store.thread(f"recovered-{number}").info().metadata == {"user": "ada"}


def test_a_lost_thread_is_found_again_by_its_records(scene: Scene) -> None:
    before = scene.loadable()
    number = thread_a(scene)
    scene.execute("DELETE FROM thread WHERE name = 'a'")
    done = scene.repair()
    assert done.report.ok
    with scene.open(done) as store:
        thread = store.thread(f"recovered-{number}")
        assert thread.info().metadata == {"user": "ada", "n": 1}
        for name, at in before:
            if name == "a":
                assert thread.load(at, strict=True).state == scene.states["a", at]


@pytest.mark.parametrize("column", ["updated_at", "head_hash", "tree", "generation"])
def test_a_thread_with_a_value_of_a_wrong_type_is_made_again_from_its_records(tmp_path: Path, column: str) -> None:
    scene = build(str(tmp_path / "a.db"), saves=8)
    number = thread_a(scene)
    scene.execute(f"UPDATE thread SET {column} = 'x' WHERE name = 'a'")
    done = scene.repair()
    assert [(note.thread, note.what) for note in done.lost] == [("a", "the thread's row is damaged")]
    with scene.open(done) as store:
        thread = store.thread(f"recovered-{number}")
        for name, at in scene.states:
            if name == "a":
                assert thread.load(at, strict=True).state == scene.states["a", at]


@pytest.mark.parametrize(
    ("column", "value"),
    [("cost", b"x"), ("key", b"x"), ("note", b"x"), ("thread", b"x"), ("parent", b"x"), ("parent", 1.5)],
)
def test_a_checkpoint_with_a_value_of_a_wrong_type_is_lost_alone(tmp_path: Path, column: str, value: Any) -> None:
    scene = build(str(tmp_path / "a.db"), saves=8)
    record, _ = ids(scene, f"thread = {thread_a(scene)}")[4]
    scene.execute(f"UPDATE record SET {column} = ? WHERE id = ?", (value, record))
    before = scene.loadable()
    done = scene.repair()
    assert [note.checkpoint for note in done.lost] == [show_id(record)]
    after = scene.check(done, before)
    assert {at for _, at in scene.states.keys() - after} == {show_id(record)}


def test_rows_of_a_tenant_whose_row_is_lost_are_named(scene: Scene) -> None:
    scene.execute("DELETE FROM tenant")
    done = scene.repair()
    assert any("rows of record that belong to no tenant" in note.what for note in done.lost)


def test_a_tenant_whose_name_is_no_text_gets_a_new_one(tmp_path: Path) -> None:
    scene = build(str(tmp_path / "a.db"), saves=8)
    scene.execute("UPDATE tenant SET name = ?", (b"x",))
    done = scene.repair()
    assert "the name of tenant 1 is damaged: it gets a new one" in {note.what for note in done.repaired}
    with scene.open(done) as store:
        assert len(list(store.tenant("recovered-1").threads())) == len(scene.heads)


def test_a_thread_that_was_deleted_does_not_come_back(scene: Scene) -> None:
    with scene.open() as store:
        store.delete_thread("a")
    scene.execute("DELETE FROM tag")
    done = scene.repair()
    with scene.open(done) as store:
        assert {info.name for info in store.threads()} == {"b", "c", "long"}


@pytest.mark.parametrize("order", ["delete first", "prune first"])
def test_what_a_pin_holds_of_a_deleted_thread_does_not_bring_it_back(scene: Scene, order: str) -> None:
    with scene.open() as store:
        gone = store.thread("gone")
        saved = [gone.save({"n": number}).id for number in range(5)]
        fork = gone.fork(saved[4], name="fork")
        fork.pin(saved[2], name="kept")
        for number in range(5):
            fork.save({"fork": number})
        if order == "delete first":
            store.delete_thread("gone")
        fork.prune(keep=1)
        if order == "prune first":
            store.delete_thread("gone")
        assert store.ops.verify().ok
    done = scene.repair()
    assert not done.changed, [str(note) for note in done.repaired]
    with scene.open(done) as store:
        assert {info.name for info in store.threads()} == {"a", "b", "c", "long", "fork"}
        assert store.thread("fork").load(saved[2], strict=True).state == {"n": 2}


def test_a_sound_store_gets_no_copy(scene: Scene, tmp_path: Path) -> None:
    before = Path(scene.url).read_bytes() if scene.is_file else b""
    done = perdure.ops.repair_store(scene.url)
    assert (done.ok, done.changed) == (True, False)
    assert done.report.checkpoints == len(scene.states)
    assert before == (Path(scene.url).read_bytes() if scene.is_file else b"")
    assert {path.name for path in tmp_path.iterdir() if "-lock" not in path.name} <= {"a.db"}
    if not scene.is_file:
        schemas = scene.execute("SELECT nspname FROM pg_namespace WHERE starts_with(nspname::text, 'perdure')")
        assert schemas == [("perdure",)]


# --- runs


def test_a_run_whose_journal_does_not_add_up_is_named_and_gets_stuck(scene: Scene) -> None:
    scene.execute("DELETE FROM journal WHERE run = (SELECT run FROM run WHERE id = 'done') AND seq = 1")
    [(run,)] = scene.execute("SELECT run FROM run WHERE id = 'asks'")
    scene.execute("UPDATE run SET entries = entries + 1 WHERE run = ?", (run,))
    done = scene.repair()
    assert {note.run for note in done.lost} == {"done", "asks"}
    assert {problem.run for problem in done.report.problems} == {"done", "asks"}
    with scene.open(done) as store:
        perdure.Worker(store).run(until_idle=True)
        with pytest.raises(perdure.RunStuck, match="does not add up"):
            store.get_run("asks").result(timeout_s=0)


def test_a_run_without_an_id_is_named_by_its_number(scene: Scene) -> None:
    [(run,)] = scene.execute("UPDATE run SET id = '' WHERE id = 'done' RETURNING run")
    done = scene.repair()
    assert {note.run for note in done.lost} == {problem.run for problem in done.report.problems} == {f"number {run}"}


def test_rows_of_runs_that_are_gone_are_removed(scene: Scene) -> None:
    scene.execute("DELETE FROM run WHERE id = 'done'")
    done = scene.repair()
    assert done.report.ok
    assert {note.what.split()[3] for note in done.lost} == {"journal", "run_value"}


# --- the command


def test_the_command(scene: Scene, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["store", "repair", "--store", scene.url]) == 0
    assert "no damage" in capsys.readouterr().out
    a_body(scene)
    target = str(tmp_path / "to.db") if scene.is_file else "elsewhere"
    assert main(["store", "repair", "--store", scene.url]) == 1
    assert "1 lost" in capsys.readouterr().out
    assert main(["store", "repair", "--store", scene.url, "--to", target, "--json"]) == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["report"]["problems"] == []
    assert len(answer["lost"]) == 1


def test_mistakes_are_said(tmp_path: Path) -> None:
    with pytest.raises(perdure.errors.OpenError, match="there is no store"):
        perdure.ops.repair_store(str(tmp_path / "none.db"))
    scene = build(str(tmp_path / "a.db"), saves=8)
    (tmp_path / "there.db").write_text("mine")
    with pytest.raises(perdure.UsageError, match="exists already"):
        perdure.ops.repair_store(scene.url, to=tmp_path / "there.db")
    assert (tmp_path / "there.db").read_text() == "mine"


def test_a_schema_that_is_there_is_never_the_place_of_the_copy(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.thread("a").save({"n": 1})
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA mine")
        connection.execute("CREATE TABLE mine.precious AS SELECT 1 AS n")
        with pytest.raises(perdure.UsageError, match='"mine" already exists'):
            perdure.ops.repair_store(postgres_url, to="mine")
        assert connection.execute("SELECT n FROM mine.precious").fetchall() == [(1,)]
