"""`perdure.views`: what the command line shows, as data for other programs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import graph_shapes
import pytest
from graph_shapes import Shape, at

import perdure
from perdure import views
from perdure.langgraph import PerdureSaver

SHAPES = ("line", "stopped", "parallel", "half_joined", "deferred", "conditional", "commanded", "asking", "sending")


@pytest.mark.parametrize("shape", [getattr(graph_shapes, name) for name in SHAPES], ids=SHAPES)
def test_a_graphs_checkpoints_are_what_the_graph_itself_says(tmp_path: Path, shape: Shape) -> None:
    with PerdureSaver(str(tmp_path / "g.db")) as saver:
        graph = shape(saver)
        now, stored = graph.get_state(at("t")), saver.get_tuple(at("t"))
        # The history shows the newest checkpoint as it was before its nodes ran; the state knows which have ended.
        shown = [*graph.get_state_history(at("t")), now]
        states = {one.config["configurable"]["checkpoint_id"]: one for one in shown}
        assert stored is not None
        channels = stored.checkpoint["channel_values"]
    with perdure.open(tmp_path / "g.db") as store:
        thread = store.thread("t")
        described = {}
        for checkpoint in thread.history():
            loaded = thread.load(checkpoint, raw=True)
            assert views.is_checkpoint(loaded.state)
            one = views.describe(thread, loaded)
            assert asyncio.run(views.adescribe(thread, loaded)) == one
            described[one.checkpoint_id] = one
        assert sorted(described) == sorted(states)
        assert {id_: sorted(one.next) for id_, one in described.items()} == {
            id_: sorted(one.next) for id_, one in states.items()
        }
        newest = thread.load(raw=True)
        values = views.values_of(newest.state)
        assert values == {name: channels[name] for name in values}
        assert {name for name in channels if name.isalpha()} == set(values)
        assert [one["id"] for one in views.describe(thread, newest).interrupts] == [one.id for one in now.interrupts]


@pytest.mark.parametrize(
    ("message", "role", "text"),
    [
        ({"role": "user", "content": "hi"}, "user", "hi"),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": '{"q": "Oslo"}'}}],
            },
            "assistant",
            '(tool calls: search({"q": "Oslo"}))',
        ),
        ({"role": "tool", "tool_call_id": "1", "content": "3 hotels"}, "tool", "3 hotels"),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see"},
                    {"type": "tool_use", "id": "1", "name": "search", "input": {"q": "Oslo"}},
                ],
            },
            "assistant",
            'Let me see (tool calls: search(q="Oslo"))',
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3 hotels"}]},
            "user",
            "3 hotels",
        ),
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "user", "[image]"),
    ],
)
def test_messages_of_the_apis_have_a_role_and_a_text(message: dict[str, Any], role: str, text: str) -> None:
    assert (views.role_of(message), views.text_of(message)) == (role, text)
    assert views.as_line(message) == f"{role}: {text}"
    assert views.are_messages([message])


@pytest.mark.parametrize("value", [None, [], {}, {"role": "user"}, {"role": "king", "content": ""}, [{"role": "user"}]])
def test_other_values_are_no_messages(value: object) -> None:
    assert views.role_of(value) is None
    assert not views.are_messages(value)


def test_values_are_compared_path_by_path() -> None:
    changes = perdure.compare({"a": [1, 2], "b": 1}, {"a": [1, 5, 2], "c": {1}})
    assert [str(change) for change in changes] == ["+ ['a'][1] = 5", "- ['b'] = 1", "+ ['c'] = {1}"]
    assert perdure.compare([1], [1]) == []
