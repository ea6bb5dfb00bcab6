"""gather, map, first, as_completed: what parallel branches did is recorded once, and replayed the way it went."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import MODES, PLACES, Interrupt, Lab, Once, finished, hooked, open_place

import holdfast as hf
from holdfast.runs.session.points import Point

PATIENCE_S = 30.0


@pytest.fixture(scope="module", params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hf.Store]:
    yield from open_place(request, tmp_path_factory)


@pytest.fixture(params=MODES)
def lab(request: pytest.FixtureRequest, store: hf.Store) -> Lab:
    return Lab(store, request.param)


def branch(lab: Lab, fn: Callable[..., Any], *args: Any) -> Any:
    """A call as the parallel functions take it: `fn` is async, and in a sync run it never really waits."""
    return fn(*args) if lab.is_async else lambda: finished(fn(*args))


def plain(lab: Lab, fn: Callable[..., Any]) -> Any:
    """The same for hf.map."""
    return fn if lab.is_async else lambda item: finished(fn(item))


def again(lab: Lab, agent: Callable[..., Any], *args: Any, id: str) -> hf.Run:
    """The same line twice: the first is interrupted, the second goes on."""
    with pytest.raises(Interrupt):
        lab.run(agent, *args, id=id)
    assert lab.store.get_run(id).status == "queued"
    return lab.run(agent, *args, id=id)


class Order:
    """Lets bodies end in a given order, one after the other, whoever comes first."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self._turn = threading.Condition()

    def free(self) -> None:
        with self._turn:
            self.names.clear()
            self._turn.notify_all()

    def wait(self, name: str) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: not self.names or self.names[0] == name, PATIENCE_S)
            if self.names:
                self.names.pop(0)
            self._turn.notify_all()

    async def await_(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.names and self.names[0] != name:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        if self.names:
            self.names.pop(0)


def ordered(lab: Lab, order: Order, *, effect: bool = False) -> Any:
    """A step whose calls end in this order."""

    def work(name: str) -> str:
        order.wait(name)
        lab.ran.append(name)
        return name.upper()

    async def awork(name: str) -> str:
        await order.await_(name)
        lab.ran.append(name)
        return name.upper()

    body: Any = awork if lab.is_async else work
    return hf.effect(name="work")(body) if effect else hf.step(name="work")(body)


def paths(run: hf.Run) -> list[tuple[str, str]]:
    return sorted((step.path, step.name) for step in run.steps())


# --- gather


def test_gather_gives_the_results_in_order_and_records_each_step_once(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def double(number: int) -> int:
        lab.ran.append(number)
        return number * 2

    async def twice(number: int) -> int:
        return int(await lab(double(await lab(double(number)))))

    @lab.durable
    async def agent() -> Any:
        found = await lab(hf.gather(*(branch(lab, twice, number) for number in (1, 2, 3))))
        once.interrupt()
        return [found, await lab(double(100))]

    run = again(lab, agent, id="r")
    assert run.result() == [[4, 8, 12], 200]
    assert sorted(lab.ran) == [1, 2, 2, 3, 4, 6, 100]
    assert paths(run) == [(path, "double") for path in ("1.1", "1.2", "2.1", "2.2", "3.1", "3.2", "4")]


def test_gather_of_nothing_is_nothing(lab: Lab) -> None:
    @hf.durable
    def agent() -> Any:
        return [hf.gather(), hf.map(str, []), list(hf.as_completed())]

    @hf.durable
    async def aagent() -> Any:
        nothing: Any = hf.as_completed()
        results: Any = hf.gather(), hf.map(str, [])
        return [await results[0], await results[1], [result async for result in nothing]]

    assert lab.run(aagent if lab.is_async else agent, id="r").result() == [[], [], []]


def test_numbers_do_not_depend_on_who_runs_first(lab: Lab) -> None:
    once, order = Once(), Order("c", "b", "a")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        return await lab(work(name))

    @lab.durable
    async def agent() -> Any:
        found = await lab(hf.gather(*(branch(lab, go, name) for name in "abc")))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert lab.ran == ["c", "b", "a"]
    assert lab.run(agent, id="r").result() == ["A", "B", "C"]
    assert lab.ran == ["c", "b", "a"]


def test_all_branches_come_to_their_end_before_the_first_error_by_position_is_raised(lab: Lab) -> None:
    once, order = Once(), Order("c", "b", "a")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        await lab(work(name))
        if name != "c":
            raise LookupError(name)
        return name

    @lab.durable
    async def agent() -> Any:
        try:
            await lab(hf.gather(*(branch(lab, go, name) for name in "abc")))
        except LookupError as error:
            once.interrupt()
            return [str(error), len(lab.ran)]

    run = again(lab, agent, id="r")
    assert run.result() == ["a", 3]
    assert lab.ran == ["c", "b", "a"]


def test_an_error_keeps_the_traceback_of_its_branch(lab: Lab) -> None:
    found: list[str] = []

    async def fails_deep_inside() -> None:
        raise ValueError("here")

    @lab.durable
    async def agent() -> None:
        try:
            await lab(hf.gather(branch(lab, fails_deep_inside)))
        except ValueError as error:
            found.append("".join(traceback.format_exception(error)))

    assert lab.run(agent, id="r").status == "done"
    assert "fails_deep_inside" in found[0]


def test_gather_in_gather(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def note(text: str) -> str:
        lab.ran.append(text)
        return text

    async def inner(text: str) -> Any:
        return await lab(note(text))

    async def outer(text: str) -> Any:
        return await lab(hf.gather(branch(lab, inner, text + "1"), branch(lab, inner, text + "2")))

    @lab.durable
    async def agent() -> Any:
        found = await lab(hf.gather(branch(lab, outer, "a"), branch(lab, outer, "b")))
        once.interrupt()
        return found

    run = again(lab, agent, id="r")
    assert run.result() == [["a1", "a2"], ["b1", "b2"]]
    assert sorted(lab.ran) == ["a1", "a2", "b1", "b2"]
    assert [path for path, _ in paths(run)] == ["1.1.1", "1.2.1", "2.1.1", "2.2.1"]


def test_branches_have_the_callers_context_variables(lab: Lab) -> None:
    from contextvars import ContextVar

    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def go() -> str:
        found = who.get()
        who.set("changed")
        return found

    @lab.durable
    async def agent() -> Any:
        who.set("ann")
        return [*await lab(hf.gather(branch(lab, go), branch(lab, go))), who.get()]

    assert lab.run(agent, id="r").result() == ["ann", "ann", "ann"]


# --- waiting


def test_a_branch_that_asks_lets_the_others_finish_and_then_the_run_parks(lab: Lab) -> None:
    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    async def works() -> Any:
        return [await lab(work(number)) for number in (1, 2, 3)]

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.gather(branch(lab, asks), branch(lab, works)))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert lab.ran == [1, 2, 3]
    lab.store.answer("r", "that one")
    assert run.result() == ["that one", [1, 2, 3]]
    assert lab.ran == [1, 2, 3]


def test_when_all_branches_wait_the_run_waits_for_whatever_comes_first(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    async def sleeps() -> Any:
        await lab(hf.sleep(3600))

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.gather(branch(lab, asks), branch(lab, sleeps)))

    run = lab.run(agent, id="r")
    info = run.info()
    assert run.status == "waiting"
    assert info.waiting_for is not None
    assert sorted(what["for"] for what in info.waiting_for["of"]) == ["question", "sleep"]
    assert info.wake_at is not None
    assert 3500 < info.wake_at.timestamp() - time.time() < 3700
    lab.store.answer("r", 1)
    assert lab.run(agent, id="r").status == "waiting"  # now for the sleep alone
    assert (run.info().waiting_for or {})["for"] == "sleep"


def test_a_wait_comes_before_an_error_which_is_raised_when_all_have_ended(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    async def fails() -> None:
        raise LookupError("no")

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.gather(branch(lab, fails), branch(lab, asks)))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    lab.store.answer("r", 1)
    with pytest.raises(hf.RunFailed, match="no"):
        run.result()


def test_a_branch_that_catches_everything_parks_all_the_same(lab: Lab) -> None:
    @lab.step()
    def work() -> None:
        lab.ran.append("worked on")

    async def asks() -> Any:
        try:
            return await lab(hf.ask("Which?"))
        except BaseException:
            return "never mind"

    @lab.durable
    async def agent() -> Any:
        try:
            found = await lab(hf.gather(branch(lab, asks)))
        except BaseException:
            found = ["never mind"]
        await lab(work())
        return found

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert lab.ran == []
    lab.store.answer("r", 1)
    assert run.result() == [1]


def test_a_rollback_in_one_branch_ends_the_others_and_undoes_what_they_did(lab: Lab) -> None:
    def cancel(what: str) -> None:
        lab.ran.append(f"-{what}")

    @lab.effect(undo=lab.body(cancel))
    def book(what: str) -> None:
        lab.ran.append(f"+{what}")

    async def books() -> None:
        await lab(book("flight"))

    async def regrets() -> None:
        hf.rollback("no")

    @lab.durable
    async def agent() -> None:
        await lab(hf.gather(branch(lab, books)))
        await lab(hf.gather(branch(lab, regrets), branch(lab, books)))

    run = lab.run(agent, id="r")
    assert run.status == "rolled_back"
    assert lab.ran.count("+flight") == lab.ran.count("-flight")


# --- map


def test_map_calls_steps_effects_and_functions_that_call_them(lab: Lab) -> None:
    @lab.step()
    def double(number: int) -> int:
        return number * 2

    @lab.effect()
    def send(number: int) -> int:
        lab.ran.append(number)
        return -number

    async def both(number: int) -> Any:
        return [await lab(double(number)), await lab(send(number))]

    @lab.durable
    async def agent() -> Any:
        return [
            await lab(hf.map(double, [1, 2])),
            await lab(hf.map(send, (number for number in (3, 4)))),
            await lab(hf.map(plain(lab, both), range(5, 7))),
        ]

    assert lab.run(agent, id="r").result() == [[2, 4], [-3, -4], [[10, -5], [12, -6]]]
    assert sorted(lab.ran) == [3, 4, 5, 6]


def test_a_limit_is_kept_and_changes_no_numbers(lab: Lab) -> None:
    once, limit = Once(), [2]
    working, most = [0], [0]
    lock = threading.Lock()

    def enter() -> None:
        with lock:
            working[0] += 1
            most[0] = max(most[0], working[0])

    def leave() -> None:
        with lock:
            working[0] -= 1

    def work(number: int) -> int:
        enter()
        time.sleep(0.002)
        leave()
        lab.ran.append(number)
        return number

    async def awork(number: int) -> int:
        enter()
        await asyncio.sleep(0.002)
        leave()
        lab.ran.append(number)
        return number

    body: Any = awork if lab.is_async else work
    step = hf.step(name="work")(body)

    @lab.durable
    async def agent() -> Any:
        found = await lab(hf.map(step, range(10), concurrency=limit[0]))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert most == [2]
    limit[0] = 7
    run = lab.run(agent, id="r")
    assert run.result() == list(range(10))
    assert sorted(lab.ran) == list(range(10))
    assert {path for path, _ in paths(run)} == {f"{number}.1" for number in range(1, 11)}


def test_a_branch_that_waits_takes_no_place_from_the_others(lab: Lab) -> None:
    """Ten questions, two at a time: all are asked before the run parks."""

    async def asks(number: int) -> Any:
        return await lab(hf.ask(f"{number}?"))

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.map(plain(lab, asks), range(10), concurrency=2))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    asks_open = lab.store.asks("r")
    assert len(asks_open) == 10
    for ask in asks_open:
        lab.store.answer("r", ask.question, step=ask.path)
    assert run.result() == [f"{number}?" for number in range(10)]


def test_a_thousand_branches(lab: Lab) -> None:
    once = Once()

    @lab.step()
    def work(number: int) -> int:
        lab.ran.append(number)
        return number

    async def go(number: int) -> Any:
        return await lab(work(number))

    @lab.durable
    async def agent() -> int:
        mapped = await lab(hf.map(work, range(1000)))
        gathered = await lab(hf.gather(*(branch(lab, go, number) for number in range(1000, 1300))))
        once.interrupt()
        return sum([*mapped, *gathered])

    before = threading.active_count()
    run = again(lab, agent, id="r")
    assert run.result() == sum(range(1300))
    assert sorted(lab.ran) == list(range(1300))
    assert threading.active_count() <= before + 8  # none of the branches' own is left


def test_map_uses_at_most_32_threads_in_a_sync_run(store: hf.Store) -> None:
    lab, most = Lab(store, "sync"), [0]

    def work(number: int) -> int:
        most[0] = max(most[0], sum(thread.name.startswith("holdfast-r-") for thread in threading.enumerate()))
        return number

    @hf.durable
    def agent() -> Any:
        return hf.map(work, range(200))

    assert lab.run(agent, id="r").result() == list(range(200))
    assert 1 <= most[0] <= 32


# --- first


def test_the_first_to_succeed_wins_and_only_its_branch_is_replayed(lab: Lab) -> None:
    once, order = Once(), Order("b", "only when it is free")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        lab.ran.append(f"begin {name}")
        return await lab(work(name))

    async def fails() -> None:
        raise LookupError("no")

    @lab.durable
    async def agent() -> Any:
        found = await lab(hf.first(branch(lab, fails), branch(lab, go, "a"), branch(lab, go, "b")))
        order.free()
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    lab.ran.clear()
    run = lab.run(agent, id="r")
    assert run.result() == "B"
    assert [what for what in lab.ran if what.startswith("begin")] == ["begin b"]
    assert lab.step_at(run, "1").result == 2


def test_if_all_fail_the_error_of_the_first_by_position_is_raised_again_and_again(lab: Lab) -> None:
    once, order = Once(), Order("b", "a")
    work = ordered(lab, order)

    async def fails(name: str) -> None:
        await lab(work(name))
        raise LookupError(name)

    @lab.durable
    async def agent() -> Any:
        try:
            await lab(hf.first(branch(lab, fails, "a"), branch(lab, fails, "b")))
        except LookupError as error:
            once.interrupt()
            return str(error)

    assert again(lab, agent, id="r").result() == "a"


def test_a_question_against_the_clock(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    async def gives_up() -> str:
        await lab(hf.sleep(1.2))
        return "too late"

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.first(branch(lab, asks), branch(lab, gives_up)))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert len(lab.store.asks("r")) == 1
    assert run.result(timeout_s=PATIENCE_S) == "too late"
    assert lab.store.asks("r") == []
    with pytest.raises(hf.AnswerRefused):
        lab.store.answer("r", "me", step="2.1")


def test_what_a_loser_waited_for_does_not_wake_the_run_later(lab: Lab) -> None:
    async def sleeps() -> Any:
        await lab(hf.sleep(3000))

    async def wins() -> str:
        return "won"

    @lab.durable
    async def agent() -> Any:
        await lab(hf.first(branch(lab, sleeps), branch(lab, wins)))
        return await lab(hf.ask("And now?"))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    assert (run.info().waiting_for or {})["for"] == "question"
    assert run.info().wake_at is None
    lab.store.answer("r", "home")
    assert run.result() == "home"


def test_a_loser_in_a_long_body_holds_up_nobody_but_the_end_of_the_run(store: hf.Store) -> None:
    """A thread cannot be stopped: the effect that it is in ends, and is recorded, before the run does."""
    lab = Lab(store, "sync")
    begun, go_on = threading.Event(), threading.Event()

    @hf.effect
    def slow(key: hf.Key) -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "slow"

    @hf.step
    def later() -> None:
        lab.ran.append("after the race")

    def loses() -> str:
        slow()
        lab.ran.append("slow has ended")
        later()
        lab.ran.append("went on")
        return "slow"

    def wins() -> str:
        assert begun.wait(PATIENCE_S)
        return "fast"

    @hf.durable
    def agent() -> str:
        found = hf.first(loses, wins)
        lab.ran.append("won")
        go_on.set()
        return found

    run = lab.run(agent, id="r")
    assert run.result() == "fast"
    assert lab.ran == ["won", "slow has ended"]
    assert [(step.name, step.status) for step in run.steps() if step.kind == "effect"] == [("slow", "done")]


def test_a_loser_is_cancelled_in_an_async_run_but_not_out_of_an_effect(store: hf.Store) -> None:
    lab = Lab(store, "async")

    @hf.step
    async def long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            lab.ran.append("step cancelled")

    @hf.effect
    async def book(key: hf.Key) -> str:
        await asyncio.sleep(0.05)
        lab.ran.append("booked")
        return "booked"

    async def wins() -> str:
        while not lab.store.get_run("r").steps():
            await asyncio.sleep(0.001)
        return "fast"

    @hf.durable
    async def agent() -> Any:
        found: Any = await hf.first(long(), book(), wins())
        lab.ran.append("won")
        return found

    run = lab.run(agent, id="r")
    assert run.result() == "fast"
    assert lab.ran == ["step cancelled", "won", "booked"]
    assert [(step.name, step.status) for step in run.steps() if step.kind == "effect"] == [("book", "done")]


def test_a_patch_after_a_race_is_not_misled_by_what_losers_recorded(lab: Lab) -> None:
    order = Order("a", "b")
    work = ordered(lab, order)
    new_code = [False]

    async def two(name: str) -> Any:
        return [await lab(work(name)), await lab(hf.ask("Which?"))]

    async def one(name: str) -> Any:
        return await lab(work(name))

    @lab.durable(version="any")
    async def agent() -> Any:
        found = await lab(hf.first(branch(lab, two, "a"), branch(lab, one, "b")))
        await lab(hf.ask("And now?"))
        return [found, hf.patched("after") if new_code[0] else None]

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    new_code[0] = True
    [ask] = lab.store.asks("r")
    lab.store.answer("r", "on", step=ask.path)
    assert run.result() == ["B", True]


# --- as_completed


def completing(lab: Lab, *calls: Any) -> Any:
    """The results of hf.as_completed as a list, in either mode."""
    if not lab.is_async:
        return list(hf.as_completed(*calls))

    async def listed() -> Any:
        return [result async for result in hf.as_completed(*calls)]

    return listed()


def test_results_come_in_the_order_they_came_in_also_on_replay(lab: Lab) -> None:
    once, order, seen = Once(), Order("c", "a", "b"), list[Any]()
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        if seen:  # on replay: the other way round
            seconds = 0.02 * (2 - seen[0].index(name.upper()))
            await asyncio.sleep(seconds) if lab.is_async else time.sleep(seconds)
        return await lab(work(name))

    @lab.durable
    async def agent() -> Any:
        found = await lab(completing(lab, *(branch(lab, go, name) for name in "abc")))
        seen.append(found)
        await lab(work("end"))
        once.interrupt()
        return found

    run = again(lab, agent, id="r")
    assert run.result() == seen[0] == seen[1]
    assert sorted(seen[0]) == ["A", "B", "C"]
    assert lab.step_at(run, "1").kind == "value"


def test_a_recorded_beginning_is_followed_and_then_gone_on_from(lab: Lab) -> None:
    """Interrupted after the first result was seen: it is the first again, also if another branch is faster now."""
    once, order = Once(), Order("b", "only when it is free")
    work, seen = ordered(lab, order), list[str]()

    async def go(name: str) -> Any:
        return await lab(work(name))

    @lab.step()
    def note(result: str) -> None:
        seen.append(result)
        order.free()

    async def noted(result: str) -> str:
        await lab(note(result))
        once.interrupt()
        return result

    @hf.durable
    async def aagent() -> Any:
        return [await noted(result) async for result in hf.as_completed(go("a"), go("b"))]

    @hf.durable
    def agent() -> Any:
        return [finished(noted(result)) for result in hf.as_completed(branch(lab, go, "a"), branch(lab, go, "b"))]

    run = again(lab, aagent if lab.is_async else agent, id="r")
    assert run.result() == ["B", "A"]
    assert seen == ["B", "A"]


def test_an_error_is_raised_in_its_turn_and_the_others_can_still_be_had(lab: Lab) -> None:
    async def fails() -> None:
        raise LookupError("no")

    async def works() -> int:
        return 1

    @hf.durable
    def agent() -> Any:
        results = hf.as_completed(branch(lab, fails), branch(lab, works))
        found: list[Any] = []
        for _ in range(2):
            try:
                found.append(next(results))
            except LookupError as error:
                found.append(str(error))
        return [sorted(found, key=str), next(results, "end")]

    @hf.durable
    async def aagent() -> Any:
        results = hf.as_completed(fails(), works())
        found: list[Any] = []
        for _ in range(2):
            try:
                found.append(await anext(results))
            except LookupError as error:
                found.append(str(error))
        return [sorted(found, key=str), await anext(results, "end")]

    assert lab.run(aagent if lab.is_async else agent, id="r").result() == [[1, "no"], "end"]


def test_results_are_given_while_another_branch_waits_and_then_the_run_parks(lab: Lab) -> None:
    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    async def works(number: int) -> int:
        return number

    @lab.step()
    def note(result: Any) -> None:
        lab.ran.append(result)

    @hf.durable
    def agent() -> Any:
        for result in hf.as_completed(branch(lab, asks), branch(lab, works, 1), branch(lab, works, 2)):
            note(result)
        return len(lab.ran)

    @hf.durable
    async def aagent() -> Any:
        async for result in hf.as_completed(asks(), works(1), works(2)):
            await note(result)
        return len(lab.ran)

    run = lab.run(aagent if lab.is_async else agent, id="r")
    assert run.status == "waiting"
    assert sorted(lab.ran) == [1, 2]
    lab.store.answer("r", "that")
    assert run.result() == 3
    assert lab.ran[2] == "that"


def test_a_loop_that_stops_early_leaves_nobody_behind_when_the_run_ends(lab: Lab) -> None:
    order = Order("a")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        found = await lab(work(name))
        await lab(work(name + name))
        return found

    async def quick() -> str:
        return "quick"

    @hf.durable
    def agent() -> Any:
        found = next(hf.as_completed(branch(lab, go, "b"), branch(lab, quick)))
        order.free()
        return found

    @hf.durable
    async def aagent() -> Any:
        found: Any = await anext(hf.as_completed(go("b"), quick()))
        order.free()
        return found

    run = lab.run(aagent if lab.is_async else agent, id="r")
    assert run.result() == "quick"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-r-")]
    assert "bb" not in lab.ran


# --- children


def test_gather_of_children(lab: Lab) -> None:
    @lab.durable(name=f"child-{id(lab)}")
    async def child(number: int) -> int:
        return number * 10

    async def one(number: int) -> Any:
        started = await lab(hf.spawn(child, number))
        return await lab(started.result())

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.gather(*(branch(lab, one, number) for number in range(5))))

    assert lab.run(agent, id="r").result(timeout_s=PATIENCE_S) == [0, 10, 20, 30, 40]
    assert len(lab.store.runs(limit=None)) == 6


# --- the state, and replays without running


def test_what_branches_change_in_the_state_is_their_makers_when_it_has_their_results(lab: Lab) -> None:
    once = Once()

    async def sets(name: str) -> str:
        hf.state()[name] = name.upper()
        return name

    async def fails() -> None:
        hf.state()["failed"] = True
        raise LookupError("no")

    @lab.step()
    def note(seen: dict[str, Any]) -> None:
        lab.ran.append(seen)

    @lab.durable
    async def agent() -> Any:
        state = hf.state({"start": 1})
        await lab(hf.gather(*(branch(lab, sets, name) for name in "ab")))
        await lab(note(dict(state)))
        winner = await lab(hf.first(branch(lab, fails), branch(lab, sets, "c")))
        assert dict(state)[winner] == "C"
        await lab(completing(lab, branch(lab, sets, "d")))
        await lab(note(dict(state)))
        once.interrupt()
        return dict(state)

    run = again(lab, agent, id="r")
    assert run.result() == {"start": 1, "a": "A", "b": "B", "c": "C", "d": "D"}
    assert lab.ran[0] == {"start": 1, "a": "A", "b": "B"}
    assert len(lab.ran) == 2


def test_a_record_of_branches_can_be_replayed_without_running_anything(lab: Lab) -> None:
    order = Order("a", "b", "c", "x", "y")
    work = ordered(lab, order)

    async def go(name: str) -> Any:
        return await lab(work(name))

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent() -> Any:
        found = [await lab(hf.gather(*(branch(lab, go, name) for name in "abc")))]
        order.free()
        found.append(await lab(hf.first(branch(lab, go, "x"), branch(lab, go, "y"))))
        found.append(await lab(completing(lab, branch(lab, go, "p"), branch(lab, go, "q"))))
        return [*found, await lab(hf.gather(branch(lab, go, "z"), branch(lab, asks)))]

    async def asks() -> Any:
        return await lab(hf.ask("Which?"))

    run = lab.run(agent, id="r")
    assert run.status == "waiting"
    ran = list(lab.ran)
    found = lab.store.replay(run)
    assert (found.name, found.is_complete) == ("hf.ask", False)
    lab.store.answer("r", 1)
    result = run.result()
    found = lab.store.replay(run)
    assert found.is_complete
    assert found.result == result
    assert lab.ran == ran


# --- what was put off


def test_no_body_runs_before_what_its_code_has_drawn_is_recorded(lab: Lab) -> None:
    """Also if it is another branch that is writing it down right now."""
    happened: list[str] = []
    lock = threading.Lock()

    def hook(point: Point) -> None:
        if point.kind == "value" and point.when == "before":
            time.sleep(0.05)  # whoever writes it is slow
        if point.kind in ("value", "body"):
            with lock:
                happened.append(f"{point.when} {point.kind}")

    @lab.step()
    def send(number: str) -> None: ...

    async def go(number: str) -> None:
        await lab(send(number))

    @lab.durable
    async def agent() -> None:
        number = str(hf.uuid())
        await lab(hf.gather(*(branch(lab, go, number) for _ in range(5))))

    with hooked(hook):
        assert lab.run(agent, id="r").status == "done"
    assert happened[:2] == ["before value", "after value"]
    assert happened.count("before value") == 1


def test_what_was_drawn_is_kept_if_what_goes_with_it_is_refused(lab: Lab) -> None:
    once = Once()
    drawn: list[Any] = []

    @lab.step()
    def note() -> None: ...

    @lab.durable
    async def agent() -> None:
        drawn.append(hf.random())
        try:
            await lab(hf.send("nobody", "hello"))
        except hf.NotFound:
            pass
        await lab(note())
        once.interrupt()

    again(lab, agent, id="r")
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_what_was_put_off_until_the_end_is_written_with_it_however_large(lab: Lab) -> None:
    @lab.step(lazy=True)
    def large() -> str:
        return "".join(str(hash((number, "a"))) for number in range(20_000))

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent() -> int:
        return len(await lab(large()))

    run = lab.run(agent, id="r")
    assert lab.store.replay(run).result == run.result()


# --- interrupts


def test_ctrl_c_while_branches_work_gives_the_run_back(store: hf.Store) -> None:
    """The branches end at their next journal call, and write nothing for a run that is another's."""
    lab = Lab(store, "sync")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @hf.step
    def slow() -> str:
        if not lab.ran:
            lab.ran.append("slow")
            begun.set()
            go_on.wait(PATIENCE_S)
        return "slow"

    def watched() -> str:
        try:
            return slow()
        finally:
            ended.set()

    @hf.durable
    def agent() -> Any:
        return hf.gather(watched, slow)

    def press() -> None:
        assert begun.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        lab.run(agent, id="r")
    presser.join()
    assert lab.store.get_run("r").status == "queued"
    assert lab.run(agent, id="r").result() == ["slow", "slow"]
    go_on.set()
    assert ended.wait(PATIENCE_S)
    assert len(lab.store.get_run("r").steps()) == 2


def test_an_interrupt_in_one_branch_ends_the_others_at_their_next_call(lab: Lab) -> None:
    once = Once()
    both = threading.Barrier(2)

    @lab.step()
    def work(number: int) -> int:
        if not lab.is_async and number == 1 and once.reached == 0:
            both.wait(PATIENCE_S)
        return number

    async def interrupted() -> None:
        if not lab.is_async and once.reached == 0:
            both.wait(PATIENCE_S)
        once.interrupt()

    async def works() -> Any:
        for number in range(1, 1000):
            await lab(work(number))
        return "all"

    @lab.durable
    async def agent() -> Any:
        return await lab(hf.gather(branch(lab, works), branch(lab, interrupted)))

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    assert len(lab.store.get_run("r").steps()) < 999
    assert lab.run(agent, id="r").result() == ["all", None]


# --- mistakes


def test_a_call_that_does_not_fit_the_run_is_explained(lab: Lab) -> None:
    @hf.step
    def sync_step() -> int:
        return 1

    @hf.step
    async def async_step() -> int:
        return 1

    told: list[str] = []

    def tell(call: Callable[[], Any]) -> None:
        with pytest.raises(hf.UsageError) as caught:
            call()
        told.append(str(caught.value))

    @hf.durable
    def agent() -> None:
        tell(lambda: hf.gather(async_step(), async_step()))
        tell(lambda: hf.gather(sync_step()))  # type: ignore[call-overload]
        tell(lambda: hf.gather(async_step))

    @hf.durable
    async def aagent() -> None:
        tell(lambda: hf.gather(lambda: async_step()))
        tell(lambda: hf.first(sync_step(), async_step()))  # type: ignore[call-overload]
        tell(lambda: hf.first())

    @lab.durable
    async def both() -> None:
        tell(lambda: hf.map(str, {1, 2}))
        tell(lambda: hf.map(str, [1], concurrency=0))

    assert lab.run(aagent if lab.is_async else agent, id="r").status == "done"
    assert lab.run(both, id="b").status == "done"
    words = ("without the lambda", "make it async", "at least one") if lab.is_async else (
        "async steps need an async durable function",
        "lambda: search",
        "the step is async",
    )  # fmt: skip
    for text, word in zip(told, (*words, "Sort it", "at least 1"), strict=True):
        assert word in text


def test_outside_of_a_run_and_inside_of_a_step_it_is_an_error(lab: Lab) -> None:
    with pytest.raises(hf.NotInRun):
        hf.gather(lambda: 1)

    @hf.step
    def step() -> Any:
        return hf.gather(lambda: 1)

    @hf.durable
    def agent() -> Any:
        return step()

    with pytest.raises(hf.RunFailed, match="inside step"):
        lab.run(agent, id="r").result()


def test_fewer_branches_than_were_recorded_is_another_way(lab: Lab) -> None:
    once, count = Once(), [3]

    async def wins() -> int:
        return 1

    async def fails() -> int:
        raise LookupError

    @lab.durable(version="any")
    async def agent() -> Any:
        losers = [branch(lab, fails) for _ in range(count[0] - 1)]
        found = await lab(hf.first(*losers, branch(lab, wins)))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        lab.run(agent, id="r")
    count[0] = 2
    run = lab.run(agent, id="r")
    assert run.status == "stuck"
    with pytest.raises(hf.RunStuck, match="NonDeterministic"):
        run.result()
