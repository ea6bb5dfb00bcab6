"""Defects that other savers have or had, one test each: values, metadata, filters, names, the saver as an object."""

from __future__ import annotations

import copy
import json
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import ormsgpack
import pytest
from checkpoints import (
    checkpoint_of,
    config_of,
    got,
    id_of,
    ids_in,
    metadata_of,
    numbered_id,
    put,
    put_arguments,
    values_at,
    writes_at,
)
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, get_checkpoint_metadata

from perdure.errors import UsageError, ValueProblem
from perdure.langgraph import PerdureSaver
from perdure.values.codec import encode


def test_same_id_put_again_replaces(saver: PerdureSaver) -> None:
    first = put(saver, "t", {"n": 1, "old": True}, id=numbered_id(1), step=1)
    saver.put_writes(first, [("a", 1)], "task")
    second = put(saver, "t", {"n": 2}, id=numbered_id(2), parent=first)
    put(saver, "t", {"n": 10, "new": True}, id=numbered_id(1), step=2)
    assert values_at(saver, first) == {"n": 10, "new": True}
    assert got(saver, first).metadata["step"] == 2
    assert writes_at(saver, first) == [("task", "a", 1)]
    assert ids_in(saver, config_of("t")) == [numbered_id(2), numbered_id(1)]
    assert values_at(saver, second) == {"n": 2}
    assert got(saver, second).parent_config == first
    put(saver, "t", {"n": 20}, id=numbered_id(2), parent=first)
    assert values_at(saver, config_of("t")) == {"n": 20}
    assert list(saver.list(config_of("t"), filter={"step": 1})) == []
    assert saver.store.ops.verify().ok


ODD_VALUES = {
    "nul": "a\0b",
    "infinite": math.inf,
    "minus": -math.inf,
    "big": 2**200,
    "surrogate": "\ud800",
    "tuple": (1, (2, [3])),
    "set": {1, 2},
    "bytes": b"\x00\xff",
    "time": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    "keys": {1: "a", (2, 3): "b", None: "c"},
    "": "a channel without a name",
    "deep": {"a": {"b": {"c": [None, True, 1.5, "ü", "\U0001f600"]}}},
    "dotted.key": {"x.y": 1},
    "id": UUID(int=7),
    "money": Decimal("1.10"),
}


def test_odd_channel_values(saver: PerdureSaver) -> None:
    """NUL, NaN and infinity are no JSON, and stock PostgreSQL refuses them."""
    config = put(saver, "t", {**ODD_VALUES, "nan": math.nan})
    saver.put_writes(config, list(ODD_VALUES.items()), "task")
    found = values_at(saver, config)
    assert math.isnan(found.pop("nan"))
    assert found == ODD_VALUES
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in ODD_VALUES.items()
    }
    assert [(channel, value) for _, channel, value in writes_at(saver, config)] == list(ODD_VALUES.items())


def test_metadata_of_any_type(saver: PerdureSaver) -> None:
    """Stock SQLite: TypeError from put."""
    extra: dict[str, Any] = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "tags": {"a", "b"},
        "took": timedelta(seconds=3),
        "nested": {"list": [1, (2, 3), {"nul": "a\0b"}], "none": None},
        "nan": math.inf,
        "big": 2**100,
        "counters_since_delta_snapshot": {"log": (3, 4)},
    }
    config = put(saver, "t", {"n": 1}, **extra)
    for found in (got(saver, config), *saver.list(config_of("t")), *saver.list(None, filter={"step": 0})):
        assert found.metadata == metadata_of(**extra)
        assert type(cast(dict[str, Any], found.metadata)["tags"]) is set


def test_metadata_gathers_the_config_as_langgraph_asks(saver: PerdureSaver) -> None:
    config, checkpoint, _, versions = put_arguments("t", {"n": 1})
    config["configurable"]["user"] = "a\0da"
    config["configurable"]["__secret"] = "x"
    config["metadata"] = {"team": 7, "object": object()}
    given = metadata_of(text="a\0b")
    stored = saver.put(config, checkpoint, given, versions)
    assert got(saver, stored).metadata == get_checkpoint_metadata(config, given)
    assert [id_of(one.config) for one in saver.list(None, filter={"user": "ada", "team": 7})] == [id_of(stored)]


def test_nested_filters_do_not_mind_the_order_of_keys(saver: PerdureSaver) -> None:
    config = put(saver, nested={"x": 1, "y": {"p": [1, {"q": 2, "r": 3}], "s": 4}})
    put(saver, "t", parent=config, nested={"x": 1, "y": {"p": [1, {"q": 2, "r": 4}], "s": 4}})
    wanted = {"nested": {"y": {"s": 4, "p": [1, {"r": 3, "q": 2}]}, "x": 1}}
    assert ids_in(saver, config_of("t"), filter=wanted) == [id_of(config)]
    wrong_order = {"nested": {"y": {"s": 4, "p": [{"r": 3, "q": 2}, 1]}, "x": 1}}
    assert ids_in(saver, config_of("t"), filter=wrong_order) == []


def test_filters_tell_types_apart(saver: PerdureSaver) -> None:
    texts = put(saver, "t", kind="1", flag="true", none="null")
    numbers = put(saver, "t", kind=1, flag=True, none=None, parent=texts)
    for name, text, other in [("kind", "1", 1), ("flag", "true", True), ("none", "null", None)]:
        assert ids_in(saver, config_of("t"), filter={name: text}) == [id_of(texts)]
        assert ids_in(saver, config_of("t"), filter={name: other}) == [id_of(numbers)]
    assert ids_in(saver, config_of("t"), filter={"missing": "x"}) == []


HOSTILE = [
    "' OR 1=1 --",
    '" OR 1=1 --',
    "'; DROP TABLE record; --",
    "$.step",
    "$",
    '"$"."step"',
    "a.b[0]",
    "%",
    "_",
    "\\",
    "{}",
    "{now}",
    ":t",
    "?",
    "%s",
    "%(t)s",
    "\u202eright to left \U0001f600 ü",
    "e\u0301",
    "\n\t\r",
    " ",
    "x" * 500,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_filters_with_hostile_keys_and_values(saver: PerdureSaver, text: str) -> None:
    plain = put(saver, "t", {"n": 1}, ordinary=1)
    hostile = put(saver, "t", {"n": 2}, parent=plain, **{text: 1, "value": text})
    assert ids_in(saver, config_of("t"), filter={text: 1}) == [id_of(hostile)]
    assert ids_in(saver, None, filter={"value": text}) == [id_of(hostile)]
    assert ids_in(saver, None, filter={text: 2}) == []
    assert ids_in(saver, None, filter={"ordinary": text}) == []
    assert ids_in(saver, None) == [id_of(hostile), id_of(plain)]
    assert saver.store.ops.verify().ok


def test_a_very_long_filter_value(saver: PerdureSaver) -> None:
    long = "ü'" * 50_000
    config = put(saver, "t", text=long)
    put(saver, "t", text=long + "x", parent=config)
    assert ids_in(saver, None, filter={"text": long}) == [id_of(config)]


@pytest.mark.parametrize("thread", [0, 7, -1, " ", "a/b", "..", "ü", "\n", "' OR 1=1 --", "%", "x" * 512, "7.0"])
def test_thread_ids_that_are_ints_or_odd_strings(saver: PerdureSaver, thread: Any) -> None:
    put(saver, "someone else", {"n": 0})
    config = put(saver, thread, {"n": 1})
    assert str(config["configurable"]["thread_id"]) == str(thread)
    saver.put_writes(config, [("a", 1)], "task")
    found = got(saver, config_of(thread))
    assert found.checkpoint["channel_values"] == {"n": 1}
    assert found.pending_writes == [("task", "a", 1)]
    assert values_at(saver, config_of(str(thread))) == {"n": 1}
    put(saver, thread, {"n": 2}, parent=config)
    assert len(ids_in(saver, config_of(thread))) == 2
    saver.delete_thread(thread)
    assert saver.get_tuple(config_of(thread)) is None
    assert len(ids_in(saver, None)) == 1


@pytest.mark.parametrize("thread", ["", "a\0b", "x" * 513, "\ud800"])
def test_thread_ids_that_no_database_keeps_are_refused(saver: PerdureSaver, thread: str) -> None:
    with pytest.raises(UsageError):
        put(saver, thread, {"n": 1})
    assert ids_in(saver, None) == []


def crafted(marker: Path) -> dict[str, Any]:
    """Values that a careless decoder would take for an order to run something."""
    command = f"touch {marker}"
    ext = ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(("os", "system", command))))
    return {
        "object": {"^obj": ["os.system", command]},
        "listed": [{"^obj": ["os", "system", command]}, {"^call": "os.system"}],
        "deep": {"^dict": [["^obj", ["os.system", [command]]]]},
        "lc": {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": [command]},
        "lc1": {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": command}},
        "msgpack": ext,
        "typed": ("msgpack", ext),
        "pickle": b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.",
    }


def test_a_crafted_payload_that_must_not_run(saver_url: str, tmp_path: Path) -> None:
    """What looks like an order is data, and comes back as the data it was."""
    marker = tmp_path / "ran"
    payload = crafted(marker)
    with PerdureSaver(saver_url) as saver:
        config = put(saver, "t", payload, extra=payload)
        saver.put_writes(config, list(payload.items()), "task")
    with PerdureSaver(saver_url) as saver:
        found = got(saver, config_of("t"))
        assert found.checkpoint["channel_values"] == payload
        assert cast(dict[str, Any], found.metadata)["extra"] == payload
        assert {channel: value for _, channel, value in found.pending_writes or []} == payload
        assert len(list(saver.list(None, filter={"step": 0}))) == 1
    assert not marker.exists()


def forged_texts(marker: Path) -> dict[str, bytes]:
    """What somebody who can write to the database could put where a value's text is."""
    command = f"touch {marker}"
    forged: dict[str, Any] = {
        "object": {"^obj": ["os.system", [command]]},
        "module": {"^obj": ["os:system", {"command": command}]},
        "process": [{"^obj": ["subprocess.Popen", {"args": command, "shell": True}]}],
        "message": {"^msg.human": {"content": {"^obj": ["os.system", [command]]}}},
        "factory": {"^defaultdict": ["os.system", [[command, command]]]},
    }
    return {sort: json.dumps(value).encode() for sort, value in forged.items()}


@pytest.mark.parametrize("sort", forged_texts(Path("x")))
def test_a_forged_text_in_the_database_must_not_run(
    saver: PerdureSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    """With valid checksums: it is refused by a decoder that calls nothing whose name it finds."""
    marker = tmp_path / "ran"
    text = forged_texts(marker)[sort]
    # Encoders that write the forged text: of channels, and of pending writes.
    for name in ("perdure.langgraph.checkpoints.encode", "perdure.values.external.encode"):
        monkeypatch.setattr(name, lambda value, codec: encode(value, codec).replace(b'"FORGE"', text))
    in_channel = put(saver, "channel", {"a": "FORGE"})
    in_write = put(saver, "write", {"a": 1})
    saver.put_writes(in_write, [("a", "FORGE")], "task")
    for config in (in_channel, in_write):
        with pytest.raises(ValueProblem):
            saver.get_tuple(config)
        with pytest.raises(ValueProblem):
            list(saver.list(config))
    assert not marker.exists()


class Forger:
    """A serializer that says whatever it was told to."""

    def __init__(self, kind: str, data: bytes) -> None:
        self.typed = (kind, data)

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return self.typed

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        raise AssertionError("it was never to be read by this one")


@pytest.mark.parametrize("kind", ["msgpack", "pickle", "json"])
def test_a_forged_payload_of_a_serializer_must_not_run(saver_url: str, tmp_path: Path, kind: str) -> None:
    """What LangGraph's serializer would run is not even given to it, unless the user has asked for that serializer."""
    marker = tmp_path / "ran"
    command = f"touch {marker}"
    data = {
        "msgpack": ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(("os", "system", command)))),
        "pickle": b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.",
        "json": json.dumps({"lc": 2, "type": "constructor", "id": ["os", "system"], "args": [command]}).encode(),
    }[kind]
    with PerdureSaver(saver_url, serde=Forger(kind, data)) as forging:
        config = put(forging, "t", {"a": 1})
        forging.put_writes(config, [("a", 1)], "task")
    with PerdureSaver(saver_url) as saver:
        with pytest.raises(UsageError, match="assigned serializer"):
            saver.get_tuple(config)
        with pytest.raises(UsageError, match="assigned serializer"):
            list(saver.list(config_of("t"), filter={"step": 0}))
    assert not marker.exists()


# --- the object itself


def test_a_copy_of_the_saver_works(saver: PerdureSaver) -> None:
    """LangGraph copies savers to give them another list of allowed classes."""
    config = put(saver, "t", {"n": 1})
    twin = copy.copy(saver)
    put(twin, "t", {"n": 2}, parent=config)
    assert values_at(saver, config_of("t")) == {"n": 2}
    del twin
    allowed = saver.with_allowlist([("myapp", "Plan")])
    assert isinstance(allowed, PerdureSaver)
    assert values_at(allowed, config_of("t")) == {"n": 2}
    put(saver, "u", {"n": 3})
    assert values_at(allowed, config_of("u")) == {"n": 3}


def test_a_saver_is_true_and_has_no_length(saver: PerdureSaver) -> None:
    """LangGraph says `if not checkpointer` and `checkpointer in (True, False)`."""
    assert bool(saver) is True
    assert not hasattr(saver, "__len__")
    assert not any(saver == one for one in (True, False, None, object()))
    assert isinstance(saver, BaseCheckpointSaver)
    assert saver == saver
    assert len({saver, copy.copy(saver)}) == 2


def test_the_returned_config_names_the_checkpoint_and_the_given_one_is_left_alone(saver: PerdureSaver) -> None:
    first = put(saver, "t", {"n": 1}, ns="child:1")
    config: RunnableConfig = {"configurable": {**first["configurable"], "user": "ada"}, "metadata": {"team": 1}}
    given = copy.deepcopy(config)
    checkpoint = checkpoint_of({"n": 2})
    kept = copy.deepcopy(checkpoint)
    stored = saver.put(config, checkpoint, metadata_of(), dict(checkpoint["channel_versions"]))
    assert stored["configurable"]["thread_id"] == "t"
    assert stored["configurable"]["checkpoint_ns"] == "child:1"
    assert stored["configurable"]["checkpoint_id"] == checkpoint["id"]
    assert (config, checkpoint) == (given, kept)
    found = got(saver, stored)
    assert found.parent_config == first
    assert {key: value for key, value in found.checkpoint.items() if key != "pending_sends"} == kept
