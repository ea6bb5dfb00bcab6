"""Databases of LangGraph's own savers, imported: everything is as it was, and graphs continue where they stopped."""

from __future__ import annotations

import json
import os
import pickle
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from graph_kit import asking, at, counting, human, inner, long_talking, outer, talking, texts
from import_kit import (
    TRUST,
    Colour,
    Plan,
    Step,
    assert_equal,
    everything,
    kept_writes,
    raw_writes,
    stock,
    typed,
    write_all,
)
from langgraph.checkpoint.base import create_checkpoint, empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

import perdure
from perdure.cli import main
from perdure.errors import NotFound, OpenError, Undecodable, UnknownType, UsageError
from perdure.langgraph import MigrationReport, PerdureSaver, import_langgraph
from perdure.testing.processes import ForkServer

KILLS = 30 if os.environ.get("PERDURE_SOAK") else 2
ONE, MANY, NAMED, METHOD, MODEL_1, MODEL_2 = range(6)  # LangGraph's msgpack extensions


@perdure.register("tests.Registered")
@dataclass
class Registered:
    """Registered under another name than its own."""

    name: str


@pytest.fixture
def new(tmp_path: Path) -> str:
    return str(tmp_path / "new.db")


@pytest.fixture
def old(tmp_path: Path) -> str:
    """A small SQLite database: two threads of a conversation."""
    path = str(tmp_path / "old.sqlite")
    with stock(path) as saver:
        graph = talking(saver)
        for thread in ("alice", "bob"):
            for turn in range(3):
                graph.invoke({"messages": [human(f"turn {turn}", id=f"{thread}{turn}")]}, at(thread))
    return path


# --- what is copied


@pytest.mark.parametrize("direction", ["sqlite to postgres", "postgres to sqlite"])
def test_everything_is_imported_and_graphs_continue(direction: str, tmp_path: Path, postgres_url: str) -> None:
    file = str(tmp_path / "file.db")
    source, target = (file, postgres_url) if direction.startswith("sqlite") else (postgres_url, file)
    with stock(source) as theirs:
        write_all(theirs)
        count = len(everything(theirs))
    writes = raw_writes(source)
    with PerdureSaver(target, trust=TRUST) as mine, stock(source) as theirs:
        assert import_langgraph(source, mine) == MigrationReport(9, count, sum(map(len, writes.values())))
        assert_equal(mine, theirs)
        for key in everything(mine):
            paths = {(task, path, channel) for task, path, _, channel in kept_writes(mine, key)}
            assert paths == {(task, path, channel) for task, path, _, channel in writes.get(key, set())}
        assert mine.store.ops.verify().ok
        assert import_langgraph(source, mine) == MigrationReport(9, 0, 0)
        assert_equal(mine, theirs)
    with PerdureSaver(target, trust=TRUST) as mine:
        graphs_continue(mine)


def graphs_continue(mine: PerdureSaver) -> None:
    said = talking(mine).invoke({"messages": [human("last", id="last")]}, at("chat"))
    assert texts(said)[-4:] == ["hello 3 ✓", "Echo: hello 3 ✓", "last", "Echo: last"]
    assert len(said["messages"]) == 10
    assert [one.value for one in asking(mine).get_state(at("asking")).interrupts] == [{"question": "name?"}]
    asking(mine).invoke(Command(resume="Bo"), at("asking"))
    assert asking(mine).invoke(Command(resume="red"), at("asking"))["answer"] == "Bo likes red"
    assert asking(mine).invoke(Command(resume="blue"), at("halfway"))["answer"] == "Ann likes blue"
    nested = outer(mine, inner(ask=True), inner())
    assert nested.invoke(Command(resume="sure"), at("nested"))["results"] == [
        "planned",
        "tides: 1 notes, sure",
        "tides: 1 notes, yes",
    ]
    long = long_talking(mine)
    assert texts(long.invoke({"messages": [human("more", id="more")]}, at("long")))[:2] == ["long 0", "Echo: long 0"]
    assert len(long.get_state(at("long")).values["messages"]) == 12
    sums = counting(mine, "a", "b")
    assert sums.invoke(None, list(sums.get_state_history(at("forked")))[-1].config)["log"] == ["a", "b"]
    assert mine.store.ops.verify().ok


def test_what_the_source_has_got_since_is_added(tmp_path: Path, new: str) -> None:
    """More checkpoints, and an interrupt that was answered on a checkpoint that is there already."""
    source = str(tmp_path / "old.sqlite")
    with stock(source) as theirs, PerdureSaver(new) as mine:
        talking(theirs).invoke({"messages": [human("one")]}, at("chat"))
        asking(theirs).invoke({"items": []}, at("asking"))
        assert import_langgraph(source, mine).ok
        talking(theirs).invoke({"messages": [human("two")]}, at("chat"))
        asking(theirs).invoke(Command(resume="Ann"), at("asking"))
        done = import_langgraph(source, mine)
        assert (done.checkpoints, done.ok) == (3, True)
        assert_equal(mine, theirs)
        assert asking(mine).invoke(Command(resume="blue"), at("asking"))["answer"] == "Ann likes blue"


def test_a_thread_that_continued_in_the_store_is_left_as_it_is(old: str, new: str) -> None:
    with PerdureSaver(new) as mine, stock(old) as theirs:
        import_langgraph(old, mine)
        talking(mine).invoke({"messages": [human("here")]}, at("alice"))
        assert import_langgraph(old, mine).ok  # the source has nothing that the store lacks
        before = everything(mine)
        talking(theirs).invoke({"messages": [human("there")]}, at("alice"))
        done = import_langgraph(old, mine)
        assert (done.checkpoints, done.skipped, done.ok) == (0, ("alice",), False)
        assert everything(mine) == before


def test_another_thread_of_the_same_name_is_left_as_it_is(old: str, new: str) -> None:
    with PerdureSaver(new) as mine:
        talking(mine).invoke({"messages": [human("mine")]}, at("alice"))
        mine.store.thread("bob").save({"not": "LangGraph's"})
        done = import_langgraph(old, mine)
        assert (done.checkpoints, done.skipped) == (0, ("alice", "bob"))
        assert len(everything(mine)) == 3
        assert mine.store.thread("bob").load().state == {"not": "LangGraph's"}


def test_a_checkpoint_whose_parent_was_pruned(old: str, new: str) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute(
            "DELETE FROM checkpoints WHERE checkpoint_id IN "
            "(SELECT min(checkpoint_id) FROM checkpoints WHERE thread_id = 'alice')"
        )
    with PerdureSaver(new) as mine:
        assert import_langgraph(old, mine).ok
        assert len(talking(mine).invoke({"messages": [human("on")]}, at("alice"))["messages"]) == 8


def test_pending_sends_of_old_checkpoints_go_to_the_next_one(postgres_url: str, new: str) -> None:
    """Before version 4 of its checkpoints, LangGraph attached the sends of a step to the checkpoint before them."""
    with PostgresSaver.from_conn_string(postgres_url) as source:
        source.setup()
        first = empty_checkpoint()
        first["v"] = 3
        config = source.put({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, first, {}, {})
        source.put_writes(config, [(TASKS, "one"), (TASKS, "two")], task_id="task")
        second = create_checkpoint(first, {}, 1)
        second["v"] = 3
        config = source.put(config, second, {}, {})
        saved = source.get_tuple(config)
        assert saved is not None
    with PerdureSaver(new) as saver:
        report = import_langgraph(postgres_url, saver)
        imported = saver.get_tuple(config)
        assert imported is not None
        assert (report.checkpoints, report.differences) == (2, ())
        assert imported.checkpoint["channel_values"] == saved.checkpoint["channel_values"] == {TASKS: ["one", "two"]}


def test_only_some_threads_with_progress(old: str, new: str) -> None:
    calls: list[tuple[int, int]] = []
    with PerdureSaver(new) as mine:
        done = import_langgraph(old, mine, threads=["bob"], progress=lambda *call: calls.append(call))
        assert (done.threads, {key[0] for key in everything(mine)}) == (1, {"bob"})
        assert calls == [(number, 9) for number in range(1, 10)]
        with pytest.raises(NotFound, match="the source has no thread 'x'"):
            import_langgraph(old, mine, threads=["bob", "x"])
        with pytest.raises(UsageError, match=r"threads=\['bob'\]"):
            import_langgraph(old, mine, threads="bob")


def test_while_the_application_has_it_open(tmp_path: Path, new: str) -> None:
    """What is only in the write-ahead log is there too, and nothing of the source is changed."""
    path = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as theirs, PerdureSaver(new) as mine:
        talking(theirs).invoke({"messages": [human("one")]}, at("chat"))
        log = Path(f"{path}-wal")
        before = path.read_bytes(), log.read_bytes()
        assert before[1]
        assert import_langgraph(path, mine).ok
        assert (path.read_bytes(), log.read_bytes()) == before
        assert_equal(mine, theirs)


@pytest.mark.timeout(240)
def test_killed_anywhere_and_run_again(tmp_path: Path, new: str) -> None:
    source = str(tmp_path / "old.sqlite")
    with stock(source) as saver:
        for turn in range(4):
            talking(saver).invoke({"messages": [human(f"turn {turn}")]}, at("chat"))
        outer(saver, inner(ask=True)).invoke({"topic": "tides"}, at("nested"))
        count = len(everything(saver))

    with ForkServer("import_run:child") as fork_server:
        [steps] = fork_server.start(source, str(tmp_path / "whole.db"), 0).lines()
        rng = random.Random(20)
        for _ in range(KILLS):
            assert list(fork_server.start(source, new, rng.randrange(steps // 8, steps // 3)).lines()) == []
    with PerdureSaver(new) as mine, stock(source) as theirs:
        assert len(everything(mine)) < count
        assert import_langgraph(source, mine).ok
        assert_equal(mine, theirs)
        assert mine.store.ops.verify().ok


# --- what is decoded


def put(saver: Any, thread: str, value: Any) -> str:
    """A checkpoint with one channel, by a saver's own `put`. Its id."""
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"value": value}
    checkpoint["channel_versions"] = {"value": "1"}
    saver.put(at(thread, checkpoint_ns=""), checkpoint, {"source": "loop", "step": 0}, {"value": "1"})
    return checkpoint["id"]


def store_raw(path: str, kind: str, make: Callable[[dict[str, Any]], bytes]) -> str:
    """A checkpoint in a stock file whose bytes are made by the test. Its id."""
    with stock(path) as saver:
        id_ = put(saver, "t", None)
    checkpoint = {**empty_checkpoint(), "id": id_, "channel_versions": {"value": "1"}}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ?", (kind, make(checkpoint)))
    return id_


def with_ext(code: int, *body: Any) -> Callable[[dict[str, Any]], bytes]:
    def make(checkpoint: dict[str, Any]) -> bytes:
        checkpoint["channel_values"] = {"value": [ormsgpack.Ext(code, ormsgpack.packb(body))]}
        return ormsgpack.packb(checkpoint)

    return make


class Xor(CipherProtocol):
    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "xor", bytes(byte ^ 0x55 for byte in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return bytes(byte ^ 0x55 for byte in ciphertext)


def encrypted(make: Callable[[dict[str, Any]], bytes], checkpoint: dict[str, Any]) -> bytes:
    return Xor().encrypt(make(checkpoint))[1]


def as_json(value: Any, checkpoint: dict[str, Any]) -> bytes:
    return json.dumps({**checkpoint, "channel_values": {"value": value}}).encode()


def test_nothing_that_is_stored_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    popen = {"args": ["touch", str(marker)]}
    hostile: list[tuple[int, tuple[Any, ...]]] = [
        (ONE, ("os", "system", f"touch {marker}")),
        (ONE, ("builtins", "eval", f"open({str(marker)!r}, 'w')")),
        (MANY, ("subprocess", "check_call", (["touch", str(marker)],))),
        (NAMED, ("subprocess", "Popen", popen)),
        (METHOD, ("pathlib", "Path", str(marker), "touch")),
        (MODEL_1, ("subprocess", "Popen", popen)),
        (MODEL_2, ("subprocess", "Popen", popen, "model_validate_json")),
    ]
    with PerdureSaver(str(tmp_path / "new.db")) as saver:
        for number, (code, body) in enumerate(hostile):
            path = str(tmp_path / f"{number}.sqlite")
            make = with_ext(code, *body)
            store_raw(path, "msgpack", make)
            with pytest.raises(UnknownType, match=rf"thread 't', checkpoint .*{body[1]}.*nothing was executed"):
                import_langgraph(path, saver, trust=["subprocess."])  # only its data classes are trusted
            store_raw(path, "msgpack+xor", partial(encrypted, make))
            with pytest.raises(UnknownType):  # the serializer inside is LangGraph's permissive default
                import_langgraph(path, saver, serde=EncryptedSerializer(Xor()))
        for lc in (1, 2):
            path = str(tmp_path / f"json{lc}.sqlite")
            value = {"lc": lc, "type": "constructor", "id": ["os", "system"], "args": [f"touch {marker}"]}
            store_raw(path, "json", partial(as_json, value))
            with pytest.raises((UnknownType, Undecodable)):
                import_langgraph(path, saver)
        assert everything(saver) == {}
    assert not marker.exists()


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        ("msgpack", b"\xc1", "cannot be read"),
        ("msgpack", ormsgpack.packb([1]), "cannot be read"),
        ("json", b"{", "cannot be read"),
        ("pickle", pickle.dumps(Bomb()), "its type is 'pickle'"),
        ("msgpack+aes", b"x", "its type is 'msgpack.aes'.*serde="),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, kind: str, data: bytes, reason: str) -> None:
    id_ = store_raw(old, kind, lambda _: data)
    with PerdureSaver(new) as saver, pytest.raises(Undecodable, match=f"thread 't', checkpoint {id_}: .*{reason}"):
        import_langgraph(old, saver, threads=["t"])


def test_classes_must_be_trusted_or_registered(tmp_path: Path, new: str) -> None:
    path = str(tmp_path / "old.sqlite")
    with stock(path) as theirs:
        put(theirs, "a", Registered("x"))
        put(theirs, "b", [Step("x", Colour.RED), Plan(goal="y")])
    with PerdureSaver(new) as saver:
        with pytest.raises(
            UnknownType, match=r"import_kit\.Colour, import_kit\.Plan, .*--trust import_kit\."
        ) as raised:
            import_langgraph(path, saver)
        assert "thread 'b'" in str(raised.value)
        assert [key[0] for key in everything(saver)] == ["a"]  # what came before is there
        assert import_langgraph(path, saver, trust=TRUST).ok
    with PerdureSaver(new, trust=TRUST) as saver, stock(path) as theirs:
        assert_equal(saver, theirs)


def test_a_serializer_of_the_callers_reads_classes_that_are_gone(tmp_path: Path, new: str) -> None:
    path = str(tmp_path / "old.sqlite")
    store_raw(path, "msgpack", with_ext(MODEL_2, "import_kit", "Vanished", {"a": 1}, "model_validate_json"))
    with PerdureSaver(new, trust=TRUST) as saver:
        with pytest.raises(UnknownType, match=r"import_kit\.Vanished"):
            import_langgraph(path, saver)
        assert import_langgraph(path, saver, serde=JsonPlusSerializer(allowed_msgpack_modules=None)).ok
        found = saver.get_tuple(at("t"))
        assert found is not None
        assert found.checkpoint["channel_values"]["value"] == [{"a": 1}]


@pytest.mark.parametrize("target", ["plain", "encrypted"])
def test_encrypted_rows_with_their_serializer(tmp_path: Path, new: str, target: str) -> None:
    path, serde = str(tmp_path / "old.sqlite"), EncryptedSerializer(Xor())
    connection = sqlite3.connect(path, check_same_thread=False)
    theirs = SqliteSaver(connection, serde=serde)
    typed(theirs).invoke({"results": []}, at("t"))
    with PerdureSaver(new, trust=TRUST, serde=serde if target == "encrypted" else None) as mine:
        assert import_langgraph(path, mine, serde=serde).ok
        assert_equal(mine, theirs)
    connection.close()


def test_differences_are_reported(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with PerdureSaver(new) as mine:
        monkeypatch.setattr(PerdureSaver, "put_writes", lambda self, config, writes, *rest: None)
        done = import_langgraph(old, mine, threads=["alice"])
        assert not done.ok
        assert len(done.differences) == 6
        assert "its pending writes differ" in done.differences[0]


# --- what is no source


def test_what_is_no_source(tmp_path: Path, new: str, postgres_url: str) -> None:
    text = tmp_path / "text.sqlite"
    text.write_bytes(b"not a database at all, but long enough to be one" * 100)
    store = str(tmp_path / "agent.db")
    perdure.open(store).close()
    for source, error, reason in (
        (tmp_path / "no.sqlite", OpenError, "there is no file .*no.sqlite"),
        (text, UsageError, "is not a database of LangGraph's checkpointers"),
        (store, UsageError, "is not a database of LangGraph's checkpointers"),
        (postgres_url, UsageError, "is not a database of LangGraph's checkpointers"),
        ("postgresql://nobody:secret@127.0.0.1:1/x", OpenError, "cannot open"),
    ):
        with PerdureSaver(new) as saver, pytest.raises(error, match=reason) as raised:
            import_langgraph(source, saver)
        assert "secret" not in str(raised.value)


# --- the command


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["store", "import-langgraph", *arguments])
        return code, *capsys.readouterr()

    return call


def test_the_command_imports(old: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("old.sqlite", "--store", "new.db")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "imported 18 checkpoints of 2 threads, with 18 pending writes",
        "verified: every imported checkpoint reads back as it is in the source",
    ]
    with PerdureSaver(str(tmp_path / "new.db")) as mine, stock(old) as theirs:
        assert_equal(mine, theirs)
        mine.delete_thread("alice")
        talking(mine).invoke({"messages": [human("other")]}, at("alice"))
    code, out, _ = run("old.sqlite", "--store", "new.db", "--json")
    assert code == 1
    assert json.loads(out) == {
        "threads": 2,
        "checkpoints": 0,
        "writes": 0,
        "skipped": ["alice"],
        "differences": [],
    }
    for arguments, expected, reason in (
        (["no.sqlite", "--store", "x.db"], 4, "there is no file no.sqlite to import"),
        (["old.sqlite", "--store", "old.sqlite"], 2, "the same file"),
        (["old.sqlite", "--store", "x.db", "--thread", "carol"], 3, "the source has no thread 'carol'"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, reason in err, len(err.splitlines())) == (expected, "", True, 1)
