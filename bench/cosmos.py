"""LangGraph on Cosmos DB: a long chat beside `langgraph-checkpoint-cosmosdb`, and both in LangGraph's conformance suite.

Both talk to the same emulator, which is no measure of Azure's speed: what counts is what is stored and how many requests
are sent. Sizes are of all items as JSON, without the fields that the server adds. Requests are counted where the client
sends them, from the second turn on: what a client asks once about an account is not counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from azure.core.pipeline.transport import RequestsTransport
from azure.cosmos import CosmosClient
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import validate
from langgraph.checkpoint.conformance.initializer import RegisteredCheckpointer

from bench.cosmos_server import KEY, client_of, emulator, new_database
from bench.langgraph_chat import Answers, Graph, NothingSaver, Saver, graph_of, texts, thread
from bench.measure import MB, Row, Run
from perdure.cosmos import CosmosSaver

SIZE_BAR = 30.0
REQUESTS_BAR = 1.0
TESTS = 81


def cosmos(run: Run) -> list[Row]:
    turns = run.count(200, 4)
    answers = texts(turns)
    logging.getLogger("azure").setLevel(logging.ERROR)
    with emulator() as url:
        kinds: list[Callable[[str, str], Saver]] = [_peer, _ours]
        peer_mb, ours_mb = (_megabytes(kind, url, answers) for kind in kinds)
        peer_requests, ours_requests = (_requests(kind, url, texts(run.count(20, 3))) for kind in kinds)
        peer_passed, ours_passed = (asyncio.run(_passed(kind, url)) for kind in kinds)
    name = f"Cosmos DB, {turns} turns"
    return [
        Row(f"{name}: size", ours_mb, "MB", peer_mb, None, peer_mb / ours_mb, SIZE_BAR, "at least",
            note="peer: langgraph-checkpoint-cosmosdb"),
        Row("  requests per turn", ours_requests, "", peer_requests, None, ours_requests / peer_requests, REQUESTS_BAR),
        Row(f"  conformance tests of {TESTS} that pass", ours_passed, "", peer_passed, None, None, TESTS, "at least",
            "ours"),
    ]  # fmt: skip


def _ours(url: str, database: str) -> Saver:
    saver = CosmosSaver(client_of(url), database)
    saver.setup()
    return saver


def _peer(url: str, database: str) -> Saver:
    from langgraph_checkpoint_cosmosdb import CosmosDBSaver, cosmosdbSaver

    to_emulator = partial(CosmosClient, enable_endpoint_discovery=False)
    account = {"COSMOSDB_ENDPOINT": url, "COSMOSDB_KEY": KEY, "AGENTSTATE_QUIET": "1"}
    with patch.dict(os.environ, account), patch.object(cosmosdbSaver, "CosmosClient", to_emulator):
        saver: Saver = CosmosDBSaver(database, "threads")
        return saver


class Written(NothingSaver):
    """Writes to a saver and reads nothing from it: the peer reads all checkpoints of a thread at every turn."""

    def __init__(self, saver: Saver) -> None:
        super().__init__()
        self._saver = saver

    def put(self, config: RunnableConfig, *checkpoint: Any) -> RunnableConfig:
        self._saver.put(config, *checkpoint)
        return super().put(config, *checkpoint)

    def put_writes(self, config: RunnableConfig, *writes: Any) -> None:
        self._saver.put_writes(config, *writes)
        super().put_writes(config, *writes)


def _megabytes(kind: Callable[[str, str], Saver], url: str, answers: Answers) -> float:
    """What a chat takes."""
    database = new_database()
    saver = kind(url, database)
    _talk(graph_of(Written(saver), answers), list(answers))
    messages = graph_of(saver, answers).get_state(thread("chat")).values["messages"]
    if [message.content for message in messages] != [text for pair in answers.items() for text in pair]:
        raise RuntimeError(f"{kind.__name__} has other messages than were said")
    container = client_of(url).get_database_client(database).get_container_client("threads")
    return sum(map(_size, container.query_items("SELECT * FROM c", enable_cross_partition_query=True))) / MB


def _requests(kind: Callable[[str, str], Saver], url: str, answers: Answers) -> float:
    """The requests per turn."""
    graph, (first, *others) = graph_of(kind(url, new_database()), answers), answers
    _talk(graph, [first])
    with _counting() as requests:
        _talk(graph, others)
    return len(requests) / len(others)


def _talk(graph: Graph, questions: Sequence[str]) -> None:
    for question in questions:
        graph.invoke({"messages": [HumanMessage(question)]}, thread("chat"))


def _size(item: dict[str, Any]) -> int:
    return len(json.dumps({name: value for name, value in item.items() if not name.startswith("_")}))


@contextmanager
def _counting() -> Iterator[list[str]]:
    """The requests that are sent meanwhile."""
    send, requests = RequestsTransport.send, list[str]()

    def counted(self: RequestsTransport, request: Any, **options: Any) -> Any:
        requests.append(request.url)
        return send(self, request, **options)

    with patch.object(RequestsTransport, "send", counted):
        yield requests


async def _passed(kind: Callable[[str, str], Saver], url: str) -> int:
    """How many tests of the conformance suite pass."""

    async def fresh() -> AsyncGenerator[BaseCheckpointSaver[Any], None]:
        yield kind(url, new_database())

    report = await validate(RegisteredCheckpointer(kind.__name__, fresh))
    return sum(result.tests_passed for result in report.results.values())
