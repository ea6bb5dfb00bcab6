"""Which recorded call a call is: whatever was changed under a waiting run, no effect is made again under another key.

Either the run finds what it did, or it is stuck before any body runs, and `perdure check` says so beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Interrupt, Once, unhashed

import perdure
from perdure.runs.execution import replay_order
from perdure.runs.history.code_check import check_code

Booked = list[tuple[str, str]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    """What is tested lies above the SQL."""
    with perdure.open(tmp_path / "runs.db") as opened:
        yield opened


@pytest.fixture
def booked() -> Booked:
    return []


@pytest.fixture
def book(booked: Booked) -> Any:
    @perdure.effect
    def book(place: str, key: perdure.IdempotencyKey) -> str:
        booked.append((place, str(key)))
        return place

    return book


@pytest.fixture
def abook(booked: Booked) -> Any:
    @perdure.effect
    async def book(place: str, key: perdure.IdempotencyKey) -> str:
        booked.append((place, str(key)))
        return place

    return book


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused in the end is refused soon."""
    monkeypatch.setattr(replay_order, "REFUSAL_S", 0.5)


def meets_new_code(store: perdure.Store, old: Any, new: Any) -> tuple[str, perdure.Run]:
    """Let a run wait under the old code and continue under the new: what `perdure check` said, and the run."""
    spec = [perdure.durable(name="travel")(fn) for fn in (old, new)]
    assert store.run(spec[0], id="r").status == "waiting"
    [finding] = check_code(store, [spec[1]])
    store.answer("r", True)
    return finding.verdict, store.run(spec[1], id="r")


def assert_refused(meeting: tuple[str, perdure.Run], booked: Booked, count: int) -> None:
    verdict, run = meeting
    assert (verdict, run.refresh().status) == ("differs", "stuck")
    with pytest.raises(perdure.RunStuck, match="diverged from its journal at step"):
        run.result()
    assert len(booked) == count


# --- changed code of a sync run


def test_calls_that_became_branches_are_refused(store: perdure.Store, book: Any, booked: Booked) -> None:
    def old() -> Any:
        return [book(place) for place in "ab"], perdure.ask("ok?")

    def new() -> Any:
        return perdure.map(book, ["a", "b"]), perdure.ask("ok?")

    assert_refused(meets_new_code(store, old, new), booked, 2)


def test_branches_that_became_calls_are_refused(store: perdure.Store, book: Any, booked: Booked) -> None:
    def old() -> Any:
        return perdure.gather(lambda: book("a")), perdure.ask("ok?")

    def new() -> Any:
        return book("a"), perdure.ask("ok?")

    assert_refused(meets_new_code(store, old, new), booked, 1)


def test_calls_that_became_tools_are_refused(store: perdure.Store, book: Any, booked: Booked) -> None:
    def old() -> Any:
        return book("a"), perdure.ask("ok?")

    def new() -> Any:
        call = {"id": "x", "name": "book", "arguments": {"place": "a"}}
        return perdure.tools([book]).call([call]), perdure.ask("ok?")

    assert_refused(meets_new_code(store, old, new), booked, 1)


@pytest.mark.parametrize("becomes", ["branches", "calls"])
def test_a_path_is_a_call_or_a_branch_for_steps_too(store: perdure.Store, becomes: str) -> None:
    ran: list[str] = []

    @perdure.step
    def search(place: str) -> str:
        ran.append(place)
        return place

    def one_by_one() -> Any:
        return [search(place) for place in "ab"], perdure.ask("ok?")

    def parallel() -> Any:
        return perdure.map(search, ["a", "b"]), perdure.ask("ok?")

    old, new = (one_by_one, parallel) if becomes == "branches" else (parallel, one_by_one)
    assert_refused(meets_new_code(store, old, new), [], 0)
    assert sorted(ran) == ["a", "b"]


def test_an_effect_that_moved_to_another_branch_is_refused(store: perdure.Store, book: Any, booked: Booked) -> None:
    """The branch that has it now comes to a path without a record: it waits for the branch that had it."""

    def old() -> Any:
        return perdure.gather(lambda: perdure.ask("ok?"), lambda: book("a"))

    def new() -> Any:
        return perdure.gather(lambda: (perdure.ask("ok?"), book("a")), lambda: None)

    assert_refused(meets_new_code(store, old, new), booked, 1)


def test_an_effect_whose_number_an_empty_branch_had_is_refused(store: perdure.Store, book: Any, booked: Booked) -> None:
    def old() -> Any:
        perdure.gather(lambda: None)
        return book("a"), perdure.ask("ok?")

    def new() -> Any:
        return book("a"), perdure.ask("ok?")

    assert_refused(meets_new_code(store, old, new), booked, 1)


def test_a_child_run_that_moved_to_another_branch_is_not_started_again(store: perdure.Store) -> None:
    @perdure.durable
    def child() -> None: ...

    def old() -> Any:
        return perdure.gather(lambda: perdure.ask("ok?"), lambda: perdure.spawn(child).id)

    def new() -> Any:
        return perdure.gather(lambda: (perdure.ask("ok?"), perdure.spawn(child).id), lambda: None)

    assert_refused(meets_new_code(store, old, new), [], 0)
    assert [run.function for run in store.runs()].count("child") == 1


def test_an_effect_that_failed_for_certain_holds_up_no_other(store: perdure.Store, booked: Booked) -> None:
    @perdure.effect(definite=ValueError, retries=1, backoff_s=3600)
    def fails() -> None:
        raise ValueError

    @perdure.effect
    def book(place: str) -> str:
        booked.append((place, ""))
        return place

    @perdure.durable
    def travel() -> Any:
        return perdure.gather(lambda: book("a"), fails)

    run = store.run(travel, id="r")
    assert (run.refresh().status, len(booked)) == ("waiting", 1)
    assert store.run(travel, id="r").status == "waiting"


# --- async runs: how many tasks there are does not matter


async def wait_for_of_3_12(call: Awaitable[Any], timeout: float) -> Any:
    async with asyncio.timeout(timeout):
        return await call


def test_wait_for_that_makes_no_task_any_more_finds_what_was_done(
    store: perdure.Store, abook: Any, booked: Booked
) -> None:
    """Up to Python 3.11 `asyncio.wait_for` makes a task of the call."""

    def travel(wait_for: Callable[..., Any]) -> Any:
        async def agent() -> Any:
            first = await wait_for(abook("a"), 60)
            return [first, await perdure.ask("ok?"), await wait_for(abook("b"), 60)]

        return agent

    verdict, run = meets_new_code(store, travel(asyncio.wait_for), travel(wait_for_of_3_12))
    assert (verdict, run.refresh().status, run.result()) == ("ok", "done", ["a", True, "b"])
    assert [step.path for step in run.steps()] == ["1", "2", "3"]
    assert len(booked) == 2


def test_a_task_that_was_not_made_before_changes_no_other_call(
    store: perdure.Store, abook: Any, booked: Booked
) -> None:
    beats, once = iter((1, 5)), Once()

    @perdure.durable
    async def travel() -> Any:
        for _ in range(next(beats)):  # as many as fit into the time that something took
            await asyncio.create_task(asyncio.sleep(0))
        first = await asyncio.create_task(abook("a"))
        once.interrupt()
        return [first, await asyncio.create_task(abook("b"))]

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    run = store.run(travel, id="r")
    assert (run.result(), [place for place, _ in booked]) == (["a", "b"], ["a", "b"])


def test_a_call_that_moved_into_or_out_of_a_task_is_found(store: perdure.Store, abook: Any, booked: Booked) -> None:
    async def first() -> Any:
        return await abook("a")

    async def second() -> Any:
        return await abook("b")

    async def renamed() -> Any:
        return await abook("b")

    async def old() -> Any:
        return [await asyncio.create_task(first()), await second(), await perdure.ask("ok?")]

    async def new() -> Any:
        return [await first(), await asyncio.create_task(renamed()), await perdure.ask("ok?")]

    verdict, run = meets_new_code(store, old, new)
    assert (verdict, run.result(), len(booked)) == ("ok", ["a", "b", True], 2)


def test_workers_of_a_queue_that_swap_their_items_repeat_nothing(
    store: perdure.Store, abook: Any, booked: Booked
) -> None:
    """Which worker takes which item depends on time that is not recorded."""
    slow, once = iter((0, 1)), Once()

    @perdure.durable
    async def travel() -> Any:
        slowest, queue = next(slow), asyncio.Queue[str]()
        for place in "abcd":
            queue.put_nowait(place)

        async def worker(number: int) -> None:
            while not queue.empty():
                place = queue.get_nowait()
                if number == slowest:
                    await asyncio.sleep(0.02)
                await abook(place)

        await asyncio.gather(worker(0), worker(1))
        once.interrupt()

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    store.run(travel, id="r").result()
    assert sorted(place for place, _ in booked) == ["a", "b", "c", "d"]


def test_results_are_taken_as_they_came(store: perdure.Store, booked: Booked) -> None:
    """On replay all of them are there at once; the order in which the code gets them is that of the journal."""
    once = Once()

    @perdure.step
    async def search(place: str) -> str:
        await asyncio.sleep({"a": 0.03, "b": 0.02, "c": 0}[place])
        return place

    @perdure.effect
    async def book(place: str, number: int) -> str:
        booked.append((place, str(number)))
        return place

    @perdure.durable
    async def travel() -> Any:
        found = []
        for number, earliest in enumerate(asyncio.as_completed([search(place) for place in "abc"])):
            found.append(await book(await earliest, number))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    assert store.run(travel, id="r").result() == ["c", "b", "a"]
    assert len(booked) == 3


@pytest.mark.parametrize("beats", [False, True], ids=["idle", "never idle"])
def test_results_are_taken_as_they_came_in_a_branch_that_a_lower_limit_holds_back(
    store: perdure.Store, booked: Booked, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """Each life has another limit, and an unrecorded wait holds up the task whose result came first."""
    monkeypatch.setattr(replay_order, "PATIENCE_S", 0.4)
    once, lives = Once(), iter([(None, 0.0), (1, 0.02)])

    @perdure.step
    async def search(place: str) -> str:
        await asyncio.sleep({"a": 0, "b": 0.02, "c": 0.03}[place])
        return place

    @perdure.effect
    async def book(place: str, number: int) -> str:
        booked.append((place, str(number)))
        return place

    async def beat() -> None:
        while beats:
            await asyncio.sleep(0.001)

    @perdure.durable
    async def travel() -> Any:
        limit, delay = next(lives)

        async def late(place: str) -> str:
            if place == "a":
                await asyncio.sleep(delay)
            return await search(place)

        async def in_order(places: str) -> list[str]:
            earliest = enumerate(asyncio.as_completed([late(place) for place in places]))
            return [await book(await place, number) for number, place in earliest]

        heart = asyncio.create_task(beat())
        found = await perdure.map(in_order, ["c", "ab"], concurrency=limit)
        heart.cancel()
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    assert store.run(travel, id="r").result() == [["c"], ["a", "b"]]
    assert len(booked) == 3


def test_results_are_taken_as_they_came_across_the_branches_of_a_limit(store: perdure.Store) -> None:
    """An unrecorded wait holds up a branch, and with it the one after it, whose result came before a third one's."""
    once, delays = Once(), iter([0.0, 0.02])

    @perdure.step
    async def search(place: str) -> str:
        await asyncio.sleep({"a": 0, "b": 0.03, "c": 0}[place])
        return place

    @perdure.durable
    async def travel() -> Any:
        delay, found = next(delays), []

        async def one(place: str) -> None:
            found.append(await search(place))
            if place == "a":
                await asyncio.sleep(delay)

        await perdure.map(one, "abc", concurrency=2)
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    assert store.run(travel, id="r").result() == ["a", "c", "b"]


def test_a_removed_task_with_an_effect_is_noticed(store: perdure.Store, abook: Any, booked: Booked) -> None:
    async def old() -> Any:
        return await asyncio.gather(abook("a"), perdure.ask("ok?"))

    async def new() -> Any:
        return await asyncio.gather(abook("b"), perdure.ask("ok?"))

    assert_refused(meets_new_code(store, old, new), booked, 1)


@pytest.mark.parametrize(("place", "status"), [("a", "stuck"), ("b", "done")])
def test_a_sync_effect_in_an_async_run_is_refused_where_it_may_be_the_recorded_one(
    store: perdure.Store, book: Any, booked: Booked, place: str, status: str
) -> None:
    """It blocks the loop, so that no task can come to the recorded effect meanwhile."""
    once, first = Once(), iter((True, False))

    @perdure.durable
    async def travel() -> Any:
        is_first = next(first)

        async def other() -> None:
            await asyncio.sleep(0 if is_first else 0.05)
            book("a")
            once.interrupt()

        async def this() -> None:
            await asyncio.sleep(60 if is_first else 0)
            book(place)

        await perdure.gather(other(), this())

    with pytest.raises(Interrupt):
        store.run(travel, id="r")
    run = store.run(travel, id="r")
    assert run.refresh().status == status
    if status == "stuck":
        with pytest.raises(perdure.RunStuck, match="holds up the tasks which may come to it: make it async"):
            run.result()
    assert [booking for booking, _ in booked] == ["a", "b"][: 1 if status == "stuck" else 2]


def test_a_task_that_is_refused_ends_those_that_wait_for_it(store: perdure.Store, book: Any, booked: Booked) -> None:
    """The code waits for a queue that only the refused task would have filled."""

    def travel(place: str) -> Any:
        async def agent() -> Any:
            queue = asyncio.Queue[str]()

            async def produce() -> None:
                queue.put_nowait(book(place))
                await perdure.ask("ok?")

            task = asyncio.create_task(produce())
            found = await queue.get()
            await task
            return found

        return agent

    assert_refused(meets_new_code(store, travel("a"), travel("b")), booked, 1)


# --- names of tasks


def test_a_fork_finds_the_tasks_of_its_origin_and_another_run_names_them_otherwise(store: perdure.Store) -> None:
    ran: list[int] = []

    @perdure.step
    async def note(number: int) -> int:
        ran.append(number)
        return number

    @perdure.durable
    async def agent() -> Any:
        return list(await asyncio.gather(note(1), note(2)))

    paths = []
    for id in ("r", "other"):
        run = store.run(agent, id=id)
        paths.append({step.path for step in run.steps() if step.name == "note"})
        assert {unhashed(path) for path in paths[-1]} == {"1@note.1"}
        assert {event.kind for event in run.stream()} == {"done", "status"}  # the key is not shown
    assert not paths[0] & paths[1]  # their hashes are keyed: 1 cannot be found out by hashing it
    assert store.fork("r", id="fork", keys="new").result() == [1, 2]
    assert ran == [1, 2, 1, 2]


def test_names_of_tasks_are_bounded(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.runs.execution.scope._NAMES_MAX", 2)

    @perdure.step
    async def note(number: int) -> int:
        return number

    async def nested(depth: int) -> int:
        return await (asyncio.create_task(nested(depth - 1)) if depth else note(0))

    @perdure.durable
    async def agent() -> Any:
        return [await asyncio.create_task(note(number)) for number in range(4)] + [await nested(40)]

    run = store.run(agent, id="r")
    assert run.result() == [0, 1, 2, 3, 0]
    paths = [step.path for step in run.steps()]
    assert [unhashed(path) for path in paths[:4]] == ["1@note.1", "1@note.1", "1@note.1", "2@note.1"]
    assert max(map(len, paths)) < 500
    assert len(set(paths)) == 5
