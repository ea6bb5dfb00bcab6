"""Perdure on Azure Cosmos DB: a checkpointer for LangGraph that stores what changed. Threads only.

    from azure.cosmos import CosmosClient
    from perdure.cosmos import CosmosSaver

    saver = CosmosSaver(CosmosClient(endpoint, credential))
    saver.setup()
    graph = builder.compile(checkpointer=saver)

It needs the extra `cosmos`.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import azure.cosmos  # noqa: F401
    import langgraph.checkpoint.base  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.cosmos", "cosmos") from error

from perdure.cosmos.copying import transfer
from perdure.cosmos.saver import CosmosSaver

__all__ = ["CosmosSaver", "transfer"]
