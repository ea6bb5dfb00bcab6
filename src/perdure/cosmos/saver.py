"""The checkpointer on Azure Cosmos DB: LangGraph's contract on `CosmosLines`, blocking and async in one class.

Azure's client blocks. In async code its calls run on threads of the saver's own pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from azure.cosmos import CosmosClient
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters import Codec, LineCheckpoint
from perdure.cosmos.container import Container
from perdure.cosmos.copying import copy_thread
from perdure.cosmos.line import CosmosLine
from perdure.cosmos.lines import CosmosLines
from perdure.langgraph import types as _types  # noqa: F401 - lets LangGraph's own classes be kept
from perdure.langgraph.configs import Address, address_of, stored_config
from perdure.langgraph.convert import history_filters, matches, tuple_of, writes_from
from perdure.langgraph.graph_runs import Requested
from perdure.langgraph.inflight import InFlight
from perdure.langgraph.native import NativeSaver, check_many, check_pruned
from perdure.langgraph.serde import PerdureSerde
from perdure.storage.store_threads import StoreThreads
from perdure.values.durations import check_duration

T = TypeVar("T")


class CosmosSaver(NativeSaver[CosmosLine]):
    """A LangGraph checkpointer on Azure Cosmos DB that stores what changed. Blocking and async in one class.

    `client` is an `azure.cosmos.CosmosClient`, which the caller has made and closes. `setup()` creates the container.
    `ttl` ("30d", a timedelta) deletes checkpoints: each lives at least so long, and at most half as long again.
    `trust` names module prefixes whose data classes may be stored; other classes must be registered. `single_writer`
    refuses a run's checkpoint with `Conflict` if another run has written to its thread since that run began.
    """

    _lines: CosmosLines

    def __init__(
        self,
        client: CosmosClient,
        database: str = "perdure",
        container: str = "threads",
        *,
        tenant: str = "default",
        ttl: str | timedelta | None = None,
        trust: Sequence[str] = (),
        serde: SerializerProtocol | None = None,
        single_writer: bool = False,
    ) -> None:
        ttl_s = None if ttl is None else check_duration(ttl, "ttl").total_seconds()
        self._lines = CosmosLines(Container(client, database, container), tenant, Codec(tuple(trust)), ttl_s)
        self._threads = StoreThreads()
        self._in_flight, self._requested = InFlight(), Requested()
        self._single_writer = single_writer
        super().__init__(serde=serde or PerdureSerde(self._lines.codec))

    def __repr__(self) -> str:
        return f"<CosmosSaver on {self._lines.context.container!r}>"

    def setup(self) -> None:
        """Create the database and the container where they do not exist."""
        self._lines.context.container.setup()

    async def asetup(self) -> None:
        """`setup`, awaited."""
        await self._call(self.setup)

    # --- LangGraph's contract, blocking

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint by its id, or else the newest of a thread and namespace; None if there is none."""
        address = address_of(config)
        return self._begin_with(address, self._line(address).load(address.id))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Iterate over checkpoints, the newest first."""
        listed = self._lines.history(**history_filters(config, before))
        matching = (one for one in listed if matches(one, filter, self.serde, self._codec))
        for one in islice(matching, None if limit is None else max(0, limit)):
            yield tuple_of(one, self.serde, self._codec)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, after the pending writes on its parent."""
        parent = address_of(config)
        line, saved = self._put(parent, config, checkpoint, metadata, new_versions)
        self._in_flight.wait(("writes", *parent))
        line.save(**saved)
        return stored_config(parent, checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task on a checkpoint."""
        address = self._address_written(config)
        with self._in_flight.doing(("writes", *address)):
            self._line(address).attach_all(str(address.id), writes_from(writes, task_id, task_path, self.serde))

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread with all its checkpoints and writes."""
        self._lines.delete_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, except those that a later checkpoint needs for a DeltaChannel."""
        self._lines.delete_runs(check_many(run_ids, "delete_for_runs", "run_ids"))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread's checkpoints and writes to another name. After a kill the same call copies what is missing."""
        copy_thread(self._lines, str(source_thread_id), self._lines, str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace ("keep_latest"), or nothing ("delete")."""
        for thread in check_pruned(thread_ids, strategy):
            if strategy == "delete":
                self._lines.delete_thread(thread)
            else:
                self._lines.prune(thread)

    # --- the same, awaited

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """`get_tuple`, awaited."""
        address = address_of(config)
        return self._begin_with(address, await self._call(partial(self._line(address).load, address.id)))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """`list`, awaited."""
        listed = self.list(config, filter=filter, before=before, limit=limit)
        while (one := await self._call(partial(next, listed, None))) is not None:
            yield one

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """`put`, awaited."""
        parent = address_of(config)
        line, saved = self._put(parent, config, checkpoint, metadata, new_versions)
        await self._in_flight.await_(("writes", *parent))
        await self._call(partial(line.save, **saved))
        return stored_config(parent, checkpoint["id"])

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`, awaited."""
        address = self._address_written(config)
        with self._in_flight.doing(("writes", *address)):
            packed = writes_from(writes, task_id, task_path, self.serde)
            await self._call(partial(self._line(address).attach_all, str(address.id), packed))

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`, awaited."""
        await self._call(partial(self.delete_thread, thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """`delete_for_runs`, awaited."""
        await self._call(partial(self.delete_for_runs, run_ids))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """`copy_thread`, awaited."""
        await self._call(partial(self.copy_thread, source_thread_id, target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`prune`, awaited."""
        await self._call(partial(self.prune, thread_ids, strategy=strategy))

    # --- what blocking and async share

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._threads.call(work)

    def _begin_with(self, address: Address, checkpoint: LineCheckpoint | None) -> CheckpointTuple | None:
        """Record that a run begins with this checkpoint, and return it as LangGraph's tuple."""
        stored = None if checkpoint is None else checkpoint.id
        self._requested.read(address.thread, address.namespace, address.id, stored)
        return None if checkpoint is None else tuple_of(checkpoint, self.serde, self._codec)
