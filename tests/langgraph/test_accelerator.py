"""The accelerator does what Python does: the same messages are unchanged, the same copies are made. It keeps count of
every object, survives what is no message, and the garbage collector has nothing to do with its copies."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from messages_kit import accelerator, change, message_codec, messages, mutable_parts
from soak import examples

from perdure.langgraph import columns
from perdure.langgraph.columns import Columns, PlainColumns, SpeedColumns
from perdure.langgraph.remembered import NOTHING, write_messages


@pytest.fixture(autouse=True)
def speed() -> Any:
    return accelerator()


def both_columns(values: list[Any]) -> list[Columns]:
    """What is remembered of messages, in both ways."""
    made: list[Columns] = []
    codec = message_codec()
    for kind in (PlainColumns, SpeedColumns):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(columns, "columns_class", kind)
            written = write_messages(values, NOTHING, codec)
        made.append(written.messages.columns if written is not None else kind())
    assert len(made[0].kinds) == len(made[1].kinds)
    return made


def plain(message: Any) -> tuple[Any, ...]:
    """All of a message, with the order of its fields and the types of its values."""
    slots = message.__pydantic_fields_set__, message.__pydantic_extra__, message.__pydantic_private__
    return type(message), repr(message.__dict__), *slots


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_both_find_the_same_messages_unchanged_and_make_the_same_copies(data: st.DataObject) -> None:
    values: list[Any] = data.draw(st.lists(messages(), max_size=6))
    python, c = both_columns(values)
    number = len(c.kinds)
    made = [one.copies(number, in_row=False) for one in (python, c)]
    assert [plain(message) for message in made[0]] == [plain(message) for message in made[1]]
    assert mutable_parts(made[1]).isdisjoint(
        mutable_parts([*c.fields, *c.names, *values, *c.copies(number, in_row=False)])
    )
    for handed in (values, *made):
        for _ in range(data.draw(st.integers(0, 3))):
            change(handed, data)
        assert not number or python.unchanged(handed, number) == c.unchanged(handed, number)


def samples() -> list[Any]:
    return [message for _ in range(8) for message in different()]


def different() -> list[Any]:
    return [
        HumanMessage("text", id="1"),
        AIMessage("", tool_calls=[{"name": "f", "args": {"a": [1, 2.5, None, {"b": True}]}, "id": "2"}]),
        ToolMessage([{"type": "text", "text": "ü"}], tool_call_id="2", artifact={"deep": [[[{}]]]}),
        AIMessageChunk(content="", usage_metadata={"input_tokens": 1, "output_tokens": 2**62, "total_tokens": 3}),
    ]


def test_copies_keep_no_memory_and_change_no_count(speed: Any) -> None:
    _, c = both_columns(samples())
    number = len(c.kinds)
    assert number == 32
    other = samples()
    other[20].additional_kwargs["odd"] = object()

    def work() -> None:
        for _ in range(200):
            made = c.copies(number, in_row=False)
            assert c.unchanged(made, number) == number
            assert c.unchanged(other, number) == 20
            with pytest.raises(TypeError):
                speed.copies(c.kinds, [*c.fields[:-1], None], c.names, c.extras, number)
            with pytest.raises(IndexError):
                speed.unchanged(made, c.kinds, c.fields, c.names, c.extras[:5], number)

    shared: list[Any] = [HumanMessage, None, "1", "text", c.fields[0], c.names[0], {}.__class__]
    work()
    gc.collect()
    tracemalloc.start()
    try:
        counts, (before, _) = [sys.getrefcount(one) for one in shared], tracemalloc.get_traced_memory()
        work()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert (
            max(abs(sys.getrefcount(one) - count) for one, count in zip(shared, counts, strict=True)) < 1000
        )  # of 6,400 copies
        assert after - before < 20_000
    finally:
        tracemalloc.stop()


def test_a_collection_leaves_copies_alone_and_they_are_freed_without_one() -> None:
    _, c = both_columns(samples())
    made = c.copies(32, in_row=False)
    assert not any(map(gc.is_tracked, made))
    made[0].additional_kwargs["more"] = [made[1]]
    made[1].tool_calls.append({"name": "g", "args": {"list": [made[0].additional_kwargs["more"][0].content]}})
    made[2].content = [{"type": "text", "text": "changed"}]
    setattr(made[2], "status", "error")  # noqa: B010
    expected = copy.deepcopy([plain(message) for message in made])
    gc.collect()
    assert [plain(message) for message in made] == expected
    gc.disable()
    try:
        alive = tracemalloc_bytes(lambda: c.copies(32, in_row=False))
    finally:
        gc.enable()
    assert alive < 20_000  # Python keeps a few for the next


def tracemalloc_bytes(make: Any) -> int:
    """What is left in memory of what was made and dropped a hundred times."""
    make()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            make()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


class Evil:
    """Compares by code that changes the list that is being compared."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __hash__(self) -> int:
        return hash("id")

    def __eq__(self, other: object) -> bool:
        self.values.clear()
        raise ZeroDivisionError


def test_what_is_no_message_is_changed_and_harms_nothing(speed: Any) -> None:
    _, c = both_columns(samples())

    def unchanged(spoil: Any) -> int:
        values: list[Any] = c.copies(32, in_row=False)
        spoil(values)
        return c.unchanged(values, 32)

    def delete_slots(values: list[Any]) -> None:
        del values[3].__pydantic_fields_set__, values[4].__pydantic_extra__

    def other_dict(values: list[Any]) -> None:
        values[5].__dict__ = {**values[5].__dict__, "more": 1}

    def cycle(values: list[Any]) -> None:
        values[2].artifact["deep"][0][0][0]["self"] = values[2].artifact

    class Sub(HumanMessage):
        pass

    def subclass(values: list[Any]) -> None:
        values[0] = Sub(content="text", id="1")

    assert unchanged(delete_slots) == 3
    assert unchanged(other_dict) == 5
    assert unchanged(cycle) == 2
    assert unchanged(subclass) == 0
    assert unchanged(lambda values: values.__setitem__(7, None)) == 7
    assert unchanged(lambda values: values.__delitem__(slice(9, None))) == 9
    values: list[Any] = c.copies(32, in_row=False)
    values[4].__pydantic_fields_set__ = {Evil(values) if name == "id" else name for name in c.names[4]}
    with pytest.raises(ZeroDivisionError):
        c.unchanged(values, 32)
    assert values == []
    wrongs: list[tuple[Any, ...]] = [(), (1,), ([], [], [], [], -1), ([], [], [], [], [], "1"), ([], [], [], (), [], 1)]
    for wrong in wrongs:
        for function in (speed.copies, speed.unchanged):
            with pytest.raises((TypeError, IndexError)):
                function(*wrong)
    with pytest.raises(TypeError):
        speed.copies([int], [{}], [set()], [None], 1)


@pytest.mark.parametrize(("setting", "expected"), [("0", "PlainColumns"), ("", "SpeedColumns")])
def test_it_is_used_where_it_is_installed_unless_a_variable_leaves_it_out(setting: str, expected: str) -> None:
    code = "from perdure.langgraph.columns import new_columns; print(type(new_columns()).__name__)"
    environment = {**os.environ, "PERDURE_SPEED": setting}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_message_that_was_copied_is_a_message_like_any_other() -> None:
    _, c = both_columns(samples())
    made: list[AnyMessage] = c.copies(4, in_row=False)
    for one, expected in zip(made, samples(), strict=False):
        assert one == expected
        assert one.model_dump_json() == expected.model_dump_json()
        assert copy.deepcopy(one) == one.model_copy(deep=True) == expected
        assert one.model_copy(update={"content": "x"}).content == "x"
