"""Run a LangGraph agent on Azure Cosmos DB: it is killed in the middle, and the same line resumes it.

    export COSMOS_ENDPOINT=https://….documents.azure.com COSMOS_KEY=…
    python examples/cosmos_agent.py        # dies while it looks for a hotel
    python examples/cosmos_agent.py        # resumes there: the flight is not looked up again

Functions stand in for tools. Needs the extra `cosmos`. It creates the database `perdure-example` in the account.
"""

from __future__ import annotations

import os
import signal
from typing import Any, TypedDict

from azure.cosmos import CosmosClient
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph

from perdure.cosmos import CosmosSaver

TRIP: RunnableConfig = {"configurable": {"thread_id": "trip-42"}}


class Trip(TypedDict, total=False):
    """What the agent knows."""

    city: str
    flight: str
    hotel: str


def open_saver() -> CosmosSaver:
    endpoint = os.environ["COSMOS_ENDPOINT"]
    # An emulator does not know the address by which it is reached.
    is_account = endpoint.startswith("https://")
    client = CosmosClient(endpoint, os.environ["COSMOS_KEY"], enable_endpoint_discovery=is_account)
    saver = CosmosSaver(client, "perdure-example", ttl="30d")
    saver.setup()
    return saver


def compiled(saver: CosmosSaver, *, dies: bool) -> Any:
    def find_flight(trip: Trip) -> Trip:
        print(f"looking for a flight to {trip['city']}")
        return {"flight": "LIS-0715"}

    def find_hotel(trip: Trip) -> Trip:
        print(f"looking for a hotel for those who arrive by {trip['flight']}", flush=True)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"hotel": "Grand Hotel Lisbon"}

    builder: Any = StateGraph(Trip)
    builder.add_node("find_flight", find_flight)
    builder.add_node("find_hotel", find_hotel)
    builder.add_edge(START, "find_flight")
    builder.add_edge("find_flight", "find_hotel")
    return builder.compile(checkpointer=saver)


def main() -> None:
    saver = open_saver()
    was_killed = saver.get_tuple(TRIP) is not None
    graph = compiled(saver, dies=not was_killed)
    trip = graph.invoke(None if was_killed else {"city": "Lisbon"}, TRIP, durability="sync")
    print(f"the trip: {trip['flight']}, {trip['hotel']}")
    saver.delete_thread("trip-42")  # so that the example can be run again


if __name__ == "__main__":
    main()
