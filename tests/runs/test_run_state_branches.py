"""`perdure.state()` with parallel branches, which only read it; and patches of a state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import Interrupt, Lab, Once, finished
from soak import examples
from state_kit import EXPECTED, agent_of

import perdure
from perdure.runs.calls.state import _apply as apply
from perdure.runs.calls.state import _difference as difference
from perdure.storage.program import Batch, Program, Sql, drive, read
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec

# --- branches


def test_branches_read_the_state_as_it_was_when_they_began(lab: Lab) -> None:
    once = Once()

    @lab.step(name="find")
    def find(name: str) -> list[str]:
        return [name, *perdure.state()["found"]]

    @lab.durable(name=f"gathering-{id(lab)}")
    async def gathering() -> Any:
        state = perdure.state({"found": ["start"]})
        calls = [(find(name) if lab.is_async else lambda name=name: find(name)) for name in "ab"]
        found = await lab(perdure.gather(*calls))
        state["found"] += [name for name, *_ in found]
        await lab(find("z"))
        once.interrupt()
        return [found, state["found"]]

    with pytest.raises(Interrupt):
        lab.run(gathering, id="gathering")
    run = lab.run(gathering, id="gathering")
    assert run.result() == [[["a", "start"], ["b", "start"]], ["start", "a", "b"]]
    assert lab.store.replay(run).result == run.result()
    assert run.state_at("2.1") is None  # recorded with the first call of the function after the state was made
    assert run.state_at("3") == {"found": ["start", "a", "b"]}
    for step in run.steps():  # a Step is read backwards from its place
        assert run.state_at(step) == run.state_at(step.path)


def test_a_task_reads_a_copy_while_the_function_continues(store: perdure.Store) -> None:
    lab = Lab(store, "async")

    @perdure.durable(name=f"tasks-{id(lab)}")
    async def tasks() -> Any:
        state = perdure.state({"count": 0})

        async def reader() -> int:
            await asyncio.sleep(0)
            return int(state["count"])

        task = asyncio.create_task(reader())
        state["count"] = 1
        return [await task, state["count"]]

    assert lab.run(tasks).result() == [0, 1]


@pytest.mark.parametrize("change", ["set", "delete", "inside", "in a body"])
def test_a_branch_that_changes_the_state_is_an_error(lab: Lab, change: str) -> None:
    @lab.step(name="write")
    def write() -> None:
        perdure.state()["count"] = 1

    @lab.step(name="nothing")
    def nothing() -> None: ...

    async def branch() -> None:
        state = perdure.state()
        if change == "set":
            state["count"] = 1
        elif change == "delete":
            del state["count"]
        elif change == "inside":
            state["notes"].append("x")
            await lab(nothing())
        else:
            await lab(write())

    @lab.durable(name=f"writing-{id(lab)}-{change}")
    async def writing() -> str:
        perdure.state({"count": 0, "notes": []})
        try:
            await lab(perdure.gather(branch() if lab.is_async else lambda: finished(branch())))
        except perdure.UsageError as error:
            return str(error)
        return ""

    assert "parallel branches only read it" in lab.run(writing).result()


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


@settings(max_examples=examples(400))
@given(_states, _states)
def test_a_patch_leads_exactly_to_what_was_there(before: dict[str, Any], after: dict[str, Any]) -> None:
    codec = Codec()
    text, wanted = encode(before, codec), encode(after, codec)
    ops = decode(encode(difference(text, after, codec), codec), codec)
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
