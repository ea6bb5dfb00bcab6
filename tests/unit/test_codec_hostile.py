"""Whatever the bytes are, decoding does not crash, does not execute, and raises only its two errors."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import tracemalloc
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from soak import examples

from perdure.errors import Undecodable, UnknownType
from perdure.values.codec import Codec, decode, encode
from perdure.values.registry import Registry
from perdure.values.revive import _READERS


class Color(Enum):
    RED = 1


@dataclass(frozen=True)
class Plan:
    title: Any
    size: int = 0


class Pair(NamedTuple):
    left: Any
    right: Any


class Job(msgspec.Struct):
    name: Any


class Model(BaseModel):
    name: Any
    size: int = 0


def codec() -> Codec:
    registry = Registry()
    for cls in (Color, Plan, Pair, Job, Model):
        registry.add(cls, name=f"app.{cls.__name__}")
    return Codec(registry=registry)


CODEC = codec()
TAGS = sorted(_READERS)
NAMES = [
    "app.Color",
    "app.Plan",
    "app.Pair",
    "app.Job",
    "app.Model",
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
]


def survives(text: bytes) -> None:
    for raw in (False, True):
        try:
            decode(text, CODEC, raw=raw)
        except UnknownType:
            assert not raw
        except Undecodable:
            pass


@settings(max_examples=examples(300))
@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_give_a_value_or_the_error(text: bytes) -> None:
    survives(text)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "utc",
            "nan",
            "0x1",
            "-0x" + "f" * 99,
            "AAAA",
            "<f8",
            "O",
            "|O",
            "<U9",
            "path",
            "2024-01-01",
            "F",
            "list",
            "Europe/Paris",
            "../../etc/passwd",
            *NAMES,
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(TAGS), inner, min_size=1, max_size=1)
        | st.dictionaries(st.sampled_from(["name", "title", "value", "set", "extra", "names", "a"]), inner, max_size=3)
        | st.tuples(st.just("^obj"), st.sampled_from(NAMES), st.integers(0, 2), inner, inner).map(
            lambda t: {t[0]: list(t[1:])}
        )
    ),
    max_leaves=20,
)


@settings(max_examples=examples(1000))
@given(anything)
def test_any_json_with_any_tags_gives_a_value_or_the_error(tree: Any) -> None:
    survives(json.dumps(tree).replace(": ", ":").replace(", ", ",").encode())


VALID: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "text"], "b": {}},
    "tuple": (1, (2,)),
    "set": {1, "a"},
    "frozen": frozenset({2}),
    "bytes": b"abc",
    "array": bytearray(b"x"),
    "int": 2**100,
    "float": [math.inf, -math.inf],
    "surrogate": "a\ud800\\",
    "dict": {1: 2, "^x": 3},
    "ordered": OrderedDict(a=1),
    "when": datetime(2024, 1, 1, tzinfo=UTC),
    "fold": datetime(2024, 1, 1, fold=1),
    "date": date(2024, 1, 1),
    "time": time(1, 2),
    "delta": timedelta(1, 2, 3),
    "zone": UTC,
    "decimal": Decimal("1.5"),
    "uuid": UUID(int=3),
    "path": Path("a/b"),
    "unset": msgspec.UNSET,
    "objects": [Color.RED, Plan("t"), Pair(1, 2), Job("n"), Model(name="n")],
    "numbers": np.arange(4).reshape(2, 2),
    "scalars": [np.float32(1), np.str_("x"), np.bytes_(b"y")],
}


def test_every_tag_occurs_in_the_text_that_is_mutated() -> None:
    text = encode(VALID, CODEC).decode()
    assert [tag for tag in TAGS if f'{{"{tag}":' not in text] == ["^zone"]


def test_mutated_texts_give_a_value_or_the_error() -> None:
    chance = random.Random(20240607)
    texts = [encode(value, CODEC) for value in VALID.values()]
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"-",
        b"0",
        b"9" * 30,
        b"null",
        b'{"^tuple":',
        b"^",
        b"\\",
        b"\xff",
        b"O",
    ]
    for _ in range(6000):
        text = bytearray(chance.choice(texts))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(text) + 1)
            until = min(len(text), at + chance.choice((0, 1, 1, 5)))
            text[at:until] = chance.choice((*pieces, bytes([chance.randrange(256)])))
        survives(bytes(text))


def test_every_cut_text_is_refused() -> None:
    text = encode({key: VALID[key] for key in ("tuple", "objects", "when")}, CODEC)
    for size in range(len(text)):
        with pytest.raises(Undecodable):
            decode(text[:size], CODEC)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "builtins.eval",
        "builtins.exec",
        "subprocess.Popen",
        "importlib.import_module",
        "pickle.loads",
        "perdure.values.codec.decode",
        "langchain_core.messages.os.system",
        "__main__.main",
    ],
)
def test_a_crafted_payload_does_not_execute(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "proof"
    monkeypatch.setattr(os, "system", lambda command: proof.write_text(command))
    for body in (
        f'["touch {proof}"]',
        f'{{"command":"touch {proof}"}}',
        f'"touch {proof}"',
        f'{{"^tuple":["touch {proof}"]}}',
    ):
        text = f'{{"a":{{"^obj":["{name}",1,{body}]}}}}'.encode()
        with pytest.raises(UnknownType):
            decode(text, CODEC)
        assert decode(text, CODEC, raw=True)["a"]["<type>"] == name
    assert not proof.exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"^ndarray":["O",[1],"EIGHT"]}',
        '{"^ndarray":["|O8",[1],"EIGHT"]}',
        '{"^ndarray":["<f8",[1000000000000],"EIGHT"]}',
        '{"^ndarray":["<f8",[-1],"EIGHT"]}',
        '{"^ndarray":["<f8",[1.0],"EIGHT"]}',
        '{"^ndarray":["<f8",[true],"EIGHT"]}',
        '{"^ndarray":["<f8",[4611686018427387904,4],""]}',
        '{"^ndarray":["|S0",[1000000000000],""]}',
        '{"^ndarray":["|V999999999",[1],""]}',
        '{"^ndarray":["<f8",[1],"EIGHT","X"]}',
        '{"^ndarray":[["|O8",[1]],[1],"EIGHT"]}',
        '{"^ndarray":[{"names":["a"],"formats":["O"],"offsets":[0],"size":8},[1],"EIGHT"]}',
        '{"^npscalar":["|O8","EIGHT"]}',
        '{"^ndarray":["i4,O",[1],"EIGHT"]}',
        '{"^bytes":"AAA"}',
        '{"^bytes":"A A="}',
        '{"^bytes":"é"}',
        '{"^bytes":3}',
        '{"^int":"12"}',
        '{"^int":"0x"}',
        '{"^int":5}',
        '{"^f":"1.5"}',
        '{"^f":"3ff0000000000000"}',
        '{"^s":"\\\\x"}',
        '{"^s":"\\\\"}',
        '{"^nothing":1}',
        '{"^":1}',
        '{"^set":[[1]]}',
        '{"^set":[1,1]}',
        '{"^dict":[[1]]}',
        '{"^dict":[[[1],2]]}',
        '{"^dict":[[1,2],[1,3]]}',
        '{"^dict":{}}',
        '{"^datetime":"2024-13-01T00:00:00"}',
        '{"^datetime":"2024-01-01T00:00:00+02:00"}',
        '{"^datetime":["x",null,0]}',
        '{"^datetime":["2024-01-01T00:00:00",5,0]}',
        '{"^datetime":["2024-01-01T00:00:00",null,2]}',
        '{"^date":"soon"}',
        '{"^timedelta":[9999999999999,0,0]}',
        '{"^timedelta":[1.5,0,0]}',
        '{"^tz":[[2,0,0],null]}',
        '{"^tz":null}',
        '{"^zone":"../../../etc/passwd"}',
        '{"^zone":"/etc/passwd"}',
        '{"^zone":"No/Such"}',
        '{"^zone":"a\\u0000b"}',
        '{"^decimal":"abc"}',
        '{"^decimal":"1e99999999999999999999"}',
        '{"^uuid":"123"}',
        '{"^path":["x","a"]}',
        '{"^range":[1,2]}',
        '{"^range":[1,2,0]}',
        '{"^complex":[1,2]}',
        '{"^deque":[[1,2],1]}',
        '{"^deque":[[],-1]}',
        '{"^defaultdict":["eval",[]]}',
        '{"^defaultdict":["list",5]}',
        '{"^unset":1}',
        '{"^obj":[]}',
        '{"^obj":["app.Plan",0,{}]}',
        '{"^obj":["app.Color",1,{"name":"__class__"}]}',
        '{"^obj":["app.Color",1,{"value":1}]}',
        '{"^obj":["app.Plan",1,[]]}',
        '{"^obj":["app.Plan",1,{"__class__":1}]}',
        '{"^obj":["app.Plan",1,{"title":1,"__init__":2}]}',
        '{"^obj":["app.Model",1,{"name":1},{"extra":{"model_fields":1}}]}',
        '{"^obj":["app.Model",1,{"name":1},{"set":5}]}',
        '{"^obj":["app.Pair",1,{"left":1}]}',
        '{"^obj":["app.Job",1,{"name":1,"__post_init__":2}]}',
        "[" * 5000 + "]" * 5000,
        '{"^tuple":[' * 300 + "]}" * 300,
        '{"^tuple":[' * 499 + "]}" * 499,
        "",
        " ",
        "nan",
        "[1,]",
        "\ufeff1",
        '"\\ud800"',
        "{1:2}",
    ],
)
def test_a_malformed_text_is_undecodable(text: str) -> None:
    with pytest.raises(Undecodable):
        decode(text.replace("EIGHT", base64.b64encode(bytes(8)).decode()).encode(), CODEC)


def test_hostile_text_allocates_no_more_than_a_multiple_of_its_size() -> None:
    texts = [
        b'{"^ndarray":["<f8",[99999999999],"AAAAAAAAAAA="]}',
        b'{"^range":[0,9223372036854775807,1]}',
        b'{"^decimal":"1e999999999"}',
        b'{"^deque":[[],9223372036854775807]}',
        b'{"^int":"0x' + b"f" * 100_000 + b'"}',
        b'{"^ndarray":["<U999999999",[0],""]}',
        b"[" + b"[]," * 30_000 + b"0]",
    ]
    np.zeros(1)
    for text in texts:
        tracemalloc.start()
        survives(text)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000 + 60 * len(text)


def test_a_key_that_occurs_twice_counts_the_last_time_and_does_no_harm() -> None:
    assert decode(b'{"a":1,"a":2}', CODEC) == {"a": 2}
    assert decode(b'{"^tuple":[1],"^tuple":[2]}', CODEC) == (2,)


def test_an_escaped_or_spaced_tag_is_read_the_same_way_or_as_a_dict_but_never_executes() -> None:
    assert decode(b'{ "^tuple":[1]}', CODEC) in ({"^tuple": [1]}, (1,))
    assert decode(b'{"\\u005etuple":[1]}', CODEC) in ({"^tuple": [1]}, (1,))
