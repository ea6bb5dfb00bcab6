"""Replay: the code with every call answered from the record, no body run, nothing written; and checking new code so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lab import Lab, hooked, unhashed
from replaying_kit import Broken, everything

import perdure
from perdure.runs.execution.hooks import Point
from perdure.runs.history.code_check import check_code


class Stop(BaseException):
    """Ends the process's part where a test wants it."""


def test_replay_runs_no_body_and_gives_the_result(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"travel-{id(lab)}")
    async def travel(place: str) -> list[Any]:
        flights = await lab(steps.search(place))
        when, chance = perdure.now(), perdure.random()
        perdure.emit({"flights": flights})
        booked = await lab(steps.book(flights[0]))
        try:
            await lab(steps.fails())
        except LookupError as error:
            booked += str(error)
        return [booked, when, chance]

    run = lab.run(travel, "NYC", id="trip")
    steps.armed = True
    before = everything(lab)
    found = lab.store.replay("trip")
    assert (found.status, found.is_complete, found.path) == ("complete", True, None)
    assert found.result == run.result()
    assert found.answered == 6
    assert asyncio.run(lab.store.areplay(run)) == found
    assert everything(lab) == before


def test_replay_stops_at_the_first_call_that_is_not_recorded(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"stopping-{id(lab)}")
    async def stopping() -> Any:
        flights = await lab(steps.search("NYC"))
        choice = await lab(perdure.ask("Which?", options=flights))
        return await lab(steps.book(choice))

    run = lab.run(stopping, id="open")
    assert run.refresh().status == "waiting"
    steps.armed = True
    before = everything(lab)
    found = lab.store.replay(run)
    assert (found.status, found.path, found.name) == ("stopped at step 2 (perdure.ask)", "2", "perdure.ask")
    assert (found.result, found.answered) == (None, 1)
    assert everything(lab) == before
    lab.store.answer("open", "NYC1")  # given, and not recorded in the journal yet
    assert lab.store.replay(run).path == "2"
    assert run.refresh().status == "waiting"


def test_an_effect_in_doubt_is_where_replay_stops_and_nobody_is_asked(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"doubting-{id(lab)}")
    async def doubting() -> Any:
        return await lab(steps.book("LH1"))

    def stop(point: Point) -> None:
        if (point.kind, point.when) == ("body", "after"):
            raise Stop

    with hooked(stop), pytest.raises(Stop):
        lab.run(doubting, id="doubt")
    steps.armed = True
    assert lab.store.replay("doubt").status == "stopped at step 1 (book)"


@pytest.mark.parametrize("wait", ["sleep", "receive", "child", "retry"])
def test_waits_count_as_not_recorded(lab: Lab, wait: str) -> None:
    attempts: list[int] = []

    @lab.durable(name=f"child-{id(lab)}-{wait}")
    async def child() -> int:
        await lab(perdure.receive())
        return 1

    @lab.step(name="tries", retries=3, backoff_s=3600)
    def tries() -> None:
        attempts.append(1)
        raise LookupError

    @lab.durable(name=f"waiting-{id(lab)}-{wait}")
    async def waiting() -> None:
        if wait == "sleep":
            await lab(perdure.sleep(3600))
        elif wait == "receive":
            await lab(perdure.receive())
        elif wait == "retry":
            await lab(tries())
        else:
            started = await lab(perdure.spawn(child))
            await lab(started.result())

    run = lab.run(waiting)
    assert run.refresh().status == "waiting"
    found = lab.store.replay(run)
    assert not found.is_complete
    assert found.path == ("2" if wait == "child" else "1")
    assert len(attempts) <= 1


def test_code_that_swallows_everything_does_not_hide_the_end(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"swallowing-{id(lab)}")
    async def swallowing() -> str:
        await lab(steps.search("NYC"))
        try:
            await lab(perdure.receive())
        except BaseException:
            pass
        return "fine"

    run = lab.run(swallowing)
    assert lab.store.replay(run).status == "stopped at step 2 (perdure.receive)"


def test_a_failed_run_replays_to_its_error(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"failing-{id(lab)}")
    async def failing() -> None:
        await lab(steps.book("LH1"))
        await lab(steps.fails())

    run = lab.run(failing)
    with pytest.raises(perdure.RunFailed):
        run.result()
    steps.armed = True
    found = lab.store.replay(run)
    assert found.is_complete
    assert isinstance(found.error, LookupError)


def test_a_run_that_began_anew_replays_its_present_round(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"endless-{id(lab)}")
    async def endless(left: int) -> int:
        await lab(steps.search(str(left)))
        if left:
            perdure.continue_as_new(left - 1)
        return left

    run = lab.run(endless, 2)
    assert run.result() == 0
    steps.armed = True
    assert lab.store.replay(run).result == 0


def test_other_code_is_tried_with_fn_and_said_to_differ(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"original-{id(lab)}")
    async def original(place: str) -> Any:
        return await lab(steps.search(place))

    run = lab.run(original, "NYC")
    steps.armed = True

    @lab.durable(name=f"other-{id(lab)}")
    async def longer(place: str) -> Any:
        flights = await lab(steps.search(place))
        return await lab(steps.book(flights[0]))

    @lab.durable(name=f"another-{id(lab)}")
    async def renamed(place: str) -> Any:
        return await lab(steps.book(place))

    @lab.durable(name=f"third-{id(lab)}")
    async def other_input(place: str) -> Any:
        return await lab(steps.search(place + "!"))

    @lab.durable(name=f"fourth-{id(lab)}")
    async def shorter(place: str) -> Any:
        return place

    assert lab.store.replay(run, longer).path == "2"
    with pytest.raises(perdure.NonDeterministic, match="at step 1: recorded search") as caught:
        lab.store.replay(run, renamed)
    assert (caught.value.path, caught.value.actual) == ("1", "book()")
    with pytest.raises(perdure.NonDeterministic, match="arguments"):
        lab.store.replay(run, other_input)
    with pytest.raises(perdure.NonDeterministic, match="the function ends"):
        lab.store.replay(run, shorter)


def test_a_swallowed_difference_is_still_one(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"tried-{id(lab)}")
    async def tried() -> Any:
        return await lab(steps.search("NYC"))

    run = lab.run(tried)

    @lab.durable(name=f"tried-other-{id(lab)}")
    async def careless() -> Any:
        try:
            return await lab(steps.search("LON"))
        except Exception:
            return None

    with pytest.raises(perdure.NonDeterministic):
        lab.store.replay(run, careless)


def test_an_unknown_function_and_an_unknown_run_are_named(lab: Lab) -> None:
    from perdure.runs.functions import specs

    @lab.durable(name=f"forgotten-{id(lab)}")
    async def forgotten() -> None: ...

    run = lab.run(forgotten)
    del specs._durables[f"forgotten-{id(lab)}"]
    with pytest.raises(perdure.UsageError, match="import its module"):
        lab.store.replay(run)
    assert lab.store.replay(run, forgotten).is_complete
    with pytest.raises(perdure.NotFound):
        lab.store.replay("nobody")


def test_a_fork_replays_with_what_it_shares_and_changes(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"forked-{id(lab)}")
    async def forked() -> Any:
        return (await lab(steps.search("NYC"))) + (await lab(steps.search("LON")))

    run = lab.run(forked)
    fork = lab.store.fork(run, at="1", changes={"1": ["X"]})
    steps.armed = True
    assert lab.store.replay(fork).path == "2"
    steps.armed = False
    assert fork.result() == ["X", "LON1", "LON2"]
    steps.armed = True
    assert lab.store.replay(fork).result == ["X", "LON1", "LON2"]


# --- async branches


def test_parallel_branches_are_all_replayed_as_far_as_they_go(store: perdure.Store) -> None:
    lab = Lab(store, "async")
    armed = False

    @perdure.step(name="work")
    async def work(number: int) -> int:
        assert not armed
        return number

    @perdure.durable(name=f"branches-{id(lab)}")
    async def branches() -> list[Any]:
        async def one(number: int) -> Any:
            first = await work(number)
            if number == 1:
                await perdure.receive()
            return first + await work(number * 10)

        return list(await asyncio.gather(one(1), one(2), one(3)))

    run = lab.run(branches)
    assert run.refresh().status == "waiting"
    armed = True
    found = lab.store.replay(run)
    assert found.path is not None
    assert unhashed(found.path) == "1@one.2"
    assert found.answered == 5


def test_a_branch_that_waits_for_an_ended_one_does_not_keep_the_replay_from_ending(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.durable(name=f"events-{id(lab)}")
    async def events() -> None:
        done = asyncio.Event()

        async def branch() -> None:
            await perdure.receive(timeout_s=3600)
            done.set()

        task = asyncio.create_task(branch())
        await done.wait()
        await task

    async def main() -> None:
        started = await lab.store.astart(events, id="events")
        found = await lab.store.areplay(started)
        assert found.path == "1@branch.1"

    asyncio.run(main())


# --- checking new code


def test_new_code_is_checked_against_every_open_run(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"agent-{id(lab)}", version="1")
    async def agent(place: str) -> Any:
        flights = await lab(steps.search(place))
        if place != "paused":
            await lab(perdure.ask("Which?"))
        return flights

    @lab.durable(name=f"gone-{id(lab)}")
    async def gone() -> Any:
        return await lab(perdure.receive())

    lab.run(agent, "waiting", id="waiting")
    lab.store.start(agent, "queued", id="queued")
    lab.run(agent, "done", id="done")
    lab.store.answer("done", 1)
    lab.run(agent, "done", id="done")
    lab.store.start(agent, "paused", id="paused").pause()
    lab.run(gone, id="of-another")
    steps.armed = True
    before = everything(lab)
    found = {finding.run: finding for finding in check_code(lab.store, [agent])}
    assert {run: finding.verdict for run, finding in found.items()} == {
        "waiting": "ok",
        "queued": "ok",
        "paused": "ok",
        "of-another": "unknown",
    }
    assert everything(lab) == before

    @lab.durable(name=f"agent-{id(lab)}", version="2")
    async def changed(place: str) -> Any:
        return await lab(steps.book(place))

    later = {finding.run: finding for finding in check_code(lab.store, [changed, gone])}
    assert {run: finding.verdict for run, finding in later.items()} == {
        "waiting": "differs",
        "queued": "ok",
        "paused": "ok",
        "of-another": "ok",
    }
    differs = later["waiting"]
    assert differs.problem == "at step 1: search() before, and now book()"
    assert everything(lab) == before
    assert check_code(lab.store, [changed, gone]) == list(later.values())


def test_a_patch_makes_changed_code_fit_the_runs_that_are_under_way(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"patched-{id(lab)}", version="1")
    async def agent() -> Any:
        await lab(steps.search("NYC"))
        await lab(perdure.receive())

    lab.run(agent, id="open")

    @lab.durable(name=f"patched-{id(lab)}", version="2")
    async def changed() -> Any:
        if perdure.patched("search the weather first"):
            await lab(steps.search("weather"))
        await lab(steps.search("NYC"))
        await lab(perdure.receive())

    [finding] = check_code(lab.store, [changed])
    assert finding.is_ok


def test_code_that_now_fails_before_the_end_of_the_record_differs(lab: Lab) -> None:
    steps = Broken(lab)

    @lab.durable(name=f"raising-{id(lab)}")
    async def agent() -> Any:
        await lab(perdure.receive())

    lab.run(agent, id="open")

    @lab.durable(name=f"raising-{id(lab)}")
    async def changed() -> Any:
        raise KeyError("new")

    [finding] = check_code(lab.store, [changed])
    assert finding.verdict == "differs"
    assert "KeyError" in (finding.problem or "")
    with pytest.raises(perdure.UsageError, match="no durable function"):
        check_code(lab.store, [steps.search])


def test_a_run_that_is_being_undone_needs_only_its_undo(lab: Lab) -> None:
    def cancel(flight: str) -> None:
        raise RuntimeError("the airline is closed")

    @lab.effect(name="reserve", undo=perdure.effect(definite=RuntimeError)(cancel))
    def reserve(flight: str) -> str:
        return flight

    @lab.durable(name=f"undoing-{id(lab)}", undo_on=KeyError)
    async def agent() -> Any:
        await lab(reserve("LH1"))
        raise KeyError("fails")

    run = lab.run(agent, id="undoing")
    assert run.refresh().status == "stuck"

    @lab.durable(name=f"undoing-{id(lab)}")
    async def changed() -> Any:
        return await lab(perdure.receive())

    [finding] = check_code(lab.store, [changed])
    assert finding.is_ok
