"""LangGraph's own conformance suite on Cosmos DB: all eight capabilities, all 81 tests.

The async methods call the blocking code on threads: where those pass, so do these.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from azure.cosmos import CosmosClient
from bench.cosmos_server import new_database
from conformance_kit import Blocking, conform
from graph_kit import MODES, Scenario, on_both
from langgraph.checkpoint.base import BaseCheckpointSaver
from soak import SOAK
from test_same_as_stock import SCENARIOS

from perdure.cosmos import CosmosSaver


@pytest.mark.parametrize("way", ["async", "blocking"] if SOAK else ["async"])
async def test_all_81_conformance_tests_pass(cosmos_client: CosmosClient, way: str) -> None:
    async def fresh() -> AsyncGenerator[BaseCheckpointSaver[int], None]:
        saver = CosmosSaver(cosmos_client, new_database())
        await saver.asetup()
        yield Blocking(saver) if way == "blocking" else saver

    await conform("CosmosSaver", fresh)


@pytest.mark.parametrize("single_writer", [False, True] if SOAK else [True])
@pytest.mark.parametrize("mode", MODES if SOAK else ["async"])
@pytest.mark.parametrize("scenario", SCENARIOS if SOAK else SCENARIOS[:1], ids=lambda scenario: scenario.__name__)
async def test_a_graph_runs_as_in_memory(
    scenario: Scenario, cosmos_client: CosmosClient, mode: str, single_writer: bool
) -> None:
    saver = CosmosSaver(cosmos_client, new_database(), single_writer=single_writer)
    saver.setup()
    mine, theirs = await on_both(scenario, saver, mode)
    assert mine == theirs
