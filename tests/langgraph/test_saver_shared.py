"""Defects that other savers have or had, one test each: a saver shared by threads, event loops and writers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import aput, config_of, got, id_of, ids_in, numbered_id, put, put_arguments, values_at, writes_at
from langchain_core.runnables import RunnableConfig

from perdure.errors import Conflict
from perdure.langgraph import PerdureSaver

THREADS = 16


def at_once(work: Callable[[int], None], number: int = THREADS) -> None:
    """Run the work in so many threads that start together; raise what the first of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(number)

    def guarded(index: int) -> None:
        try:
            start.wait(60)
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a deadlock"
    if failures:
        raise failures[0]


# --- event loops


@pytest.mark.timeout(30)
async def test_sync_calls_on_the_loop_thread(saver: PerdureSaver) -> None:
    """Stock async SQLite waits for its own loop."""
    first = put(saver, "t", {"n": 1})
    saver.put_writes(first, [("a", 1)], "task")
    second = await aput(saver, "t", {"n": 2}, parent=first)
    assert values_at(saver, config_of("t")) == {"n": 2}
    assert writes_at(saver, first) == [("task", "a", 1)]
    third = put(saver, "t", {"n": 3}, parent=second)
    found = await saver.aget_tuple(config_of("t"))
    assert found is not None
    assert found.config == third
    saver.delete_thread("t")
    assert saver.get_tuple(config_of("t")) is None


@pytest.mark.timeout(30)
async def test_a_sync_put_on_the_loop_thread_with_its_parents_async_writes_in_flight(saver: PerdureSaver) -> None:
    """The writes can only go on when the loop is free: a put that waited for them here would wait for itself."""
    first = put(saver, "t", {"n": 1})
    writes = [asyncio.create_task(saver.aput_writes(first, [("a", n)], f"task {n}")) for n in range(8)]
    for _ in range(3):  # begun, and somewhere inside
        await asyncio.sleep(0)
    second = put(saver, "t", {"n": 2}, parent=first)
    await asyncio.gather(*writes)
    assert [value for _, _, value in writes_at(saver, first)] == list(range(8))
    assert values_at(saver, second) == {"n": 2}
    # The same with an async put: it does wait, and the loop goes on.
    writes = [asyncio.create_task(saver.aput_writes(second, [("a", n)], f"task {n}")) for n in range(8)]
    third = asyncio.create_task(aput(saver, "t", {"n": 3}, parent=second))
    await third
    assert [value for _, _, value in writes_at(saver, second)] == list(range(8))
    await asyncio.gather(*writes)


@pytest.mark.timeout(30)
async def test_writes_that_were_cancelled_do_not_hold_up_the_next_put(saver: PerdureSaver) -> None:
    parent = put(saver, "t", {"n": 0})
    for number in range(1, 10):
        task = asyncio.create_task(saver.aput_writes(parent, [("a", number)], "task"))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        task.cancel()
        parent = await aput(saver, "t", {"n": number}, parent=parent)
        await asyncio.gather(task, return_exceptions=True)
    assert values_at(saver, config_of("t")) == {"n": 9}
    assert saver.store.ops.verify().ok


@pytest.mark.timeout(30)
async def test_a_cancelled_put_leaves_the_writes_it_waited_for_alone(saver: PerdureSaver) -> None:
    parent = put(saver, "t", {"n": 0})
    for number in range(6):
        writes = [asyncio.create_task(saver.aput_writes(parent, [("a", n)], f"{number} {n}")) for n in range(4)]
        task = asyncio.create_task(aput(saver, "t", {"n": 1}, parent=parent))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(*writes)  # none of them was told of a cancellation that was not theirs
        await asyncio.gather(task, return_exceptions=True)
    assert len(writes_at(saver, parent)) == 24
    put(saver, "t", {"n": 2}, parent=parent)
    assert values_at(saver, config_of("t")) == {"n": 2}


@pytest.mark.timeout(30)
def test_writes_that_failed_do_not_hold_up_the_next_put(saver: PerdureSaver) -> None:
    parent = put(saver, "t", {"n": 0})
    with pytest.raises(TypeError):
        saver.put_writes(parent, [("a", lambda: None)], "task")
    put(saver, "t", {"n": 1}, parent=parent)
    assert values_at(saver, config_of("t")) == {"n": 1}


@pytest.mark.timeout(60)
def test_several_event_loops(saver: PerdureSaver) -> None:
    """One after the other, and two at once in two threads. Stock async savers belong to one loop."""

    async def work(thread: str, count: int) -> None:
        parent = None
        for number in range(count):
            parent = await aput(saver, thread, {"n": number}, parent=parent)
            await asyncio.gather(*(saver.aput_writes(parent, [("a", n)], f"task {n}") for n in range(4)))
        found = await saver.aget_tuple(config_of(thread))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"n": count - 1}
        assert len(found.pending_writes or []) == 4

    asyncio.run(work("one", 5))
    asyncio.run(work("two", 5))
    at_once(lambda index: asyncio.run(work(f"of loop {index}", 10)), 2)
    put(saver, "one", {"n": "blocking"}, parent=got(saver, config_of("one")).config)
    assert len(ids_in(saver, None)) == 5 + 5 + 20 + 1


@pytest.mark.timeout(60)
def test_blocking_and_async_puts_and_writes_of_one_thread_on_two_loops(saver: PerdureSaver) -> None:
    """The writes come from one loop and from pool threads, the put that waits for them from another loop."""
    parent = put(saver, "t", {"n": 0})
    for number in range(1, 6):
        entered = threading.Event()

        async def write(config: RunnableConfig, entered: threading.Event) -> None:
            tasks = [asyncio.create_task(saver.aput_writes(config, [("a", n)], f"task {n}")) for n in range(4)]
            await asyncio.sleep(0)
            entered.set()
            await asyncio.gather(*tasks)

        def act(index: int, config: RunnableConfig, entered: threading.Event, number: int) -> None:
            if index == 0:
                asyncio.run(write(config, entered))
            elif index == 1:
                assert entered.wait(30)
                asyncio.run(aput(saver, "t", {"n": number}, parent=config, id=numbered_id(number)))
                assert len(writes_at(saver, config)) >= 4
            else:
                saver.put_writes(config, [("b", index)], f"thread {index}")

        at_once(lambda index, p=parent, e=entered, n=number: act(index, p, e, n), 4)  # type: ignore[misc]
        assert len(writes_at(saver, parent)) == 6
        parent = config_of("t", id=numbered_id(number))
    assert values_at(saver, parent) == {"n": 5}


# --- threads


@pytest.mark.timeout(120)
def test_a_saver_shared_by_threads_each_with_a_thread_of_its_own(saver: PerdureSaver) -> None:
    def work(index: int) -> None:
        parent = None
        for number in range(8):
            parent = put(saver, f"t{index}", {"by": index, "log": list(range(number))}, parent=parent, step=number)
            saver.put_writes(parent, [("a", number)], "task")
            found = got(saver, config_of(f"t{index}"))
            assert found.config == parent
            assert found.pending_writes == [("task", "a", number)]

    at_once(work)
    assert len(ids_in(saver, None)) == THREADS * 8
    for index in range(THREADS):
        listed = list(saver.list(config_of(f"t{index}")))
        assert [found.metadata["step"] for found in listed] == list(range(7, -1, -1))
        assert all(found.checkpoint["channel_values"]["by"] == index for found in listed)
    assert saver.store.ops.verify().ok


@pytest.mark.timeout(120)
def test_a_saver_shared_by_threads_all_on_one_thread(saver: PerdureSaver) -> None:
    """Sixteen that go on from wherever the thread stands: forks, and nothing lost."""
    root = put(saver, "t", {"by": None})
    made: list[tuple[RunnableConfig, int, int]] = []

    def work(index: int) -> None:
        for number in range(6):
            latest = got(saver, config_of("t"))
            config = put(saver, "t", {"by": index, "number": number}, parent=latest.config)
            saver.put_writes(root, [("a", (index, number))], f"{index:02} {number}")
            made.append((config, index, number))

    at_once(work)
    assert len({id_of(config) for config, _, _ in made}) == THREADS * 6
    for config, index, number in made:
        assert values_at(saver, config) == {"by": index, "number": number}
        assert got(saver, config).parent_config is not None
    assert [value for _, _, value in writes_at(saver, root)] == sorted((i, n) for _, i, n in made)
    assert len(ids_in(saver, config_of("t"))) == THREADS * 6 + 1
    assert saver.store.ops.verify().ok


@pytest.mark.timeout(60)
def test_threads_that_write_the_same_task_agree_on_the_first(saver: PerdureSaver) -> None:
    config = put(saver)
    at_once(lambda index: saver.put_writes(config, [("a", index), ("b", index)], "task"))
    [(_, _, a), (_, _, b)] = writes_at(saver, config)
    assert a == b  # both of one batch: a batch is all or nothing


@pytest.mark.timeout(60)
def test_puts_race_with_a_delete(saver: PerdureSaver) -> None:
    """Whoever comes first: afterwards a thread stands that began after the delete, or none."""
    for turn in range(5):
        thread = f"t{turn}"
        config = put(saver, thread, {"n": 0}, id=numbered_id(1))

        def act(index: int, thread: str = thread, config: RunnableConfig = config) -> None:
            if index == 0:
                saver.delete_thread(thread)
            elif index % 2:
                saver.put_writes(config, [("a", index)], f"task {index}")
            else:
                try:
                    put(saver, thread, {"n": index}, parent=config, id=numbered_id(1 + index))
                except LookupError:
                    pass  # ThreadDeleted

        at_once(act, 6)
        assert saver.get_tuple(config_of(thread)) is None
    assert ids_in(saver, None) == []
    assert saver.store.ops.verify().ok


# --- writers


def test_two_writers_make_a_fork_and_both_lines_stay(saver_url: str) -> None:
    with PerdureSaver(saver_url) as one, PerdureSaver(saver_url) as two:
        root = put(one, "t", {"n": 0}, id=numbered_id(1))
        assert id_of(got(two, config_of("t")).config) == id_of(root)
        ours = put(one, "t", {"n": "one"}, parent=root, id=numbered_id(2))
        theirs = put(two, "t", {"n": "two"}, parent=root, id=numbered_id(3))
        ours = put(one, "t", {"n": "one again"}, parent=ours, id=numbered_id(4))
        for saver in (one, two):
            assert values_at(saver, ours) == {"n": "one again"}
            assert values_at(saver, theirs) == {"n": "two"}
            assert got(saver, theirs).parent_config == root
            assert id_of(got(saver, ours).parent_config) == numbered_id(2)
            assert values_at(saver, config_of("t")) == {"n": "one again"}
            assert ids_in(saver, config_of("t")) == [numbered_id(n) for n in (4, 3, 2, 1)]
        assert one.store.ops.verify().ok


def test_two_writers_of_which_one_is_refused(saver_url: str) -> None:
    with (
        PerdureSaver(saver_url, single_writer=True) as one,
        PerdureSaver(saver_url, single_writer=True) as two,
    ):
        root = put(one, "t", {"n": 0})
        for saver in (one, two):
            assert got(saver, config_of("t")).config == root
        ours = put(one, "t", {"n": "one"}, parent=root)
        with pytest.raises(Conflict):
            put(two, "t", {"n": "two"}, parent=root)
        with pytest.raises(Conflict):
            put(one, "t", {"n": "one, out of another run"}, parent=root)
        with pytest.raises(Conflict):
            put(two, "t", {"n": "a beginning of its own"})
        assert ids_in(two, config_of("t")) == [id_of(ours), id_of(root)]
        put(two, "t", {"n": "two"}, parent=got(two, config_of("t")).config)
        put(two, "t", {"n": "sub"}, ns="child:1")  # another namespace, another line
        assert values_at(one, config_of("t")) == {"n": "two"}


async def test_a_refused_writer_is_refused_in_async_code_too(saver_url: str) -> None:
    async with PerdureSaver(saver_url, single_writer=True) as saver:
        root = await aput(saver, "t", {"n": 0})
        results = await asyncio.gather(
            *(aput(saver, "t", {"n": n}, parent=root) for n in range(4)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in refused] == [Conflict] * 3
        assert len(ids_in(saver, config_of("t"))) == 2


def test_a_single_writer_may_travel_in_time_and_put_an_id_again(saver_url: str) -> None:
    with PerdureSaver(saver_url, single_writer=True) as saver:
        root = put(saver, "t", {"n": 0}, id=numbered_id(1))
        second = put(saver, "t", {"n": 1}, parent=root, id=numbered_id(2))
        put(saver, "t", {"n": 2}, parent=second, id=numbered_id(3))
        assert got(saver, root).config == root  # asked for by its id: whoever does that means it
        put(saver, "t", {"n": "fork"}, parent=root, id=numbered_id(4))
        assert values_at(saver, config_of("t")) == {"n": "fork"}
        again = put(saver, "t", {"n": "fork, at exit"}, parent=root, id=numbered_id(4))
        assert values_at(saver, config_of("t")) == {"n": "fork, at exit"}
        put(saver, "t", {"n": 5}, parent=again, id=numbered_id(5))
        assert len(ids_in(saver, config_of("t"))) == 5


def test_two_single_writers_at_once(saver_url: str) -> None:
    """However they race, one line comes out of it."""
    with PerdureSaver(saver_url, single_writer=True) as saver:
        parent = put(saver, "t", {"n": -1})
        for number in range(5):
            won: list[RunnableConfig] = []
            arguments: list[Any] = [put_arguments("t", {"n": number}, parent=parent) for _ in range(6)]

            def act(index: int, arguments: list[Any] = arguments, won: list[RunnableConfig] = won) -> None:
                try:
                    won.append(saver.put(*arguments[index]))
                except Conflict:
                    pass

            at_once(act, 6)
            assert len(won) == 1
            [parent] = won
        assert len(ids_in(saver, config_of("t"))) == 6
