"""What a graph, or a caller of the saver, sees is what LangGraph's own in-memory saver shows: unknown checkpoints,
metadata filters, time travel through subgraphs that remember, also where a second writer would be refused.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import put
from graph_kit import (
    MODES,
    AnySaver,
    Runner,
    Scenario,
    at,
    counting,
    id_of,
    inner,
    on_both,
    outer,
)
from langgraph.types import Command

from perdure.langgraph import PerdureSaver

UNKNOWN = "1ef00000-0000-6000-8000-000000000000"


async def an_unknown_checkpoint_begins_a_thread(saver: AnySaver, mode: str) -> Any:
    graph = Runner(counting(saver), mode)
    results = [await graph.invoke({"total": 0, "log": []}, at("t", checkpoint_id=id)) for id in (UNKNOWN, "of mine")]
    await graph.update(at("by hand", checkpoint_id=UNKNOWN), {"total": 5, "log": ["x"]}, "a")
    assert results == [{"total": 2, "log": ["a", "b"]}] * 2
    history = await graph.history(at("t")) + await graph.history(at("by hand"))
    return [results, [(state.values, state.next) for state in history]]


async def a_run_goes_back_through_a_subgraph_that_remembers(saver: AnySaver, mode: str) -> Any:
    """`checkpointer=True`: the subgraph continues from its newest checkpoint before the parent's, if there is one."""
    seen: list[Any] = []
    for durability in ("sync", "async", "exit"):
        graph = Runner(outer(saver, inner(ask=True, checkpointer=True)), mode)
        for topic in ("tea", "rum"):
            await graph.invoke({"topic": topic}, at(durability), durability=durability)
            await graph.invoke(Command(resume=f"yes, {topic}"), at(durability), durability=durability)
        for number, old in enumerate(await graph.history(at(durability))):
            if old.next:
                seen.append(await graph.invoke(None, old.config, durability=durability))
                seen.append(await graph.state(at(durability), subgraphs=True))
                seen.append(
                    await graph.invoke(Command(resume=f"again {number}"), at(durability), durability=durability)
                )
                fork = await graph.update(old.config, {"topic": "ale"})
                seen.append(await graph.invoke(None, fork, durability=durability))
                seen.append(await graph.invoke(Command(resume=f"fork {number}"), at(durability), durability=durability))
                seen.append(await graph.history(at(durability, checkpoint_ns="sub0"), limit=3))
    return seen


SCENARIOS: list[Scenario] = [
    an_unknown_checkpoint_begins_a_thread,
    a_run_goes_back_through_a_subgraph_that_remembers,
]


@pytest.mark.parametrize("single_writer", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_a_graph_runs_as_in_memory(scenario: Scenario, saver_url: str, mode: str, single_writer: bool) -> None:
    with PerdureSaver(saver_url, single_writer=single_writer) as saver:
        mine, theirs = await on_both(scenario, saver, mode)
        assert mine == theirs


def test_a_filter_with_dots_finds_keys_with_dots_and_nested_ones(saver: PerdureSaver) -> None:
    """In memory it finds the first, with LangGraph's SQLite saver the second."""
    flat, nested = {"user.access-level": "admin"}, {"user": {"access-level": "admin"}}
    ids = [id_of(put(saver, thread, {"n": 1}, **more)) for thread, more in (("a", flat), ("b", nested), ("c", {}))]
    assert {id_of(found.config) for found in saver.list(None, filter=flat)} == set(ids[:2])
    assert [id_of(found.config) for found in saver.list(None, filter=nested)] == [ids[1]]
    assert list(saver.list(None, filter={"user.access-level.admin": "admin"})) == []
    assert list(saver.list(None, filter={"user.access-level": "guest"})) == []


@pytest.mark.parametrize("mode", MODES)
async def test_prune_leaves_the_newest_checkpoint_of_what_can_still_run(saver: PerdureSaver, mode: str) -> None:
    """None of a finished call of a subgraph, one of a subgraph that remembers; and the oldest has no parent."""

    async def parents(namespace: str | None = None) -> list[bool]:
        config = at("t") if namespace is None else at("t", checkpoint_ns=namespace)
        found = [one async for one in saver.alist(config)] if graph.waits else list(saver.list(config))
        for one in found:
            alone = await saver.aget_tuple(one.config) if graph.waits else saver.get_tuple(one.config)
            assert alone is not None
            assert alone.parent_config == one.parent_config
        return [one.parent_config is not None for one in found]

    graph = Runner(outer(saver, inner(), inner(checkpointer=True)), mode)
    for number in range(4):
        await graph.invoke({"topic": f"tea {number}"}, at("t"))
    before = await graph.state(at("t"))
    saver.store.thread("t").prune(keep=3)
    assert await parents("") == [True, True, False]
    assert await parents("sub1") == [True, True, False]
    await saver.aprune(["t"]) if graph.waits else saver.prune(["t"])
    assert await parents() == [False, False]
    assert (await graph.state(at("t"))).values == before.values
    assert (await graph.invoke({"topic": "rum"}, at("t")))["results"][-1] == "rum: 9 notes, yes"
    assert saver.store.ops.verify().ok
