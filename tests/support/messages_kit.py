"""Messages of all kinds, usual and not, and changes of them in place."""

from __future__ import annotations

import shutil
import sysconfig
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage

from perdure.langgraph import PerdureSaver, columns


class Special(HumanMessage):
    """A subclass: no message as LangChain makes them."""


ATOMS = st.sampled_from(["", "a", "^msg", "ü\n", None, 0, 1, -1, True, False, 0.0, -0.0, 1.0, 1.5, 2**40])
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc^"), inner, max_size=2),
    max_leaves=4,
)
DICTS = st.dictionaries(st.sampled_from(["a", "b", "^c"]), VALUES, max_size=2)
CONTENTS = st.sampled_from(["", "hello", "ü", "^"]) | st.lists(DICTS, max_size=2)


@st.composite
def messages(draw: st.DrawFn) -> AnyMessage:
    kind: Any = draw(st.sampled_from([*[HumanMessage, AIMessage, SystemMessage, ToolMessage] * 4, Special]))
    fields: dict[str, Any] = {"content": draw(CONTENTS)}
    if draw(st.booleans()):
        fields["id"] = draw(st.sampled_from(["1", "2"]))
    if draw(st.booleans()):
        fields["additional_kwargs"] = draw(DICTS)
    if kind is ToolMessage:
        fields["tool_call_id"] = "call"
        if draw(st.booleans()):
            fields["artifact"] = draw(VALUES) if draw(st.integers(0, 4)) else (1, 2)
    if kind is HumanMessage and draw(st.integers(0, 9)) == 9:
        fields["unheard_of"] = draw(VALUES)
    made: AnyMessage = kind(**fields)
    if draw(st.booleans()):
        made.__dict__["name"] = draw(ATOMS)
    return made


CHANGES = (
    "content",
    "kwargs",
    "nested",
    "field",
    "set",
    "unset",
    "extra",
    "share",
    "swap",
    "remove",
    "insert",
    "append",
    "type",
    "type",
)


def change(values: list[Any], data: st.DataObject) -> None:
    """One change, in place."""
    what = data.draw(st.sampled_from(CHANGES))
    if what == "append" or not values:
        values.append(data.draw(messages()))
        return
    at = data.draw(st.integers(0, len(values) - 1))
    one = values[at]
    fields = one.__dict__
    if what == "content":
        one.content = data.draw(CONTENTS)
    elif what == "kwargs":
        one.additional_kwargs[data.draw(st.sampled_from("abc"))] = data.draw(VALUES)
    elif what == "nested":
        for held in list(one.additional_kwargs.values()):
            if type(held) is list:
                held.append(data.draw(VALUES))
            elif type(held) is dict:
                held["more"] = data.draw(VALUES)
    elif what == "field":
        fields[data.draw(st.sampled_from(["name", "id", "response_metadata"]))] = data.draw(VALUES)
    elif what == "set":
        one.__pydantic_fields_set__.add("name")
    elif what == "unset":
        one.__pydantic_fields_set__.discard(data.draw(st.sampled_from(["id", "additional_kwargs"])))
    elif what == "extra":
        one.__pydantic_extra__["beside"] = data.draw(VALUES)
    elif what == "share":
        one.additional_kwargs = fields["response_metadata"] = values[0].additional_kwargs
    elif what == "swap":
        values[at], values[0] = values[0], one
    elif what == "remove":
        del values[at]
    elif what == "insert":
        values.insert(at, data.draw(messages()))
    else:  # the same values, of other types
        for message in values:
            message.__dict__.update({name: retyped(value) for name, value in message.__dict__.items()})


def retyped(value: Any) -> Any:
    """The same value where numbers are of other types: equal, and another text."""
    if isinstance(value, list):
        return [retyped(item) for item in value]
    if isinstance(value, dict):
        return {key: retyped(item) for key, item in value.items()}
    if type(value) is bool:
        return int(value)
    if type(value) is int:
        return float(value)
    return -value if type(value) is float and value == 0 else bool(value) if value == 1 else value


@cache
def message_codec() -> Any:
    """The codec of a saver, which knows LangChain's messages."""
    with PerdureSaver(":memory:", trust=[__name__]) as saver:
        return saver._codec


def mutable_parts(value: Any) -> set[int]:
    """The ids of all objects in it that can be changed."""
    found: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | dict | set | HumanMessage | AIMessage | SystemMessage | ToolMessage):
            if id(one) in found:
                continue
            found.add(id(one))
            if isinstance(one, list | set):
                waiting += one
            elif isinstance(one, dict):
                waiting += one.values()
            else:
                waiting += (one.__dict__, one.__pydantic_fields_set__, one.__pydantic_extra__)
    return found


def accelerator() -> Any:
    """The C module. A machine that could have built it must have it; the run says where one could not."""
    if columns.speed is not None:
        return columns.speed
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"perdure-speed is not built: there is no C compiler ({compiler})")
    pytest.fail("perdure-speed is not installed, or is an old build: pip install --force-reinstall ./speed")
