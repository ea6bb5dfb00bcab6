"""LangChain's messages come back exactly as they were, whatever they hold, and share nothing with each other."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_samples import (
    CALL,
    CHUNK,
    CODEC,
    NEEDED,
    ODD,
    SAMPLES,
    USAGE,
    assert_equal,
    assert_same,
    full,
    lc,
    make,
    trip,
)
from pydantic import BaseModel
from soak import examples

from perdure.errors import Unstorable, UsageError
from perdure.values.codec import DEPTH_MAX, Codec, decode, encode
from perdure.values.model_tags import add_models, tag_of
from perdure.values.registry import Registry


@dataclass
class Holder:
    inner: Any


HOLDING: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda m: m, lambda v: v),
    "list": (lambda m: [m], lambda v: v[0]),
    "state": (lambda m: {"messages": [m, m], "n": 1}, lambda v: v["messages"][1]),
    "value": (lambda m: {"m": m}, lambda v: v["m"]),
    "tuple": (lambda m: (1, m), lambda v: v[1]),
    "mixed": (lambda m: ["a", {"x": 1}, m, None], lambda v: v[2]),
    "deep": (lambda m: {"a": {"b": [[{"c": {"d": [m]}}]]}}, lambda v: v["a"]["b"][0][0]["c"]["d"][0]),
    "dataclass": (lambda m: Holder([m]), lambda v: v.inner[0]),
    "dataclasses": (lambda m: [Holder(m), Holder(m)], lambda v: v[1].inner),
    "with another class": (lambda m: [Holder(1), m], lambda v: v[1]),
    "int keys": (lambda m: {1: m}, lambda v: v[1]),
}


def holder_codec() -> Codec:
    registry = Registry()
    registry.add(Holder, name="app.Holder")
    return Codec(registry=registry)


@pytest.mark.parametrize("holding", HOLDING)
def test_every_message_comes_back_from_every_container_under_its_own_tag(holding: str) -> None:
    put, get = HOLDING[holding]
    codec = holder_codec()
    for message in SAMPLES.values():
        text = encode(put(message), codec)
        assert b'{"^msg.' in text
        assert b"langchain" not in text
        assert_equal(get(decode(text, codec)), message)


def test_the_texts_are_short() -> None:
    assert encode(lc.HumanMessage("hi", id="1"), CODEC) == b'{"^msg.human":{"content":"hi","id":"1"}}'
    assert encode([lc.AIMessage("hi")], CODEC) == b'[{"^msg.ai":{"content":"hi"}}]'
    assert encode([lc.RemoveMessage(id="1")], CODEC) == b'[{"^msg.remove":{"content":"","id":"1"}}]'
    assert encode(lc.HumanMessage("hi", a=1), CODEC) == b'{"^msg.human":{"content":"hi","^extra":{"a":1}}}'
    unset = lc.HumanMessage.model_construct(content="hi", _fields_set=set())
    assert encode([unset], CODEC) == b'[{"^msg.human":{"content":"hi","^set":[]}}]'
    assert encode(lc.ToolMessage("x", tool_call_id="1", status="success"), CODEC) == (
        b'{"^msg.tool":{"content":"x","tool_call_id":"1","status":"success"}}'
    )


def test_alone_and_in_a_list_a_message_has_the_same_text() -> None:
    for message in SAMPLES.values():
        assert encode([message], CODEC) == b"[%b]" % encode(message, CODEC)
        assert encode([message, 1], CODEC) == b"[%b,1]" % encode(message, CODEC)


def test_every_message_class_of_langchain_has_a_tag() -> None:
    bases = (lc.BaseMessage, lc.BaseMessageChunk)
    classes = [c for c in vars(lc).values() if isinstance(c, type) and issubclass(c, lc.BaseMessage) and c not in bases]
    assert all(tag_of(f"{cls.__module__}.{cls.__qualname__}") for cls in classes)
    assert {type(message) for message in SAMPLES.values()} == set(classes)
    base = lc.BaseMessage(content="x", type="mine")
    assert encode(base, CODEC).startswith(b'{"^obj":')
    assert_equal(trip(base), base)


def test_a_message_is_what_pydantic_and_langchain_would_make() -> None:
    for message in SAMPLES.values():
        back = trip(message)
        assert back == type(message).model_validate(message.model_dump())
        if not isinstance(message, (lc.RemoveMessage, lc.BaseMessageChunk)):
            assert lc.messages_from_dict(lc.messages_to_dict([back])) == [message]
            assert lc.convert_to_messages([back]) == [message]
        validated = type(message).model_validate(message.model_dump())
        assert_equal(trip([validated])[0], validated)


def test_a_message_is_what_langgraphs_serializer_makes() -> None:
    module = pytest.importorskip("langgraph.checkpoint.serde.jsonplus")
    serde = module.JsonPlusSerializer()
    for message in SAMPLES.values():
        theirs = serde.loads_typed(serde.dumps_typed(message))
        assert theirs == trip(message)
        assert_equal(trip([theirs])[0], theirs)


@pytest.mark.parametrize("name", ODD)
def test_values_that_are_not_plain_come_back_from_every_field(name: str) -> None:
    value = ODD[name]
    for kind in NEEDED:
        for field in (*getattr(lc, kind).model_fields, "colour"):
            if name == "caret key" and field == "colour":
                continue
            message = make(kind)
            fields_set = set(message.__pydantic_fields_set__)
            setattr(message, field, value)
            unset = copy.copy(message)
            object.__setattr__(unset, "__pydantic_fields_set__", fields_set)
            for odd in (message, unset):
                assert b"^msg." in encode(odd, CODEC)
                assert_same(trip(odd), odd)
                assert_same(trip([make(kind), odd, make(kind)])[1], odd)


def test_an_odd_message_does_not_keep_those_around_it_from_being_written_together() -> None:
    many = [make(kind, str(at)) for at, kind in enumerate(itertools.islice(itertools.cycle(NEEDED), 1000))]
    many[300].additional_kwargs["when"] = datetime(2024, 1, 1, tzinfo=UTC)
    many[301].content = "a\ud800"
    many[302].additional_kwargs["n"] = 2**90
    many[999].response_metadata["^x"] = {"^y": 1}
    for back, message in zip(trip({"messages": many})["messages"], many, strict=True):
        assert_same(back, message)


def test_names_of_set_fields_come_back_whatever_they_are() -> None:
    every = list(lc.AIMessage.model_fields)
    for bits in range(2 ** len(every)):
        names = {name for at, name in enumerate(every) if bits >> at & 1}
        message = lc.AIMessage("hi", id="1", usage_metadata=USAGE)
        object.__setattr__(message, "__pydantic_fields_set__", names)
        assert_same(trip([message])[0], message)
    message = lc.HumanMessage("hi", colour=1)
    del message.colour
    assert "colour" in message.model_fields_set  # pydantic leaves it there
    assert_equal(trip([message])[0], message)
    message = lc.HumanMessage("hi")
    message.colour = 1
    assert_equal(trip([message])[0], message)


def test_extra_values_come_back_whatever_they_are() -> None:
    extras: list[Any] = [None, {}, {"a": 1}, {"^a": {"^b": 1}}, {"a": (1,)}, {"content": 1}, {"a b": OrderedDict()}]
    for extra in extras:
        message = lc.HumanMessage("hi")
        object.__setattr__(message, "__pydantic_extra__", extra)
        assert_same(trip(message), message)
        assert_same(trip([message])[0], message)


def test_a_message_whose_fields_are_in_another_order_keeps_that_order() -> None:
    message = lc.HumanMessage("hi", id="1", name="ann")
    name = message.__dict__.pop("name")
    message.__dict__["name"] = name
    assert list(message.__dict__)[-1] == "name"
    assert_equal(trip([message])[0], message)


def test_a_message_that_is_none_is_refused_with_its_path() -> None:
    empty = lc.HumanMessage.__new__(lc.HumanMessage)
    strange = lc.HumanMessage("hi")
    strange.__dict__["colour"] = 1
    lacking = lc.HumanMessage("hi")
    del lacking.__dict__["content"]
    itself = lc.HumanMessage("hi")
    itself.additional_kwargs["me"] = itself
    for message in (empty, strange, lacking):
        with pytest.raises(Unstorable) as caught:
            encode({"messages": [lc.HumanMessage("a"), message]}, CODEC)
        assert caught.value.path == 'state["messages"][1]'
    with pytest.raises(Unstorable, match="itself") as caught:
        encode({"messages": [itself]}, CODEC)
    assert caught.value.path == 'state["messages"][0].additional_kwargs["me"]'


def test_a_value_in_a_message_that_cannot_be_saved_is_named() -> None:
    many = [lc.HumanMessage("hi") for _ in range(200)]
    many[150].response_metadata["f"] = [print]
    with pytest.raises(Unstorable) as caught:
        encode({"messages": many}, CODEC)
    assert caught.value.path == 'state["messages"][150].response_metadata["f"][0]'
    with pytest.raises(Unstorable) as caught:
        encode([lc.HumanMessage("hi", colour=print)], CODEC)
    assert caught.value.path == "state[0].colour"


def test_what_is_nested_too_deeply_is_refused_and_what_is_saved_can_be_read() -> None:
    refused = 0
    for inner, outer in itertools.product((0, 1, 5, DEPTH_MAX - 10), range(DEPTH_MAX - 12, DEPTH_MAX + 2)):
        nested: Any = []
        for _ in range(inner):
            nested = [nested]
        value: Any = [lc.HumanMessage("hi", id="1", **({"additional_kwargs": {"a": nested}} if inner else {}))]
        for _ in range(outer if inner < 100 else outer - DEPTH_MAX + 12):
            value = [value]
        try:
            text = encode(value, CODEC)
        except Unstorable:
            refused += 1
            continue
        assert encode(decode(text, CODEC), CODEC) == text
        level = value
        while type(level) is list:
            level = level[0]
    assert 4 < refused < 50


def test_a_message_is_written_as_it_is_now() -> None:
    message = lc.AIMessage("hi", id="1", additional_kwargs={"a": [1]})
    state = {"messages": [message]}
    before = encode(state, CODEC)
    message.content = "changed"
    message.additional_kwargs["a"].append(2)
    message.tool_calls.append(CALL)
    message.colour = 3
    assert_equal(trip(state)["messages"][0], message)
    assert decode(before, CODEC)["messages"][0] == lc.AIMessage("hi", id="1", additional_kwargs={"a": [1]})


def containers(value: Any, found: list[int]) -> list[int]:
    """The ids of everything in a message that can be changed, itself included."""
    if isinstance(value, BaseModel):
        found += [id(value), id(value.__dict__), id(value.model_fields_set), id(value.__pydantic_extra__)]
        for part in (*value.__dict__.values(), *(value.__pydantic_extra__ or {}).values()):
            containers(part, found)
    elif isinstance(value, dict | list):
        found.append(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            containers(part, found)
    return found


def test_messages_share_nothing_that_can_be_changed() -> None:
    text = encode([*SAMPLES.values()], CODEC)
    alone = [decode(encode(message, CODEC), CODEC) for message in SAMPLES.values() for _ in range(2)]
    everything = [*SAMPLES.values(), *decode(text, CODEC), *decode(text, CODEC), *alone]
    found = containers(everything, [])
    assert len(found) == len(set(found))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "^a", "^msg.ai", "^set", "^tuple", "content"]), inner, max_size=3)
        | st.tuples(inner)
        | st.builds(lambda value: lc.HumanMessage("inner", additional_kwargs={"x": value}), inner)
    ),
    max_leaves=8,
)


@st.composite
def any_messages(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(list(NEEDED)))
    blocks = st.lists(st.text(max_size=5) | st.dictionaries(st.text(max_size=3), anything, max_size=2), max_size=3)
    message = make(kind, draw(st.text(max_size=20) | blocks))
    fields = list(type(message).model_fields)
    for name in draw(st.lists(st.sampled_from([*fields, "colour", "^size"]), max_size=4)):
        setattr(message, name, draw(anything))
    if draw(st.integers(0, 3)) == 0:
        names = draw(st.sets(st.sampled_from([*fields, "colour", "gone"]), max_size=5))
        object.__setattr__(message, "__pydantic_fields_set__", names)
    return message


@settings(max_examples=examples(400))
@given(st.lists(any_messages(), min_size=1, max_size=4))
def test_any_messages_come_back(many: list[Any]) -> None:
    text = encode({"messages": many}, CODEC)
    assert b"^msg." in text
    for back, message in zip(decode(text, CODEC)["messages"], many, strict=True):
        assert_same(back, message)
        assert_same(trip(message), message)
    assert encode(decode(text, CODEC), CODEC) == text
    decode(text, CODEC, raw=True)


def test_rebuilt_messages_do_what_messages_do() -> None:
    for message in SAMPLES.values():
        back = trip([message])[0]
        assert back.text == message.text
        assert back.pretty_repr() == message.pretty_repr()
        assert back.model_copy(update={"id": "9"}) == message.model_copy(update={"id": "9"})
        assert copy.deepcopy(back) == message
        assert_equal(copy.copy(back), message)
        assert_equal(pickle.loads(pickle.dumps(back)), message)
        assert repr(back) == repr(message)
        back.id = "9"
        back.colour = "blue"
        assert back.id == "9"
        assert back.colour == "blue"
        assert "id" in back.model_fields_set
        assert back != message
    first, second = trip([lc.AIMessageChunk("a", id="1"), lc.AIMessageChunk("b", tool_call_chunks=[CHUNK])])
    assert first + second == lc.AIMessageChunk("a", id="1") + lc.AIMessageChunk("b", tool_call_chunks=[CHUNK])
    assert (first + second).content == "ab"
    called = trip([full("AIMessage")])[0]
    assert called.tool_calls == [CALL]
    assert called.content_blocks == full("AIMessage").content_blocks


def test_a_tag_stands_for_one_class() -> None:
    for tag, cls in (("^msg.human", "ai.AIMessage"), ("^msg.other", "human.HumanMessage"), ("msg", "base.BaseMessage")):
        with pytest.raises(UsageError, match="stands for one class"):
            add_models("langchain_core.messages.", "langchain-core", {tag: cls})
    add_models("langchain_core.messages.", "langchain-core", {"^msg.human": "human.HumanMessage"})
