"""`perdure.state()` with branches: a thread's own, and those of parallel calls; and patches of a state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import Interrupt, Lab, Once, hooked
from state_kit import EXPECTED, Stop, agent_of

import perdure
from perdure.runs.calls.patching import apply, difference
from perdure.runs.session.points import Point
from perdure.storage.program import Batch, Program, Sql, drive, read
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec

# --- branches


def test_branches_change_paths_of_their_own(store: perdure.Store) -> None:
    lab = Lab(store, "async")
    once = Once()

    @perdure.step(name="work")
    async def work(name: str) -> str:
        perdure.state()["found"][name] = name.upper()
        return name

    @perdure.durable(name=f"branches-{id(lab)}")
    async def branches() -> Any:
        state = perdure.state({"found": {}, "log": []})

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
    assert lab.store.ops.verify().ok


def test_two_branches_that_write_one_path_are_an_error(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.step(name="note")
    async def note(name: str) -> None:
        perdure.state()["notes"].append(name)

    @perdure.durable(name=f"clash-{id(lab)}")
    async def clash() -> None:
        state = perdure.state({"notes": []})
        await asyncio.gather(note("a"), note("b"))
        state["done"] = True

    run = lab.run(clash)
    assert run.status == "stuck"
    with pytest.raises(perdure.RunStuck, match=r"changed state\['notes'\]"):
        run.result()


def test_a_branch_and_its_maker_that_write_one_path_are_an_error(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.durable(name=f"clash-maker-{id(lab)}")
    async def clash() -> None:
        state = perdure.state()

        async def branch() -> None:
            state["who"] = "branch"

        task = asyncio.create_task(branch())
        state["who"] = "maker"
        await task
        dict(state)

    run = lab.run(clash)
    with pytest.raises(perdure.RunStuck, match=r"state\['who'\]"):
        run.result()


def test_a_branch_that_ends_in_the_middle_of_a_call_is_recorded_with_it(store: perdure.Store) -> None:
    """Whether it ends before or after a step of the main line is chance, and must be the same on replay."""
    lab = Lab(store, "async")
    once = Once()
    ended = asyncio.Event()
    seen: list[bool] = []

    @perdure.step(name="slow")
    async def slow(number: int) -> int:
        if number == 1 and not seen:
            await asyncio.wait_for(ended.wait(), 30)
        return number

    @perdure.durable(name=f"late-{id(lab)}")
    async def late() -> Any:
        state = perdure.state()

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


def test_a_branch_that_was_cancelled_changes_nothing(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.durable(name=f"cancelled-{id(lab)}")
    async def cancelled() -> Any:
        state = perdure.state()

        async def loser() -> None:
            state["loser"] = True
            await asyncio.sleep(3600)

        task = asyncio.create_task(loser())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return dict(state)

    assert lab.run(cancelled).result() == {}


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
        perdure.state()["messages"].append("one more")

    @lab.durable(name=f"small-{id(lab)}")
    async def small() -> None:
        perdure.state({"messages": [f"message {number} " * 20 for number in range(500)]})
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


# --- branches that Perdure makes


def test_what_gathered_branches_change_is_there_when_they_have_ended(lab: Lab) -> None:
    once = Once()

    @lab.step(name="find")
    def find(name: str) -> str:
        lab.ran.append(name)
        perdure.state()["found"][name] = name.upper()
        return name

    @lab.durable(name=f"gathering-{id(lab)}")
    async def gathering() -> Any:
        state = perdure.state({"found": {}})
        calls = [(find(name) if lab.is_async else lambda name=name: find(name)) for name in "abc"]
        await lab(perdure.gather(*calls))
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
        perdure.state()[name] = True
        if name == "loser":
            raise LookupError(name)
        return name

    @lab.durable(name=f"racing-{id(lab)}")
    async def racing() -> Any:
        state = perdure.state()
        calls = [(attempt(name) if lab.is_async else lambda name=name: attempt(name)) for name in ("loser", "winner")]
        won = await lab(perdure.first(*calls))
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
        perdure.state()["count"] += 1

    @lab.durable(name=f"counting-{id(lab)}")
    async def counting() -> Any:
        state = perdure.state({"count": 0})
        await lab(perdure.gather(*((count() if lab.is_async else count) for _ in range(2))))
        return dict(state)

    with pytest.raises(perdure.RunStuck, match=r"changed state\['count'\]"):
        lab.run(counting).result()


def test_tools_change_the_state_each_in_its_own_place(lab: Lab) -> None:
    once = Once()

    @lab.step(name="note")
    def note(topic: str) -> str:
        """Note a topic."""
        perdure.state()["topics"][topic] = len(topic)
        return topic

    @lab.durable(name=f"tooling-{id(lab)}")
    async def tooling() -> Any:
        state = perdure.state({"topics": {}})
        calls = [{"id": f"call_{topic}", "name": "note", "arguments": {"topic": topic}} for topic in ("a", "bb")]
        await lab(perdure.tools([note]).call(calls))
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
    with pytest.raises(perdure.UsageError, match="fork"):
        lab.store.delete_run("source")
    lab.store.delete_run(run.id)
    assert sorted(info.name for info in lab.store.threads()) == ["run:fork", "run:source"]
    lab.store.delete_run(fork.id)
    lab.store.delete_run("source")
    assert lab.store.threads() == []
    assert lab.store.ops.verify().ok


@pytest.mark.parametrize("at", range(1, 10))
def test_tasks_that_end_at_any_time_are_put_in_at_the_same_place_again(store: perdure.Store, at: int) -> None:
    """Background tasks end when they like; the run is stopped after each of its commits, and goes on the same way."""
    import random

    lab = Lab(store, "async")
    chance = random.Random(at)
    commits: list[Point] = []

    @perdure.step(name="work")
    async def work(name: str) -> str:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        perdure.state()[name] = name
        return name if len(name) < 3 else name * BLOB

    @perdure.durable(name=f"racy-{id(lab)}")
    async def racy() -> Any:
        state = perdure.state({"seen": []})

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
