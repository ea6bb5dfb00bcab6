"""A LangGraph graph as a member of a team: each message is one run of the graph on a thread of its own.

The member's state is the id of the checkpoint that the graph stands at. So a team that goes back takes its graphs
along: the next message continues from that checkpoint. A turn that broke off continues the graph where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.adapters import apart, member_turn
from perdure.errors import UsageError
from perdure.langgraph.saver import PerdureSaver

_MESSAGE = "perdure_message"  # in the metadata of checkpoints: the message that they are of


def as_agent(graph: Any) -> Callable[[Any, Any], Any]:
    """Return a graph as the handler of an agent: its input is the message, and its output answers a call."""
    if not isinstance(getattr(graph, "checkpointer", None), PerdureSaver):
        raise UsageError("a graph in a team keeps its state in the store: compile(checkpointer=PerdureSaver(store))")

    def handler(state: Any, message: Any) -> Any:
        return advance(graph, state, message)

    return handler


def advance(graph: Any, state: dict[str, Any], message: Any) -> Any:
    """Run a graph with a message, in the turn of a team's member, and return its values.

    `state` is the member's: it keeps where the graph stands, under "checkpoint". Call it once in a turn.
    """
    turn = member_turn("perdure.langgraph.advance()")
    # Nodes run as tasks of the graph, which records their steps: the turn must not record them too.
    values, state["checkpoint"] = apart(partial(_advance, graph, *turn, state.get("checkpoint"), message))
    return values


def _advance(graph: Any, thread: str, about: str, checkpoint: str | None, message: Any) -> tuple[Any, str]:
    config = {"configurable": {"thread_id": f"graph:{thread}"}, "metadata": {_MESSAGE: about}}
    newest = graph.get_state(config)
    if (newest.metadata or {}).get(_MESSAGE) != about:  # this turn has not begun it
        start = {**config["configurable"], **({"checkpoint_id": checkpoint} if checkpoint else {})}
        if checkpoint is None and newest.values:  # the team went back to before its first message
            start["checkpoint_id"] = _first(graph, config)
        graph.invoke(message, {**config, "configurable": start})
    elif newest.next:
        graph.invoke(None, config)
    ended = graph.get_state(config)
    if ended.next:
        raise UsageError(
            f"the graph of member {thread!r} interrupts, and a turn cannot wait for its answer: ask with perdure.ask() "
            "in a handler of your own, and give the answer to perdure.langgraph.advance()"
        )
    return ended.values, ended.config["configurable"]["checkpoint_id"]


def _first(graph: Any, config: dict[str, Any]) -> str:
    *_, oldest = graph.get_state_history(config)
    first: str = oldest.config["configurable"]["checkpoint_id"]
    return first
