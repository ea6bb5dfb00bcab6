"""perdure.tools: schemas for the APIs of models, and their tool calls, run so that they replay."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import Interrupt, Lab, Once
from tools_kit import SoldOut, chat, said, search

import perdure
from perdure.agents.formats import ERROR_CHARACTERS_MAX, ToolCall, ToolResult, label, messages, parse, text_of

# --- schemas


@perdure.effect
def reserve(room: str, key: perdure.IdempotencyKey) -> str:
    """Reserve a room."""
    return f"{room} {key}"


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where to look"},
        "nights": {"type": "integer", "default": 1},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def test_schemas_are_in_the_form_that_each_api_wants() -> None:
    tools = perdure.tools([search])
    about = {"name": "search", "description": "Find hotels in a city."}
    assert tools.schemas() == [{"type": "function", "function": {**about, "parameters": PARAMETERS}}]
    assert tools.schemas("responses") == [{"type": "function", **about, "parameters": PARAMETERS, "strict": False}]
    assert tools.schemas("anthropic") == [{**about, "input_schema": PARAMETERS}]
    assert tools.schemas(style="plain") == [{**about, "parameters": PARAMETERS}]
    with pytest.raises(perdure.UsageError, match="openai, responses, anthropic, plain"):
        tools.schemas("gemini")


def test_the_key_and_what_is_ignored_are_not_shown_to_a_model() -> None:
    @perdure.step(ignore=("client",))
    def look(query: str, client: Any = None) -> str:
        return query

    effect, step = (tool["parameters"] for tool in perdure.tools([reserve, look]).schemas("plain"))
    assert (list(effect["properties"]), list(step["properties"])) == (["room"], ["query"])


def test_tools_are_named_by_their_functions_or_as_said() -> None:
    class Agent:
        @perdure.step
        def look(self, at: str) -> str:
            return at

    @perdure.step(name="places.find")
    def find(city: str) -> str:
        return city

    assert perdure.tools([Agent().look, find, search]).names == ["look", "places_find", "search"]
    assert perdure.tools({"hotels": search, "flights": search}).names == ["hotels", "flights"]
    assert repr(perdure.tools([search])) == "<Tools search>"


@dataclass
class Callable_:
    """Callable, and no function."""

    def __call__(self) -> None: ...


def test_what_cannot_be_a_tool_is_refused_when_it_is_given() -> None:
    class Agent:
        @perdure.step
        def look(self, at: str) -> str:
            return at

    @perdure.step(ignore=("client",))
    def needs(query: str, client: Any) -> str:
        return query

    def untold(what: threading.Lock) -> None: ...

    refusals: list[tuple[Any, str]] = [
        ([search, search], "two tools have the name 'search'"),
        ([lambda: 1], "cannot be a tool's name"),
        ({"my tool": search}, "cannot be a tool's name"),
        ([Callable_()], "takes functions"),
        ([dict], "takes functions"),
        (search, "takes a list of functions"),
        ([Agent.look], "a method of no object"),
        ([needs], "needs 'client'"),
        ([untold], "'what'"),
    ]
    for functions, reason in refusals:
        with pytest.raises(perdure.UsageError, match=reason):
            perdure.tools(functions)


# --- the forms of calls and answers


FORMS: list[tuple[Any, dict[str, Any]]] = [
    (chat("a", "f", x=1), {"role": "tool", "tool_call_id": "a", "content": "42"}),
    ({"function": {"name": "f", "arguments": {"x": 1}}}, {"role": "tool", "tool_name": "f", "content": "42"}),
    (
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "42"},
    ),
    (
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "42"}]},
    ),
    (
        {"type": "tool_call", "id": "a", "name": "f", "args": {"x": 1}},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "42", "status": "success"},
    ),
    (
        {"id": "a", "name": "f", "arguments": {"x": 1}},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "42", "status": "success"},
    ),
]


def as_object(value: Any) -> Any:
    """A call as an SDK's object has it: attributes, but the arguments stay what they are."""
    if not isinstance(value, dict):
        return value
    inner = {"arguments", "input", "args"}
    return SimpleNamespace(**{name: item if name in inner else as_object(item) for name, item in value.items()})


@pytest.mark.parametrize("shape", [lambda call: call, as_object], ids=["dict", "object"])
@pytest.mark.parametrize(("call", "answer"), FORMS, ids=lambda form: str(form)[:25])
def test_each_form_of_a_call_is_understood_and_answered_in_kind(call: Any, answer: Any, shape: Any) -> None:
    [parsed] = parse([shape(call)])
    assert (parsed.name, parsed.arguments) in (("f", {"x": 1}), ("f", '{"x": 1}'))
    assert messages([(parsed, ToolResult("42"))]) == [answer]


def test_results_for_anthropic_go_together_and_say_what_is_an_error() -> None:
    uses: list[Any] = [{"type": "tool_use", "id": one, "name": "f", "input": {}} for one in ("a", "b")]
    calls = parse([{"type": "text", "text": "I'll look"}, *uses])
    [message] = messages(zip(calls, [ToolResult("1"), ToolResult("no", is_error=True)], strict=True))
    assert [block.get("is_error") for block in message["content"]] == [None, True]
    assert [block["tool_use_id"] for block in message["content"]] == ["a", "b"]


def test_langchain_takes_the_answers_as_its_messages() -> None:
    from langchain_core.messages import AIMessage, ToolMessage, convert_to_messages

    message = AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "a"}])
    [call] = parse(message.tool_calls)
    assert call == ToolCall("plain", "a", "f", {"x": 1})
    [answer] = convert_to_messages(messages([(call, ToolResult("no", is_error=True))]))
    assert isinstance(answer, ToolMessage)
    assert (answer.tool_call_id, answer.status, answer.content, answer.name) == ("a", "error", "no", "f")


def test_what_is_no_list_of_calls_is_refused_and_other_items_are_passed_over() -> None:
    assert parse(None) == []
    assert parse([{"type": "reasoning", "summary": []}, {"type": "message", "content": []}]) == []
    wrongs: list[Any] = ["text", {"tool_calls": []}, 3]
    for wrong in wrongs:
        with pytest.raises(perdure.UsageError, match="takes the list of tool calls"):
            parse(wrong)
    with pytest.raises(perdure.UsageError, match="no tool call of a known form"):
        parse([{"tool": "f"}])


@given(st.lists(st.one_of(st.none(), st.text(min_size=1, max_size=100)), max_size=8))
def test_ids_are_told_apart_in_paths_whatever_they_are(ids: list[str | None]) -> None:
    calls = [ToolCall("plain", call_id, "f", {}) for call_id in ids]
    labels = [label(call, position) for position, call in enumerate(calls, 1)]
    for one in labels:
        assert 0 < len(one) <= 64
        assert not set(one) & set(".~#@: ")
    named = {call_id for call_id in ids if call_id is not None}
    assert len(set(labels)) == len(named) + ids.count(None)


class Colour(Enum):
    RED = "red"


@dataclass
class Room:
    name: str
    tags: set[str]


def test_results_are_readable_and_the_same_in_every_process() -> None:
    tags = {f"tag-{number}" for number in range(20)}
    shown = {
        "text": "text",
        '{"a":[1,2],"b":null}': {"a": (1, 2), "b": None},
        json.dumps({"name": "x", "tags": sorted(tags)}, separators=(",", ":")): Room("x", tags),
        '["2026-01-02T00:00:00Z","1.50","red"]': [datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.50"), Colour.RED],
        '["(object)"]': [object()],
        "null": None,
    }
    assert [text_of(value) for value in shown.values()] == list(shown)


# --- what goes back to the model


def test_what_a_model_can_mend_goes_back_to_it(lab: Lab) -> None:
    def fail(what: str) -> None:
        raise SoldOut(what * 3000 if what == "long" else what)

    tools = perdure.tools([lab.body(search), lab.body(fail)])
    odd = chat("e", "search")
    odd["function"]["arguments"] = "{not json"
    calls = [
        chat("a", "nothing", x=1),
        chat("b", "search", town="Rome"),
        chat("c", "search", city="Rome", nights="2"),
        chat("d", "fail", what="rooms"),
        odd,
        chat("f", "fail", what="long"),
    ]

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call(calls)))

    unknown, misfit, good, failed, no_json, long = lab.run(agent).result()
    assert unknown == "Error: there is no tool 'nothing': the tools are search, fail"
    assert misfit.startswith("Error: the arguments of search do not fit: Object contains unknown field `town`")
    assert good == '["Rome 2"]'  # a number that was written as text
    assert failed == "Error: SoldOut: rooms"
    assert no_json.startswith("Error: the arguments of search do not fit: the arguments are not JSON")
    assert len(long) == ERROR_CHARACTERS_MAX


def test_an_error_is_told_again_as_it_was_whatever_the_code_knows_now(lab: Lab) -> None:
    """The next call of the model has it among its arguments."""
    once = Once()

    def fail() -> None:
        class Local(Exception):
            """Cannot be found again by name."""

        raise Local("no rooms")

    calls = [chat("a", "fail"), chat("b", "later"), chat("c", "search", town="x")]
    before = perdure.tools({"fail": lab.body(fail), "search": lab.body(search)})
    after = perdure.tools(
        {"fail": lab.body(fail), "search": lab.body(lambda town: town), "later": lab.body(lambda: "there")}
    )

    @lab.step()
    def think(messages: list[Any]) -> int:
        return len(messages)

    @lab.durable
    async def agent() -> list[str]:
        found = await lab((after if once.reached else before).call(calls))
        await lab(think(found))
        once.interrupt()
        return said(found)

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    failed, unknown, misfit = lab.run(agent, id="r").result()
    assert (failed, unknown) == (
        "Error: Local: no rooms",
        "Error: there is no tool 'later': the tools are fail, search",
    )
    assert "unknown field `town`" in misfit


def test_arguments_that_no_journal_keeps_are_the_models_to_mend(lab: Lab) -> None:
    tools = perdure.tools([lab.body(search)])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([{"id": "a", "name": "search", "arguments": {"city": object()}}])))

    [text] = lab.run(agent).result()
    assert text.startswith("Error: the arguments of search do not fit: ")


def test_a_persons_no_goes_back_to_the_model_and_a_yes_runs_it(lab: Lab) -> None:
    @lab.effect(approve=True)
    def book(room: str) -> str:
        lab.ran.append(room)
        return f"booked {room}"

    def look() -> str:
        lab.ran.append("look")
        return "seen"

    tools = perdure.tools([book, lab.body(look)])

    @lab.durable
    async def agent(room: str) -> list[str]:
        return said(await lab(tools.call([chat("a", "book", room=room), chat("b", "look")])))

    for room, agreed in (("7", True), ("8", False)):
        run = lab.run(agent, room, id=f"r{room}")
        assert run.refresh().status == "waiting"
        assert lab.ran[-1] == "look"  # it need not wait for the other one
        lab.store.answer(run.id, agreed)
        done, seen = run.result()
        assert seen == "seen"
        assert done == "booked 7" if agreed else done.startswith("Error: NotApproved: book(room='8') was not approved")
    assert lab.ran == ["look", "7", "look"]


# --- what does not


def test_doubt_never_goes_back_to_a_model(lab: Lab) -> None:
    @lab.effect(on_doubt="fail")
    def book() -> None:
        raise TimeoutError("no answer")

    tools = perdure.tools([book])

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "book")]))

    with pytest.raises(perdure.RunFailed) as failed:
        lab.run(agent).result()
    assert isinstance(failed.value.__cause__, perdure.InDoubt)


def test_doubt_that_a_person_settles_parks_the_run(lab: Lab) -> None:
    @lab.effect(timeout_s=0.001)
    def book() -> str:
        lab.ran.append("book")
        raise ConnectionError("gone")

    tools = perdure.tools([book])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat("a", "book")])))

    run = lab.run(agent, id="r")
    assert run.refresh().status == "waiting"
    run.resolve("1.a.1", done="B-1")
    assert run.result() == ["B-1"]
    assert lab.ran == ["book"]


def test_a_park_that_is_swallowed_still_parks(lab: Lab) -> None:
    @lab.effect(approve=True)
    def book() -> str:
        return "booked"

    tools = perdure.tools([book])

    @lab.step()
    def after() -> None:
        lab.ran.append("after")

    @lab.durable
    async def agent() -> list[str]:
        try:
            return said(await lab(tools.call([chat("a", "book")])))
        except BaseException:
            await lab(after())
            return ["swallowed"]

    run = lab.run(agent, id="r")
    assert (run.refresh().status, lab.ran) == ("waiting", [])
    lab.store.answer("r", True)
    assert run.result() == ["booked"]


def test_a_timeout_around_the_calls_is_not_an_error_of_a_tool(lab: Lab) -> None:
    tools = perdure.tools([lab.body(search)])

    @lab.durable
    async def agent() -> str:
        try:
            with perdure.timeout(0):
                return str(await lab(tools.call([chat("a", "search", city="x")])))
        except TimeoutError:
            return "over"

    assert lab.run(agent).result() == "over"


def test_a_result_that_cannot_be_stored_leaves_the_run_stuck(lab: Lab) -> None:
    tools = perdure.tools({"odd": lab.body(lambda: object())})

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "odd")]))

    assert lab.run(agent).status == "stuck"


def test_an_undo_inside_a_tool_is_an_undo(lab: Lab) -> None:
    @lab.durable
    async def give_up() -> None:
        perdure.undo("enough")

    tools = perdure.tools([give_up])

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "give_up")]))

    assert lab.run(agent).status == "undone"
