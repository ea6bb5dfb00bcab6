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
