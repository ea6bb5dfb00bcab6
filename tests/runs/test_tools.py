"""hf.tools: schemas for the APIs of models, and their tool calls, run so that they replay."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import MODES, PLACES, Interrupt, Lab, Once, open_place

import holdfast as hf
from holdfast.runs.agents.toolcalls import ERROR_CHARACTERS_MAX, Outcome, ToolCall, label, messages, parse, text_of


@pytest.fixture(scope="module", params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hf.Store]:
    yield from open_place(request, tmp_path_factory)


@pytest.fixture(params=MODES)
def lab(request: pytest.FixtureRequest, store: hf.Store) -> Lab:
    return Lab(store, request.param)


@pytest.fixture
def sync_lab(store: hf.Store) -> Lab:
    return Lab(store, "sync")


@pytest.fixture
def async_lab(store: hf.Store) -> Lab:
    return Lab(store, "async")


class SoldOut(Exception):
    """Nothing left."""


def chat(call_id: str | None, name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call as OpenAI's chat API has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def said(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


# --- schemas


def search(city: str, nights: int = 1) -> list[str]:
    """Find hotels in a city.

    Args:
        city: where to look
    """
    return [f"{city} {nights}"]


@hf.effect
def reserve(room: str, key: hf.Key) -> str:
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
    tools = hf.tools([search])
    about = {"name": "search", "description": "Find hotels in a city."}
    assert tools.schemas() == [{"type": "function", "function": {**about, "parameters": PARAMETERS}}]
    assert tools.schemas("responses") == [{"type": "function", **about, "parameters": PARAMETERS, "strict": False}]
    assert tools.schemas("anthropic") == [{**about, "input_schema": PARAMETERS}]
    assert tools.schemas(style="plain") == [{**about, "parameters": PARAMETERS}]
    with pytest.raises(hf.UsageError, match="openai, responses, anthropic, plain"):
        tools.schemas("gemini")


def test_the_key_and_what_is_ignored_are_not_shown_to_a_model() -> None:
    @hf.step(ignore=("client",))
    def look(query: str, client: Any = None) -> str:
        return query

    effect, step = (tool["parameters"] for tool in hf.tools([reserve, look]).schemas("plain"))
    assert (list(effect["properties"]), list(step["properties"])) == (["room"], ["query"])


def test_tools_are_named_by_their_functions_or_as_said() -> None:
    class Agent:
        @hf.step
        def look(self, at: str) -> str:
            return at

    @hf.step(name="places.find")
    def find(city: str) -> str:
        return city

    assert hf.tools([Agent().look, find, search]).names == ["look", "places_find", "search"]
    assert hf.tools({"hotels": search, "flights": search}).names == ["hotels", "flights"]
    assert repr(hf.tools([search])) == "<Tools search>"


@dataclass
class Callable_:
    """Callable, and no function."""

    def __call__(self) -> None: ...


def test_what_cannot_be_a_tool_is_refused_when_it_is_given() -> None:
    class Agent:
        @hf.step
        def look(self, at: str) -> str:
            return at

    @hf.step(ignore=("client",))
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
        with pytest.raises(hf.UsageError, match=reason):
            hf.tools(functions)


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
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "42", "is_error": False},
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
    assert messages([(parsed, Outcome("42"))]) == [answer]


def test_results_for_anthropic_go_together_and_say_what_is_an_error() -> None:
    uses: list[Any] = [{"type": "tool_use", "id": one, "name": "f", "input": {}} for one in ("a", "b")]
    calls = parse([{"type": "text", "text": "I'll look"}, *uses])
    [message] = messages(zip(calls, [Outcome("1"), Outcome("no", is_error=True)], strict=True))
    assert [block.get("is_error") for block in message["content"]] == [None, True]
    assert [block["tool_use_id"] for block in message["content"]] == ["a", "b"]


def test_langchain_takes_the_answers_as_its_messages() -> None:
    from langchain_core.messages import AIMessage, ToolMessage, convert_to_messages

    message = AIMessage("", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "a"}])
    [call] = parse(message.tool_calls)
    assert call == ToolCall("langchain", "a", "f", {"x": 1})
    [answer] = convert_to_messages(messages([(call, Outcome("no", is_error=True))]))
    assert isinstance(answer, ToolMessage)
    assert (answer.tool_call_id, answer.status, answer.content, answer.name) == ("a", "error", "no", "f")


def test_what_is_no_list_of_calls_is_refused_and_other_items_are_passed_over() -> None:
    assert parse(None) == []
    assert parse([{"type": "reasoning", "summary": []}, {"type": "message", "content": []}]) == []
    wrongs: list[Any] = ["text", {"tool_calls": []}, 3]
    for wrong in wrongs:
        with pytest.raises(hf.UsageError, match="takes the list of tool calls"):
            parse(wrong)
    with pytest.raises(hf.UsageError, match="no tool call of a known form"):
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
        '"nan"': float("nan"),
        '["(object)"]': [object()],
        "null": None,
    }
    assert [text_of(value) for value in shown.values()] == list(shown)


# --- running


def test_calls_are_run_as_steps_of_their_own_scope_and_once(lab: Lab) -> None:
    once = Once()

    def price(city: str) -> int:
        lab.ran.append(city)
        return len(city)

    tools = hf.tools([lab.body(price)])
    calls = [chat("call_a", "price", city="Rome"), chat("call_b", "price", city="Oslo!")]

    @lab.durable
    async def agent() -> list[str]:
        found = await lab(tools.call(calls if not once.reached else calls[::-1]))
        once.interrupt()
        return said(sorted(found, key=lambda message: str(message["tool_call_id"])))

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    run = lab.run(agent, id="r")  # the calls come in another order now
    assert run.result() == ["4", "5"]
    assert sorted(lab.ran) == ["Oslo!", "Rome"]
    assert sorted(step.path for step in run.steps()) == ["1.call_a.1", "1.call_b.1"]


def test_answers_come_in_the_order_of_the_calls(lab: Lab) -> None:
    tools = hf.tools([lab.body(search)])

    @lab.durable
    async def agent() -> list[Any]:
        found = await lab(tools.call([chat(str(n), "search", city=str(n)) for n in (3, 1, 2)]))
        return [(message["tool_call_id"], message["content"]) for message in found]

    assert lab.run(agent).result() == [("3", '["3 1"]'), ("1", '["1 1"]'), ("2", '["2 1"]')]


def test_calls_without_ids_have_their_position_and_the_same_id_may_come_again_later(lab: Lab) -> None:
    tools = hf.tools([lab.body(search)])

    @lab.durable
    async def agent() -> int:
        await lab(tools.call([chat(None, "search", city="a"), chat("", "search", city="b")]))
        await lab(tools.call([chat("x", "search", city="c")]))
        await lab(tools.call([]))
        await lab(tools.call([chat("x", "search", city="d"), chat("odd id.1", "search", city="e")]))
        return 1

    run = lab.run(agent)
    assert run.result() == 1
    paths = sorted(step.path for step in run.steps())
    assert paths[:4] == ["1._1.1", "1._2.1", "2.x.1", "3.odd-id-1-" + paths[3][11:27] + ".1"]
    assert paths[4] == "3.x.1"


def test_two_calls_with_one_id_are_refused(lab: Lab) -> None:
    tools = hf.tools([lab.body(search)])

    @lab.durable
    async def agent() -> Any:
        return await lab(tools.call([chat("x", "search", city="a"), chat("x", "search", city="b")]))

    told = lab.run(agent).result()
    assert len(told) == 2
    assert all("2 calls have the id 'x'" in message["content"] for message in told)


def test_effects_get_their_keys_and_methods_their_objects(lab: Lab) -> None:
    keys: list[str] = []

    class Desk:
        name = "desk"

        @lab.effect()
        def book(self, room: str, *, key: hf.Key) -> str:
            keys.append(key)
            return f"{self.name}: {room}"

        @lab.step()
        def look(self, room: str = "any") -> str:
            return f"{self.name} has {room}"

    desk = Desk()
    tools = hf.tools([desk.book, desk.look])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat("a", "book", room="7"), chat("b", "look")])))

    run = lab.run(agent)
    assert run.result() == ["desk: 7", "desk has any"]
    assert keys == [step.key for step in run.steps() if step.kind == "effect"]


def test_arguments_come_by_position_as_in_code_so_that_reconcile_may_name_them_otherwise(lab: Lab) -> None:
    def find(key: hf.Key, which: str, *more: Any, **named: Any) -> hf.Done:
        return hf.Done([which, list(more), named])

    @lab.effect(reconcile=find)
    def book(room: str, nights: int, guest: str = "", *, key: hf.Key, note: str = "") -> None:
        raise TimeoutError

    tools = hf.tools([book])

    @lab.durable
    async def agent() -> list[str]:
        calls = [chat("a", "book", note="n", nights=2, room="7"), chat("b", "book", room="8", nights=1, guest="Ann")]
        return said(await lab(tools.call(calls)))

    assert lab.run(agent).result() == ['["7",[2],{"note":"n"}]', '["8",[1,"Ann"],{}]']


def test_a_replay_runs_no_tool(lab: Lab) -> None:
    def price(city: str) -> int:
        lab.ran.append(city)
        if city == "Oslo":
            raise SoldOut(city)
        return len(city)

    tools = hf.tools([lab.body(price)])
    calls = [chat("a", "price", city="Rome"), chat("b", "price", city="Oslo"), chat("c", "weather")]

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call(calls)))

    run = lab.run(agent)
    found = lab.store.replay(run)
    assert (found.status, found.result, len(lab.ran)) == ("complete", run.result(), 2)


# --- what goes back to the model


def test_what_a_model_can_mend_goes_back_to_it(lab: Lab) -> None:
    def fail(what: str) -> None:
        raise SoldOut(what * 3000 if what == "long" else what)

    tools = hf.tools([lab.body(search), lab.body(fail)])
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
    assert misfit.startswith("Error: the arguments of search do not fit: city: is missing\ntown: is no argument")
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
    before = hf.tools({"fail": lab.body(fail), "search": lab.body(search)})
    after = hf.tools(
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
    assert "town: is no argument" in misfit


def test_arguments_that_no_journal_keeps_are_the_models_to_mend(lab: Lab) -> None:
    tools = hf.tools([lab.body(search)])

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

    tools = hf.tools([book, lab.body(look)])

    @lab.durable
    async def agent(room: str) -> list[str]:
        return said(await lab(tools.call([chat("a", "book", room=room), chat("b", "look")])))

    for room, agreed in (("7", True), ("8", False)):
        run = lab.run(agent, room, id=f"r{room}")
        assert run.status == "waiting"
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

    tools = hf.tools([book])

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "book")]))

    with pytest.raises(hf.RunFailed) as failed:
        lab.run(agent).result()
    assert isinstance(failed.value.__cause__, hf.InDoubt)


def test_doubt_that_a_person_settles_parks_the_run(lab: Lab) -> None:
    @lab.effect(timeout_s=0.001)
    def book() -> str:
        lab.ran.append("book")
        raise ConnectionError("gone")

    tools = hf.tools([book])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat("a", "book")])))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    run.resolve("1.a.1", done="B-1")
    assert run.result() == ["B-1"]
    assert lab.ran == ["book"]


def test_a_park_that_is_swallowed_still_parks(lab: Lab) -> None:
    @lab.effect(approve=True)
    def book() -> str:
        return "booked"

    tools = hf.tools([book])

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
    assert (run.status, lab.ran) == ("waiting", [])
    lab.store.answer("r", True)
    assert run.result() == ["booked"]


def test_a_budget_ends_the_run_and_not_the_conversation(lab: Lab) -> None:
    @lab.step()
    def think() -> None:
        hf.spend(tokens=10)

    tools = hf.tools([lab.body(search)])

    @lab.durable
    async def agent() -> None:
        hf.budget(tokens=5)
        await lab(think())
        await lab(tools.call([chat("a", "search", city="x")]))

    with pytest.raises(hf.RunFailed) as failed:
        lab.run(agent).result()
    assert isinstance(failed.value.__cause__, hf.BudgetExceeded)


def test_a_timeout_around_the_calls_is_not_an_error_of_a_tool(lab: Lab) -> None:
    tools = hf.tools([lab.body(search)])

    @lab.durable
    async def agent() -> str:
        try:
            with hf.timeout(0):
                return str(await lab(tools.call([chat("a", "search", city="x")])))
        except TimeoutError:
            return "over"

    assert lab.run(agent).result() == "over"


def test_a_result_that_cannot_be_stored_leaves_the_run_stuck(lab: Lab) -> None:
    tools = hf.tools({"odd": lab.body(lambda: object())})

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "odd")]))

    assert lab.run(agent).status == "stuck"


def test_a_rollback_inside_a_tool_is_a_rollback(lab: Lab) -> None:
    @lab.durable
    async def give_up() -> None:
        hf.rollback("enough")

    tools = hf.tools([give_up])

    @lab.durable
    async def agent() -> None:
        await lab(tools.call([chat("a", "give_up")]))

    assert lab.run(agent).status == "rolled_back"


# --- tools with steps of their own


def test_a_durable_tool_asks_and_has_steps(lab: Lab) -> None:
    @lab.step()
    def note(text: str) -> None:
        lab.ran.append(text)

    @lab.durable
    async def ask_user(question: str) -> str:
        """Ask the user."""
        answer = await lab(hf.ask(question))
        await lab(note(answer))
        return str(answer)

    tools = hf.tools([ask_user])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat(one, "ask_user", question=f"{one}?") for one in ("a", "b")])))

    run = lab.run(agent, id="r")
    assert sorted(ask.path for ask in lab.store.asks("r")) == ["1.a.1", "1.b.1"]
    lab.store.answer("r", "this", step="1.a.1")
    lab.store.answer("r", "that", step="1.b.1")
    assert run.result() == ["this", "that"]
    assert sorted(lab.ran) == ["that", "this"]


def test_tools_and_runs_of_different_kinds_are_refused(sync_lab: Lab, async_lab: Lab) -> None:
    async def later() -> None: ...

    @hf.durable
    def now() -> None: ...

    @hf.durable
    def blocking() -> None:
        hf.tools([later]).call([chat("a", "later")])

    @hf.durable
    async def awaiting() -> None:
        await hf.tools([now]).call([chat("a", "now")])

    for agent, reason in ((blocking, "'later' is async"), (awaiting, "'now' is sync")):
        with pytest.raises(hf.RunFailed) as failed:
            sync_lab.run(agent).result()
        assert isinstance(failed.value.__cause__, hf.UsageError)
        assert reason in str(failed.value.__cause__)


def test_calls_belong_in_a_run_and_not_in_a_step(lab: Lab) -> None:
    tools = hf.tools([search])
    with pytest.raises(hf.NotInRun, match=r"tools\.call"):
        tools.call([chat("a", "search", city="x")])

    @lab.step()
    def body() -> None:
        tools.call([chat("a", "search", city="x")])

    @lab.durable
    async def agent() -> None:
        await lab(body())

    with pytest.raises(hf.RunFailed) as failed:
        lab.run(agent).result()
    assert "inside step 'body'" in str(failed.value.__cause__)


# --- at the same time


def test_async_tools_run_at_the_same_time(async_lab: Lab) -> None:
    async def meet(me: str) -> str:
        here.append(me)
        if len(here) == 2:
            both.set()
        await both.wait()  # alone it would wait for ever
        return me

    here: list[str] = []
    both = asyncio.Event()
    tools = hf.tools([meet])

    @hf.durable
    async def agent() -> list[str]:
        return said(await tools.call([chat("a", "meet", me="a"), chat("b", "meet", me="b")]))

    assert async_lab.run(agent).result() == ["a", "b"]


def test_sync_tools_run_at_the_same_time_on_threads(lab: Lab) -> None:
    barrier = threading.Barrier(3, timeout=30)

    def meet(me: str) -> str:
        barrier.wait()
        return me

    @hf.effect
    def meet_outside(me: str) -> str:
        return meet(me)

    @hf.step(timeout_s=60)
    def meet_in_time(me: str) -> str:
        return meet(me)

    tools = hf.tools([meet, meet_outside, meet_in_time])

    @lab.durable
    async def agent() -> list[str]:
        return said(await lab(tools.call([chat(name, name, me=name) for name in tools.names])))

    assert lab.run(agent).result() == tools.names


def test_tools_run_one_after_the_other_if_they_must(lab: Lab) -> None:
    threads: list[int] = []
    at_once: list[int] = []

    def alone(me: str) -> str:
        at_once.append(1)
        lab.ran.append((me, len(at_once)))
        threads.append(threading.get_ident())
        at_once.pop()
        if me == "b":
            raise SoldOut
        return me

    tools = hf.tools([lab.body(alone)])

    @lab.durable
    async def agent() -> list[str]:
        threads.append(threading.get_ident())
        found = await lab(tools.call([chat(one, "alone", me=one) for one in "abc"], concurrency=1))
        return said(found)

    assert lab.run(agent).result() == ["a", "Error: SoldOut", "c"]
    assert lab.ran == [("a", 1), ("b", 1), ("c", 1)]
    assert len(set(threads)) == 1
    with pytest.raises(hf.UsageError, match="at least 1"):
        tools.call([], concurrency=0)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_what_ends_a_run_is_raised_when_all_calls_have_ended(lab: Lab, concurrency: int | None) -> None:
    @lab.effect(on_doubt="fail")
    def book() -> None:
        raise TimeoutError("no answer")

    @lab.effect(approve=True)
    def pay() -> str:
        return "paid"

    def look() -> str:
        lab.ran.append("look")
        return "seen"

    tools = hf.tools([book, pay, lab.body(look)])

    @lab.durable
    async def agent() -> list[str]:
        calls = [chat(name, name) for name in tools.names]
        return said(await lab(tools.call(calls, concurrency=concurrency)))

    run = lab.run(agent, id=f"r-{concurrency}")
    assert (run.status, lab.ran) == ("waiting", ["look"])
    lab.store.answer(run.id, True)
    with pytest.raises(hf.RunFailed) as failed:
        run.result()
    assert isinstance(failed.value.__cause__, hf.InDoubt)
    assert [step.status for step in run.steps() if step.name == "pay"] == ["done"]


def test_several_batches_may_run_at_the_same_time(async_lab: Lab) -> None:
    tools = hf.tools([search])
    once = Once()

    @hf.durable
    async def agent() -> list[list[str]]:
        found = await asyncio.gather(*(tools.call([chat("x", "search", city=city)]) for city in ("a", "b")))
        once.interrupt()
        return [said(messages) for messages in found]

    with pytest.raises(Interrupt):
        async_lab.run(agent, id="r")
    run = async_lab.run(agent, id="r")
    assert run.result() == [['["a 1"]'], ['["b 1"]']]
    assert sorted(step.path for step in run.steps()) == ["1.1.x.1", "2.1.x.1"]
