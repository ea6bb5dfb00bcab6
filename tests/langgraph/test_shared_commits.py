"""What a short thread costs, and what that must not lose: a first checkpoint looks nothing up, and the writes of the
only task of a checkpoint share the commit of the next one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from checkpoints import config_of, got, ids_in, numbered_id, put, values_at, writes_at
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph

from perdure.adapters import PreparedSave
from perdure.errors import Conflict, OutcomeUnknown
from perdure.langgraph import PerdureSaver, inflight
from perdure.storage.program import Transaction

LONG_S = 60.0  # longer than any test: an offer ends because it is taken or withdrawn


@pytest.fixture
def long_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "_OFFER_S", LONG_S)
    monkeypatch.setattr(inflight, "_ENDS_S", LONG_S)


@contextmanager
def offered(saver: PerdureSaver, config: RunnableConfig) -> Iterator[Future[None]]:
    """The writes of a task on a checkpoint, in another thread, while they are offered to the next checkpoint."""
    begun = threading.Event()
    offer = saver._in_flight._offer

    def noted(*args: Any) -> Any:
        try:
            return offer(*args)
        finally:
            begun.set()

    saver._in_flight._offer = noted  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(saver.put_writes, config, [("a", "x" * 100)], "task")
        assert begun.wait(LONG_S)
        yield writing
        writing.result(LONG_S)


def commits(saver: PerdureSaver) -> list[str]:
    """What is committed from now on."""
    driver: Any = saver.store._context.driver
    run, arun, append, aappend = driver.run, driver.arun, driver.append, driver.aappend
    found: list[str] = []

    def noted_run(transaction: Transaction) -> Any:
        found.extend(["program"] * transaction.write)
        return run(transaction)

    async def noted_arun(transaction: Transaction) -> Any:
        found.extend(["program"] * transaction.write)
        return await arun(transaction)

    def noted_append(*args: Any) -> bool:
        found.append("append")
        return bool(append(*args))

    async def noted_aappend(*args: Any) -> bool:
        found.append("append")
        return bool(await aappend(*args))

    driver.run, driver.arun, driver.append, driver.aappend = noted_run, noted_arun, noted_append, noted_aappend
    return found


def chat(saver: PerdureSaver) -> Any:
    builder: Any = StateGraph(MessagesState)
    builder.add_node("answer", lambda state: {"messages": [("ai", f"answer {len(state['messages'])}")]})
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


@pytest.mark.usefixtures("long_offers")
@pytest.mark.parametrize("way", ["blocking", "async"])
async def test_a_turn_is_two_commits(saver: PerdureSaver, way: str) -> None:
    """The input, what its task has written, and the checkpoint made of that; then the answer and its checkpoint. On an
    event loop the input is stored by itself, as it is where the thread that stores it starts late."""
    graph = chat(saver)
    put(saver, "another", {"n": 1})  # the tenant is there
    made = commits(saver)
    counts = []
    for number in range(1 if way == "async" else 5):
        config = config_of(f"chat-{number}")
        for turn in range(3):
            asked = {"messages": [("human", f"question {turn}")]}
            if way == "async":
                await graph.ainvoke(asked, config)
            else:
                graph.invoke(asked, config)
        assert set(made) == {"append"}
        counts.append(len(made))
        made.clear()
        assert len(graph.get_state(config).values["messages"]) == 6
        assert [len(found.pending_writes or []) for found in saver.list(config)] == [0, 1, 2] * 3
    assert min(counts) == (9 if way == "async" else 7)
    assert max(counts) <= 9
    assert saver.store.ops.verify().ok


@pytest.mark.usefixtures("long_offers")
def test_a_turn_leaves_nothing_for_the_garbage_collector(saver: PerdureSaver) -> None:
    """A cycle would keep the whole state of each turn until the collector comes."""
    graph, config = chat(saver), config_of("chat")
    gc.collect()
    before = set(map(id, gc.get_objects()))
    gc.disable()
    try:
        for turn in range(4):
            graph.invoke({"messages": [("human", f"question {turn}")]}, config)
        new = [one for one in gc.get_objects() if type(one) in (inflight.UnderWay, PreparedSave)]
        assert (
            len([one for one in new if id(one) not in before]) <= 2
        )  # a thread may still be about to end the last one
    finally:
        gc.enable()


@pytest.mark.usefixtures("long_offers")
def test_a_task_with_siblings_waits_for_no_checkpoint(saver: PerdureSaver) -> None:
    """Their writes are stored at once: a crash while a sibling runs finds them."""
    first = put(saver, "t", {"n": 1})
    with offered(saver, first):
        for number in range(3):
            saver.put_writes(first, [("a", number)], f"sibling {number}")
    assert {task for task, _, _ in writes_at(saver, first)} == {"task", "sibling 0", "sibling 1", "sibling 2"}


def test_writes_wait_for_a_checkpoint_that_is_still_to_be_put(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is stored none would find them; after that they wait no longer than others."""
    monkeypatch.setattr(inflight, "_COMES_S", LONG_S)
    before = put(saver, "t", {"n": 0})
    with offered(saver, config_of("t", id=numbered_id(1))) as writing:
        assert not writing.done()
        first = put(saver, "t", {"n": 1}, id=numbered_id(1), parent=before)
        writing.result(LONG_S)
    assert writes_at(saver, first) == [("task", "a", "x" * 100)]


@pytest.mark.usefixtures("long_offers")
def test_nothing_waits_where_the_caller_wants_each_step_durable(saver: PerdureSaver) -> None:
    first = put(saver, "t", {"n": 1})
    first["configurable"]["__pregel_durability"] = "sync"
    saver.put_writes(first, [("a", 1)], "task")
    assert writes_at(saver, first) == [("task", "a", 1)]


@pytest.mark.usefixtures("long_offers")
def test_writes_outlive_a_checkpoint_that_is_refused(saver_url: str) -> None:
    with PerdureSaver(saver_url, single_writer=True) as saver, PerdureSaver(saver_url) as other:
        first = put(saver, "t", {"n": 1})
        put(other, "t", {"n": 2}, parent=first)
        with offered(saver, first), pytest.raises(Conflict):
            put(saver, "t", {"n": 3}, parent=first)
        assert writes_at(other, first) == [("task", "a", "x" * 100)]


@pytest.mark.usefixtures("long_offers")
@pytest.mark.parametrize("moved", ["the head", "the thread's generation"])
def test_writes_are_stored_where_the_next_checkpoint_is_no_plain_one(saver_url: str, moved: str) -> None:
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        before = put(saver, "t", {"n": 0})
        first = put(saver, "t", {"n": 1}, parent=before)
        if moved == "the head":
            put(other, "t", {"n": 2}, parent=first)
        else:
            other.store.thread("t").prune(keep=1)
        with offered(saver, first):
            put(saver, "t", {"n": 3}, parent=first)
        assert writes_at(saver, first) == [("task", "a", "x" * 100)]
        assert saver.store.ops.verify().ok


def lose_answer(saver: PerdureSaver, method: str, *, does: bool) -> None:
    """The answer to the next COMMIT is lost, which was done or not."""
    driver: Any = saver.store._context.driver
    perform: Callable[..., Any] = getattr(driver, method)

    def lost(*args: Any) -> Any:
        if isinstance(args[0], Transaction) and not args[0].write:
            return perform(*args)
        setattr(driver, method, perform)
        if does:
            perform(*args)
        raise OutcomeUnknown("the connection was lost")

    setattr(driver, method, lost)


@pytest.mark.usefixtures("long_offers")
@pytest.mark.parametrize("does", [True, False], ids=["committed", "not committed"])
def test_a_lost_answer_to_a_shared_commit(saver: PerdureSaver, does: bool) -> None:
    first = put(saver, "t", {"n": 1})
    with offered(saver, first):
        lose_answer(saver, "append", does=does)
        put(saver, "t", {"n": 2}, parent=first)
    assert writes_at(saver, first) == [("task", "a", "x" * 100)]
    assert len(ids_in(saver, config_of("t"))) == 2
    assert saver.store.ops.verify().ok


@contextmanager
def waiting_input(saver: PerdureSaver, before: RunnableConfig) -> Iterator[tuple[RunnableConfig, Future[None]]]:
    """A graph's input that is left to the writes of its task, which are offered to the next checkpoint."""
    made = commits(saver)
    with offered(saver, config_of("t", id=numbered_id(1))) as writing:
        config = put(saver, "t", {"n": "y" * 100}, id=numbered_id(1), parent=before, source="input")
        assert made == [] or writing.done()
        yield config, writing


def check_input(saver: PerdureSaver, ids: list[int]) -> None:
    config = config_of("t", id=numbered_id(1))
    assert values_at(saver, config) == {"n": "y" * 100}
    assert writes_at(saver, config) == [("task", "a", "x" * 100)]
    assert ids_in(saver, config_of("t")) == [numbered_id(number) for number in ids]
    assert got(saver, config).parent_config == config_of("t", id=numbered_id(0))
    assert saver.store.ops.verify().ok


@pytest.fixture
def long_waits(long_offers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "_COMES_S", LONG_S)


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("does", [None, True, False], ids=["answered", "committed", "not committed"])
def test_an_input_is_stored_with_what_follows_it(saver: PerdureSaver, does: bool | None) -> None:
    """Also if the answer to their commit is lost."""
    before = put(saver, "t", {"n": 0}, id=numbered_id(0))
    made = commits(saver)
    with waiting_input(saver, before) as (config, _):
        if does is not None:
            lose_answer(saver, "append", does=does)
        put(saver, "t", {"n": 2}, id=numbered_id(2), parent=config)
        assert does is not None or made == ["append"]
    check_input(saver, [2, 1, 0])
    assert values_at(saver, config_of("t")) == {"n": 2}


@pytest.mark.usefixtures("long_waits")
def test_an_input_is_stored_with_the_writes_of_its_task_where_nothing_follows(
    saver: PerdureSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(saver, "t", {"n": 0}, id=numbered_id(0))
    monkeypatch.setattr(inflight, "_OFFER_S", 0.001)
    with waiting_input(saver, before) as (_, writing):
        writing.result(LONG_S)
    check_input(saver, [1, 0])


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("moved", ["the head", "the thread's generation"])
def test_an_input_is_stored_where_another_writer_was_faster(saver_url: str, moved: str) -> None:
    with PerdureSaver(saver_url) as saver, PerdureSaver(saver_url) as other:
        put(saver, "t", {"n": -1}, id=numbered_id(0))
        before = put(saver, "t", {"n": 0}, id=numbered_id(0))
        with waiting_input(saver, before) as (config, _):
            if moved == "the head":
                put(other, "t", {"n": 9}, id=numbered_id(9), parent=before)
            else:
                other.store.thread("t").prune(keep=1)
            put(saver, "t", {"n": 2}, id=numbered_id(2), parent=config)
        check_input(saver, [9, 2, 1, 0] if moved == "the head" else [2, 1, 0])
        assert got(other, config_of("t", id=numbered_id(2))).parent_config == config


@pytest.mark.usefixtures("long_waits")
def test_an_input_is_stored_where_the_next_checkpoint_is_refused(saver: PerdureSaver) -> None:
    before = put(saver, "t", {"n": 0}, id=numbered_id(0))
    with waiting_input(saver, before) as (config, _):
        saver._check_settled = refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(Conflict):
            put(saver, "t", {"n": 2}, id=numbered_id(2), parent=config)
    check_input(saver, [1, 0])


def refuse(*_: Any) -> None:
    raise Conflict("a person has to decide")


@pytest.mark.parametrize("does", [True, False], ids=["committed", "not committed"])
def test_a_lost_answer_to_the_first_commit_of_a_thread(saver: PerdureSaver, does: bool) -> None:
    put(saver, "another", {"n": 1})
    lose_answer(saver, "run", does=does)
    first = put(saver, "t", {"n": 1}, user="ada")
    put(saver, "t", {"n": 2}, parent=first)
    assert len(ids_in(saver, config_of("t"))) == 2
    assert [found.name for found in saver.store.threads(where={"user": "ada"})] == ["t"]
    assert saver.store.ops.verify().ok


def test_many_processes_begin_a_thread_at_once(saver_url: str) -> None:
    """One makes it, and the first checkpoints of all are there."""
    savers = [PerdureSaver(saver_url) for _ in range(4)]
    put(savers[0], "another", {"n": 1})
    start = threading.Barrier(len(savers))

    def begin(number: int) -> None:
        for turn in range(5):
            start.wait(LONG_S)
            put(savers[number], f"t{turn}", {"n": number}, user=turn)

    with ThreadPoolExecutor(len(savers)) as pool:
        list(pool.map(begin, range(len(savers))))
    for turn in range(5):
        found = list(savers[0].list(config_of(f"t{turn}")))
        assert sorted(one.checkpoint["channel_values"]["n"] for one in found) == [0, 1, 2, 3]
        assert [one.parent_config for one in found] == [None] * 4
        assert [one.name for one in savers[1].store.threads(where={"user": turn})] == [f"t{turn}"]
        assert got(savers[2], config_of(f"t{turn}")).config == got(savers[3], config_of(f"t{turn}")).config
    assert savers[0].store.ops.verify().ok
    for saver in savers:
        saver.close()
