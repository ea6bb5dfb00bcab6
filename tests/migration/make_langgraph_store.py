"""Writes LangGraph threads that later versions must be able to read: a store in tests/data, and what it holds.

    .venv/bin/python tests/migration/make_langgraph_store.py

Run it once per format, into a folder of its own, and never again for an old one: the point of those files is that
this version's code did not write them.
"""

from __future__ import annotations

import json
import operator
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

from holdfast.langgraph import HoldfastSaver

FOLDER = Path(__file__).parent.parent / "data" / "langgraph-v1"
TURNS = 5


class Talk(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    plan: tuple[int, ...]
    seen: Annotated[list[Any], operator.add]


def answer(state: Talk) -> dict[str, Any]:
    count = len(state["messages"])
    call = {"name": "search", "args": {"n": count}, "id": f"call {count}", "type": "tool_call"}
    return {
        "messages": [
            AIMessage(f"answer {count} " + "word " * (count % 30), id=f"ai {count}", tool_calls=[call]),
            ToolMessage("found", tool_call_id=f"call {count}", id=f"tool {count}", artifact={"raw": b"\x00\xff"}),
        ],
        "plan": tuple(range(count)),
    }


def ask(state: Talk) -> dict[str, Any]:
    return {"messages": [HumanMessage(str(interrupt({"question": "go on?"})), id="answered")]}


def graph_of(saver: HoldfastSaver) -> Any:
    """A node, a subgraph that asks, and one that is sent to."""
    inner = StateGraph(Talk).add_node("ask", ask).add_edge(START, "ask").compile()
    builder = StateGraph(Talk)
    builder.add_node("answer", answer)
    builder.add_node("inner", inner)
    builder.add_node("sent", lambda state: {"seen": [state["plan"]]})
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", lambda state: [Send("sent", {"plan": (1, 2)}), "inner"])
    return builder.compile(checkpointer=saver)


def write(saver: HoldfastSaver) -> None:
    graph = graph_of(saver)
    for name in ("answered", "waiting", "forked"):
        config = {"configurable": {"thread_id": name, "user_id": "ann"}}
        for turn in range(TURNS):
            message = HumanMessage(f"question {turn} " + "more " * turn, id=f"human {turn}")
            graph.invoke({"messages": [message]}, config)
            if name != "waiting" or turn < TURNS - 1:
                graph.invoke(Command(resume=f"yes {turn}"), config)
    old = list(graph.get_state_history({"configurable": {"thread_id": "forked"}}))[10]
    graph.update_state(old.config, {"messages": [HumanMessage("by hand", id="hand")]}, as_node="answer")
    saver.copy_thread("forked", "copied")
    saver.prune(["copied"])


def read(saver: HoldfastSaver) -> list[Any]:
    """Everything, in a form that JSON can hold and that does not depend on how it is stored."""
    return [
        json.loads(
            json.dumps([one.config, one.parent_config, one.metadata, one.checkpoint, one.pending_writes], default=repr)
        )
        for one in saver.list(None)
    ]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store.db"
        with HoldfastSaver(str(path)) as saver:
            write(saver)
            expected = read(saver)
        (folder / "store.db").write_bytes(path.read_bytes())
    (folder / "expected.json").write_text(json.dumps(expected, indent=None, separators=(",", ":")))


if __name__ == "__main__":
    main()
