"""A dataset has the turns, tool calls and outcomes of one tenant as chat messages, and nothing that is redacted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from graph_kit import at, human, talking
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

import perdure
from perdure.forensics import export_dataset
from perdure.langgraph import PerdureSaver
from perdure.memory import Conversation

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "find_flights", "arguments": '{"query":"Oslo"}'}},
    {"id": "c2", "type": "function", "function": {"name": "book_flight", "arguments": '{"flight":"LH1"}'}},
    {"id": "c3", "type": "function", "function": {"name": "fly", "arguments": "{}"}},
]


@perdure.step
def find_flights(query: str) -> list[str]:
    return [f"{query}: LH1"]


@perdure.effect
def book_flight(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"booked {flight} for al@ice.org"


tools = perdure.tools([find_flights, book_flight])


@perdure.step
def think_flight(messages: list[Any]) -> dict[str, Any]:
    if len(messages) > 1:
        return {"role": "assistant", "content": "You fly LH1."}
    return {"role": "assistant", "content": None, "tool_calls": CALLS}


@perdure.durable
def flight_agent(task: str) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        reply = think_flight(messages)
        messages.append(reply)
        if "tool_calls" not in reply:
            return str(reply["content"])
        messages += tools.call(reply["tool_calls"])


@perdure.durable
def flight_plain(to: str, seats: int) -> str:
    book_flight(to)
    seat = perdure.ask("Which seat?")
    raise ValueError(f"no seat {seat}")


def by_id(documents: Any) -> dict[str, dict[str, Any]]:
    found = {document["id"]: document for document in documents}
    for document in found.values():
        json.dumps(document)
        answered = {message.get("tool_call_id") for message in document["messages"]}
        asked = [call["id"] for message in document["messages"] for call in message.get("tool_calls", ())]
        assert set(asked) == answered - {None}
    return found


def test_a_run_of_an_agent_with_tools(store: perdure.Store) -> None:
    store.run(flight_agent, "Oslo, please", id="trip")
    found = by_id(export_dataset(store))["run:trip"]
    asked, *answers, last = found["messages"][1:]
    assert found["messages"][0] == {"role": "user", "content": "Oslo, please"}
    assert asked == {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert [(one["role"], one["tool_call_id"]) for one in answers] == [("tool", "c1"), ("tool", "c2"), ("tool", "c3")]
    assert answers[0]["content"] == '["Oslo: LH1"]'
    assert "there is no tool 'fly'" in answers[2]["content"]
    assert last == {"role": "assistant", "content": "You fly LH1."}
    assert found["outcome"]["status"] == "done"


class Rained(Exception):
    """The trip is off."""


@perdure.effect(undo=lambda: None)
def rent_car(size: str, key: perdure.IdempotencyKey) -> str:
    return f"rented a {size} car"


@perdure.effect(approve="Insure it?")
def insure(key: perdure.IdempotencyKey) -> str:
    raise AssertionError("nobody approves")


@perdure.durable
def choose_colour() -> str:
    """A tool with a question and a step of its own."""
    return f"the colour is {perdure.ask('Which colour?')}, {find_flights('x')[0]}"


CAR: tuple[dict[str, dict[str, str]], ...] = ({"rent_car": {"size": "small"}, "insure": {}}, {"choose_colour": {}})
car_tools = perdure.tools([rent_car, insure, choose_colour])
seen_by_model: dict[str, list[Any]] = {}


@perdure.step
def think_car(task: str, messages: list[Any]) -> dict[str, Any]:
    """Return a whole completion of OpenAI's client."""
    seen_by_model[task] = messages
    turn = sum(message["role"] == "assistant" for message in messages)
    message: dict[str, Any] = {"role": "assistant", "content": "Have a good trip."}
    if turn < len(CAR):
        calls = [
            {
                "id": f"c{turn}-{name}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for name, arguments in CAR[turn].items()
        ]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"model": "m", "choices": [{"index": 0, "message": message}], "usage": {"prompt_tokens": 1}}


@perdure.durable(undo_on=(Rained,))
def car_agent(task: str) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        messages.append(think_car(task, messages)["choices"][0]["message"])
        if not (results := car_tools.call(messages[-1].get("tool_calls"))):
            if task == "fails":
                raise Rained
            return str(messages[-1]["content"])
        messages += results


@pytest.mark.parametrize("task", ["fails", "is undone", "stays"])
def test_a_dataset_has_what_the_model_saw_though_effects_were_undone_later(store: perdure.Store, task: str) -> None:
    run = store.run(car_agent, task, id="trip")
    store.answer("trip", False)
    store.run(car_agent, task, id="trip")
    store.answer("trip", "red")
    store.run(car_agent, task, id="trip")
    if task == "is undone":
        run.undo()
        store.run(car_agent, task, id="trip")
    assert any(step.kind == "undo" for step in run.steps()) == (task != "stays")
    document = by_id(export_dataset(store))["run:trip"]
    assert document["outcome"]["status"] == {"fails": "failed", "is undone": "undone", "stays": "done"}[task]
    exported = {one["tool_call_id"]: one["content"] for one in document["messages"] if one["role"] == "tool"}
    seen = {one["tool_call_id"]: one["content"] for one in seen_by_model[task] if one["role"] == "tool"}
    assert exported == seen
    assert seen["c0-rent_car"] == "rented a small car"
    assert "NotApproved" in seen["c0-insure"]
    assert seen["c1-choose_colour"] == "the colour is red, x: LH1"
    assert document["messages"][-1] == {"role": "assistant", "content": "Have a good trip."}


def test_a_run_without_a_model(store: perdure.Store) -> None:
    store.run(flight_plain, "LH1", 2, id="trip")
    store.answer("trip", "aisle")
    assert store.run(flight_plain, "LH1", 2, id="trip").status == "failed"
    found = by_id(export_dataset(store))["run:trip"]
    assert found["messages"] == [
        {"role": "user", "content": '{"seats":2,"to":"LH1"}'},
        {"role": "assistant", "content": "", "tool_calls": [{**found["messages"][1]["tool_calls"][0]}]},
        {"role": "tool", "tool_call_id": "step-1", "content": "booked LH1 for al@ice.org"},
        {"role": "assistant", "content": "Which seat?"},
        {"role": "user", "content": "aisle"},
    ]
    assert found["messages"][1]["tool_calls"][0]["function"] == {"name": "book_flight", "arguments": '{"flight":"LH1"}'}
    assert found["outcome"]["status"] == "failed"
    assert "no seat aisle" in found["outcome"]["error"]


def test_threads_with_messages(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store:
        talk = Conversation(store.thread("talk"), "verbatim")
        talk.add("user", "hi")
        talk.add("assistant", "hello")
        call = {"name": "find_flights", "args": {"query": "x"}, "id": "c1", "type": "tool_call"}
        chain = [
            SystemMessage("be kind"),
            HumanMessage("find x"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("found", tool_call_id="c1"),
        ]
        store.thread("chain").save({"other": [1], "messages": chain})
        anthropic = [
            {"role": "user", "content": [{"type": "text", "text": "find"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "find_flights", "input": {"query": "y"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "none"},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ]
        store.thread("anthropic").save({"log": anthropic})
        store.thread("no chat").save({"n": 1})
        store.thread("run:of a user").save({"messages": [{"role": "user", "content": "hi"}]})
        found = by_id(export_dataset(store))
    assert set(found) == {"thread:talk", "thread:chain", "thread:anthropic", "thread:run:of a user"}
    assert [one["content"] for one in found["thread:talk"]["messages"]] == ["hi", "hello"]
    made = {"id": "c1", "type": "function", "function": {"name": "find_flights", "arguments": '{"query":"x"}'}}
    assert found["thread:chain"]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "find x"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]
    assert found["thread:anthropic"]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"query":"y"}'
    assert found["thread:anthropic"]["messages"][2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "none"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_graph_at_a_snapshot(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "store.db") as store, PerdureSaver(store) as saver:
        graph = talking(saver)
        graph.invoke({"messages": [human("one")]}, at("chat"))
        snap = store.snapshot("s")
        graph.invoke({"messages": [human("two")]}, at("chat"))
        found = by_id(export_dataset(snap))["thread:chat"]
    assert [(one["role"], one["content"]) for one in found["messages"]] == [("user", "one"), ("assistant", "Echo: one")]


def test_nothing_that_is_redacted_leaves(tmp_path: Path) -> None:
    secrets = ("al@ice.org", 'quoted"secret', "4111111111111111")

    def redact(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "x")
        return text

    with perdure.open(tmp_path / "store.db") as store:
        store.run(flight_agent, "for al@ice.org", id="al@ice.org")
        store.run(flight_plain, "al@ice.org", 4111111111111111, id="waits")
        turn = {"role": "user", "content": {'quoted"secret': ['quoted"secret', 4111111111111111]}}
        store.thread("al@ice.org", metadata={"mail": "al@ice.org"}).save({"messages": [turn]})
        snap = store.snapshot("s")
        store.tenant("other").thread("t").save({"messages": [{"role": "user", "content": "of another tenant"}]})
        plain, clean = (json.dumps(list(export_dataset(snap, redact=how))) for how in (str, redact))
    for secret in (*secrets, "quoted"):
        assert secret.partition('"')[0] in plain
        assert secret not in clean
    assert "another tenant" not in plain
    by_id(json.loads(clean))
