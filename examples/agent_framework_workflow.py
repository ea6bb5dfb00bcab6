"""Keep a workflow of the Microsoft Agent Framework in a store: killed in its second executor, it resumes there.

    python examples/agent_framework_workflow.py    twice; needs, in a clone: pip install '.[agent-framework]'

It needs no model and no network. The first time the process kills itself in the middle.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from agent_framework import Executor, WorkflowBuilder, WorkflowContext, handler

import perdure
from perdure.agent_framework import PerdureCheckpointStorage


@perdure.register  # a checkpoint may hold it
@dataclass
class Offer:
    hotel: str


class Search(Executor):
    @handler
    async def search(self, city: str, context: WorkflowContext[Offer]) -> None:
        print("searching in", city, flush=True)
        await context.send_message(Offer("Pension Sol"))


class Book(Executor):
    @handler
    async def book(self, offer: Offer, context: WorkflowContext[None, str]) -> None:
        print("booking", flush=True)
        if not Path("was_killed").exists():
            Path("was_killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await context.yield_output(offer.hotel)


async def travel(store: perdure.Store) -> None:
    storage = PerdureCheckpointStorage(store)
    search, book = Search("search"), Book("book")
    builder = WorkflowBuilder(start_executor=search, name="travel", checkpoint_storage=storage)
    workflow = builder.add_edge(search, book).build()
    newest = await storage.get_latest(workflow_name="travel")
    result = await (workflow.run("Lisbon") if newest is None else workflow.run(checkpoint_id=newest.checkpoint_id))
    print("booked:", *result.get_outputs())


if __name__ == "__main__":
    with perdure.open("workflow.db") as store:
        asyncio.run(travel(store))
