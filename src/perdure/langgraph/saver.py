"""The checkpointer: LangGraph's contract on a Perdure store, blocking and async in one class."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from perdure import Store
from perdure.adapters import Call, Flow, Line, LineCheckpoint, Lines, Tasks, Write
from perdure.errors import AnswerRefused, NotFound, PerdureError, ThreadDeleted
from perdure.langgraph import types as _types  # noqa: F401 - lets LangGraph's own classes be kept
from perdure.langgraph.configs import DURABILITY, Address, address_of, stored_config
from perdure.langgraph.convert import DeltaWalk, kept_answers, tuple_of, writes_from
from perdure.langgraph.graph_runs import Checkpointed, Requested
from perdure.langgraph.inflight import InFlight, Taking, UnderWay
from perdure.langgraph.listing import CheckpointListing
from perdure.langgraph.native import NativeSaver, check_many, check_pruned
from perdure.langgraph.opening import IN_MEMORY, OpensStore
from perdure.langgraph.serde import PerdureSerde
from perdure.langgraph.undoing import end_of, newest_of

_UNFINISHED = (ERROR, INTERRUPT)
_NO_TASK = "00000000-0000-0000-0000-000000000000"  # the task whose write is the value of Command(resume=…)
_TASK_S = 1.0  # limit for a thread that waits for a task of an event loop: the loop may be blocked by that thread


class PerdureSaver(OpensStore, NativeSaver[Line]):
    """A LangGraph checkpointer that stores what changed. One class for SQLite and PostgreSQL, blocking and async.

    `store` is a path or URL as for `perdure.open`, or an open store, which the caller closes. Without it, checkpoints
    are in memory and end with the process: a warning in the log says so once, except in pytest. `trust` names module
    prefixes whose data classes may be stored; other classes must be registered. `single_writer` refuses the checkpoint
    of a run if another run has written to its thread since that run began.
    """

    _lines: Lines

    def __init__(
        self,
        store: str | Store = IN_MEMORY,
        *,
        serde: SerializerProtocol | None = None,
        trust: Sequence[str] = (),
        tenant: str | None = None,
        single_writer: bool = False,
        **options: Any,
    ) -> None:
        OpensStore.__init__(self, store, tenant, **({"trust": trust} if trust else {}), **options)
        self._lines, self._tasks = Lines(self.store), Tasks(self.store)
        self._in_flight = InFlight()
        self._checkpointed = Checkpointed()
        self._single_writer = single_writer
        self._requested = Requested()
        NativeSaver.__init__(self, serde=serde or PerdureSerde(self._codec))

    # --- LangGraph's contract, blocking

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint by its id, or else the newest of a thread and namespace; None if there is none."""
        address = address_of(config)
        self._checkpointed.note(address.thread, address.namespace)
        return self._begin_with(address, self._line(address).load(address.id))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Iterate over checkpoints, the newest first. No lock is held between two of them."""
        listing = CheckpointListing(self, config, filter, before, limit)
        for checkpoint in self._lines.history(**listing.filters) if listing.left != 0 else ():
            if listing.takes(checkpoint):
                yield from listing.add(checkpoint)
                if listing.left == 0:
                    return
        yield from listing.end()

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, after the pending writes on its parent or in the same commit."""
        parent = address_of(config)
        place = parent.thread, parent.namespace, checkpoint["id"]
        with self._in_flight.doing(("put", *place)) as operation:
            line, saved = self._put(parent, config, checkpoint, metadata, new_versions)
            try:
                with Taking() as taken:
                    self._in_flight.wait(("writes", *parent), taken)
                    self._check_settled(parent, metadata)
                    is_input = metadata.get("source") == "input" and parent.id is not None
                    if is_input and not _is_sync(config) and not taken.writes and self._carried(operation, line, saved):
                        return stored_config(parent, checkpoint["id"])
                    try:
                        line.save(**saved, writes=taken.writes, before=taken.held)
                    except ThreadDeleted:
                        line.save(**self._first(parent, saved))
            except PerdureError as error:
                self._requested.current().refuse(error)
                raise
        return stored_config(parent, checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task on a checkpoint."""
        address = self._written(config, writes, task_id)
        with self._in_flight.doing(("writes", *address)) as operation:
            packed = writes_from(self._unused(writes, task_id), task_id, task_path, self.serde)
            ending = self._tasks.ending(address.thread, task_id, is_over=_is_over(writes))
            may_wait = ending is None and _may_wait(config, packed)
            if may_wait:
                self._in_flight.offer_to_carry(operation)
                if self._in_flight.offer(operation, packed, ("put", *address)):
                    return
            line, held = self._line(address), self._in_flight.take_over(operation)
            self._in_flight.wait(("put", *address), by=operation)
            if held is not None:
                try:
                    line.store(held)
                except PerdureError as error:
                    self._requested.current().refuse(error)
                    raise
            line.attach_all(str(address.id), packed, ending)

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread with all its checkpoints and writes. Writes that arrive later are dropped."""
        with suppress(NotFound):
            self.store.delete_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, except those that a later checkpoint needs for a DeltaChannel."""
        self._lines.delete_runs(check_many(run_ids, "delete_for_runs", "run_ids"))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread's checkpoints and writes to another name. States are shared on disk, not duplicated."""
        self.store.thread(str(source_thread_id)).fork(name=str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace ("keep_latest"), or nothing ("delete")."""
        for thread in check_pruned(thread_ids, strategy):
            if strategy == "delete":
                self.delete_thread(thread)
            else:
                with suppress(NotFound):
                    self.store.thread(thread).prune(keep=1)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes of a checkpoint's ancestors to DeltaChannels since each channel's last stored value."""
        address, walk = address_of(config), DeltaWalk(channels, self.serde, self._codec)
        line = self._line(address)
        walk.begin(line.load(address.id))
        while (id_ := walk.next_id()) is not None:
            walk.take(line.load(id_))
        return walk.result()

    def undo(self, config: RunnableConfig, *, who: str | None = None) -> int:
        """Undo the effects of a thread's nodes, newest first, and end the thread's run. Return how many are undone.

        It can be called again: each effect is undone once. Nothing runs next in the thread then, and
        `graph.invoke(None, config)` changes nothing. A new input starts again from the values that the thread has.
        `who` is recorded in `ops.actions()`. Raises InDoubt or RunStuck if a person must act first, and LeaseLost while
        another process runs the thread.
        """
        thread = address_of(config).thread
        undone = self._tasks.undo(thread, who)
        saved = contextvars.copy_context().run(self.get_tuple, newest_of(thread))
        if saved is not None and (ended := end_of(saved)) is not None:
            self.put(saved.config, *ended)
        return undone

    async def aundo(self, config: RunnableConfig, *, who: str | None = None) -> int:
        """`undo`, awaited."""
        thread = address_of(config).thread
        undone = await self._tasks.aundo(thread, who)
        saved = await asyncio.create_task(self.aget_tuple(newest_of(thread)))  # in a context of its own
        if saved is not None and (ended := end_of(saved)) is not None:
            await self.aput(saved.config, *ended)
        return undone

    # --- the same, awaited

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """`get_tuple`, awaited."""
        address = address_of(config)
        self._checkpointed.note(address.thread, address.namespace)
        return self._begin_with(address, await self._line(address).aload(address.id))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """`list`, awaited."""
        listing = CheckpointListing(self, config, filter, before, limit)
        if listing.left != 0:
            async for checkpoint in self._lines.ahistory(**listing.filters):
                if listing.takes(checkpoint):
                    for found in listing.add(checkpoint):
                        yield found
                    if listing.left == 0:
                        return
        for found in listing.end():
            yield found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """`put`, awaited."""
        parent = address_of(config)
        with self._in_flight.doing(("put", parent.thread, parent.namespace, checkpoint["id"])):
            line, saved = self._put(parent, config, checkpoint, metadata, new_versions)
            try:
                with Taking() as taken:
                    await self._in_flight.await_(("writes", *parent), taken)
                    self._check_settled(parent, metadata)
                    try:
                        await line.asave(**saved, writes=taken.writes, before=taken.held)
                    except ThreadDeleted:
                        await line.asave(**self._first(parent, saved))
            except PerdureError as error:
                self._requested.current().refuse(error)
                raise
        return stored_config(parent, checkpoint["id"])

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`, awaited."""
        address = self._written(config, writes, task_id)
        with self._in_flight.doing(("writes", *address)) as operation:
            left = self._unused(writes, task_id)
            packed = writes_from(left, task_id, task_path, self.serde)
            ending = self._tasks.ending(address.thread, task_id, is_over=_is_over(writes))
            may_wait = ending is None and _may_wait(config, packed)
            if may_wait and await self._in_flight.aoffer(operation, packed, ("put", *address)):
                return
            await self._in_flight.await_(("put", *address))
            await self._line(address).aattach_all(str(address.id), packed, ending)
        if left is writes and self._unused(writes, task_id) is not writes:  # it was used while this loop was blocked
            await self.aput_writes(config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`, awaited."""
        with suppress(NotFound):
            await self.store.adelete_thread(str(thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """`delete_for_runs`, awaited."""
        await self._lines.adelete_runs(check_many(run_ids, "delete_for_runs", "run_ids"))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """`copy_thread`, awaited."""
        await self.store.thread(str(source_thread_id)).afork(name=str(target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`prune`, awaited."""
        for thread in check_pruned(thread_ids, strategy):
            if strategy == "delete":
                await self.adelete_thread(thread)
            else:
                with suppress(NotFound):
                    await self.store.thread(thread).aprune(keep=1)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """`get_delta_channel_history`, awaited."""
        address, walk = address_of(config), DeltaWalk(channels, self.serde, self._codec)
        line = self._line(address)
        walk.begin(await line.aload(address.id))
        while (id_ := walk.next_id()) is not None:
            walk.take(await line.aload(id_))
        return walk.result()

    # --- what blocking and async share

    def _begin_with(self, address: Address, checkpoint: LineCheckpoint | None) -> CheckpointTuple | None:
        """Record that a run begins with this checkpoint, and return it as LangGraph's tuple."""
        if checkpoint is None:
            self._requested.read(*address, None)
            return None
        kept = kept_answers(checkpoint.writes, self.serde, self._codec)
        self._requested.read(*address, checkpoint.id, kept)
        self._in_flight.note_stored(("put", address.thread, address.namespace, checkpoint.id))
        return tuple_of(checkpoint, self.serde, self._codec)

    def _carried(self, put: UnderWay, line: Line, saved: dict[str, Any]) -> bool:
        """Let the writes on a graph's input store its checkpoint too. Return False if the caller must store it."""
        if put.loop is not None or line.namespace:
            return False
        carrier = self._in_flight.expect_carrier(("writes", *put.key[1:]))
        held = line.prepare(**saved) if carrier is not None else None
        if carrier is None or held is None:
            return False
        if not self._in_flight.hand_over(put, carrier, held):
            line.store(held)
        return True

    def _written(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str) -> Address:
        """Return the address of the checkpoint that a task's writes belong to.

        Raises if the task interrupts after a checkpoint of a graph inside it was refused: no answer could resume it.
        Raises too if the task took an answer of `Command(resume=…)` besides the one that the store was given.
        """
        address = self._address_written(config)
        self._check_answered_once(address.thread, writes, task_id)
        refused = self._requested.current().refused_inside
        if refused is not None and any(channel == INTERRUPT for channel, _ in writes):
            raise refused
        return address

    def _check_answered_once(self, thread: str, writes: Sequence[tuple[str, Any]], task_id: str) -> None:
        """Raise AnswerRefused if a graph with an answer given to the store was resumed with another one.

        The task has taken the first of the two, so the second would go to its next question.
        """
        run = self._requested.current()
        if not run.kept:
            return
        if not isinstance(run.refused, AnswerRefused):
            answers = [value for channel, value in writes if channel == RESUME and value is not None]
            if not answers or (task_id != _NO_TASK and len(answers[-1]) <= run.kept.get(task_id, len(answers[-1]))):
                return
            run.refuse(
                AnswerRefused(
                    f"a question of thread {thread!r} is answered already (perdure answer), and the graph was resumed "
                    "with another answer: nothing was stored; resume it with None: graph.invoke(None, config)"
                )
            )
        assert run.refused is not None
        raise run.refused

    def _unused(self, writes: Sequence[tuple[str, Any]], task_id: str) -> Sequence[tuple[str, Any]]:
        """Return the writes without the resume answer if a question has used it before it was stored."""
        if task_id != _NO_TASK or not self._requested.current().is_answer_used:
            return writes
        return [(channel, None if channel == RESUME else value) for channel, value in writes]

    def _forget_answer(self, address: Address) -> Flow[None]:
        """Clear the stored answer that a graph was resumed with.

        Otherwise LangGraph would also give it to the task's next question when the graph is invoked again without an
        answer. LangGraph stores it in the background, so its write may be under way or still to come.
        """
        self._requested.current().outermost().is_answer_used = True
        key = ("writes", *address)
        yield Call(lambda _: self._in_flight.wait(key, task_s=_TASK_S), lambda _: self._in_flight.await_(key))
        writes = writes_from([(RESUME, None)], _NO_TASK, "", self.serde)
        yield from self._tasks.attaching(address.thread, address.namespace, str(address.id), writes)

    def _first(self, parent: Address, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `save` for the first checkpoint of a thread that does not exist.

        Re-raises ThreadDeleted if the thread existed when the run began.
        """
        if not self._requested.was_missing(*parent):
            raise
        return {**saved, "parent": None}

    def _check_settled(self, parent: Address, metadata: CheckpointMetadata) -> None:
        """Raise if a task of the parent left something for a person to settle, or is still in a call.

        Updates by hand and forks are allowed. Nodes that run on a refused checkpoint get the same error.
        """
        run = self._requested.current()
        if run.kept and isinstance(run.refused, AnswerRefused):
            raise run.refused
        if parent.id is None:
            return
        error: PerdureError | None = None
        if metadata.get("source") == "loop":
            error = self._tasks.unsettled(parent.thread, parent.namespace, parent.id)
        elif metadata.get("source") == "input":
            error = self._tasks.running(parent.thread, parent.namespace, parent.id)
        if error is not None:
            raise error


def _is_over(writes: Sequence[tuple[str, Any]]) -> bool:
    """Return whether a task has ended: it neither failed nor interrupted."""
    return not any(channel in _UNFINISHED for channel, _ in writes)


def _may_wait(config: RunnableConfig, writes: Sequence[Write]) -> bool:
    """Return whether writes may share the commit of the checkpoint that follows.

    Writes that replace others (an answer, an error) may not: the later of two must win. Nor may those of a subgraph: it
    has a line of its own, which the same statement cannot extend.
    """
    is_replacing = any(write.idx < 0 for write in writes)
    return not (is_replacing or config["configurable"].get("checkpoint_ns") or _is_sync(config))


def _is_sync(config: RunnableConfig) -> bool:
    """Return whether each step must be durable before the next begins."""
    return bool(config["configurable"].get(DURABILITY) == "sync")
