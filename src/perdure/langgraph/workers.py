"""A graph that a worker resumes: `perdure.Worker(store, graphs=[graph])`.

The worker invokes the graph on its event loop with None: the tasks find their answers in the checkpoint. A graph with
blocking nodes runs them in threads, as `ainvoke` always does.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig

from perdure import Store
from perdure.adapters import Await, OtherGraph, Resumer, add_resumer
from perdure.langgraph.saver import PerdureSaver

if TYPE_CHECKING:
    from langgraph.pregel import Pregel


class GraphResumer:
    """A compiled graph with a `PerdureSaver`."""

    def __init__(self, graph: Pregel[Any, Any, Any, Any], saver: PerdureSaver) -> None:
        self._graph, self._saver = graph, saver
        self.name = graph.get_name()
        self.store: Store = saver.store

    def due(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the threads that are to be resumed, by name, each with its metadata."""
        return self._saver._tasks.due()

    def resume(self, thread: str, await_: Await) -> bool:
        """Invoke the graph on a thread if the thread is due. Raises OtherGraph, and what the graph raises."""
        metadata = contextvars.copy_context().run(self._check, thread)
        # What a run was configured with is in the metadata of its thread.
        config: RunnableConfig = {"configurable": {**metadata, "thread_id": thread}}

        async def invoke() -> None:
            await self._graph.ainvoke(None, config)

        return self._saver._tasks.resume(thread, lambda: await_(invoke()))

    def _check(self, thread: str) -> dict[str, Any]:
        """Return a thread's metadata. Raises OtherGraph if the graph lacks one of its nodes or channels."""
        saved = self._saver.get_tuple({"configurable": {"thread_id": thread}})
        if saved is not None:
            nodes = {name for name in saved.checkpoint["versions_seen"] if not name.startswith("__")}
            channels = {name for name in saved.checkpoint["channel_versions"] if not name.startswith("__")}
            if unknown := sorted((nodes - {*self._graph.nodes}) | (channels - {*self._graph.channels})):
                raise OtherGraph(
                    f"thread {thread!r} is not resumed here: graph {self.name!r} has no {unknown[0]!r}; if several "
                    "graphs share the store, name the threads of this one by their metadata (where=)"
                )
        return self.store.thread(thread).info().metadata


def resumer_of(graph: object) -> Resumer | None:
    """Return the resumer of a compiled graph with a `PerdureSaver`; None for another object."""
    from langgraph.pregel import Pregel  # late: it takes long to import

    if isinstance(graph, Pregel) and isinstance(graph.checkpointer, PerdureSaver):
        return GraphResumer(graph, graph.checkpointer)
    return None


add_resumer(resumer_of)
