"""The checkpointer: LangGraph's contract on a Perdure store, blocking and async in one class."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

import perdure.langgraph.types
from perdure import Store, ThreadInfo
from perdure.adapters import (
    Ancestors,
    Codec,
    Ending,
    Entry,
    Flow,
    LineEngine,
    Listing,
    Mark,
    ParentChanged,
    Progress,
    TaskTurns,
    Write,
    adrive,
    drive,
    is_large,
    line_flows,
    line_reads,
    pack_id,
    policy_fields,
    set_policy,
    task_scope,
)
from perdure.errors import PerdureError, UsageError
from perdure.langgraph import removal
from perdure.langgraph.checkpoints import encode_checkpoint, run_key
from perdure.langgraph.configs import (
    Address,
    Written,
    address_of,
    note_of,
    parent_of,
    stored_config,
    tags_of,
    written_address,
)
from perdure.langgraph.convert import DeltaWalk, matches, tuple_of, wanted_of, writes_from
from perdure.langgraph.inflight import InFlight
from perdure.langgraph.requested import Checkpointed, Requested
from perdure.langgraph.serde import PerdureSerde

if TYPE_CHECKING:
    from perdure.ops import Compacted

_UNFINISHED = ("__error__", "__interrupt__")
T = TypeVar("T")


class PerdureSaver(BaseCheckpointSaver[Any]):
    """A LangGraph checkpointer that stores what changed. One class for SQLite and PostgreSQL, blocking and async.

    `store` is a path or URL as for `perdure.open`, or a store that is open already (then closing is its owner's).
    `trust` names module prefixes whose data classes may be kept; others must be registered. `ttl` and `keep_last` set
    the store's retention (`store.ops.set_retention`) at the first put; `compact()` acts on it, or a worker daily.
    `single_writer` refuses a run's checkpoint if another run has written to its thread since it began.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        serde: SerializerProtocol | None = None,
        trust: Sequence[str] = (),
        tenant: str | None = None,
        ttl: float | timedelta | None = None,
        keep_last: int | None = None,
        single_writer: bool = False,
        **options: Any,
    ) -> None:
        self._owned = not isinstance(store, Store)
        if isinstance(store, Store):
            opened = store if tenant is None else store.tenant(tenant)
            if trust or options:
                options_given = ", ".join(["trust"] * bool(trust) + sorted(options))
                raise UsageError(f"give {options_given} to perdure.open: this store is open already")
        else:
            of_tenant: dict[str, Any] = {} if tenant is None else {"tenant": tenant}
            opened = perdure.open(store, trust=trust, **of_tenant, **options)
        #: the engine underneath: the same threads, as Perdure sees them
        self.store: Store = opened
        self._engine = LineEngine(opened._context, TaskTurns(opened._context))
        self._in_flight = InFlight()
        self._checkpointed = Checkpointed()
        #: of the store's retention: set with the first put
        self._policy = policy_fields(*("inherit" if given is None else given for given in (ttl, keep_last)))
        self._single_writer = single_writer
        self._requested = Requested()
        super().__init__(serde=serde or PerdureSerde(self._codec))

    def __repr__(self) -> str:
        return f"<PerdureSaver on {self.store!r}>"

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """The same as the class itself: use what it returns directly, or in a `with` or `async with`."""
        return cls(conn_string, **options)

    def setup(self) -> Awaitable[None]:
        """Not needed: a store is made when it is opened. May be called, and awaited, as with other savers."""
        return _Done()

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> BaseCheckpointSaver[Any]:
        """The same saver that also keeps these classes (module, name): LangGraph derives them from a graph's schema."""
        if not isinstance(self.serde, PerdureSerde):
            return super().with_allowlist(extra_allowlist)
        serde = self.serde.with_classes(extra_allowlist)
        if serde is self.serde:
            return self
        clone = copy.copy(self)
        clone.serde = serde
        return clone

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Versions are counted. Those of imported threads are text, and stay text."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}"
        return int(current) + 1

    # --- LangGraph's contract, blocking

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """A checkpoint by its id, or the newest of a thread and namespace."""
        return self._run(self._get(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, the newest first. Nothing is locked between two of them."""
        listing, fits = self._list(config, filter, before)
        left = limit
        while left is None or left > 0:
            entry = self._run(listing.next(fits))
            if left == 1:
                self._went_back(config, before, entry)
            if entry is None:
                return
            yield self._tuple(entry)
            left = None if left is None else left - 1

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint. Waits for what is being written on its parent: it is stored first."""
        address, flow = self._put(config, checkpoint, metadata, new_versions)
        if (parent := parent_of(config)) is not None:
            self._in_flight.wait(("writes", address.thread, address.namespace, parent))
        with self._putting(address, checkpoint["id"], parent, metadata):
            self._run(flow)
        return stored_config(address, checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task has written on a checkpoint."""
        address = written_address(config)
        with self._in_flight.doing(("writes", *address)):
            packed = writes_from(writes, task_id, task_path, self.serde)
            if is_large(packed):  # it shares what its checkpoint says, once that is stored
                self._in_flight.wait(("put", *address))
            self._run(self._put_writes(address, packed, self._ending(address, task_id, writes)))

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread with all its checkpoints and writes. Late writes to it are dropped."""
        self._run(line_flows.delete(self._engine, str(thread_id)))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that runs have made, except those that a later one needs for a DeltaChannel."""
        self._run(removal.delete_runs(self._engine, run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """A thread of another name with the same checkpoints and writes. Their states are shared, not copied."""
        self._run(line_flows.copy(self._engine, str(source_thread_id), str(target_thread_id)))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace ("keep_latest"), or nothing ("delete")."""
        self._run(removal.prune(self._engine, thread_ids, strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What a checkpoint's ancestors have written to DeltaChannels since their last stored value."""
        walk, ancestors, target = self._delta(config, channels)
        walk.begin(self._run(target))
        while (id_ := walk.next_id()) is not None:
            walk.take(self._run(ancestors.entry(id_)))
        return walk.result()

    # --- the same, awaited

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """`get_tuple`, awaited."""
        return await self._arun(self._get(config))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """`list`, awaited."""
        listing, fits = self._list(config, filter, before)
        left = limit
        while left is None or left > 0:
            entry = await self._arun(listing.next(fits))
            if left == 1:
                self._went_back(config, before, entry)
            if entry is None:
                return
            yield self._tuple(entry)
            left = None if left is None else left - 1

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """`put`, awaited."""
        address, flow = self._put(config, checkpoint, metadata, new_versions)
        if (parent := parent_of(config)) is not None:
            await self._in_flight.await_(("writes", address.thread, address.namespace, parent))
        with self._putting(address, checkpoint["id"], parent, metadata):
            await self._arun(flow)
        return stored_config(address, checkpoint["id"])

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`, awaited."""
        address = written_address(config)
        with self._in_flight.doing(("writes", *address)):
            packed = writes_from(writes, task_id, task_path, self.serde)
            if is_large(packed):
                await self._in_flight.await_(("put", *address))
            await self._arun(self._put_writes(address, packed, self._ending(address, task_id, writes)))

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`, awaited."""
        await self._arun(line_flows.delete(self._engine, str(thread_id)))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """`delete_for_runs`, awaited."""
        await self._arun(removal.delete_runs(self._engine, run_ids))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """`copy_thread`, awaited."""
        await self._arun(line_flows.copy(self._engine, str(source_thread_id), str(target_thread_id)))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`prune`, awaited."""
        await self._arun(removal.prune(self._engine, thread_ids, strategy))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """`get_delta_channel_history`, awaited."""
        walk, ancestors, target = self._delta(config, channels)
        walk.begin(await self._arun(target))
        while (id_ := walk.next_id()) is not None:
            walk.take(await self._arun(ancestors.entry(id_)))
        return walk.result()

    # --- what other savers have not

    def threads(
        self, *, where: Mapping[str, Any] | None = None, since: datetime | None = None, limit: int | None = 100
    ) -> Sequence[ThreadInfo]:
        """Threads, the most recently written first: those whose metadata (`configurable` and `metadata` of their runs)
        has all of `where`, written since `since`."""
        return self.store.threads(where=where, since=since, limit=limit)

    async def athreads(
        self, *, where: Mapping[str, Any] | None = None, since: datetime | None = None, limit: int | None = 100
    ) -> Sequence[ThreadInfo]:
        """`threads`, awaited."""
        return await self.store.athreads(where=where, since=since, limit=limit)

    def compact(self, *, progress: Progress | None = None) -> Compacted:
        """`store.ops.compact(vacuum=True)`. Meant for quiet hours: it rewrites an SQLite file. `progress`: (done, of
        how many) threads."""
        self._run(self._set_policy())
        return self.store.ops.compact(vacuum=True, progress=progress)

    async def acompact(self, *, progress: Progress | None = None) -> Compacted:
        """`compact`, awaited: it works in a thread of its own."""
        return await asyncio.to_thread(partial(self.compact, progress=progress))

    def close(self) -> None:
        """Close the store, if this saver opened it. May be called twice."""
        if self._owned:
            self.store.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._owned:
            await self.store.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- the same, as flows

    @property
    def _codec(self) -> Codec:
        return self._engine.ctx.codec

    def _run(self, flow: Flow[T]) -> T:
        return drive(self._engine.ctx.driver, flow)

    async def _arun(self, flow: Flow[T]) -> T:
        return await adrive(self._engine.ctx.driver, flow)

    def _tuple(self, entry: Entry) -> CheckpointTuple:
        return tuple_of(entry, self.serde, self._codec)

    def _list(
        self, config: RunnableConfig | None, conditions: Mapping[str, Any] | None, before: RunnableConfig | None
    ) -> tuple[Listing, Callable[[Entry], bool]]:
        wanted = wanted_of(config, before)
        if wanted.thread is not None and wanted.namespace is not None:
            self._checkpointed.note(
                wanted.thread, wanted.namespace
            )  # how a subgraph that goes back finds its checkpoint
        listing = Listing(self._engine, wanted)
        return listing, lambda entry: matches(entry, conditions, self.serde, self._codec)

    def _went_back(self, config: RunnableConfig | None, before: RunnableConfig | None, entry: Entry | None) -> None:
        """A subgraph looks for its checkpoint so when the graph around it goes back; none: it begins anew."""
        wanted = wanted_of(config, before)
        if before is not None and wanted.thread is not None and wanted.namespace:
            self._requested.read(wanted.thread, wanted.namespace, b"", b"" if entry is None else entry.id)

    def _get(self, config: RunnableConfig) -> Flow[CheckpointTuple | None]:
        address = address_of(config)
        self._checkpointed.note(address.thread, address.namespace)
        id_ = pack_id(address.id) if address.id else None
        entry = yield from line_reads.load(self._engine, address.thread, address.namespace, id_)
        self._requested.read(address.thread, address.namespace, id_, entry.id if entry is not None else None)
        return None if entry is None else self._tuple(entry)

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[Address, Flow[None]]:
        """The work that needs no store is done here, on the caller's thread: values are as they are at the call."""
        address = address_of(config)
        parent = parent_of(config)
        stored = get_checkpoint_metadata(config, metadata)
        packed = pack_id(parent) if parent is not None else None
        known = None
        if packed is not None and new_versions:  # what it does not name is unchanged
            known = line_flows.parent_text(self._engine, address.thread, address.namespace, packed)
        reused, before = known or (None, None)
        text = encode_checkpoint(checkpoint, stored, parent, self.serde, self._codec, new_versions, before)
        native = isinstance(self.serde, PerdureSerde)
        run = stored.get("run_id")
        mark = Mark(
            address.namespace,
            pack_id(checkpoint["id"]),
            packed,
            run_key(str(run)) if run is not None else None,
            self._single_writer,
            self._requested.allowed(address.thread, address.namespace),
            forks=stored.get("source") == "fork",
            reused=reused,
        )
        # What an assigned serializer hides is not shown elsewhere.
        note, tags = (note_of(stored), tags_of(stored)) if native else (None, {})

        def store() -> Flow[None]:
            yield from self._set_policy()
            try:
                yield from line_flows.save(self._engine, address.thread, text, mark, note, tags)
            except ParentChanged:  # the parent's id was put again: nothing is taken from what it was
                whole = encode_checkpoint(checkpoint, stored, parent, self.serde, self._codec)
                yield from line_flows.save(self._engine, address.thread, whole, mark._replace(reused=None), note, tags)

        return address, store()

    def _set_policy(self) -> Flow[None]:
        """Make `ttl` and `keep_last` the store's retention, once."""
        if self._policy:
            yield from set_policy(self._engine.ctx, self._policy)
            self._policy = {}

    def _put_writes(self, address: Written, writes: Sequence[Write], end: Ending | None) -> Flow[None]:
        place = (self._engine, address.thread, address.namespace, pack_id(address.id), writes)
        if end is None:
            yield from line_flows.attach(*place)
        elif end.error is not None:
            yield from task_scope.settle(end)
            raise end.error
        else:
            yield from line_flows.attach(*place, [end.statement])
            task_scope.finish(end)

    def _ending(self, address: Written, task: str, writes: Sequence[tuple[str, Any]]) -> Ending | None:
        is_over = not any(channel in _UNFINISHED for channel, _ in writes)
        return task_scope.ending(self._engine.ctx, address.thread, task, is_over, self.store._keep_us)

    def _check_settled(self, address: Address, parent: str, metadata: CheckpointMetadata) -> None:
        """Raise what a task left for a person: the checkpoint that follows it must not be stored, unless the state is
        changed by hand, or forked."""
        ctx, source = self._engine.ctx, metadata.get("source")
        error = task_scope.unsettled_in(ctx, address.thread, (address.namespace, parent))
        if error is not None and source == "loop":
            raise error
        if source == "input" and task_scope.is_busy_on(ctx, address.thread, (address.namespace, parent)):
            raise self._engine.turns.refuse(address.thread)

    @contextmanager
    def _putting(self, address: Address, id_: str, parent: str | None, metadata: CheckpointMetadata) -> Iterator[None]:
        """A checkpoint is being stored; if it is refused, the nodes that run on it get the reason."""
        try:
            if parent is not None:
                self._check_settled(address, parent, metadata)
            with self._in_flight.doing(("put", address.thread, address.namespace, id_)):
                yield
        except PerdureError as error:
            self._requested.current().refused = error
            raise

    def _delta(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> tuple[DeltaWalk, Ancestors, Flow[Entry | None]]:
        thread, namespace, id_ = address_of(config)
        return (
            DeltaWalk(channels, self.serde, self._codec),
            Ancestors(self._engine, thread, namespace),
            line_reads.load(self._engine, thread, namespace, pack_id(id_) if id_ else None),
        )


class _Done:
    """Nothing to do, and nothing to wait for: what `setup()` gives."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
