"""`hf.state()`: what the function changes is computed again, what bodies change comes back, and every step shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import MODES, PLACES, Interrupt, Lab, Once, hooked, open_place

import holdfast as hf
from holdfast.runs.calls.patching import apply, difference
from holdfast.runs.session.points import Point
from holdfast.storage.program import Batch, Program, Sql, drive, read
from holdfast.values.codec import decode, encode
from holdfast.values.registry import Codec


@pytest.fixture(scope="module", params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hf.Store]:
    yield from open_place(request, tmp_path_factory)


@pytest.fixture(params=MODES)
def lab(request: pytest.FixtureRequest, store: hf.Store) -> Lab:
    return Lab(store, request.param)


class Stop(BaseException):
    """Ends the process's part where a test wants it."""


def agent_of(lab: Lab, once: Once | None = None) -> Any:
    """Changes its state in the function and in a step's body."""

    @lab.step(name="research")
    def research(topic: str) -> int:
        lab.ran.append(topic)
        state = hf.state()
        state["notes"].append({"topic": topic, "found": len(topic)})
        state["count"] = state.get("count", 0) + 1
        return len(topic)

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent(topics: list[str]) -> dict[str, Any]:
        state = hf.state({"plan": [], "notes": []})
        state["plan"] += topics
        for topic in topics:
            state["now"] = topic
            await lab(research(topic))
        del state["now"]
        if once is not None:
            once.interrupt()
        return dict(state)

    return agent


EXPECTED = {
    "plan": ["a", "bb"],
    "notes": [{"topic": "a", "found": 1}, {"topic": "bb", "found": 2}],
    "count": 2,
}


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
    with pytest.raises(hf.NotFound, match="no step '9'"):
        run.state_at("9")


def test_states_are_checkpoints_of_a_thread(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"], id="kept")
    thread = lab.store.thread("run:kept")
    assert thread.load().state == EXPECTED
    assert [checkpoint.state.get("count") for checkpoint in thread.history()] == [2, 2, 1]
    assert thread.info().metadata == {"holdfast_run": "kept"}
    assert lab.store.verify().ok
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
        return len(hf.state())

    @lab.durable(name=f"looking-{id(lab)}")
    async def looking() -> int:
        hf.state({"a": 1, "b": 2})
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
        state = hf.state()
        state["asked"] = True
        answer = await lab(hf.ask("Well?"))
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
        state = hf.state()
        state["tries"] = state.get("tries", 0) + 1
        if state["tries"] < 3:
            raise LookupError("again")
        return "fine"

    @lab.effect(name="pay")
    def pay(amount: int) -> int:
        hf.state()["paid"] = amount
        return amount

    @lab.step(name="fails")
    def fails() -> None:
        hf.state()["failed"] = True
        raise ValueError("no")

    @lab.step(name="lazy", lazy=True)
    def lazy() -> None:
        hf.state()["lazy"] = 1

    @lab.durable(name=f"all-{id(lab)}")
    async def everything() -> dict[str, Any]:
        state = hf.state()
        await lab(flaky())
        await lab(pay(5))
        try:
            await lab(fails())
        except ValueError:
            state["caught"] = True
        await lab(lazy())
        state["seen"] = state["lazy"]
        hf.random()
        await lab(pay(6))
        once.interrupt()
        return dict(state)

    expected = {"tries": 3, "paid": 6, "failed": True, "caught": True, "lazy": 1, "seen": 1}
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
        state = hf.state({"plan": {"step": 0}})
        state["plan"]["step"] = len(lab.ran)  # a global: not recorded
        lab.ran.append("called")
        await lab(work(1))
        once.interrupt()

    with pytest.raises(Interrupt):
        lab.run(impure, id="impure")
    run = lab.run(impure, id="impure")
    assert run.status == "stuck"
    with pytest.raises(
        hf.RunStuck, match=r"state\['plan'\]\['step'\] = 0 before, and now state\['plan'\]\['step'\] = 1"
    ):
        run.result()
    with pytest.raises(hf.NonDeterministic) as caught:
        lab.store.replay(run)
    assert caught.value.path == "1"


def test_values_of_all_sorts_are_kept(lab: Lab) -> None:
    once = Once()

    @lab.step(name="fill")
    def fill() -> None:
        state = hf.state()
        state["tuple"] = (1, (2, 3))
        state["set"] = {1, 2}
        state[7] = float("nan")  # type: ignore[index]
        state["bytes"] = b"x"
        state["deep"] = {"list": [{"a": 1}, {"b": [1, 2, 3]}]}

    @lab.step(name="change")
    def change() -> None:
        state = hf.state()
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
        state = hf.state()
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
    thread = lab.store.thread("run:fork")
    assert thread.info().forked_at is not None
    assert thread.info().metadata == {"holdfast_run": "fork"}
    assert lab.store.verify().ok


def test_a_fork_with_another_result_computes_another_state(lab: Lab) -> None:
    @lab.step(name="find")
    def find(number: int) -> int:
        hf.state()["bodies"] = number
        return number

    @lab.durable(name=f"changing-{id(lab)}")
    async def changing() -> dict[str, Any]:
        state = hf.state()
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
        hf.state()["count"] += 1

    @lab.durable(name=f"endless-{id(lab)}")
    async def endless(left: int) -> int:
        state = hf.state({"count": left * 10})
        await lab(count())
        if left:
            hf.continue_as_new(left - 1)
        return int(state["count"])

    run = lab.run(endless, 2, id="endless")
    assert run.result() == 1
    assert run.state_at() == {"count": 1}
    assert [one.state["count"] for one in lab.store.thread("run:endless").history()] == [1, 11, 21]


def test_a_deleted_thread_of_states_does_not_stop_the_run(lab: Lab) -> None:
    once = Once()

    @lab.step(name="more")
    def more() -> None:
        hf.state()["count"] += 1

    @lab.durable(name=f"robbed-{id(lab)}")
    async def robbed() -> int:
        state = hf.state({"count": 0})
        await lab(more())
        await lab(more())
        once.interrupt()
        lab.store.delete("run:robbed")
        await lab(more())
        await lab(more())
        return int(state["count"])

    with pytest.raises(Interrupt):
        lab.run(robbed, id="robbed")
    run = lab.run(robbed, id="robbed")
    assert run.result() == 4
    assert run.state_at() == {"count": 4}
    with pytest.raises(hf.NotFound, match="gone"):
        run.state_at("1")
    assert run.state_at("3") == {"count": 3}


def test_a_pruned_thread_of_states_does_not_stop_the_run(lab: Lab) -> None:
    @lab.step(name="grow")
    def grow(number: int) -> None:
        hf.state()["text"] += f" {number}" * 50

    @lab.durable(name=f"pruned-{id(lab)}")
    async def pruned() -> int:
        state = hf.state({"text": "x" * 5000})
        for number in range(12):
            await lab(grow(number))
            if number % 4 == 3:
                lab.store.thread("run:pruned").prune(keep=1)
        return len(state["text"])

    run = lab.run(pruned, id="pruned")
    assert run.result() == len(run.state_at()["text"])
    assert lab.store.verify().ok


# --- branches


def test_branches_change_paths_of_their_own(store: hf.Store) -> None:
    lab = Lab(store, "async")
    once = Once()

    @hf.step(name="work")
    async def work(name: str) -> str:
        hf.state()["found"][name] = name.upper()
        return name

    @hf.durable(name=f"branches-{id(lab)}")
    async def branches() -> Any:
        state = hf.state({"found": {}, "log": []})

        async def one(name: str) -> None:
            seen = sorted(state["found"])
            await work(name)
            state["found"][name + "2"] = seen

        await asyncio.gather(*(one(name) for name in "abc"))
        state["log"].append(sorted(state["found"]))
        await work("z")
        once.interrupt()
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(branches, id="branches")
    run = lab.run(branches, id="branches")
    found = {"a": "A", "a2": [], "b": "B", "b2": [], "c": "C", "c2": [], "z": "Z"}
    assert run.result() == {"found": found, "log": [sorted(set(found) - {"z"})]}
    assert lab.store.replay(run).result == run.result()
    # A branch saw what there was when it began, and what it did itself.
    assert run.state_at("2.1") == {"found": {"b": "B"}, "log": []}
    assert sorted(run.state_at("4")["found"]) == sorted(found)
    assert lab.store.verify().ok


def test_two_branches_that_write_one_path_are_an_error(store: hf.Store) -> None:
    lab = Lab(store, "async")

    @hf.step(name="note")
    async def note(name: str) -> None:
        hf.state()["notes"].append(name)

    @hf.durable(name=f"clash-{id(lab)}")
    async def clash() -> None:
        state = hf.state({"notes": []})
        await asyncio.gather(note("a"), note("b"))
        state["done"] = True

    run = lab.run(clash)
    assert run.status == "stuck"
    with pytest.raises(hf.RunStuck, match=r"changed state\['notes'\]"):
        run.result()


def test_a_branch_and_its_maker_that_write_one_path_are_an_error(store: hf.Store) -> None:
    lab = Lab(store, "async")

    @hf.durable(name=f"clash-maker-{id(lab)}")
    async def clash() -> None:
        state = hf.state()

        async def branch() -> None:
            state["who"] = "branch"

        task = asyncio.create_task(branch())
        state["who"] = "maker"
        await task
        dict(state)

    run = lab.run(clash)
    with pytest.raises(hf.RunStuck, match=r"state\['who'\]"):
        run.result()


def test_a_branch_that_ends_in_the_middle_of_a_call_is_recorded_with_it(store: hf.Store) -> None:
    """Whether it ends before or after a step of the main line is chance, and must be the same on replay."""
    lab = Lab(store, "async")
    once = Once()
    ended = asyncio.Event()
    seen: list[bool] = []

    @hf.step(name="slow")
    async def slow(number: int) -> int:
        if number == 1 and not seen:
            await asyncio.wait_for(ended.wait(), 30)
        return number

    @hf.durable(name=f"late-{id(lab)}")
    async def late() -> Any:
        state = hf.state()

        async def background() -> None:
            state["background"] = True
            ended.set()

        task = asyncio.create_task(background())
        await slow(1)
        state["after"] = state.get("background")
        await slow(2)
        await task
        await slow(3)
        seen.append(True)
        once.interrupt()
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(late, id="late")
    run = lab.run(late, id="late")
    assert run.result() == {"background": True, "after": True}
    assert lab.store.replay(run).result == run.result()


def test_a_branch_that_was_cancelled_changes_nothing(store: hf.Store) -> None:
    lab = Lab(store, "async")

    @hf.durable(name=f"cancelled-{id(lab)}")
    async def cancelled() -> Any:
        state = hf.state()

        async def loser() -> None:
            state["loser"] = True
            await asyncio.sleep(3600)

        task = asyncio.create_task(loser())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return dict(state)

    assert lab.run(cancelled).result() == {}


# --- bad use


def test_bad_use_gets_a_clear_error(lab: Lab) -> None:
    with pytest.raises(hf.NotInRun):
        hf.state()
    caught: list[BaseException] = []

    @lab.step(name="first")
    def first() -> None:
        try:
            hf.state({"a": 1})
        except hf.UsageError as error:
            caught.append(error)

    kept: list[hf.State] = []

    @lab.durable(name=f"wrong-{id(lab)}")
    async def wrong() -> None:
        await lab(first())
        for bad in ([1], {"a": object()}):
            try:
                hf.state(bad)  # type: ignore[arg-type]
            except (hf.UsageError, hf.Unstorable) as error:
                caught.append(error)
        kept.append(hf.state({"a": 1}))

    assert lab.run(wrong).result() is None
    assert len(caught) == 3
    with pytest.raises(hf.NotInRun, match="outside of it"):
        kept[0]["a"]


def test_an_unstorable_value_in_the_state_leaves_the_run_stuck(lab: Lab) -> None:
    @lab.step(name="spoil")
    def spoil() -> None:
        hf.state()["lock"] = object()

    @lab.durable(name=f"spoiled-{id(lab)}")
    async def spoiled() -> None:
        hf.state()
        await lab(spoil())

    run = lab.run(spoiled)
    with pytest.raises(hf.RunStuck, match="lock"):
        run.result()


def test_the_initial_value_is_copied_and_counts_once(lab: Lab) -> None:
    initial = {"list": [1]}

    @lab.durable(name=f"copied-{id(lab)}")
    async def copied() -> Any:
        state = hf.state(initial)
        state["list"].append(2)
        return [dict(hf.state({"other": 1})), len(state), "list" in state]

    assert lab.run(copied).result() == [{"list": [1, 2]}, 1, True]
    assert initial == {"list": [1]}


@dataclass
class Note:
    """A class of the user's, in the state."""

    text: str


def test_a_step_inside_another_process_of_the_store_sees_classes_raw(lab: Lab) -> None:
    hf.register(Note)

    @lab.durable(name=f"classes-{id(lab)}")
    async def classes() -> None:
        state = hf.state()
        state["note"] = Note("hi")
        hf.emit(1)

    run = lab.run(classes)
    assert run.state_at() == {"note": Note("hi")}


# --- patches

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text("abc", max_size=2), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)
_states = st.dictionaries(st.text("abc", max_size=2), _values, max_size=5)


@settings(max_examples=400, deadline=None)
@given(_states, _states)
def test_a_patch_leads_exactly_to_what_was_there(before: dict[str, Any], after: dict[str, Any]) -> None:
    codec = Codec()
    text, wanted = encode(before, codec), encode(after, codec)
    ops = decode(encode(difference(text, after, wanted, codec), codec), codec)
    state = decode(text, codec)
    apply(state, ops)
    assert encode(state, codec) == wanted


def test_a_small_change_of_a_large_state_is_a_small_patch(lab: Lab) -> None:
    @lab.step(name="append")
    def append() -> None:
        hf.state()["messages"].append("one more")

    @lab.durable(name=f"small-{id(lab)}")
    async def small() -> None:
        hf.state({"messages": [f"message {number} " * 20 for number in range(500)]})
        await lab(append())
        await lab(append())

    run = lab.run(small, id="small")
    assert run.result() is None

    def program() -> Program[int]:
        [[(size,)]] = yield Batch(
            Sql(
                """SELECT max(length(body)) FROM journal WHERE run = (SELECT run FROM run WHERE id = 'small'
                AND tenant = (SELECT tenant FROM tenant WHERE name = :name))"""
            )(name=lab.store._context.tenant_name)
        )
        return int(size)

    assert drive(lab.store._context.driver, read(program)) < 300


# --- branches that Holdfast makes


def test_what_gathered_branches_change_is_there_when_they_have_ended(lab: Lab) -> None:
    once = Once()

    @lab.step(name="find")
    def find(name: str) -> str:
        lab.ran.append(name)
        hf.state()["found"][name] = name.upper()
        return name

    @lab.durable(name=f"gathering-{id(lab)}")
    async def gathering() -> Any:
        state = hf.state({"found": {}})
        calls = [(find(name) if lab.is_async else lambda name=name: find(name)) for name in "abc"]
        await lab(hf.gather(*calls))
        state["seen"] = list(state["found"])
        await lab(find("z"))
        once.interrupt()
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(gathering, id="gathering")
    run = lab.run(gathering, id="gathering")
    assert run.result() == {"found": {"a": "A", "b": "B", "c": "C", "z": "Z"}, "seen": ["a", "b", "c"]}
    assert sorted(lab.ran) == ["a", "b", "c", "z"]
    assert lab.store.replay(run).result == run.result()
    assert run.state_at("2.1") == {"found": {"b": "B"}}


def test_of_a_race_only_the_winner_changes_the_state(lab: Lab) -> None:
    once = Once()

    @lab.step(name="try")
    def attempt(name: str) -> str:
        hf.state()[name] = True
        if name == "loser":
            raise LookupError(name)
        return name

    @lab.durable(name=f"racing-{id(lab)}")
    async def racing() -> Any:
        state = hf.state()
        calls = [(attempt(name) if lab.is_async else lambda name=name: attempt(name)) for name in ("loser", "winner")]
        won = await lab(hf.first(*calls))
        once.interrupt()
        return [won, dict(state)]

    with pytest.raises(Interrupt):
        lab.run(racing, id="racing")
    run = lab.run(racing, id="racing")
    assert run.result() == ["winner", {"winner": True}]
    assert lab.store.replay(run).result == run.result()


def test_gathered_branches_that_write_one_path_are_an_error(lab: Lab) -> None:
    @lab.step(name="count")
    def count() -> None:
        hf.state()["count"] += 1

    @lab.durable(name=f"counting-{id(lab)}")
    async def counting() -> Any:
        state = hf.state({"count": 0})
        await lab(hf.gather(*((count() if lab.is_async else count) for _ in range(2))))
        return dict(state)

    with pytest.raises(hf.RunStuck, match=r"changed state\['count'\]"):
        lab.run(counting).result()


def test_tools_change_the_state_each_in_its_own_place(lab: Lab) -> None:
    once = Once()

    @lab.step(name="note")
    def note(topic: str) -> str:
        """Note a topic."""
        hf.state()["topics"][topic] = len(topic)
        return topic

    @lab.durable(name=f"tooling-{id(lab)}")
    async def tooling() -> Any:
        state = hf.state({"topics": {}})
        calls = [{"id": f"call_{topic}", "name": "note", "arguments": {"topic": topic}} for topic in ("a", "bb")]
        await lab(hf.tools([note]).call(calls))
        once.interrupt()
        return dict(state)

    with pytest.raises(Interrupt):
        lab.run(tooling, id="tooling")
    run = lab.run(tooling, id="tooling")
    assert run.result() == {"topics": {"a": 1, "bb": 2}}


def test_the_states_go_with_the_run(lab: Lab) -> None:
    run = lab.run(agent_of(lab), ["a", "bb"], id="gone")
    fork = lab.store.fork(lab.run(agent_of(lab), ["a", "bb"], id="source"), at="1", id="fork")
    assert fork.result() == EXPECTED
    with pytest.raises(hf.UsageError, match="fork"):
        lab.store.delete_run("source")
    lab.store.delete_run(run.id)
    assert sorted(info.name for info in lab.store.threads()) == ["run:fork", "run:source"]
    lab.store.delete_run(fork.id)
    lab.store.delete_run("source")
    assert lab.store.threads() == []
    assert lab.store.verify().ok


@pytest.mark.parametrize("at", range(1, 10))
def test_tasks_that_end_at_any_time_are_put_in_at_the_same_place_again(store: hf.Store, at: int) -> None:
    """Background tasks end when they like; the run is stopped after each of its commits, and goes on the same way."""
    import random

    lab = Lab(store, "async")
    chance = random.Random(at)
    commits: list[Point] = []

    @hf.step(name="work")
    async def work(name: str) -> str:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        hf.state()[name] = name
        return name if len(name) < 3 else name * BLOB

    @hf.durable(name=f"racy-{id(lab)}")
    async def racy() -> Any:
        state = hf.state({"seen": []})

        async def background(name: str) -> None:
            await work(name)
            await asyncio.sleep(0)
            state[f"{name}-end"] = sorted(state)

        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(background(f"b{number}")))
            await work(f"main{number}")
            state["seen"].append(sorted(state))
        await asyncio.gather(*tasks)
        state["seen"].append(sorted(state))
        await work("z")
        return dict(state)

    def stop(point: Point) -> None:
        if point.kind == "done" and point.when == "after":
            commits.append(point)
            if len(commits) == at:
                raise Stop

    with hooked(stop):
        try:
            run = lab.run(racy, id="racy")
        except Stop:
            run = lab.run(racy, id="racy")
    assert run.status in ("done", "queued"), run.info()
    result = run.result()
    expected = {"main0", "main1", "main2", "z", "seen", *(f"b{n}{end}" for n in range(3) for end in ("", "-end"))}
    assert set(result) == expected
    assert set(result["seen"][3]) == expected - {"z"}
    assert lab.store.replay(run).result == result
    assert run.state_at() == result


BLOB = 20_000
