"""Messages of every class and with every sort of content, and what makes two of them the same."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import PrivateAttr

from perdure.values.codec import Codec, decode, encode

lc: Any = pytest.importorskip("langchain_core.messages")

CODEC = Codec()
CALL = {"name": "search", "args": {"q": "x", "n": [1, 2.5, None]}, "id": "call_1", "type": "tool_call"}
BAD_CALL = {"name": "search", "args": "{", "id": "call_2", "error": "no JSON", "type": "invalid_tool_call"}
CHUNK = {"name": "search", "args": '{"q":', "id": "call_1", "index": 0, "type": "tool_call_chunk"}
USAGE = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_token_details": {"cache_read": 1}}
CONTENTS: dict[str, Any] = {
    "text": "Hello, world",
    "empty": "",
    "unicode": "héllo \u2028 ☃ 🎉 \x00",
    "carets": '^msg {"^msg.human":{"content":"x"}} ^^',
    "list": ["a", "b"],
    "blocks": [{"type": "text", "text": "a"}, "b", {"type": "image_url", "image_url": {"url": "data:x", "^a": 1}}],
    "none": [],
}
# What each class needs beside its content.
NEEDED: dict[str, dict[str, Any]] = {
    "HumanMessage": {},
    "AIMessage": {},
    "SystemMessage": {},
    "ToolMessage": {"tool_call_id": "call_1"},
    "FunctionMessage": {"name": "f"},
    "ChatMessage": {"role": "critic"},
    "HumanMessageChunk": {},
    "AIMessageChunk": {},
    "SystemMessageChunk": {},
    "ToolMessageChunk": {"tool_call_id": "call_1"},
    "FunctionMessageChunk": {"name": "f"},
    "ChatMessageChunk": {"role": "critic"},
}
COMMON: dict[str, Any] = {
    "id": "7b1f",
    "name": "ann",
    "additional_kwargs": {"a": {"b": [1, {"c": None}]}},
    "response_metadata": {"model_name": "x", "logprobs": None},
}
OPTIONAL: dict[str, dict[str, Any]] = {
    "AIMessage": {"tool_calls": [CALL], "invalid_tool_calls": [BAD_CALL], "usage_metadata": USAGE},
    "AIMessageChunk": {"tool_call_chunks": [CHUNK], "usage_metadata": USAGE, "chunk_position": "last"},
    "ToolMessage": {"artifact": {"rows": [[1, 2], [3, 4]]}, "status": "error"},
    "ToolMessageChunk": {"artifact": {"rows": [[1, 2], [3, 4]]}, "status": "error"},
}


def make(kind: str, content: Any = "hi", **fields: Any) -> Any:
    return getattr(lc, kind)(content=copy.deepcopy(content), **copy.deepcopy(NEEDED[kind] | fields))


def full(kind: str, content: Any = "hi") -> Any:
    return make(kind, content, **COMMON, **OPTIONAL.get(kind, {}))


def all_samples() -> dict[str, Any]:
    made: dict[str, Any] = {"remove": lc.RemoveMessage(id="7"), "remove all": lc.RemoveMessage(id="__remove_all__")}
    for kind in NEEDED:
        for name, content in CONTENTS.items():
            made[f"{kind} {name}"] = make(kind, content)
            made[f"{kind} {name} id"] = make(kind, content, id="7")
            made[f"{kind} {name} full"] = full(kind, content)
            made[f"{kind} {name} extra"] = make(kind, content, colour={"red": [1]}, size=None)
    return made


SAMPLES = all_samples()


def trip(value: Any, codec: Codec = CODEC) -> Any:
    return decode(encode(value, codec), codec)


def assert_same(back: Any, message: Any) -> None:
    """Equal in every respect that one can see; types of nested values show in the repr."""
    assert type(back) is type(message)
    assert repr(back.__dict__) == repr(message.__dict__)
    assert list(back.__dict__) == list(message.__dict__)
    assert back.__pydantic_fields_set__ == message.__pydantic_fields_set__
    assert type(back.__pydantic_fields_set__) is set
    assert repr(back.__pydantic_extra__) == repr(message.__pydantic_extra__)
    assert back.__pydantic_private__ == message.__pydantic_private__


def assert_equal(back: Any, message: Any) -> None:
    assert_same(back, message)
    assert back == message
    assert back.model_dump() == message.model_dump()
    assert back.model_dump_json() == message.model_dump_json()
    assert back.model_dump(exclude_unset=True) == message.model_dump(exclude_unset=True)


ODD: dict[str, Any] = {
    "tuple": (1, (2, "a")),
    "datetime": datetime(2024, 1, 1, tzinfo=UTC),
    "set": {1, 2},
    "bytes": b"\x00",
    "surrogate": "a\ud800",
    "caret key": {"^x": 1},
    "looks like a tag": {"^msg.human": {"content": "x"}},
    "big int": 2**70,
    "nan": math.nan,
    "inf": [math.inf, {"x": -math.inf}],
    "int keys": {1: 2},
    "ordered": OrderedDict(a=1),
    "message": lc.AIMessage("inner", id="9"),
    "messages": [lc.AIMessage("inner"), lc.HumanMessage("inner", additional_kwargs={"x": (1,)})],
    "false": False,
    "zero": 0,
    "empty ordered": OrderedDict(),
    "empty tuple": (),
    "unset": msgspec.UNSET,
    "array": np.arange(4).reshape(2, 2),
    "empty array": np.zeros(0),
}


class Mine(lc.HumanMessage):  # type: ignore[misc]
    mood: str = "good"


class Secret(lc.HumanMessage):  # type: ignore[misc]
    _hidden: list[int] = PrivateAttr(default_factory=lambda: [1])
