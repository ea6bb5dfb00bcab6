"""Run a LangGraph chat on Perdure: two turns, history, time travel, and the size of a long thread on disk.

    python examples/langgraph_chat.py

A function stands in for the model, so you need no key. Needs the extra `langgraph`. It leaves chat.db in the current
directory, so that you can look at it afterwards.
"""

from __future__ import annotations

import random
from typing import Any

from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from perdure.langgraph import PerdureSaver

FILE = "chat.db"
LONG_TURNS = 60


def answer(state: MessagesState) -> dict[str, Any]:
    """Stands for a model."""
    said = [message.content for message in state["messages"] if message.type == "human"]
    return {"messages": [AIMessage(f"Your message {len(said)} was: {said[-1]}")]}


def compiled(saver: BaseCheckpointSaver[Any]) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def at(thread: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "user": "alice"}}


def two_turns(graph: Any) -> None:
    for text in ("Hello", "To Lisbon, please"):
        result = graph.invoke({"messages": [HumanMessage(text)]}, at("alice-001"))
        print(f"human: {text}\n   ai: {result['messages'][-1].content}")


def time_travel(graph: Any) -> None:
    history = list(graph.get_state_history(at("alice-001")))
    print(f"\n{len(history)} checkpoints, the newest first:")
    for snapshot in history:
        step, next_node = snapshot.metadata["step"], ", ".join(snapshot.next) or "nothing"
        print(f"  step {step:>2}: {len(snapshot.values.get('messages', []))} messages, next: {next_node}")
    after_hello = next(snapshot for snapshot in history if snapshot.metadata["step"] == 1)
    other = graph.invoke({"messages": [HumanMessage("To Oslo, please")]}, after_hello.config)
    asked = [message.content for message in other["messages"] if message.type == "human"]
    print(f"back to step 1, another way: {asked}")


def sizes(saver: PerdureSaver) -> None:
    """Hold the same chat with both savers. Random words compress no better than a real conversation."""
    chance = random.Random(42)
    words = ["".join(chance.choices("eeeaaoittnnsshrdlucmfwygp", k=chance.randint(2, 9))) for _ in range(2000)]
    questions = [" ".join(chance.choices(words, k=50)) for _ in range(LONG_TURNS)]
    memory = InMemorySaver()
    before = saver.store.ops.stats().stored_bytes
    for graph in (compiled(memory), compiled(saver)):
        for question in questions:
            graph.invoke({"messages": [HumanMessage(question)]}, at("long"))
    in_full = sum(len(dumps(saved.checkpoint).encode()) for saved in memory.list(at("long")))
    stored = saver.store.ops.stats().stored_bytes - before
    print(f"\na chat of {LONG_TURNS} turns, {3 * LONG_TURNS} checkpoints:")
    print(f"  every checkpoint of InMemorySaver as JSON {in_full / 1000:>10,.0f} kB")
    print(f"  stored by PerdureSaver                   {stored / 1000:>10,.0f} kB")


def main() -> None:
    with PerdureSaver(FILE) as saver:
        for thread in ("alice-001", "long"):
            saver.delete_thread(thread)  # of an earlier run
        graph = compiled(saver)
        two_turns(graph)
        time_travel(graph)
        sizes(saver)
        print(f"\nthreads of alice: {sorted(info.name for info in saver.store.threads(where={'user': 'alice'}))}")
    print(f"\nlook at it:  perdure show alice-001 --store {FILE}")
    print(f"             perdure log alice-001 --branches --store {FILE}")


if __name__ == "__main__":
    main()
