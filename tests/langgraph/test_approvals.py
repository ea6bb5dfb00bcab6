"""An effect that wants approval asks by LangGraph's interrupt: it runs once, after the answer that was meant for it,
whether that came with `Command(resume=…)` or from the command line.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from effects_features_kit import Broken, Office, Trip
from graph_kit import MODES, Runner, at
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME
from langgraph.errors import GraphInterrupt
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from perdure.adapters import Line
from perdure.errors import AnswerRefused, NotApproved
from perdure.langgraph import PerdureSaver
from perdure.langgraph import saver as saver_module
from perdure.runs.calls import asks


def questions(result: Any) -> list[Any]:
    return [found.value for found in result["__interrupt__"]]


@pytest.mark.parametrize("mode", MODES)
async def test_an_approval_is_an_interrupt_among_others(saver_url: str, mode: str) -> None:
    """Each process that resumes the graph is a new one."""
    office = Office(mode, approve=True)

    async def trip(state: Trip) -> Trip:
        first = await office(office.book("a"))
        colour = interrupt("Which colour?")
        second = await office(office.book("b"))
        return {"booked": [first, colour, second, interrupt("Is that all?")]}

    answers: list[Any] = [{}, *(Command(resume=answer) for answer in (True, "blue", True, "yes"))]
    asked: list[Any] = []
    for number, given in enumerate(answers):
        with PerdureSaver(saver_url) as saver:
            graph = office.line(saver, trip)
            result = await graph.invoke(given, at("t"))
            if number < 4:
                [question] = questions(result)
                asked.append(question if isinstance(question, str) else question["question"])
            waiting = [ask.text for ask in saver.store.questions()]
            assert waiting == (asked[-1:] if number < 4 else [])
    assert asked == ["May book(item='a') run?", "Which colour?", "May book(item='b') run?", "Is that all?"]
    assert result["booked"] == ["a-1", "blue", "b-2", "yes"]
    assert office.ran == ["book a", "book b"]


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_not_approved_does_not_run(saver: PerdureSaver, mode: str) -> None:
    office = Office(mode, approve="Shall I?")

    async def trip(state: Trip) -> Trip:
        try:
            return {"booked": [await office(office.book("a"))]}
        except NotApproved:
            return {"booked": ["nothing"]}

    graph = office.line(saver, trip)
    assert questions(await graph.invoke({}, at("t")))[0]["question"] == "Shall I?"
    assert questions(await graph.invoke(None, at("t")))[0]["question"] == "Shall I?"  # nothing was answered
    with pytest.raises(AnswerRefused, match="must be one of"):
        await graph.invoke(Command(resume="perhaps"), at("t"))
    assert (await graph.invoke(Command(resume=False), at("t")))["booked"] == ["nothing"]
    assert office.ran == []


@pytest.mark.parametrize("mode", MODES)
async def test_answers_do_not_go_to_the_tool_that_happens_to_come_first(saver: PerdureSaver, mode: str) -> None:
    """Tools of one task run in parallel, and LangGraph shows the interrupt of one of them."""
    office = Office(mode, approve=True)
    orders = ["ab", "ba", "ba"]  # in which they come to their approval, each time that the task runs

    async def tools(state: Trip) -> Trip:
        ended: dict[str, Any] = {}
        for item in orders.pop(0):
            try:
                ended[item] = await office(office.book(item))
            except NotApproved:
                ended[item] = "not approved"
            except GraphInterrupt as stopped:
                ended[item] = stopped
        for item in "ab":
            if isinstance(ended[item], GraphInterrupt):
                raise ended[item]
        return {"booked": [ended["a"], ended["b"]]}

    graph = office.line(saver, tools)
    assert "item='a'" in questions(await graph.invoke({}, at("t")))[0]["question"]
    assert "item='b'" in questions(await graph.invoke(Command(resume=True), at("t")))[0]["question"]
    assert office.ran == ["book a"]
    assert (await graph.invoke(Command(resume=False), at("t")))["booked"] == ["a-1", "not approved"]
    assert office.ran == ["book a"]


async def test_an_approval_can_be_given_to_the_store_instead(saver: PerdureSaver) -> None:
    for mode in MODES:
        office = Office(mode, approve=True)

        async def trip(state: Trip, office: Office = office) -> Trip:
            return {"booked": [await office(office.book("a")), interrupt("Is that all?")]}

        graph = office.line(saver, trip)
        [question] = questions(await graph.invoke({}, at(mode)))
        [ask] = saver.store.questions()
        assert (question["run"], question["step"]) == (ask.run, ask.path)
        assert (question["effect"], question["arguments"]) == ("book", {"item": "a"}) == (ask.effect, ask.arguments)
        saver.store.answer(ask.run, True, step=ask.path, who="maria")
        assert questions(await graph.invoke(None, at(mode))) == ["Is that all?"]
        assert (await graph.invoke(Command(resume="yes"), at(mode)))["booked"] == ["a-1", "yes"]
        assert office.ran == ["book a"]


async def test_who_may_approve_holds_for_a_resume_too(saver: PerdureSaver) -> None:
    for mode in MODES:
        office = Office(mode, approve={"approvers": ["maria", "paul"], "quorum": 2})

        async def trip(state: Trip, office: Office = office) -> Trip:
            return {"booked": [await office(office.book("a")), interrupt("Is that all?")]}

        graph = office.line(saver, trip)
        await graph.invoke({}, at(mode))
        with pytest.raises(AnswerRefused, match="may not answer"):
            await graph.invoke(Command(resume=True), at(mode))
        for who in ("maria", "paul"):
            result = await graph.invoke(Command(resume={"answer": True, "who": who}), at(mode))
        assert questions(result) == ["Is that all?"]
        assert (await graph.invoke(Command(resume="yes"), at(mode)))["booked"] == ["a-1", "yes"]
        [info] = [info for info in saver.store.runs(tasks=True) if mode in info.id]
        assert saver.store.get_run(info.id).steps()[0].status == "done"


@pytest.mark.parametrize("mode", MODES)
async def test_answers_that_came_here_and_there_leave_the_next_question_its_own(saver: PerdureSaver, mode: str) -> None:
    """One approver resumes the graph, the other answers the store; a refused answer is neither's."""
    office = Office(mode, approve={"approvers": ["maria", "paul"], "quorum": 2})

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a")), interrupt("Is that all?")]}

    graph = office.line(saver, trip)
    await graph.invoke({}, at("t"))
    with pytest.raises(AnswerRefused, match="may not answer"):
        await graph.invoke(Command(resume=True), at("t"))
    assert "item='a'" in questions(await graph.invoke(None, at("t")))[0]["question"]  # asked again, not refused again
    assert (
        "item='a'"
        in questions(await graph.invoke(Command(resume={"answer": True, "who": "maria"}), at("t")))[0]["question"]
    )
    [ask] = saver.store.questions()
    saver.store.answer(ask.run, True, step=ask.path, who="paul")
    assert questions(await graph.invoke(None, at("t"))) == ["Is that all?"]
    assert (await graph.invoke(Command(resume="yes"), at("t")))["booked"] == ["a-1", "yes"]
    assert office.ran == ["book a"]


async def test_an_answer_that_was_stored_before_a_crash_is_not_taken_for_the_next_one(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LangGraph itself would hand the answer out to the question that follows."""
    for mode in MODES:
        office = Office(mode, approve=True)

        async def trip(state: Trip, office: Office = office) -> Trip:
            return {"booked": [await office(office.book("a")), interrupt("Is that all?")]}

        def broken(*_: Any) -> Any:
            raise Broken

        graph = office.line(saver, trip)
        await graph.invoke({}, at(mode))
        with monkeypatch.context() as patched:
            patched.setattr(asks, "await_answer", broken)
            with pytest.raises(Broken):
                await graph.invoke(Command(resume=True), at(mode))
        assert questions(await graph.invoke(None, at(mode))) == ["Is that all?"]
        assert (await graph.invoke(Command(resume="yes"), at(mode)))["booked"] == ["a-1", "yes"]
        assert office.ran == ["book a"]


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_langgraph_lost_in_a_crash_takes_nothing_from_the_next_question(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """LangGraph stores the answers of a task when it ends. The journal has the approval, and the effect has run."""
    office, crashes = Office(mode, approve=True), [True]

    async def trip(state: Trip) -> Trip:
        first = await office(office.book("a"))
        if crashes:
            raise Broken
        return {
            "booked": [first, interrupt("Which colour?"), await office(office.book("b")), interrupt("Is that all?")]
        }

    def lost(*_: Any, **__: Any) -> None: ...

    async def alost(*_: Any, **__: Any) -> None: ...

    graph = office.line(saver, trip)
    await graph.invoke({}, at("t"))
    with monkeypatch.context() as patched:
        patched.setattr(PerdureSaver, "put_writes", lost)
        patched.setattr(PerdureSaver, "aput_writes", alost)
        with pytest.raises(Broken):
            await graph.invoke(Command(resume=True), at("t"))
    crashes.clear()
    assert questions(await graph.invoke(None, at("t"))) == ["Which colour?"]
    assert "item='b'" in questions(await graph.invoke(Command(resume="blue"), at("t")))[0]["question"]
    assert questions(await graph.invoke(Command(resume=True), at("t"))) == ["Is that all?"]
    assert (await graph.invoke(Command(resume="yes"), at("t")))["booked"] == ["a-1", "blue", "b-2", "yes"]
    assert office.ran == ["book a", "book b"]


async def test_nothing_is_approved_by_the_answer_to_an_earlier_question(saver: PerdureSaver) -> None:
    """LangGraph keeps what a graph was resumed with, and hands it out again."""
    for mode in MODES:
        office = Office(mode, approve=True)

        async def trip(state: Trip, office: Office = office) -> Trip:
            first = await office(office.book("a"))
            assert interrupt("Is that all?") is True
            return {"booked": [first, await office(office.book("b"))]}

        graph = office.line(saver, trip)
        await graph.invoke({}, at(mode))
        for _ in range(2):
            await graph.invoke(Command(resume=True), at(mode))
        for _ in range(3):
            assert "item='b'" in questions(await graph.invoke(None, at(mode)))[0]["question"]
        assert office.ran == ["book a"]
        assert (await graph.invoke(Command(resume=True), at(mode)))["booked"] == ["a-1", "b-2"]


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_langgraph_stores_late_approves_nothing(saver_url: str, mode: str) -> None:
    """LangGraph stores it in the background. Here it begins to when the question that follows is asked."""

    class Late(PerdureSaver):
        asked, aasked = threading.Event(), asyncio.Event()

        def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            if writes[0][0] == INTERRUPT:
                self.asked.set()
            elif writes[0] == (RESUME, True):
                assert self.asked.wait(60)
            super().put_writes(config, writes, task_id, task_path)

        async def aput_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            if writes[0][0] == INTERRUPT:
                self.aasked.set()
            elif writes[0] == (RESUME, True):
                await asyncio.wait_for(self.aasked.wait(), 60)
            await super().aput_writes(config, writes, task_id, task_path)

    office = Office(mode, approve=True)

    async def trip(state: Trip) -> Trip:
        return {"booked": [await office(office.book("a")), await office(office.book("b"))]}

    with Late(saver_url) as saver:
        graph = office.line(saver, trip)
        await graph.invoke({}, at(mode))
        saver.asked.clear()
        saver.aasked.clear()
        turns: list[Any] = [Command(resume=True), None, None]
        for given in turns:
            assert "item='b'" in questions(await graph.invoke(given, at(mode)))[0]["question"]
        assert office.ran == ["book a"]


@pytest.mark.parametrize("in_thread", [False, True])
async def test_an_answer_that_is_being_stored_on_a_blocked_loop_approves_nothing(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    """A blocking effect in an async node cannot wait for what its own loop is storing, nor can one in a thread that
    the node blocks its loop for."""
    monkeypatch.setattr(saver_module, "_TASK_S", 0.05)
    office, asked = Office("sync", approve=True), asyncio.Event()
    attach = Line.aattach_all

    async def late(self: Line, id: str, writes: Any, *rest: Any) -> None:
        if any(write.key == INTERRUPT for write in writes):
            asked.set()
        elif [(write.key, write.text) for write in writes] == [(RESUME, b"true")]:
            await asyncio.wait_for(asked.wait(), 60)
        await attach(self, id, writes, *rest)

    def book(item: str) -> Any:
        if not in_thread:
            return office.book(item)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, office.book, item).result(60)

    async def trip(state: Trip) -> Trip:
        return {"booked": [book("a"), book("b")]}

    builder = StateGraph(Trip)
    builder.add_node("trip", trip)
    builder.add_edge(START, "trip")
    graph: Any = builder.compile(checkpointer=saver)
    await graph.ainvoke({}, at("t"), durability="sync")
    monkeypatch.setattr(Line, "aattach_all", late)
    turns: list[Any] = [Command(resume=True), None, None]
    for given in turns:
        found = await graph.ainvoke(given, at("t"), durability="sync")
        assert "item='b'" in questions(found)[0]["question"]
    assert office.ran == ["book a"]


# --- a no is an answer


def called(*items: str) -> AIMessage:
    """A model's answer that calls the tool for each item."""
    calls: Any = [{"name": "book", "args": {"item": item}, "id": item, "type": "tool_call"} for item in items]
    return AIMessage("", tool_calls=calls)


def replies(result: Any) -> list[tuple[str, str]]:
    return [(message.status, message.content) for message in result["messages"] if message.type == "tool"]


def declined(item: str) -> tuple[str, str]:
    return "error", f"book(item='{item}') was not approved; it did not run"


@pytest.mark.parametrize("mode", MODES)
async def test_an_agent_gets_a_no_as_the_answer_of_its_tool(saver: PerdureSaver, mode: str) -> None:
    class Model(FakeMessagesListChatModel):
        def bind_tools(self, *_: Any, **__: Any) -> Any:
            return self

    office = Office(mode, approve=True)
    model = Model(responses=[called("a"), AIMessage("a pity"), called("b"), AIMessage("booked")])
    book = tool("book", description="Books.")(office.book)
    graph = Runner(create_agent(model, [book], checkpointer=saver), mode)
    for said, answer in (("book a", False), ("book b", True)):
        assert questions(await graph.invoke({"messages": [("user", said)]}, at("t")))
        result = await graph.invoke(Command(resume=answer), at("t"))
    assert replies(result) == [declined("a"), ("success", "b-1")]
    assert result["messages"][3].content == "a pity"
    assert office.ran == ["book b"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_no_to_one_of_parallel_tools_stops_no_other(saver: PerdureSaver, mode: str) -> None:
    office = Office(mode, approve=True)
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([tool("book", description="Books.")(office.book)]))
    builder.add_edge(START, "tools")
    graph = Runner(builder.compile(checkpointer=saver), mode)
    asked = questions(await graph.invoke({"messages": [called("a", "b")]}, at("t")))
    for _ in range(2):
        result = await graph.invoke(Command(resume=asked[0]["arguments"] == {"item": "b"}), at("t"))
        asked = questions(result) if "__interrupt__" in result else []
    assert replies(result) == [declined("a"), ("success", "b-1")]
    assert saver.store.runs() == []
