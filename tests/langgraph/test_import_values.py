"""What an import makes of stored values: nothing is executed, no type is lost, old forms are read."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import ormsgpack
import psycopg
import pytest
from graph_kit import at, human, talking
from import_kit import TRUST, Colour, Plan, Step, assert_equal, everything, stock, typed
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Interrupt, Send
from psycopg.types.json import Jsonb

import perdure
from perdure.errors import PerdureError, Undecodable, UnknownType, Unstorable
from perdure.langgraph import PerdureSaver
from perdure.langgraph.importing import import_langgraph

ONE, MANY, NAMED, METHOD, MODEL_1, MODEL_2, ARRAY, SNAPSHOT = range(8)
EXECUTED = "executed"


@perdure.register("tests.Registered")
@dataclass
class Registered:
    """Registered under another name than its own."""

    name: str


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "old.sqlite")


@pytest.fixture
def new(tmp_path: Path) -> str:
    return str(tmp_path / "new.db")


def put(saver: Any, thread: str, value: Any, parent: str | None = None) -> str:
    """A checkpoint with one channel, by a saver's own `put`. Its id."""
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"value": value}
    checkpoint["channel_versions"] = {"value": "1"}
    config = at(thread, checkpoint_ns="", **({"checkpoint_id": parent} if parent else {}))
    saver.put(config, checkpoint, {"source": "loop", "step": 0}, {"value": "1"})
    return checkpoint["id"]


def store_raw(path: str, kind: str | None, make: Callable[[dict[str, Any]], bytes]) -> str:
    """A checkpoint in a stock file whose bytes are made by the test, of a checkpoint with an empty channel."""
    with stock(path) as saver:
        id_ = put(saver, "t", None)
    checkpoint = {**empty_checkpoint(), "id": id_, "channel_versions": {"value": "1"}}
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ?", (kind, make(checkpoint)))
    return id_


def with_ext(code: int, *body: Any) -> Callable[[dict[str, Any]], bytes]:
    def make(checkpoint: dict[str, Any]) -> bytes:
        checkpoint["channel_values"] = {"value": [ormsgpack.Ext(code, ormsgpack.packb(body))]}
        return ormsgpack.packb(checkpoint)

    return make


def imported_value(path: str, new: str, **options: Any) -> Any:
    with PerdureSaver(new, trust=options.get("trust", ())) as saver:
        assert import_langgraph(path, saver, **options).ok
        found = saver.get_tuple(at("t"))
        assert found is not None
        return found.checkpoint["channel_values"]["value"]


# --- what is hostile


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (ONE, ("os", "system", "touch {}")),
        (ONE, ("posix", "system", "touch {}")),
        (ONE, ("builtins", "eval", "open({!r}, 'w')")),
        (MANY, ("os", "system", ("touch {}",))),
        (MANY, ("subprocess", "check_call", (["touch", "{}"],))),
        (NAMED, ("pathlib", "Path.touch", {"self": "{}"})),
        (NAMED, ("subprocess", "Popen", {"args": ["touch", "{}"]})),
        (METHOD, ("pathlib", "Path", "{}", "touch")),
        (METHOD, ("os", "path", "{}", "system")),
        (MODEL_1, ("subprocess", "Popen", {"args": ["touch", "{}"]})),
        (MODEL_2, ("subprocess", "Popen", {"args": ["touch", "{}"]}, "model_validate_json")),
    ],
)
@pytest.mark.parametrize("place", ["value", "write"])
def test_nothing_that_is_stored_is_executed(
    tmp_path: Path, path: str, new: str, code: int, body: tuple[Any, ...], place: str
) -> None:
    marker = tmp_path / EXECUTED
    filled = json.loads(json.dumps(body).replace("{}", str(marker)).replace("{!r}", f"'{marker}'"))
    if place == "value":
        store_raw(path, "msgpack", with_ext(code, *filled))
    else:
        with stock(path) as saver:
            put(saver, "t", 1)
            newest = saver.get_tuple(at("t"))
            assert newest is not None
            saver.put_writes(newest.config, [("value", 1)], "task")
        with sqlite3.connect(path) as connection:
            hostile = ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb(filled)))
            connection.execute("UPDATE writes SET value = ?", (hostile,))
    with PerdureSaver(new) as saver:
        with pytest.raises(UnknownType, match="nothing of it was executed") as raised:
            import_langgraph(path, saver)
        assert body[1] in str(raised.value)
        assert "thread 't'" in str(raised.value)
        assert everything(saver) == {}
    assert not marker.exists()


def test_trusting_a_module_lets_in_its_data_classes_only(tmp_path: Path, path: str, new: str) -> None:
    """`subprocess.Popen` is a class and its module is trusted: it is still no data."""
    marker = tmp_path / EXECUTED
    store_raw(path, "msgpack", with_ext(NAMED, "subprocess", "Popen", {"args": ["touch", str(marker)]}))
    with PerdureSaver(new) as saver, pytest.raises(UnknownType, match="no such data class"):
        import_langgraph(path, saver, trust=["subprocess."])
    assert not marker.exists()


@pytest.mark.parametrize("lc", [1, 2])
def test_the_old_json_form_executes_nothing_either(tmp_path: Path, path: str, new: str, lc: int) -> None:
    marker = tmp_path / EXECUTED
    hostile = {"lc": lc, "type": "constructor", "id": ["os", "system"], "args": [f"touch {marker}"]}
    store_raw(path, "json", lambda one: json.dumps({**one, "channel_values": {"value": hostile}}).encode())
    with PerdureSaver(new) as saver, pytest.raises(UnknownType, match=r"os\.system.*nothing of it was executed"):
        import_langgraph(path, saver)
    assert not marker.exists()


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def test_pickle_is_refused(tmp_path: Path, path: str, new: str) -> None:
    marker = tmp_path / EXECUTED
    store_raw(path, "pickle", lambda _: pickle.dumps(Bomb(str(marker))))
    with PerdureSaver(new) as saver, pytest.raises(Undecodable, match="pickle, which runs code"):
        import_langgraph(path, saver)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("msgpack", b"\xc1", "cannot be read"),
        ("msgpack", b"", "cannot be read"),
        ("msgpack", ormsgpack.packb([1]), "no checkpoint"),
        ("json", b"{", "cannot be read"),
        ("json", b"\xff", "cannot be read"),
        ("bytes", b"x", "no checkpoint"),
        ("null", b"", "no checkpoint"),
        (None, b"x", "its type is None"),
        ("yaml", b"x", "its type is 'yaml'"),
        ("msgpack+aes", b"x", r"encrypted.*serde="),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_none(
    path: str, new: str, kind: str | None, data: bytes, said: str
) -> None:
    id_ = store_raw(path, kind, lambda _: data)
    with PerdureSaver(new) as saver, pytest.raises(Undecodable, match=f"thread 't', checkpoint {id_}: .*{said}"):
        import_langgraph(path, saver)


def test_deep_nesting_is_an_error_and_no_crash(path: str, new: str) -> None:
    deep = ormsgpack.packb(None)
    for _ in range(20_000):
        deep = ormsgpack.packb(ormsgpack.Ext(SNAPSHOT, deep))
    store_raw(path, "msgpack", lambda one: ormsgpack.packb({**one, "channel_values": {}})[:-1] + deep)
    with PerdureSaver(new) as saver, pytest.raises(PerdureError):
        import_langgraph(path, saver)


# --- classes of one's own


def test_types_that_are_not_trusted_are_all_named(path: str, new: str) -> None:
    """Also those of later checkpoints: they can be trusted at once."""
    with stock(path) as theirs:
        put(theirs, "a", 1)
        put(theirs, "b", Step("x", Colour.RED))
        put(theirs, "c", [Plan(goal="y")])
    with PerdureSaver(new) as saver:
        with pytest.raises(UnknownType) as raised:
            import_langgraph(path, saver)
        said = str(raised.value)
        assert "import_kit.Colour, import_kit.Plan, import_kit.Step" in said
        assert "--trust import_kit." in said
        assert [key[0] for key in everything(saver)] == ["a"]  # what came before is there
        assert import_langgraph(path, saver, trust=TRUST).ok
        with pytest.raises(UnknownType, match="--trust import_kit"):  # also where there is nothing left to do
            import_langgraph(path, saver)
    with PerdureSaver(new, trust=TRUST) as saver, stock(path) as theirs:
        assert_equal(saver, theirs)


def test_a_registered_class_needs_no_trust(path: str, new: str) -> None:
    with stock(path) as theirs:
        put(theirs, "t", Registered("x"))
    assert imported_value(path, new) == Registered("x")


def test_a_class_that_is_gone_is_named(path: str, new: str) -> None:
    store_raw(path, "msgpack", with_ext(MODEL_2, "import_kit", "Vanished", {"a": 1}, "model_validate_json"))
    with PerdureSaver(new) as saver, pytest.raises(UnknownType, match=r"import_kit\.Vanished: there is no such"):
        import_langgraph(path, saver, trust=TRUST)


def test_a_class_of_a_script_must_be_imported_there(path: str, new: str) -> None:
    store_raw(path, "msgpack", with_ext(NAMED, "__main__", "Mine", {"a": 1}))
    with PerdureSaver(new) as saver, pytest.raises(UnknownType, match="only in its own script"):
        import_langgraph(path, saver)


def test_a_dataclass_is_not_run_but_filled(path: str, new: str) -> None:
    store_raw(path, "msgpack", with_ext(NAMED, "import_kit", "Step", {"title": 1, "colour": None, "after": None}))
    [step] = imported_value(path, new, trust=TRUST)
    assert step == Step(1, None)  # type: ignore[arg-type]


def test_values_that_perdure_cannot_keep_are_named(path: str, new: str) -> None:
    with stock(path) as theirs:
        put(theirs, "t", 1)
    with sqlite3.connect(path) as connection:
        [(data,)] = connection.execute("SELECT checkpoint FROM checkpoints").fetchall()
        checkpoint = ormsgpack.unpackb(data)
        checkpoint["channel_values"]["__langgraph__"] = 1
        connection.execute("UPDATE checkpoints SET checkpoint = ?", (ormsgpack.packb(checkpoint),))
    with PerdureSaver(new) as saver, pytest.raises(Unstorable, match=r"thread 't'.*cannot be named '__langgraph__'"):
        import_langgraph(path, saver)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"bytes",
        bytearray(b"more"),
        float("inf"),
        {1: "one", "two": 2},
        {"set"},
        frozenset({1, 2}),
        UUID(int=7),
        datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        date(2026, 1, 2),
        Send("node", {"arg": 1}),
        Interrupt("why?", id="x"),
        [HumanMessage("hi", id="1"), AIMessage("ho", id="2", tool_calls=[{"name": "f", "args": {}, "id": "c"}])],
    ],
    ids=repr,
)
def test_values_come_as_the_stock_saver_gives_them(path: str, new: str, value: Any) -> None:
    with stock(path) as theirs:
        put(theirs, "t", value)
    with PerdureSaver(new) as mine, stock(path) as theirs:
        assert import_langgraph(path, mine).ok
        assert_equal(mine, theirs)


def test_arrays(path: str, new: str) -> None:
    with stock(path) as theirs:
        put(theirs, "t", numpy.arange(6.0).reshape(2, 3))
    found = imported_value(path, new)
    assert (found.dtype, found.tolist()) == (numpy.dtype("float64"), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


# --- old forms


def test_old_json_rows(path: str, new: str) -> None:
    old = {
        "message": {
            "lc": 1,
            "type": "constructor",
            "id": ["langchain", "schema", "messages", "HumanMessage"],
            "kwargs": {"content": "hi", "id": "1", "type": "human"},
        },
        "at": {
            "lc": 2,
            "type": "constructor",
            "id": ["datetime", "datetime"],
            "method": "fromisoformat",
            "args": ["2026-01-02T03:04:05+00:00"],
        },
        "id": {"lc": 2, "type": "constructor", "id": ["uuid", "UUID"], "args": [UUID(int=7).hex]},
        "raw": {"lc": 2, "type": "constructor", "id": ["builtins", "bytes"], "method": "fromhex", "args": ["00ff"]},
        "plan": {
            "lc": 2,
            "type": "constructor",
            "id": ["import_kit", "Plan"],
            "method": [None, "model_construct"],
            "kwargs": {"goal": "x", "steps": ["y"]},
        },
        "plain": {"lc": 3, "type": "constructor", "id": ["os", "system"]},
    }
    store_raw(path, "json", lambda one: json.dumps({**one, "channel_values": {"value": old}}).encode())
    assert imported_value(path, new, trust=TRUST) == {
        "message": HumanMessage("hi", id="1"),
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "id": UUID(int=7),
        "raw": b"\x00\xff",
        "plan": Plan(goal="x", steps=["y"]),
        "plain": old["plain"],
    }


def test_a_file_from_before_writes_had_paths(path: str, new: str) -> None:
    with stock(path) as theirs:
        talking(theirs).invoke({"messages": [human("hi")]}, at("t"))
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE writes DROP COLUMN task_path")
        connection.execute("UPDATE checkpoints SET metadata = NULL, parent_checkpoint_id = '' WHERE rowid = 1")
    with PerdureSaver(new) as mine:
        assert import_langgraph(path, mine).ok
        with stock(path) as theirs:
            assert_equal(mine, theirs)


def test_sends_that_an_old_postgres_saver_kept_on_the_parent(postgres_url: str, new: str) -> None:
    with stock(postgres_url) as theirs:
        parent = put(theirs, "t", ["x"])
        put(theirs, "t", ["y"], parent)
        config = at("t", checkpoint_ns="", checkpoint_id=parent)
        for number in (2, 1):
            theirs.put_writes(config, [("__pregel_tasks", Send("node", number))], f"task {number}")
    with psycopg.connect(postgres_url) as connection:
        for id_, checkpoint in connection.execute("SELECT checkpoint_id, checkpoint FROM checkpoints").fetchall():
            old = Jsonb({**checkpoint, "v": 3})
            connection.execute("UPDATE checkpoints SET checkpoint = %s WHERE checkpoint_id = %s", (old, id_))
    with PerdureSaver(new) as mine, stock(postgres_url) as theirs:
        assert import_langgraph(postgres_url, mine).ok
        newest = mine.get_tuple(at("t"))
        assert newest is not None
        assert newest.checkpoint["channel_values"]["__pregel_tasks"] == [Send("node", 1), Send("node", 2)]
        assert_equal(mine, theirs)


# --- encrypted, and other serializers


class Xor(CipherProtocol):
    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "xor", bytes(byte ^ 0x55 for byte in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "xor"
        return bytes(byte ^ 0x55 for byte in ciphertext)


@pytest.mark.parametrize("target", ["plain", "encrypted"])
def test_encrypted_rows_with_their_serializer(path: str, new: str, target: str) -> None:
    serde = EncryptedSerializer(Xor())
    connection = sqlite3.connect(path, check_same_thread=False)
    theirs = SqliteSaver(connection, serde=serde)
    typed(theirs).invoke({"results": []}, at("t"))
    with PerdureSaver(new, trust=TRUST, serde=serde if target == "encrypted" else None) as mine:
        with pytest.raises(Undecodable, match="encrypted"):
            import_langgraph(path, mine)
        assert import_langgraph(path, mine, serde=serde).ok
        assert_equal(mine, theirs)
        again = import_langgraph(path, mine, serde=serde)
        assert (again.checkpoints, again.ok) == (0, True)
    connection.close()


def test_an_encrypted_row_executes_nothing_either(tmp_path: Path, path: str, new: str) -> None:
    """The serializer inside the encrypted one is LangGraph's permissive default: only its cipher is used."""
    marker = tmp_path / EXECUTED
    make = with_ext(ONE, "os", "system", f"touch {marker}")
    store_raw(path, "msgpack+xor", lambda one: Xor().encrypt(make(one))[1])
    with PerdureSaver(new) as saver, pytest.raises(UnknownType, match=r"os\.system"):
        import_langgraph(path, saver, serde=EncryptedSerializer(Xor()))
    assert not marker.exists()


def test_a_serializer_of_the_callers(path: str, new: str) -> None:
    """The way out for classes that are gone: what it gives is taken."""
    store_raw(path, "msgpack", with_ext(MODEL_2, "import_kit", "Vanished", {"a": 1}, "model_validate_json"))
    assert imported_value(path, new, serde=JsonPlusSerializer(allowed_msgpack_modules=None)) == [{"a": 1}]


def test_a_value_that_differs_is_named(path: str, new: str) -> None:
    """1 is not True: types count."""
    with stock(path) as theirs:
        parent = put(theirs, "t", {"n": 1})
        put(theirs, "t", 2, parent)
    with PerdureSaver(new) as mine:
        assert import_langgraph(path, mine).ok
        with sqlite3.connect(path) as connection:
            [(data,)] = connection.execute("SELECT checkpoint FROM checkpoints WHERE rowid = 1").fetchall()
            changed = ormsgpack.unpackb(data)
            changed["channel_values"] = {"value": {"n": True}, "more": 1}
            changed["channel_versions"] = {"value": "2"}
            connection.execute("UPDATE checkpoints SET checkpoint = ? WHERE rowid = 1", (ormsgpack.packb(changed),))
        where = f"thread 't', checkpoint {parent}: "
        assert import_langgraph(path, mine).differences == (
            f"{where}channel 'more' is missing",
            f"{where}channel 'value' differs",
            f"{where}its 'channel_versions' differs",
        )
