"""Checkpoints of the Agent Framework's workflows in a store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    CheckpointStorage,
    Content,
    Executor,
    InMemoryCheckpointStorage,
    Message,
    Workflow,
    WorkflowBuilder,
    WorkflowCheckpoint,
    WorkflowContext,
    handler,
    response_handler,
)
from agent_framework.exceptions import WorkflowCheckpointException
from agent_framework_shop import Deciding

import perdure
from perdure.agent_framework import PerdureCheckpointStorage


@perdure.register
@dataclass
class Offer:
    hotel: str
    nights: set[int]


class Search(Executor):
    @handler
    async def search(self, response: AgentExecutorResponse, context: WorkflowContext[Offer]) -> None:
        context.set_state("said", [message.text for message in response.full_conversation])
        await context.send_message(Offer("Pension Sol", {1, 2}))


class Approve(Executor):
    @handler
    async def ask(self, offer: Offer, context: WorkflowContext[None, str]) -> None:
        await context.request_info(offer, bool)

    @response_handler
    async def answer(self, offer: Offer, agreed: bool, context: WorkflowContext[None, str]) -> None:
        await context.yield_output(f"{offer}: {agreed}")


def workflow(storage: CheckpointStorage) -> Workflow:
    agent: Any = AgentExecutor(Agent(Deciding(), name="clerk"), id="clerk")
    search, approve = Search("search"), Approve("approve")
    builder = WorkflowBuilder(start_executor=agent, name="a/trip", checkpoint_storage=storage)
    return builder.add_edge(agent, search).add_edge(search, approve).build()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "store.db"), durability="normal") as opened:
        yield opened


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_contract._place", [tmp_path])


class Both:
    """A storage that saves to the framework's own one too."""

    def __init__(self, store: perdure.Store) -> None:
        self.stock, self.ours = InMemoryCheckpointStorage(), PerdureCheckpointStorage(store)

    async def save(self, checkpoint: WorkflowCheckpoint) -> str:
        await self.stock.save(checkpoint)
        return await self.ours.save(copy.deepcopy(checkpoint))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)


def plain(checkpoint: Any) -> Any:
    """What can be compared of a checkpoint: messages and events have no equality."""
    if isinstance(checkpoint, list):
        return [plain(each) for each in checkpoint]
    if isinstance(checkpoint, dict):
        return {name: plain(each) for name, each in checkpoint.items()}
    if isinstance(checkpoint, AgentExecutorResponse):
        return plain(vars(checkpoint))
    return plain(checkpoint.to_dict()) if hasattr(checkpoint, "to_dict") else repr(checkpoint)


async def test_a_workflow_goes_on_from_its_newest_checkpoint_in_another_process(store: perdure.Store) -> None:
    first = workflow(PerdureCheckpointStorage(store))
    await first.run("look")
    storage = PerdureCheckpointStorage(store)  # knows nothing of the first
    newest = await storage.get_latest(workflow_name="a/trip")
    assert newest is not None
    second = workflow(storage)
    [question] = (await second.run(checkpoint_id=newest.checkpoint_id)).get_request_info_events()
    assert question.data == Offer("Pension Sol", {1, 2})
    done = await second.run(responses={question.request_id: True})
    assert done.get_outputs() == ["Offer(hotel='Pension Sol', nights={1, 2}): True"]
    assert store.ops.verify().ok


async def test_the_storage_answers_as_the_frameworks_own(store: perdure.Store) -> None:
    both: Any = Both(store)
    for _ in range(2):
        await workflow(both).run("look")
    ours, stock = PerdureCheckpointStorage(store), both.stock
    ids = await stock.list_checkpoint_ids(workflow_name="a/trip")
    assert await ours.list_checkpoint_ids(workflow_name="a/trip") == ids
    assert len(ids) > 6
    for one in ids:
        assert plain(await ours.load(one)) == plain(await stock.load(one))
    assert plain(await ours.list_checkpoints(workflow_name="a/trip")) == plain(
        await stock.list_checkpoints(workflow_name="a/trip")
    )
    assert (await ours.get_latest(workflow_name="other"), await ours.list_checkpoints(workflow_name="other")) == (
        None,
        [],
    )
    assert await ours.list_checkpoint_ids(workflow_name="other") == []
    for one in (ids[1], ids[-1]):
        assert [await ours.delete(one), await ours.delete(one)] == [True, False]
        with pytest.raises(WorkflowCheckpointException, match="No checkpoint"):
            await PerdureCheckpointStorage(store).load(one)
        await stock.delete(one)
    assert await ours.list_checkpoint_ids(workflow_name="a/trip") == await stock.list_checkpoint_ids(
        workflow_name="a/trip"
    )
    assert plain(await ours.get_latest(workflow_name="a/trip")) == plain(await stock.get_latest(workflow_name="a/trip"))
    assert store.ops.verify().ok


async def test_a_message_comes_back_whole_and_an_unknown_class_is_not_saved(store: perdure.Store) -> None:
    storage = PerdureCheckpointStorage(store)
    call = Content.from_function_call("c1", "pay", arguments={"cents": 900})
    said = {"said": [Message(role="assistant", contents=[call])]}
    await storage.save(WorkflowCheckpoint("w", "hash", checkpoint_id="one", state=said))
    [message] = (await storage.load("one")).state["said"]
    assert message.to_dict() == said["said"][0].to_dict()
    with pytest.raises(perdure.errors.Unstorable, match="Unknown"):
        await storage.save(WorkflowCheckpoint("w", "hash", state={"unknown": Unknown()}))


class Unknown:
    pass
