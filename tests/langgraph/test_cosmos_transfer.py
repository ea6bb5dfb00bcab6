"""`perdure.cosmos.transfer`: threads between Cosmos DB and a store, whole, once, and again after it was stopped."""

from __future__ import annotations

from pathlib import Path

import crash_run
import pytest
from azure.cosmos import CosmosClient
from checkpoints import everything, numbered_id, put
from cosmos_run import StruckContainer

from perdure.cosmos import transfer
from perdure.errors import NotFound, UsageError
from perdure.langgraph import PerdureSaver


def test_threads_are_the_same_in_a_store_and_in_cosmos_db_and_back(cosmos_client: CosmosClient, tmp_path: Path) -> None:
    """A kill at a request leaves checkpoints that the next call does not copy again."""
    with PerdureSaver(str(tmp_path / "a.db")) as source, PerdureSaver(str(tmp_path / "b.db")) as back:
        crash_run.prepare(source)
        source.store.thread("no graph").save([1])
        struck, items = StruckContainer.saver(cosmos_client)
        items.left = 7
        with pytest.raises(StruckContainer.Struck):
            transfer(source, struck)
        cosmos, _ = StruckContainer.saver(cosmos_client, items)
        done = list[tuple[int, int]]()
        report = transfer(source, cosmos, progress=lambda *counts: done.append(counts))
        assert done == [(0, 2), (1, 2)]
        assert report.checkpoints < len(everything(source))
        assert everything(cosmos) == everything(source)
        assert transfer(cosmos, back).checkpoints == len(everything(source))
        assert everything(back) == everything(source)
        assert back.store.ops.verify().ok
        again = transfer(cosmos, back, threads=["main"])
        assert (again.threads, again.already) == (0, ("main",))
        put(back, "main", {"n": 6}, id=numbered_id(60))
        with pytest.raises(UsageError, match="another thread 'main' in the target already"):
            transfer(source, back, threads=["main"])
        with pytest.raises(NotFound, match="no thread 'no graph' of a graph"):
            transfer(source, cosmos, threads=["no graph"])
        with pytest.raises(UsageError, match="not str"):
            transfer(source, "cosmos")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"\['main'\]"):
            transfer(source, cosmos, threads="main")
