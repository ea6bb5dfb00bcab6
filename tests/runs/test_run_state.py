"""`perdure.state()`: what the function changes is computed again, what bodies change is read back, at every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from lab import Interrupt, Lab, Once, hooked
from state_kit import EXPECTED, Stop, agent_of

import perdure
from perdure.runs.execution.hooks import Point


def test_the_function_and_its_bodies_change_one_state(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"])
    assert run.result() == EXPECTED


def test_what_bodies_changed_comes_back_when_the_run_is_resumed(lab: Lab) -> None:
    agent = agent_of(lab, Once())
    with pytest.raises(Interrupt):
        lab.run(agent, ["a", "bb"], id="resumed")
    assert lab.run(agent, ["a", "bb"], id="resumed").result() == EXPECTED
    assert lab.ran == ["a", "bb"]
    assert lab.store.replay("resumed").result == EXPECTED


def test_the_state_at_each_step_is_seen_without_running_code(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"])
    first, second, *_ = run.steps()
    assert run.state_at("1") == {
        "plan": ["a", "bb"],
        "notes": [{"topic": "a", "found": 1}],
        "now": "a",
        "count": 1,
    }
    for step in run.steps():  # a Step is read backwards from its place
        assert run.state_at(step) == run.state_at(step.path)
    assert run.state_at(first) == run.state_at(1) == run.state_at("1")
    assert run.state_at(second)["count"] == 2
    assert run.state_at() == EXPECTED
    assert run.state_at(0) is None
    assert asyncio.run(run.astate_at()) == EXPECTED
    changes = run.diff("1", "2")
    assert {(change.path, change.kind) for change in changes} == {
        (("now",), "changed"),
        (("count",), "changed"),
        (("notes", 1), "added"),
    }
    assert [change.path for change in run.diff("2")] == [("now",)]
    assert {change.path for change in run.diff(0, 1)} == {("plan",), ("notes",), ("now",), ("count",)}
    assert asyncio.run(run.adiff("1", "2")) == changes
    with pytest.raises(perdure.NotFound, match="no step '9'"):
        run.state_at("9")


def test_states_are_checkpoints_of_a_thread(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"], id="kept")
    thread = lab.store.thread("run:kept")
    assert thread.load().state == EXPECTED
    assert [checkpoint.state.get("count") for checkpoint in thread.history()] == [2, 2, 1]
    assert thread.info().metadata == {"perdure_run": "kept"}
    assert lab.store.ops.verify().ok
    assert run.state_at() == EXPECTED


def test_a_run_without_state_has_none(lab: Lab) -> None:
    @lab.step(name="plain")
    def plain() -> int:
        return 1

    @lab.durable(name=f"stateless-{id(lab)}")
    async def stateless() -> int:
        return int(await lab(plain()))

    run = lab.run(stateless)
    assert run.state_at("1") is None
    assert run.diff("1") == []
    assert lab.store.threads() == []
    assert all("state" not in (step.note or {}) for step in run.steps())


def test_a_step_that_changes_nothing_keeps_nothing(lab: Lab) -> None:
    @lab.step(name="looks")
    def looks() -> int:
        return len(perdure.state())

    @lab.durable(name=f"looking-{id(lab)}")
    async def looking() -> int:
        perdure.state({"a": 1, "b": 2})
        await lab(looks())
        return int(await lab(looks()))

    run = lab.run(looking, id="looking")
    assert run.result() == 2
    assert len(list(lab.store.thread("run:looking").history())) == 1
    assert "state" not in (lab.step_at(run, "2").note or {})
    assert run.state_at("2") == {"a": 1, "b": 2}


def test_the_state_is_recorded_before_a_wait(lab: Lab) -> None:
    @lab.durable(name=f"asking-{id(lab)}")
    async def asking() -> Any:
        state = perdure.state()
        state["asked"] = True
        answer = await lab(perdure.ask("Well?"))
        state["answer"] = answer
        return dict(state)

    run = lab.run(asking, id="asking")
    assert run.state_at() == {"asked": True}
    lab.store.answer("asking", "yes")
    assert lab.run(asking, id="asking").result() == {"asked": True, "answer": "yes"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_the_commit_loses_neither_or_both(lab: Lab, when: str) -> None:
    """The checkpoint and the step's completion are one commit."""

    def stop(point: Point) -> None:
        if (point.kind, point.path, point.when) == ("done", "2", when):
            raise Stop

    agent = agent_of(lab)
    with hooked(stop), pytest.raises(Stop):
        lab.run(agent, ["a", "bb"], id="crash")
    counts = [checkpoint.state["count"] for checkpoint in lab.store.thread("run:crash").history()]
    assert counts == ([1] if when == "before" else [2, 1])
    assert lab.run(agent, ["a", "bb"], id="crash").result() == EXPECTED
    assert lab.ran == (["a", "bb", "bb"] if when == "before" else ["a", "bb"])
    assert [checkpoint.state["count"] for checkpoint in lab.store.thread("run:crash").history()] == [2, 2, 1]


def test_a_step_with_a_changed_state_is_still_one_commit(lab: Lab) -> None:
    commits: list[str] = []

    def note(point: Point) -> None:
        if point.when == "after" and point.kind != "body":
            commits.append(f"{point.kind} {point.path}".strip())

    with hooked(note):
        lab.run(agent_of(lab), ["a", "bb"])
    assert commits == ["claim", "done 1", "done 2", "value state", "finish"]


def test_effects_and_retries_bring_their_changes_back_too(lab: Lab) -> None:
    once = Once()

    @lab.step(name="flaky", retries=2, backoff_s=0.001)
    def flaky() -> str:
        state = perdure.state()
        state["tries"] = state.get("tries", 0) + 1
        if state["tries"] < 3:
            raise LookupError("again")
        return "fine"

    @lab.effect(name="pay")
    def pay(amount: int) -> int:
        perdure.state()["paid"] = amount
        return amount

    @lab.step(name="fails")
    def fails() -> None:
        perdure.state()["failed"] = True
        raise ValueError("no")

    @lab.durable(name=f"all-{id(lab)}")
    async def everything() -> dict[str, Any]:
        state = perdure.state()
        await lab(flaky())
        await lab(pay(5))
        try:
            await lab(fails())
        except ValueError:
            state["caught"] = True
        perdure.random()
        await lab(pay(6))
        once.interrupt()
        return dict(state)

    expected = {"tries": 3, "paid": 6, "failed": True, "caught": True}
    with pytest.raises(Interrupt):
        lab.run(everything, id="all")
    run = lab.run(everything, id="all")
    assert run.result() == expected
    assert run.state_at("2")["paid"] == 5
    assert lab.store.replay(run).result == expected


def test_a_state_that_is_computed_otherwise_on_replay_is_noticed_and_named(lab: Lab) -> None:
    once = Once()

    @lab.step(name="work")
    def work(number: int) -> int:
        return number

    @lab.durable(name=f"impure-{id(lab)}")
    async def impure() -> None:
        state = perdure.state({"plan": {"step": 0}})
        state["plan"]["step"] = len(lab.ran)  # a global: not recorded
        lab.ran.append("called")
        await lab(work(1))
        once.interrupt()

    with pytest.raises(Interrupt):
        lab.run(impure, id="impure")
    run = lab.run(impure, id="impure")
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match=r"state\['plan'\]\['step'\] = 0, now state\['plan'\]\['step'\] = 1"):
        run.result()
    with pytest.raises(perdure.NonDeterministic) as caught:
        lab.store.replay(run)
    assert caught.value.path == "1"


def test_values_of_all_sorts_are_kept(lab: Lab) -> None:
    once = Once()

    @lab.step(name="fill")
    def fill() -> None:
        state = perdure.state()
        state["tuple"] = (1, (2, 3))
        state["set"] = {1, 2}
        state[7] = float("nan")  # type: ignore[index]
        state["bytes"] = b"x"
        state["deep"] = {"list": [{"a": 1}, {"b": [1, 2, 3]}]}

    @lab.step(name="change")
    def change() -> None:
        state = perdure.state()
        state["tuple"] = (1, (2, 4))
        state["deep"]["list"][1]["b"][1] = True
        state["deep"]["list"].insert(0, "first")
        del state["deep"]["list"][1]["a"]
        state["set"].discard(1)
        state["set"].add(True)  # == 1, and not the same
        moved = state["bytes"]
        del state["bytes"]
        state["bytes"] = moved

    @lab.durable(name=f"values-{id(lab)}")
    async def values() -> Any:
        state = perdure.state()
        await lab(fill())
        await lab(change())
        once.interrupt()
        state.pop(7)  # type: ignore[call-overload]
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(values, id="values")
    result = lab.run(values, id="values").result()
    assert result == {
        "tuple": (1, (2, 4)),
        "set": {True, 2},
        "deep": {"list": ["first", {}, {"b": [1, True, 3]}]},
        "bytes": b"x",
    }
    assert result["deep"]["list"][2]["b"][1] is True


def test_a_fork_starts_with_the_state_at_its_point(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"], id="source")
    fork = lab.store.fork(run, at="1", id="fork")
    assert fork.state_at() == run.state_at("1")
    assert fork.result() == EXPECTED
    assert lab.ran == ["a", "bb", "bb"]
    assert fork.state_at("1") == run.state_at("1")
    assert fork.state_at("2") == run.state_at("2")
    assert all(fork.state_at(step) for step in fork.steps())  # also at the mark that the fork itself makes
    thread = lab.store.thread("run:fork")
    assert thread.info().forked_at is not None
    assert thread.info().metadata == {"perdure_run": "fork"}
    assert lab.store.ops.verify().ok


def test_a_fork_with_another_result_computes_another_state(lab: Lab) -> None:
    @lab.step(name="find")
    def find(number: int) -> int:
        perdure.state()["bodies"] = number
        return number

    @lab.durable(name=f"changing-{id(lab)}")
    async def changing() -> dict[str, Any]:
        state = perdure.state()
        state["first"] = await lab(find(1))
        await lab(find(2))
        await lab(find(3))
        return dict(state)

    run = lab.run(changing)
    assert run.result() == {"bodies": 3, "first": 1}
    fork = lab.store.fork(run, at="2", changes={"1": 10})
    assert fork.result() == {"bodies": 3, "first": 10}
    assert fork.state_at() == {"bodies": 3, "first": 10}
    assert lab.store.replay(fork).result == fork.result()


def test_a_run_that_begins_anew_has_a_new_state(lab: Lab) -> None:
    @lab.step(name="count")
    def count() -> None:
        perdure.state()["count"] += 1

    @lab.durable(name=f"endless-{id(lab)}")
    async def endless(left: int) -> int:
        state = perdure.state({"count": left * 10})
        await lab(count())
        if left:
            perdure.continue_as_new(left - 1)
        return int(state["count"])

    run = lab.run(endless, 2, id="endless")
    assert run.result() == 1
    assert run.state_at() == {"count": 1}
    assert [one.state["count"] for one in lab.store.thread("run:endless").history()] == [1, 11, 21]


def test_a_deleted_thread_of_states_does_not_stop_the_run(lab: Lab) -> None:
    once = Once()

    @lab.step(name="more")
    def more() -> None:
        perdure.state()["count"] += 1

    @lab.durable(name=f"robbed-{id(lab)}")
    async def robbed() -> int:
        state = perdure.state({"count": 0})
        await lab(more())
        await lab(more())
        once.interrupt()
        lab.store.delete_thread("run:robbed")
        await lab(more())
        await lab(more())
        return int(state["count"])

    with pytest.raises(Interrupt):
        lab.run(robbed, id="robbed")
    run = lab.run(robbed, id="robbed")
    assert run.result() == 4
    assert run.state_at() == {"count": 4}
    with pytest.raises(perdure.NotFound, match="gone"):
        run.state_at("1")
    assert run.state_at("3") == {"count": 3}


def test_a_pruned_thread_of_states_does_not_stop_the_run(lab: Lab) -> None:
    @lab.step(name="grow")
    def grow(number: int) -> None:
        perdure.state()["text"] += f" {number}" * 50

    @lab.durable(name=f"pruned-{id(lab)}")
    async def pruned() -> int:
        state = perdure.state({"text": "x" * 5000})
        for number in range(12):
            await lab(grow(number))
            if number % 4 == 3:
                lab.store.thread("run:pruned").prune(keep=1)
        return len(state["text"])

    run = lab.run(pruned, id="pruned")
    assert run.result() == len(run.state_at()["text"])
    assert lab.store.ops.verify().ok


# --- bad use


def test_bad_use_gets_a_clear_error(lab: Lab) -> None:
    with pytest.raises(perdure.NotInRun):
        perdure.state()
    caught: list[BaseException] = []

    @lab.step(name="first")
    def first() -> None:
        try:
            perdure.state({"a": 1})
        except perdure.UsageError as error:
            caught.append(error)

    kept: list[perdure.State] = []

    @lab.durable(name=f"wrong-{id(lab)}")
    async def wrong() -> None:
        await lab(first())
        for bad in ([1], {"a": object()}):
            try:
                perdure.state(bad)  # type: ignore[arg-type]
            except (perdure.UsageError, perdure.Unstorable) as error:
                caught.append(error)
        kept.append(perdure.state({"a": 1}))

    assert lab.run(wrong).result() is None
    assert len(caught) == 3
    with pytest.raises(perdure.NotInRun, match="outside of it"):
        kept[0]["a"]


def test_an_unstorable_value_in_the_state_leaves_the_run_stuck(lab: Lab) -> None:
    @lab.step(name="spoil")
    def spoil() -> None:
        perdure.state()["lock"] = object()

    @lab.durable(name=f"spoiled-{id(lab)}")
    async def spoiled() -> None:
        perdure.state()
        await lab(spoil())

    run = lab.run(spoiled)
    with pytest.raises(perdure.RunStuck, match="lock"):
        run.result()


def test_the_initial_value_is_copied_and_counts_once(lab: Lab) -> None:
    initial = {"list": [1]}

    @lab.durable(name=f"copied-{id(lab)}")
    async def copied() -> Any:
        state = perdure.state(initial)
        state["list"].append(2)
        return [dict(perdure.state({"other": 1})), len(state), "list" in state]

    assert lab.run(copied).result() == [{"list": [1, 2]}, 1, True]
    assert initial == {"list": [1]}


@dataclass
class Note:
    """A class of the user's, in the state."""

    text: str


def test_a_step_inside_another_process_of_the_store_sees_classes_raw(lab: Lab) -> None:
    perdure.register(Note)

    @lab.durable(name=f"classes-{id(lab)}")
    async def classes() -> None:
        state = perdure.state()
        state["note"] = Note("hi")
        perdure.emit(1)

    run = lab.run(classes)
    assert run.state_at() == {"note": Note("hi")}
