"""A plain `interrupt()` is a question of the store: listed, answered from any process, and taken once by its graph."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from effects_features_kit import Office
from graph_kit import MODES, AnyGraph, Runner, at
from langchain_core.runnables import RunnableConfig
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import perdure
from perdure.errors import AnswerRefused, NotFound, UsageError
from perdure.langgraph import PerdureSaver


class Said(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]


def graph_of(saver: PerdureSaver | bool | None, **nodes: Any) -> AnyGraph:
    """A graph whose nodes run side by side."""
    builder = StateGraph(Said)
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(START, name)
    return builder.compile(checkpointer=saver)


def two(state: Said) -> Said:
    return {"said": [interrupt({"question": "first?", "price": 90}), interrupt("second?")]}


def other(state: Said) -> Said:
    return {"said": [interrupt("other?")]}


def texts(saver: PerdureSaver) -> list[str]:
    return [question.text for question in saver.store.questions()]


def ask_of(saver: PerdureSaver, text: str) -> perdure.Question:
    [question] = [one for one in saver.store.questions() if one.text == text]
    return question


@pytest.mark.parametrize("mode", MODES)
async def test_an_interrupt_is_answered_from_the_store(saver: PerdureSaver, mode: str) -> None:
    graph = Runner(graph_of(saver, two=two), mode)
    await graph.invoke({"said": []}, at("trip"))
    [question] = saver.store.questions("trip")
    assert (question.run, question.thread, question.text, question.kind) == ("trip", "trip", "first?", "question")
    assert question.arguments == {"question": "first?", "price": 90}
    saver.store.answer("trip", "blue", who="maria")
    assert texts(saver) == []
    [answered] = saver.store.questions(all=True)
    assert [answer[:2] for answer in answered.answers] == [("maria", "blue")]
    with pytest.raises(AnswerRefused, match="is answered already, by maria"):
        saver.store.answer("trip", "red", step=question.path)
    await graph.invoke(None, at("trip"))
    assert texts(saver) == ["second?"]
    saver.store.answer("trip", "green")
    assert (await graph.invoke(None, at("trip")))["said"] == ["blue", "green"]
    with pytest.raises(AnswerRefused, match="has no open question"):
        saver.store.answer("trip", "red", step=question.path)
    with pytest.raises(UsageError, match="nothing to answer"):
        saver.store.answer("trip", "red")
    with pytest.raises(NotFound, match="no run and no thread 'trap'"):
        saver.store.answer("trap", "red")
    assert saver.store.ops.verify().ok


async def test_a_question_that_is_answered_by_a_command_is_gone(saver: PerdureSaver) -> None:
    for mode in MODES:
        graph = Runner(graph_of(saver, two=two), mode)
        await graph.invoke({"said": []}, at(mode))
        await graph.invoke(Command(resume="blue"), at(mode))
        assert texts(saver) == ["second?"]
        saver.store.answer(mode, "green")
        assert (await graph.invoke(None, at(mode)))["said"] == ["blue", "green"]  # "blue" goes to no second question
        assert texts(saver) == []


@pytest.mark.parametrize("inner", [None, True], ids=["a subgraph", "a subgraph that remembers"])
def test_each_of_several_questions_gets_its_own_answer(saver: PerdureSaver, inner: bool | None) -> None:
    subgraph = graph_of(inner, two=two)
    graph = graph_of(saver, outer=lambda state: {"said": subgraph.invoke({"said": []}, {})["said"]}, other=other)
    graph.invoke({"said": []}, at("t"))
    assert sorted(texts(saver)) == ["first?", "other?"]
    with pytest.raises(UsageError, match="2 open questions"):
        saver.store.answer("t", "?")
    worker = perdure.Worker(saver.store, graphs=[graph])
    for text, left in (("first?", ["other?", "second?"]), ("second?", ["other?"]), ("other?", [])):
        saver.store.answer("t", f"to {text}", step=ask_of(saver, text).path)
        worker.run(until_idle=True)
        assert sorted(texts(saver)) == left
    assert sorted(graph.get_state(at("t")).values["said"]) == ["to first?", "to other?", "to second?"]
    assert worker.counts == {"resumed": 3}


def test_a_task_of_an_entrypoint_gets_its_answer(saver: PerdureSaver) -> None:
    @task
    def ask(text: str) -> Any:
        return interrupt(text)

    @entrypoint(checkpointer=saver)
    def talk(given: str) -> list[Any]:
        return [ask("first?").result(), interrupt("own?"), ask("second?").result()]

    talk.invoke("go", at("t"))
    worker = perdure.Worker(saver.store, graphs=[talk])
    for text in ("first?", "own?", "second?"):
        assert texts(saver) == [text]
        saver.store.answer("t", f"to {text}")
        worker.run(until_idle=True)
    assert talk.get_state(at("t")).values == ["to first?", "to own?", "to second?"]


def test_two_answers_that_come_before_the_graph_runs_are_both_taken(saver: PerdureSaver) -> None:
    graph = graph_of(saver, other=other, two=two)
    graph.invoke({"said": []}, at("t"))
    for text in ("first?", "other?"):
        saver.store.answer("t", f"to {text}", step=ask_of(saver, text).path)
    assert [one.value for one in graph.invoke(None, at("t"))["__interrupt__"]] == ["second?"]
    saver.store.answer("t", "to second?")
    assert sorted(graph.invoke(None, at("t"))["said"]) == ["to first?", "to other?", "to second?"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_map", [False, True], ids=["one", "by id"])
async def test_a_second_answer_by_a_command_does_not_reach_the_next_question(
    saver: PerdureSaver, mode: str, is_map: bool
) -> None:
    graph = Runner(graph_of(saver, two=two), mode)
    await graph.invoke({"said": []}, at("t"))
    [question] = saver.store.questions()
    saver.store.answer("t", "blue")
    with pytest.raises(AnswerRefused, match="answered already"):
        await graph.invoke(Command(resume={question.path: "red"} if is_map else "red"), at("t"))
    assert [one.value for one in (await graph.invoke(None, at("t")))["__interrupt__"]] == ["second?"]
    assert (await graph.invoke(Command(resume="green"), at("t")))["said"] == ["blue", "green"]


def test_questions_belong_to_the_newest_checkpoint(saver: PerdureSaver) -> None:
    graph, store = graph_of(saver, two=two), saver.store
    graph.invoke({"said": []}, at("t"))
    [question] = store.questions()
    store.thread("t").fork(name="copy")
    assert [one.thread for one in store.questions()] == ["t", "copy"]
    store.answer("copy", "blue")
    assert [one.thread for one in store.questions()] == ["t"]  # a fork is a thread of its own
    graph.update_state(at("t"), {"said": ["by hand"]}, as_node="two")
    assert store.questions() == []
    with pytest.raises(AnswerRefused, match="its graph has continued"):
        store.answer("t", "late", step=question.path)
    graph.invoke(None, {"configurable": {"thread_id": "t", "checkpoint_id": _asking(graph)}})
    assert [one.thread for one in store.questions()] == ["t"]  # time travel asks again
    store.thread("t").rollback(next(store.thread("t").history()).id)
    assert store.questions() == []
    store.delete_thread("t")
    store.delete_thread("copy")
    assert store.questions() == []


def _asking(graph: AnyGraph) -> str:
    [asking] = [one for one in graph.get_state_history(at("t")) if one.interrupts]
    return str(asking.config["configurable"]["checkpoint_id"])


def test_an_answer_must_fit_the_schema_of_the_interrupt(saver: PerdureSaver) -> None:
    schema = {"type": "integer", "minimum": 1}
    graph = graph_of(saver, ask=lambda state: {"said": [interrupt("How many?", response_schema=schema)]})
    graph.invoke({"said": []}, at("t"))
    assert saver.store.questions()[0].schema == schema
    with pytest.raises(AnswerRefused, match="not of type 'integer'"):
        saver.store.answer("t", "many")
    saver.store.answer("t", 3)
    assert graph.invoke(None, at("t"))["said"] == [3]


def test_snapshots_copies_and_tenants_have_the_questions_that_are_theirs(saver: PerdureSaver, tmp_path: Path) -> None:
    graph, store = graph_of(saver, two=two), saver.store
    graph.invoke({"said": []}, at("t"))
    snapshot = store.snapshot("asked")
    store.ops.transfer(str(tmp_path / "other.db"), threads=["t"])
    with perdure.open(tmp_path / "other.db") as target:
        assert [one.text for one in target.questions()] == ["first?"]
        target.answer("t", "there")
        there = graph_of(PerdureSaver(target), two=two)
        assert [one.value for one in there.invoke(None, at("t"))["__interrupt__"]] == ["second?"]
    assert store.tenant("acme").questions() == []
    store.answer("t", "blue")
    graph.invoke(None, at("t"))
    assert texts(saver) == ["second?"]
    assert [one.text for one in snapshot.store.questions()] == ["first?"]
    store.restore(snapshot)
    assert texts(saver) == ["first?"]
    store.answer("t", "red")
    graph.invoke(None, at("t"))
    store.answer("t", "green")
    assert graph.invoke(None, at("t"))["said"] == ["red", "green"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_resumes_what_was_approved(saver: PerdureSaver, mode: str) -> None:
    office = Office(mode, approve=True)

    async def trip(state: Any) -> Any:
        return {"booked": [await office(office.book("a")), interrupt("Is that all?")]}

    graph = office.line(saver, trip)
    await graph.invoke({}, at("t"))
    [approval] = saver.store.questions()  # once, although it is an interrupt too
    assert approval.kind == "approval"
    saver.store.answer(approval.run, True)
    worker = perdure.Worker(saver.store, graphs=[graph.graph])
    worker.run(until_idle=True)
    assert texts(saver) == ["Is that all?"]
    saver.store.answer("t", "yes")
    worker.run(until_idle=True)
    assert graph.graph.get_state(at("t")).values["booked"] == ["a-1", "yes"]
    assert office.ran == ["book a"]


def test_a_worker_resumes_the_threads_of_its_graph_with_their_configuration(saver: PerdureSaver) -> None:
    seen: list[Any] = []

    def who(state: Said, config: RunnableConfig) -> Said:
        seen.append(config["configurable"].get("user"))
        return {"said": [interrupt("Well?")]}

    graph, stranger = graph_of(saver, who=who), graph_of(saver, stranger=other)
    for name, user in (("a", "ann"), ("b", "bob")):
        graph.invoke({"said": []}, at(name, user=user))
    stranger.invoke({"said": []}, at("c"))
    for name in "abc":
        saver.store.answer(name, "yes")
    perdure.Worker(saver.store, graphs=[graph], where={"user": "ann"}).run(until_idle=True)
    assert seen == ["ann", "bob", "ann"]
    perdure.Worker(saver.store, graphs=[graph]).run(until_idle=True)
    assert seen == ["ann", "bob", "ann", "bob"]
    assert [graph.get_state(at(name)).values["said"] for name in "abc"] == [["yes"], ["yes"], []]
    with pytest.raises(UsageError, match="was compiled with checkpointer=PerdureSaver"):
        perdure.Worker(saver.store, graphs=[graph_of(None, two=two)])


def test_a_graph_that_fails_is_not_resumed_until_there_is_another_answer(
    saver: PerdureSaver, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[Any] = []

    def fails(state: Said) -> Said:
        tries.append(interrupt("Well?"))
        raise ValueError("broken")

    graph = graph_of(saver, fails=fails)
    graph.invoke({"said": []}, at("t"))
    saver.store.answer("t", "yes")
    worker = perdure.Worker(saver.store, graphs=[graph])
    for _ in range(2):
        worker.run(until_idle=True)
    assert (tries, worker.counts) == (["yes"], {"failed": 1})
    assert "the graph of thread 't' raised ValueError; correct it, and invoke it again" in caplog.text
    with pytest.raises(ValueError, match="broken"):
        graph.invoke(None, at("t"))
    assert tries == ["yes", "yes"]  # the answer is kept


def test_questions_and_answers_of_an_encrypted_store_are_read_with_its_key(saver_url: str) -> None:
    with PerdureSaver(saver_url, keys=bytes(range(32))) as saver:
        graph = graph_of(saver, two=two)
        graph.invoke({"said": []}, at("t", user="ann"))
        saver.store.answer("t", "blue", who="maria")
        perdure.Worker(saver.store, graphs=[graph], where={"user": "ann"}).run(until_idle=True)
        assert texts(saver) == ["second?"]
        assert saver.store.ops.verify().ok
