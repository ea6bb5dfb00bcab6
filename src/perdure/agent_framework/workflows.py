"""`PerdureCheckpointStorage`: the checkpoints of workflows in a store.

The framework's own storages pickle the objects in a checkpoint. Here they are saved by Perdure's closed registry, so
reading a checkpoint executes nothing.
"""

from __future__ import annotations

from urllib.parse import quote

import agent_framework
from agent_framework import (
    AgentExecutorRequest,
    AgentExecutorResponse,
    WorkflowCheckpoint,
    WorkflowEvent,
    WorkflowMessage,
)
from agent_framework.exceptions import WorkflowCheckpointException

import perdure
from perdure.adapters import Line, Lines, checked_store, register_foreign
from perdure.errors import NotFound

_FOLDER = "agent-framework/workflow/"
_KNOWN_MAX = 1024  # places of checkpoints that are kept in memory

for _name in ("Content", "Message", "ChatResponse", "ChatResponseUpdate", "AgentResponse", "AgentResponseUpdate"):
    _class = getattr(agent_framework, _name)
    perdure.register(_class, name=f"agent_framework.{_name}", dump=_class.to_dict, load=_class.from_dict)
perdure.register(
    WorkflowEvent, name="agent_framework.WorkflowEvent", dump=WorkflowEvent.to_dict, load=WorkflowEvent.from_dict
)
perdure.register(type(WorkflowMessage("", "").type), name="agent_framework.MessageType")
for _class in (AgentExecutorRequest, AgentExecutorResponse, WorkflowMessage):
    register_foreign(_class)


class PerdureCheckpointStorage:
    """Checkpoints of workflows in a store: those of a workflow's name are a thread, each stored as what changed.

    Executors may keep and send values that a store can save: plain values, the framework's messages, and data classes
    that are registered (`@perdure.register`) or trusted (`perdure.open(…, trust=["shop."])`).
    """

    def __init__(self, store: perdure.Store) -> None:
        self._store, self._lines = checked_store(store), Lines(store)
        self._known: dict[str, tuple[str, str]] = {}  # workflow and place of a checkpoint, by its id

    def _line(self, workflow: str) -> Line:
        return self._lines.line(_FOLDER + quote(workflow, safe=""), "", {"workflow": workflow})

    async def save(self, checkpoint: WorkflowCheckpoint) -> str:
        """Save a checkpoint after the one that it follows."""
        id, workflow, previous = checkpoint.checkpoint_id, checkpoint.workflow_name, checkpoint.previous_checkpoint_id
        follows = await self._find(previous) if previous is not None else None
        place = f"{checkpoint.timestamp} {id}"  # sorts by time
        await self._line(workflow).asave(
            checkpoint.to_dict(),
            id=place,
            parent=follows[1] if follows is not None and follows[0] == workflow else None,
            note=f"iteration {checkpoint.iteration_count}",
            run=id,
        )
        self._remember(id, workflow, place)
        return id

    async def load(self, checkpoint_id: str) -> WorkflowCheckpoint:
        where = await self._find(checkpoint_id)
        loaded = await self._line(where[0]).aload(where[1]) if where is not None else None
        if loaded is None:
            raise WorkflowCheckpointException(f"No checkpoint found with ID {checkpoint_id}")
        return WorkflowCheckpoint.from_dict(loaded.state)

    async def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Return the checkpoints of a workflow, the oldest first."""
        listed = [WorkflowCheckpoint.from_dict(each.state) async for each in self._line(workflow_name).ahistory()]
        return listed[::-1]

    async def delete(self, checkpoint_id: str) -> bool:
        where = await self._find(checkpoint_id)
        if where is None or await self._line(where[0]).aload(where[1]) is None:
            return False
        await self._lines.adelete_runs([checkpoint_id])
        self._known.pop(checkpoint_id, None)
        return True

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        newest = await self._line(workflow_name).aload()
        return None if newest is None else WorkflowCheckpoint.from_dict(newest.state)

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        return [id for id, _ in await self._places(self._line(workflow_name).thread)]

    async def _find(self, id: str) -> tuple[str, str] | None:
        """Return the workflow and the place of a checkpoint. Only the first use in a process looks for it."""
        if id not in self._known:
            for info in await self._store.athreads(name_prefix=_FOLDER, limit=None):
                for one, place in await self._places(info.name):
                    if one == id:
                        self._remember(id, info.metadata["workflow"], place)
        return self._known.get(id)

    async def _places(self, thread: str) -> list[tuple[str, str]]:
        """Return the ids and places of the checkpoints of a thread, the oldest first."""
        try:
            lines = await self._store.thread(thread).alines()
        except NotFound:
            return []
        return [(place.rpartition(" ")[2], place) for line in lines for place in sorted(line.checkpoints)]

    def _remember(self, id: str, workflow: str, place: str) -> None:
        self._known[id] = (workflow, place)
        if len(self._known) > _KNOWN_MAX:
            self._known.pop(next(iter(self._known)))
