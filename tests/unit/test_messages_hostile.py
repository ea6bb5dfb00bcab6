"""Message texts from anybody, from other versions of LangChain, without it, and of classes that are near it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_samples import CODEC, SAMPLES, Mine, Secret, assert_equal, assert_same, lc, trip
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from soak import examples

from perdure.errors import Undecodable, UnknownType, Unstorable
from perdure.values.class_adapters import ModelAdapter
from perdure.values.codec import DEPTH_MAX, Codec, decode, encode
from perdure.values.registry import Registry


def test_a_subclass_is_written_like_any_model() -> None:
    registry = Registry()
    for cls in (Mine, Secret):
        registry.add(cls, name=f"app.{cls.__name__}")
    codec = Codec(registry=registry)
    for message in (Mine("hi", mood="bad", id="1"), Secret("hi")):
        text = encode([message, lc.HumanMessage("hi")], codec)
        assert text.startswith(b'[{"^obj":["app.')
        assert text.endswith(b',{"^msg.human":{"content":"hi"}}]')
        back = decode(text, codec)
        assert_equal(back[0], message)
        assert_equal(back[1], lc.HumanMessage("hi"))
    with pytest.raises(Unstorable, match="neither registered nor trusted"):
        encode([Mine("hi")], CODEC)


def test_a_message_class_that_is_registered_in_another_way_is_kept_in_that_way() -> None:
    own = Registry()
    own.add(lc.HumanMessage, dump=lambda message: message.content, load=lambda content: lc.HumanMessage(content))
    assert encode([lc.HumanMessage("hi")], Codec(registry=own)).endswith(b'HumanMessage",1,"hi"]}]')
    named = Registry()
    named.add(lc.HumanMessage, name="app.Human")
    assert encode([lc.HumanMessage("hi")], Codec(registry=named)).startswith(b'[{"^obj":["app.Human",1')
    newer = Registry()
    newer.add(lc.HumanMessage, version=2, upgrade={1: lambda old: old | {"content": old["content"].upper()}})
    codec = Codec(registry=newer)
    assert encode([lc.HumanMessage("hi")], codec).startswith(b'[{"^obj":[')
    text = b'{"^msg.human":{"content":"hi","^set":["content"],"^extra":{"a":1}}}'
    for wrapped in (text, b"[%b]" % text, b"[[%b],1]" % text):
        back = decode(wrapped, codec)
        while type(back) is list:
            back = back[0]
        expected = lc.HumanMessage("HI", a=1)
        object.__setattr__(expected, "__pydantic_fields_set__", {"content"})
        assert_equal(back, expected)


def test_texts_from_before_these_tags_are_read() -> None:
    def old_text(message: Any) -> bytes:
        body, extras = ModelAdapter(type(message)).take(message)
        name = f"{type(message).__module__}.{type(message).__qualname__}"
        return orjson.dumps({"^obj": [name, 1, body] if extras is None else [name, 1, body, extras]})

    for message in SAMPLES.values():
        if "carets" in repr(message.content) or "^a" in repr(message.content):
            continue  # was written with ^dict
        assert_equal(decode(old_text(message), CODEC), message)
        both = b"[%b,%b]" % (old_text(message), encode(message, CODEC))
        assert decode(both, CODEC) == [message, message]


HOSTILE = [
    '{"^msg.human":null}',
    '{"^msg.human":[]}',
    '{"^msg.human":"hi"}',
    '{"^msg.human":1}',
    '{"^msg.human":{}}',
    '{"^msg.human":{"id":"1"}}',
    '{"^msg.human":{"content":"a","role":"x"}}',
    '{"^msg.human":{"content":"a","__class__":"x"}}',
    '{"^msg.human":{"content":"a","__dict__":{}}}',
    '{"^msg.human":{"content":"a","__pydantic_fields_set__":["a"]}}',
    '{"^msg.human":{"content":"a","model_config":{}}}',
    '{"^msg.human":{"content":"a","^other":1}}',
    '{"^msg.human":{"content":"a","^set":null,"^set ":1}}',
    '{"^msg.human":{"content":"a","^set":5}}',
    '{"^msg.human":{"content":"a","^set":"content"}}',
    '{"^msg.human":{"content":"a","^set":{"a":1}}}',
    '{"^msg.human":{"content":"a","^set":[1]}}',
    '{"^msg.human":{"content":"a","^set":[["a"]]}}',
    '{"^msg.human":{"content":"a","^set":[null]}}',
    '{"^msg.human":{"content":"a","^set":{"^tuple":["a"]}}}',
    '{"^msg.human":{"content":"a","^extra":5}}',
    '{"^msg.human":{"content":"a","^extra":["a"]}}',
    '{"^msg.human":{"content":"a","^extra":{"^tuple":["a"]}}}',
    '{"^msg.human":{"content":"a","^extra":{"^dict":[[1,2]]}}}',
    '{"^msg.human":{"content":"a","^extra":{"^odict":[["a",2]]}}}',
    '{"^msg.human":{"content":"a","^extra":{"^unknown":1}}}',
    '{"^msg.human":{"content":{"^unknown":1}}}',
    '{"^msg.human":{"content":{"^tuple":1}}}',
    '{"^msg.human":{"^tuple":[1]}}',
    '{"^msg.tool":{"content":"a"}}',
    '{"^msg.chat":{"content":"a"}}',
    '{"^msg.robot":{"content":"a"}}',
    '{"^msg.":{"content":"a"}}',
    '{"^msg":["human",{"content":"a"}]}',
    '{"^msg.HumanMessage":{"content":"a"}}',
    '{"^msg.human.HumanMessage":{"content":"a"}}',
    '{"^msg.human":{"content":"a"},"^msg.ai":{"content":"a"},"x":{"^msg.ai":1}}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_refused(text: str) -> None:
    good = '{"^msg.human":{"content":"a"}}'
    for wrapped in (text, f"[{text}]", f"[{good},{text},{good}]", f'{{"a":[1,{text}]}}'):
        with pytest.raises(Undecodable):
            decode(wrapped.encode(), CODEC)


def test_deeply_nested_hostile_texts_are_refused() -> None:
    for levels in (DEPTH_MAX + 1, DEPTH_MAX + 50, 900):
        deep = "[" * levels + "]" * levels
        with pytest.raises(Undecodable):
            decode(f'[{{"^msg.human":{{"content":{deep}}}}}]'.encode(), CODEC)
        with pytest.raises(Undecodable):
            decode(("[" * levels + '{"^msg.human":{"content":"a"}}' + "]" * levels).encode(), CODEC)


def test_names_of_set_fields_are_only_names() -> None:
    back = decode(b'{"^msg.human":{"content":"a","^set":["__class__","content","content"]}}', CODEC)
    assert_same(back, lc.HumanMessage.model_construct(content="a", _fields_set={"__class__", "content"}))
    assert back.model_dump(exclude_unset=True) == {"content": "a"}


def test_texts_with_ever_new_orders_of_fields_take_no_more_memory() -> None:
    codec = Codec()
    fields = {"content": "a", "id": "1", "name": "n", "type": "human", "additional_kwargs": {}}
    for order in itertools.permutations(fields):
        back = decode(orjson.dumps([{"^msg.human": {name: fields[name] for name in order}}]), codec)[0]
        assert list(back.__dict__) == list(lc.HumanMessage.model_fields)
        assert back == lc.HumanMessage("a", id="1", name="n")
        assert back.model_fields_set == fields.keys()
    shape = codec.entry_tagged("^msg.human").shape
    assert shape is not None
    assert len(shape.readers) <= 64


hostile = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=4) | st.sampled_from(["content", "id", "__class__"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["^msg.human", "^msg.ai", "^msg.tool", "^msg.remove", "^msg.ai_chunk", "^tuple", "^dict", "^odict", "a"]
            ),
            inner,
            max_size=1,
        )
        | st.dictionaries(
            st.sampled_from(["content", "id", "name", "role", "tool_call_id", "^set", "^extra", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(1000))
@given(hostile)
def test_any_json_with_message_tags_gives_a_value_or_the_error(tree: Any) -> None:
    text = orjson.dumps([tree, {"^msg.human": tree}], option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    for raw in (False, True):
        try:
            decode(text, CODEC, raw=raw)
        except Undecodable:
            pass


def test_raw_gives_readable_dicts_of_what_is_stored() -> None:
    message = lc.AIMessage("hi", id="1", additional_kwargs={"t": (1,)}, colour="red")
    plain = lc.HumanMessage.model_construct(content="hi", _fields_set=set())
    assert decode(encode({"messages": [message, plain]}, CODEC), CODEC, raw=True) == {
        "messages": [
            {
                "<type>": "langchain_core.messages.ai.AIMessage",
                "content": "hi",
                "additional_kwargs": {"t": (1,)},
                "id": "1",
                "colour": "red",
            },
            {"<type>": "langchain_core.messages.human.HumanMessage", "content": "hi"},
        ]
    }


SCRIPT = """
import sys
from perdure.errors import UnknownType
from perdure.values.codec import Codec, decode
human, chunk = b'{"^msg.human":{"content":"hi"}}', b'{"^msg.ai_chunk":{"content":"a"}}'
text = b'{"messages":[%b,%b],"m":{"^msg.remove":{"content":"","id":"1"}}}' % (human, chunk)
assert "langchain_core" not in sys.modules and "pydantic" not in sys.modules
raw = decode(text, Codec(), raw=True)
assert raw["messages"][0] == {"<type>": "langchain_core.messages.human.HumanMessage", "content": "hi"}, raw
assert "langchain_core" not in sys.modules and "pydantic" not in sys.modules
if sys.argv[1] == "absent":
    sys.modules["langchain_core"] = None
    for part in (text, human, b"[%b,%b]" % (human, chunk)):
        try:
            decode(part, Codec())
        except UnknownType as problem:
            assert "pip install" in str(problem) and problem.type_name.startswith("langchain_core.messages."), problem
        else:
            raise AssertionError("no error")
else:
    value = decode(text, Codec())
    from langchain_core.messages import AIMessageChunk, HumanMessage, RemoveMessage
    assert value == {"messages": [HumanMessage("hi"), AIMessageChunk("a")], "m": RemoveMessage(id="1")}
"""


@pytest.mark.parametrize("case", ["present", "absent"])
def test_langchain_is_imported_only_for_a_message_and_its_absence_is_named(case: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, case], check=True, timeout=60)


def other_version(monkeypatch: pytest.MonkeyPatch, cls: type) -> Codec:
    parts = ("", ".messages", ".messages.human", ".messages.ai")
    for name in [f"langchain_core{part}" for part in parts]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    cls.__module__, cls.__qualname__ = "langchain_core.messages.human", "HumanMessage"
    vars(sys.modules["langchain_core.messages.human"])["HumanMessage"] = cls
    return Codec()


def test_a_field_that_is_new_in_langchain_gets_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class HumanMessage(BaseModel):
        model_config = ConfigDict(extra="allow")
        content: str
        seen: bool = False
        score: float = 0.0
        when: list[int] = Field(default_factory=lambda: [7])
        tags: list[str] = []
        id: str | None = None
        double: str = Field(default_factory=lambda data: data["content"] * 2)

    codec = other_version(monkeypatch, HumanMessage)
    for text in (b'{"^msg.human":{"content":"hi","id":"1"}}', b'{"^msg.human":{"content":"hi","id":"1","^extra":{}}}'):
        back = decode(b"[%b,%b]" % (text, text), codec)
        for message in back:
            assert_equal(message, HumanMessage(content="hi", id="1"))
        assert back[0].when is not back[1].when
        assert back[0].tags is not back[1].tags
    # Defaults that are not simple are written, so that a change of them changes nothing that was saved.
    more = HumanMessage.model_validate({"content": "hi", "seen": True, "tags": ["a"], "more": 1})
    for message in (HumanMessage(content="hi"), more):
        assert_equal(trip([message], codec)[0], message)
        assert_equal(trip(message, codec), message)
        assert b'"score":0.0' in encode([message], codec)


def test_a_field_that_langchain_no_longer_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class HumanMessage(BaseModel):
        content: str

    codec = other_version(monkeypatch, HumanMessage)
    assert_equal(trip([HumanMessage(content="hi")], codec)[0], HumanMessage(content="hi"))
    with pytest.raises(Undecodable, match=r"'id'.*pip install -U langchain-core"):
        decode(b'[{"^msg.human":{"content":"hi","id":"1"}}]', codec)
    with pytest.raises(Undecodable, match="extra"):
        decode(b'[{"^msg.human":{"content":"hi","^extra":{"a":1}}}]', codec)
    with pytest.raises(UnknownType, match="pip install -U langchain-core"):
        decode(b'[{"^msg.ai":{"content":"hi"}}]', codec)


def test_a_class_with_private_attributes_is_written_like_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class HumanMessage(BaseModel):
        content: str
        _cache: list[int] = PrivateAttr(default_factory=list)

    codec = other_version(monkeypatch, HumanMessage)
    assert encode([HumanMessage(content="hi")], codec).startswith(b'[{"^obj":')
    back = decode(b'{"^msg.human":{"content":"hi"}}', codec)
    assert_equal(back, HumanMessage(content="hi"))
