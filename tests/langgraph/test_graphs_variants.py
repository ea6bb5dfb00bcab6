"""Scenarios of the graph tests once more (in a soak all of them), on savers that must make no difference: an
encrypting serializer, all options at once, one that remembers nothing from call to call, many threads and tasks on one.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import test_graphs
import test_graphs_features
import test_graphs_flow
import test_graphs_subgraphs
from graph_kit import Scenario, at, human, normal, on_both, talking, texts
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from soak import spread
from test_graphs_serde import Cipher

import perdure
from perdure.langgraph import PerdureSaver

SCENARIOS: list[Scenario] = [
    *test_graphs.SCENARIOS,
    *test_graphs_flow.SCENARIOS,
    *test_graphs_subgraphs.SCENARIOS,
    *test_graphs_features.SCENARIOS,
]
SOME = spread(SCENARIOS, 4)


class Forgetful(BaseCheckpointSaver[Any]):
    """Opens the store for each call, as if each were made by another process: nothing is remembered in between."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def get_tuple(self, config: Any) -> CheckpointTuple | None:
        with PerdureSaver(self.url) as saver:
            return saver.get_tuple(config)

    def list(self, config: Any, **options: Any) -> Iterator[CheckpointTuple]:
        with PerdureSaver(self.url) as saver:
            yield from list(saver.list(config, **options))

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        # LangGraph adds interrupts to the very dict that it hands over: opening takes long enough to see that.
        checkpoint = copy.deepcopy(checkpoint)
        with PerdureSaver(self.url) as saver:
            return saver.put(config, checkpoint, metadata, new_versions)

    def put_writes(self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        with PerdureSaver(self.url) as saver:
            saver.put_writes(config, writes, task_id, task_path)

    def get_delta_channel_history(self, *, config: Any, channels: Sequence[str]) -> Any:
        with PerdureSaver(self.url) as saver:
            return saver.get_delta_channel_history(config=config, channels=channels)


@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario.__name__)
async def test_an_encrypting_serializer_makes_no_difference(scenario: Scenario, tmp_path: Path) -> None:
    with PerdureSaver(str(tmp_path / "a.db"), serde=EncryptedSerializer(Cipher(b"k" * 32))) as saver:
        mine, theirs = await on_both(scenario, saver, "async")
    assert mine == theirs


@pytest.mark.parametrize("scenario", SOME, ids=lambda scenario: scenario.__name__)
async def test_options_that_do_not_apply_make_no_difference(scenario: Scenario, tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with PerdureSaver(path, single_writer=True, tenant="me", durability="normal") as saver:
        mine, theirs = await on_both(scenario, saver, "sync")
    assert mine == theirs


# A thousand openings of a store say no more than fifty.
SHORT = [scenario for scenario in SOME if scenario is not test_graphs.a_long_history_is_read_in_pages]


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.__name__)
async def test_a_saver_that_remembers_nothing_makes_no_difference(scenario: Scenario, tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    mine = normal(await scenario(Forgetful(path), "sync"))
    assert mine == normal(await scenario(InMemorySaver(), "sync"))
    with perdure.open(path) as store:
        assert store.ops.verify().ok


TURNS = 4
MANY = [f"thread {number}" for number in range(12)]
EXPECTED = [part for turn in range(TURNS) for part in (f"m{turn}", f"Echo: m{turn}")]


async def test_many_tasks_share_a_saver(saver: PerdureSaver) -> None:
    graph = talking(saver)

    async def talk(name: str) -> list[str]:
        for turn in range(TURNS):
            result = await graph.ainvoke({"messages": [human(f"m{turn}")]}, at(name))
        return texts(result)

    assert await asyncio.gather(*map(talk, MANY)) == [EXPECTED] * len(MANY)
    assert [texts((await graph.aget_state(at(name))).values) for name in MANY] == [EXPECTED] * len(MANY)
    assert (await asyncio.to_thread(saver.store.ops.verify)).ok


def test_many_threads_share_a_saver(saver: PerdureSaver) -> None:
    graph = talking(saver)

    def talk(name: str) -> list[str]:
        for turn in range(TURNS):
            result = graph.invoke({"messages": [human(f"m{turn}")]}, at(name))
        return texts(result)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(talk, MANY)) == [EXPECTED] * len(MANY)
    assert [texts(graph.get_state(at(name)).values) for name in MANY] == [EXPECTED] * len(MANY)
    assert saver.store.ops.verify().ok


def test_event_loops_come_and_go(saver: PerdureSaver) -> None:
    """A saver is bound to no event loop: one after the other may use it, and blocking calls in between."""
    graph = talking(saver)
    for turn in range(TURNS):
        given = {"messages": [human(f"m{turn}")]}
        if turn == 1:
            graph.invoke(given, at("t"))
        else:
            asyncio.run(graph.ainvoke(given, at("t")))
    assert texts(graph.get_state(at("t")).values) == EXPECTED
