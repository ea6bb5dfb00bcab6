"""Messages that did not change are not written again, and what is handed out is nobody else's: whatever happens to the
objects in between, a checkpoint is what it was when it was put."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, MessagesState, StateGraph
from messages_kit import Special, change, message_codec, messages, mutable_parts
from soak import examples

from perdure.adapters import encode
from perdure.errors import UnknownType
from perdure.langgraph import PerdureSaver
from perdure.langgraph.history import History
from perdure.langgraph.remembered import NOTHING, Remembered, write_messages

pytestmark = pytest.mark.usefixtures("columns_class")


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_written_is_what_encoding_all_of_it_gives(data: st.DataObject) -> None:
    codec = message_codec()
    values: list[Any] = data.draw(st.lists(messages(), min_size=1, max_size=6))
    before, text = NOTHING, b""
    for _ in range(data.draw(st.integers(1, 4))):
        expected = encode(values, codec)
        written = write_messages(values, before, codec, text[: before.size] if data.draw(st.booleans()) else b"")
        if written is None:
            before, text = NOTHING, expected
        else:
            text = text[: written.kept] + written.text
            before = written.messages
            read = before.read(text[before.size :], codec)
            assert encode(read, codec) == expected
            _check_apart(read, values, before)
        assert text == expected
        for _ in range(data.draw(st.integers(0, 3))):
            change(values, data)


def _check_apart(read: list[Any], values: list[Any], remembered: Remembered) -> None:
    """Nothing that can be changed is in two of: what is read, was written, is remembered, is read again."""
    again = remembered.copies()
    columns = remembered.columns
    sides = [
        mutable_parts(read),
        mutable_parts(values),
        mutable_parts([*columns.fields, *columns.names]),
        mutable_parts(again),
    ]
    for at, side in enumerate(sides):
        for other in sides[at + 1 :]:
            assert side.isdisjoint(other)


def test_lists_that_follow_the_same_one_do_not_meet() -> None:
    codec = message_codec()
    first: list[Any] = [HumanMessage(str(n), id=str(n)) for n in range(200)]
    start = write_messages(first, NOTHING, codec)
    assert start is not None
    texts: list[bytes] = []
    for answer in ("one", "two"):
        values = [*start.messages.copies(), AIMessage(answer)]
        written = write_messages(values, start.messages, codec)
        assert written is not None
        assert written.kept == start.messages.size
        texts.append(start.text[: written.kept] + written.text)
        assert texts[-1] == encode(values, codec)
        assert encode(written.messages.copies(), codec) == texts[-1]
    changed = copy.deepcopy(first)
    changed[130].content = "other"
    written = write_messages(changed, start.messages, codec)
    assert written is not None
    assert 0 < written.kept < start.messages.size
    assert start.text[: written.kept] + written.text == encode(changed, codec)


def test_messages_between_changed_ones_are_not_encoded_again() -> None:
    codec = message_codec()
    values: list[Any] = [HumanMessage(f"text {n}", id=str(n)) for n in range(200)]
    start = write_messages(values, NOTHING, codec)
    assert start is not None
    before = start.messages
    values[0].additional_kwargs["seen"] = [1]
    values[99] = AIMessage("of another class, with more fields", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    values[130].content = ""
    values.append(AIMessage("new"))
    written = write_messages(values, before, codec, start.text[: before.size])
    assert written is not None
    assert start.text[: written.kept] + written.text == encode(values, codec)
    after = written.messages
    encoded = [at for at in range(200) if after.columns.fields[at] is not before.columns.fields[at]]
    assert encoded == [0, 99, 130]
    assert encode(after.copies(), codec) == encode(values, codec)
    assert after.unchanged(values, codec) is after
    values[199].content = "changed too"
    assert after.unchanged(values, codec).number == 199
    assert encode(before.copies(), codec) == start.text, "the parent's messages are as they were"


def test_a_graph_that_changes_old_messages_in_place(saver_url: str) -> None:
    """Each checkpoint has what the messages were then, in this process and in another that resumes."""

    def node(state: MessagesState) -> dict[str, Any]:
        for number, message in enumerate(state["messages"]):
            message.additional_kwargs["seen"] = [*message.additional_kwargs.get("seen", []), len(state["messages"])]
            if number == 0:
                message.content = f"changed {len(state['messages'])}"
        return {"messages": [AIMessage(f"answer {len(state['messages'])}", response_metadata={"n": 1})]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    config: Any = {"configurable": {"thread_id": "t"}}
    results: list[list[Any]] = []
    for _ in range(3):  # opened anew each time: nothing is remembered
        with PerdureSaver(saver_url) as saver:
            graph = builder.compile(checkpointer=saver)
            for turn in range(3):
                result = graph.invoke({"messages": [HumanMessage(f"question {turn}")]}, config)
                results.append(copy.deepcopy(result["messages"]))
                result["messages"][0].content = "changed by the caller"
                got = graph.get_state(config).values["messages"]
                assert got == results[-1]
                got[0].additional_kwargs["seen"].append("changed by a reader")
                assert graph.get_state(config).values["messages"] == results[-1]
    with PerdureSaver(saver_url) as saver:
        graph = builder.compile(checkpointer=saver)
        ends = [state for state in graph.get_state_history(config) if not state.next]
        assert [state.values["messages"] for state in reversed(ends)] == results


def test_a_history_is_what_its_checkpoints_are_one_by_one(saver: PerdureSaver) -> None:
    """Whatever was changed between two of them, and whatever a reader does to the states that it has got."""
    chance = random.Random(7)
    values: dict[str, Any] = {"a": 1, "messages": [], "notes": ["x"], "more": []}
    parents: dict[str, str] = {}
    for number in range(120):
        for name in ("messages", "more")[: chance.choice([1, 2])]:
            values[name] += [
                HumanMessage(f"question {number}", id=str(number)),
                AIMessage("a", response_metadata={"n": [1]}),
            ]
        if number % 9 == 5:
            values["messages"][chance.randrange(len(values["messages"]))].content = f"other {number}"
        if number % 13 == 7:
            values["messages"].insert(3, ToolMessage("t", tool_call_id="1", artifact=(1, number)))
        if number % 30 == 29:
            del values["messages"][: chance.randrange(40)]
        values["a"] = chance.choice([1, True, 1.0, "ü"])
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = values
        checkpoint["channel_versions"] = dict.fromkeys(values, number)
        thread = str(number % 8 == 0)
        where = {"thread_id": thread, "checkpoint_id": parents.get(thread), "checkpoint_ns": ""}
        config: Any = {"configurable": where}
        saver.put(config, checkpoint, {"step": number}, dict.fromkeys(values, number))
        parents[thread] = checkpoint["id"]
    codec = message_codec()
    for which in ({"configurable": {"thread_id": "False"}}, None):
        listed = []
        for found in saver.list(which):  # type: ignore[arg-type]
            listed.append((found.config, encode(found.checkpoint, codec), found.metadata))
            for message in found.checkpoint["channel_values"]["messages"]:
                message.content, message.additional_kwargs["x"] = "changed by a reader", 1
                message.__pydantic_fields_set__.clear()
        for config, shown, metadata in listed:
            alone = saver.get_tuple(config)
            assert alone is not None
            assert (encode(alone.checkpoint, codec), alone.metadata) == (shown, metadata)
    assert len(listed) == 120


def put_all(saver: PerdureSaver, states: list[list[Any]]) -> list[str]:
    """Put checkpoints with these messages, one after the other, and return their ids, the newest first."""
    where: dict[str, Any] = {"thread_id": "t", "checkpoint_ns": ""}
    ids: list[str] = []
    for number, values in enumerate(states):
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"], checkpoint["channel_versions"] = {"messages": values}, {"messages": number}
        where = saver.put({"configurable": where}, checkpoint, {"step": number}, {"messages": number})["configurable"]
        ids.insert(0, checkpoint["id"])
    return ids


def growing(number: int) -> list[list[Any]]:
    values = [HumanMessage(str(at), id=str(at)) for at in range(number)]
    return [values[: at + 1] for at in range(number)]


def test_a_list_gives_out_what_it_can_read_before_it_raises(saver_url: str) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    with PerdureSaver(saver_url, trust=["messages_kit"]) as saver:
        ids = put_all(saver, [*growing(4), [Special(content="odd")], *growing(9)])
    with PerdureSaver(saver_url) as saver:
        listed = saver.list(config)
        assert [next(listed).checkpoint["id"] for _ in range(9)] == ids[:9]
        with pytest.raises(UnknownType):
            next(listed)


def test_a_list_reads_at_most_as_much_again_as_its_caller_takes(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = put_all(saver, growing(10))
    read: list[int] = []
    states = History.states

    def counted(self: History, entries: Any) -> list[Any]:
        read.append(len(entries))
        return states(self, entries)

    monkeypatch.setattr(History, "states", counted)
    config: Any = {"configurable": {"thread_id": "t"}}
    assert [found.checkpoint["id"] for found in saver.list(config, limit=5)] == ids[:5]
    assert read == [1, 2, 2]
    read.clear()
    listed = saver.list(config)
    assert [next(listed).checkpoint["id"] for _ in range(2)] == ids[:2]
    assert read == [1, 2]


def test_what_is_remembered_is_bounded_by_the_cache(tmp_path: Any) -> None:
    with PerdureSaver(str(tmp_path / "store.db"), cache_bytes=800_000) as saver:
        config: Any = {"configurable": {"thread_id": "", "checkpoint_ns": ""}}
        for number in range(20):
            config["configurable"]["thread_id"] = str(number)
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"messages": [HumanMessage("x" * 100) for _ in range(100)]}
            checkpoint["channel_versions"] = {"messages": 1}
            saver.put(config, checkpoint, {}, {"messages": 1})
        bases = saver.store._context.cache._known.values()
        remembered = [base.parts["messages"].known for base in bases]
        assert 1 < len(remembered) < 8
        assert sum(one.weight_bytes for one in remembered) < 800_000


def test_an_interrupt_while_messages_are_remembered_leaves_what_was_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, old = message_codec(), [HumanMessage("a")]
    before = write_messages(old, NOTHING, codec)
    assert before is not None
    with monkeypatch.context() as patched:
        patched.setattr(type(before.messages.columns), "_added", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_messages([*old, HumanMessage("lost")], before.messages, codec)
    after = write_messages([*old, HumanMessage("b")], before.messages, codec)
    assert after is not None
    assert [message.content for message in after.messages.copies()] == ["a", "b"]
