"""Steps and effects in nodes meet LangGraph's features: retries, loops, interrupts, time travel, tools, subgraphs.

A test is written once and runs blocking and awaited, on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from effects_features_kit import Broken, Office, Trip
from graph_kit import MODES, Runner, at
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt

import perdure
from perdure.langgraph import PerdureSaver
from perdure.storage.program import Program
from perdure.tasks import policy as task_policy
from perdure.threads.line_saves import LineSave


@pytest.fixture(params=MODES)
def office(request: pytest.FixtureRequest) -> Office:
    return Office(request.param)


# --- LangGraph runs nodes again


async def test_a_retry_runs_what_failed_and_not_what_is_done(saver: PerdureSaver, office: Office) -> None:
    """LangGraph's RetryPolicy: the step that raised is run again, the effect before it is not."""

    async def trip(state: Trip) -> Trip:
        booked = await office(office.book("a"))
        office.trouble += [Broken()] if len(office.ran) == 1 else []
        return {"booked": [booked, await office(office.search("b"))]}

    policy = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False, retry_on=Broken)
    graph = office.line(saver, trip, retry_policy=policy)
    assert (await graph.invoke({}, at("t")))["booked"] == ["a-1", "found b"]
    assert office.ran == ["book a", "search b", "search b"]


async def test_a_definite_failure_is_tried_again_with_the_same_key(saver: PerdureSaver, office: Office) -> None:
    """The receiver said no: nothing is in doubt. The graph ends with its error, and goes on when it is run again."""

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a"))]}

    office.trouble = [Broken("sold out")]
    graph = office.line(saver, trip)
    with pytest.raises(Broken, match="sold out"):
        await graph.invoke({}, at("t"))
    [info] = saver.store.runs(tasks=True)
    assert (info.status, info.waiting_for and info.waiting_for.kind) == ("waiting", "graph")
    assert (await graph.invoke(None, at("t")))["booked"] == ["a-2"]
    assert len(set(office.keys)) == 1


async def test_a_node_that_is_run_twice_books_twice(saver: PerdureSaver, office: Office) -> None:
    """Two turns of a loop are two tasks."""

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a"))], "turns": 1}

    builder = StateGraph(Trip)
    builder.add_node("trip", office.node(trip))
    builder.add_edge(START, "trip")
    builder.add_conditional_edges("trip", lambda state: END if state["turns"] == 2 else "trip")
    graph = Runner(builder.compile(checkpointer=saver), office.mode)
    assert (await graph.invoke({}, at("t")))["booked"] == ["a-1", "a-2"]
    assert len(set(office.keys)) == 2


async def test_equal_calls_in_one_node_are_counted(saver: PerdureSaver, office: Office) -> None:
    """Twice the same, then an error: both are found again."""

    async def trip(state: Trip) -> Trip:
        both = [await office(office.book("a")), await office(office.book("a"))]
        await office(office.search("c"))
        return {"booked": both}

    graph = office.line(saver, trip)
    search, office.search = office.search, office.step(_raise, name="search") if not office.is_async else _araise
    with pytest.raises(Broken):
        await graph.invoke({}, at("t"))
    office.search = search
    assert (await graph.invoke(None, at("t")))["booked"] == ["a-1", "a-2"]
    assert office.ran == ["book a", "book a", "search c"]


def _raise(what: str) -> str:
    raise Broken(what)


async def _araise(what: str) -> str:
    raise Broken(what)


async def test_a_node_that_calls_with_other_arguments_the_next_time_is_warned_of(
    saver: PerdureSaver, office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell that it is the same call: what decides the arguments must be a step."""
    items = ["a", "b"]

    async def trip(state: Trip) -> Trip:
        booked = await office(office.book(items.pop(0)))
        if items:
            raise Broken
        return {"booked": [booked]}

    graph = office.line(saver, trip)
    with pytest.raises(Broken):
        await graph.invoke({}, at("t"))
    await graph.invoke(None, at("t"))
    [said] = [record.getMessage() for record in caplog.records if record.name == "perdure"]
    assert f"key {office.keys[0]}), and this one did not: make a step of what decides them" in said


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_interrupt_before_or_after_an_effect(saver: PerdureSaver, office: Office, when: str) -> None:
    """The node runs again from its beginning when it is answered."""

    async def trip(state: Trip) -> Trip:
        found = [await office(office.book("a"))] if when == "after" else []
        said = interrupt("sure?")
        found += [await office(office.book("a"))] if when == "before" else []
        return {"booked": [*found, said]}

    graph = office.line(saver, trip)
    await graph.invoke({}, at("t"))
    assert office.ran == (["book a"] if when == "after" else [])
    assert (await graph.invoke(Command(resume="yes"), at("t")))["booked"] == ["a-1", "yes"]
    assert office.ran == ["book a"]


async def test_time_travel_and_forks_book_anew(saver: PerdureSaver, office: Office) -> None:
    """A fork's checkpoint is another one: other tasks, other keys. What was done before it stays done once."""

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a"))]}

    async def more(state: Trip) -> Trip:
        return {"booked": [await office(office.book("b"))]}

    graph = office.line(saver, trip, more)
    await graph.invoke({}, at("t"))
    [before] = [snapshot.config for snapshot in await graph.history(at("t")) if snapshot.next == ("n1",)]
    assert (await graph.invoke(None, before))["booked"] == ["a-1", "b-3"]
    saver.store.thread("t").fork(name="other")
    assert (await graph.invoke({}, at("other")))["booked"] == ["a-1", "b-3", "a-4", "b-5"]
    assert office.ran == ["book a", "book b", "book b", "book a", "book b"]
    assert len(set(office.keys)) == 5


async def test_an_old_interrupt_that_is_answered_again_finds_what_was_done(saver: PerdureSaver, office: Office) -> None:
    """LangGraph runs the same task again, also if the thread has gone on since: nothing is done twice."""

    async def trip(state: Trip) -> Trip:
        booked = await office(office.book("a"))
        return {"booked": [booked, await office(office.book(interrupt("which?")))]}

    graph = office.line(saver, trip)
    await graph.invoke({}, at("t"))
    asked = (await graph.state(at("t"))).config
    assert (await graph.invoke(Command(resume="b"), at("t")))["booked"] == ["a-1", "b-2"]
    assert (await graph.invoke(Command(resume="b"), asked))["booked"] == ["a-1", "b-2"]
    assert office.ran == ["book a", "book b"]


# --- tools


def tooling(office: Office, saver: Any, items: list[str], **options: Any) -> Runner:
    """A model that calls a tool for each item, all at once."""

    def book_item(item: str) -> str:
        return str(office.book(item))

    async def abook_item(item: str) -> str:
        return str(await office.book(item))

    given: dict[str, Any] = {"coroutine": abook_item} if office.is_async else {"func": book_item}
    tool = StructuredTool.from_function(name="book_item", description="Books.", **given)
    calls: Any = [
        {"name": "book_item", "args": {"item": item}, "id": f"call {number}", "type": "tool_call"}
        for number, item in enumerate(items)
    ]
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [AIMessage("", id="plan", tool_calls=calls)]})
    builder.add_node("tools", ToolNode([tool], **options))
    builder.add_node("tell", lambda state: {"messages": [AIMessage("done", id="end")]})
    for before, after in ((START, "model"), ("model", "tools"), ("tools", "tell")):
        builder.add_edge(before, after)
    return Runner(builder.compile(checkpointer=saver), office.mode)


async def test_parallel_tools_that_fail_in_the_middle_go_on_one_by_one(saver: PerdureSaver, office: Office) -> None:
    """One of them is refused: the others have booked, and are not asked again."""
    items = ["a", "b", "c", "a"]  # twice the same: two bookings
    office.trouble = [Broken()]
    graph = tooling(office, saver, items)
    with pytest.raises(Broken):
        await graph.invoke({"messages": []}, at("t"))
    result = await graph.invoke(None, at("t"))
    told = [message.content.partition("-")[0] for message in result["messages"] if message.type == "tool"]
    assert told == items
    assert sorted(office.ran).count("book b") + sorted(office.ran).count("book c") <= 3
    assert len(office.ran) == len(items) + 1
    assert len(set(office.keys)) == len(items)


async def test_a_doubt_never_goes_to_the_model(saver: PerdureSaver, office: Office) -> None:
    """A tool node that makes messages of errors would let the model book again. The graph ends instead, where it is."""
    graph = tooling(office, saver, ["a", "b"], handle_tool_errors=True)
    office.trouble = [TimeoutError("no answer")]
    for _ in range(2):
        with pytest.raises(perdure.InDoubt, match="perdure run resolve") as caught:
            await graph.invoke(None if office.ran else {"messages": []}, at("t"))
        assert len(office.ran) == 2
        assert (await graph.state(at("t"))).next == ("tools",)
    [info] = saver.store.runs()  # listed while it waits for somebody
    assert info.waiting_for is not None
    assert (info.status, info.waiting_for.kind) == ("waiting", "doubt")
    saver.store.get_run(str(caught.value.run)).resolve(str(caught.value.step), done="looked-up")
    result = await graph.invoke(None, at("t"))
    assert "looked-up" in [message.content for message in result["messages"]]
    assert len(office.ran) == 2
    assert saver.store.runs() == []


async def test_a_node_cannot_swallow_a_doubt_but_on_doubt_fail_is_its_own_to_handle(saver: PerdureSaver) -> None:
    for mode in MODES:
        asking, failing = Office(mode), Office(mode, on_doubt="fail")

        async def swallow(state: Trip, office: Office = asking) -> Trip:
            try:
                return {"booked": [await office(office.book("a"))]}
            except perdure.InDoubt as doubt:
                return {"booked": [f"perhaps {doubt.key}"]}

        async def handle(state: Trip, office: Office = failing) -> Trip:
            return await swallow(state, office)

        asking.trouble, failing.trouble = [TimeoutError()], [TimeoutError()]
        with pytest.raises(perdure.InDoubt):
            await asking.line(saver, swallow).invoke({}, at(f"ask {mode}"))
        graph = failing.line(saver, handle)
        assert (await graph.invoke({}, at(f"fail {mode}")))["booked"] == [f"perhaps {failing.keys[0]}"]
        assert len(failing.keys) == 1


@pytest.mark.parametrize("durability", ["async", "sync"])
async def test_after_a_swallowed_doubt_nothing_more_is_booked(
    saver: PerdureSaver, office: Office, durability: str
) -> None:
    """With durability "async" LangGraph begins the next step meanwhile: its effects wait for a checkpoint in vain."""

    async def swallow(state: Trip) -> Trip:
        try:
            return {"booked": [await office(office.book("a"))]}
        except perdure.InDoubt:
            return {}

    async def more(state: Trip) -> Trip:
        return {"booked": [await office(office.book("b"))]}

    office.trouble = [TimeoutError()]
    graph = office.line(saver, swallow, more)
    with pytest.raises(perdure.InDoubt):
        await graph.invoke({}, at("t"), durability=durability)
    assert office.ran == ["book a"]
    assert (await graph.state(at("t"))).next == ("n0",)


async def test_on_doubt_fail_is_an_end_also_where_the_node_runs_again(saver: PerdureSaver) -> None:
    """Nobody knows whether it happened: running the graph again must not do it again."""
    for mode in MODES:
        office = Office(mode, on_doubt="fail")

        async def trip(state: Trip, office: Office = office) -> Trip:
            return {"booked": [await office(office.book("a"))]}

        office.trouble = [TimeoutError()]
        graph = office.line(saver, trip)
        givens: list[Any] = [{}, None, None]
        for given in givens:
            with pytest.raises(perdure.InDoubt):
                await graph.invoke(given, at(mode))
        assert len(office.keys) == 1


# --- where it stands


async def test_an_effect_waits_until_its_checkpoint_is_stored(
    saver: PerdureSaver, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kill in the effect would find no checkpoint to go on from, and the next run would be another task."""
    order: list[str] = []
    settle = LineSave.settle
    looked, find, prepare = threading.Event(), task_policy._find, LineSave.prepare

    def watched(tenant: int, task: Any) -> Program[int | None]:
        found = yield from find(tenant, task)
        if found is None:
            looked.set()
        return found

    def held(request: LineSave, after: int = 0) -> Any:
        if request.note == "loop 0":  # the checkpoint of the first node
            order.append("put begins")
            while not looked.is_set():  # a transaction that does nothing, until the effect has looked in vain
                yield _nothing()
        return (yield from prepare(request, after))

    def settled(request: LineSave, *stored: Any) -> None:
        settle(request, *stored)
        order.append(str(request.note))

    async def trip(state: Trip) -> Trip:
        booked = await office(office.book("a"))
        order.append("booked")
        return {"booked": [booked]}

    monkeypatch.setattr(task_policy, "_find", watched)
    monkeypatch.setattr(LineSave, "prepare_warm", lambda _: None)
    monkeypatch.setattr(LineSave, "prepare", held)
    monkeypatch.setattr(LineSave, "settle", settled)
    await office.line(saver, trip).invoke({}, at("t"))
    assert order.index("loop 0") < order.index("booked")
    assert looked.is_set()


def _nothing() -> Any:
    from perdure.storage.program import Batch, Sql, Transaction

    def program() -> Program[None]:
        yield Batch(Sql("SELECT 1")(), last=True)  # a real one: others get their turn on the loop while it waits

    return Transaction(program)


@pytest.mark.parametrize("make", [lambda: None, InMemorySaver], ids=["none", "memory"])
async def test_without_a_perdure_saver_an_effect_is_refused_and_a_step_is_a_plain_call(
    office: Office, make: Callable[[], Any]
) -> None:
    async def look(state: Trip) -> Trip:
        return {"booked": [await office(office.search("a"))]}

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a"))]}

    other = make()
    assert (await office.line(other, look).invoke({}, at("t")))["booked"] == ["found a"]
    with pytest.raises(perdure.NotInRun, match=r"compile it with checkpointer=PerdureSaver"):
        await office.line(other, trip).invoke({}, at("t"))
    assert office.ran == ["search a"]


async def test_where_no_checkpoint_is_stored_an_effect_is_refused(saver: PerdureSaver, office: Office) -> None:
    """durability="exit", and subgraphs that keep nothing: after a crash it would be another task."""

    async def trip(state: Trip) -> Trip:
        await office(office.search("a"))
        return {"booked": [await office(office.book("a"))]}

    with pytest.raises(perdure.UsageError, match=r'durability="exit" .* use durability="async"'):
        await office.line(saver, trip).invoke({}, at("t"), durability="exit")
    inner = StateGraph(Trip)
    inner.add_node("trip", office.node(trip))
    inner.add_edge(START, "trip")
    for checkpointer in (False, True, None):
        builder = StateGraph(Trip)
        builder.add_node("inner", inner.compile(checkpointer=checkpointer))
        builder.add_edge(START, "inner")
        graph = Runner(builder.compile(checkpointer=saver), office.mode)
        if checkpointer is False:
            with pytest.raises(perdure.UsageError, match=r"subgraph 'inner' stores no checkpoints"):
                await graph.invoke({}, at("none"))
        else:
            assert len((await graph.invoke({}, at(str(checkpointer))))["booked"]) == 1
    assert office.ran.count("book a") == 2


async def test_a_blocking_effect_in_an_async_node_is_refused_unless_checkpoints_come_first(
    saver: PerdureSaver,
) -> None:
    """It would hold up the event loop that stores the checkpoint. A step is a plain call there."""
    office = Office("sync")

    async def trip(state: Trip) -> Trip:
        return {"booked": [office.search("a"), office.book("a")]}

    builder = StateGraph(Trip)
    builder.add_node("trip", trip)
    builder.add_edge(START, "trip")
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(perdure.UsageError, match="blocking call in an async node"):
        await graph.ainvoke({}, at("t"))
    assert (await graph.ainvoke(None, at("t"), durability="sync"))["booked"] == ["found a", "a-1"]


async def test_an_interrupt_inside_an_effect_is_no_doubt(saver: PerdureSaver) -> None:
    """A tool that asks before it acts: LangGraph runs its body again from the top, with the answer."""
    keys: list[str] = []

    @perdure.effect(name="book")
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        keys.append(key)
        return f"{item}: {interrupt('sure?')}"

    def trip(state: Trip) -> Trip:
        return {"booked": [book("a")]}

    graph = StateGraph(Trip).add_node("trip", trip).add_edge(START, "trip").compile(checkpointer=saver)
    assert "__interrupt__" in graph.invoke({}, at("t"))
    assert graph.invoke(Command(resume="yes"), at("t"))["booked"] == ["a: yes"]
    assert len(keys) == 2
    assert len(set(keys)) == 1
