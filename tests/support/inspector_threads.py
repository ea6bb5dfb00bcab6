"""Threads and memory that the tests of the inspector look at: a plan, a chat of LangGraph, a user who is remembered."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

import perdure
from perdure.langgraph import PerdureSaver
from perdure.memory import AgentMemory

TASKS = ("Draft the agenda", "Invite the reviewers", "Collect the numbers")
TALK = (
    ("My order 8841 has not arrived.", "I am sorry about that. Let me look it up for you."),
    ("It was a standing desk.", "It left the warehouse on 28 October and was last scanned in Hamburg."),
    ("So it is lost?", "Most likely. After 14 days we count a parcel as lost."),
)


def plan(store: perdure.Store, saves: int = 9) -> perdure.Thread:
    """A thread whose state grows: step n has n + 1 in `turn`."""
    thread = store.thread("plans/launch", metadata={"team": "growth", "owner": "chen"})
    state: dict[str, Any] = {"goal": "Launch review", "turn": 0, "tasks": [], "api_key": "sk-live-5d1f0c"}
    for number in range(saves):
        state["turn"] = number + 1
        if number < len(TASKS):
            state["tasks"].append({"title": TASKS[number], "owner": "ann"})
        elif number % 3 == 0:
            state["tasks"][number % 3]["owner"] = "bo"
        thread.save(state, note="weekly sync" if number == 4 else None)
    return thread


def chat(store: perdure.Store, name: str = "support/chat-1042") -> None:
    """A conversation of a graph that stops at an interrupt."""

    def answer(state: MessagesState) -> dict[str, Any]:
        number = sum(message.type == "human" for message in state["messages"]) - 1
        call = {"name": "find_order", "args": {"order": "8841"}, "id": f"call-{number}"}
        found = ToolMessage('{"carrier": "Nordpost"}', tool_call_id=call["id"], name="find_order")
        looked = [AIMessage("", tool_calls=[call]), found] if number == 1 else []
        return {"messages": [*looked, AIMessage(TALK[number][1])]}

    def approve(state: MessagesState) -> dict[str, Any]:
        interrupt({"question": "Pay back 1,240.00 EUR?", "order": "8841"})
        return {}

    def is_last(state: MessagesState) -> str:
        return "approve" if sum(message.type == "human" for message in state["messages"]) == len(TALK) else END

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_node("approve", approve)
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", is_last, ["approve", END])
    graph = builder.compile(checkpointer=PerdureSaver(store))
    for said, _ in TALK:
        graph.invoke({"messages": [HumanMessage(said)]}, {"configurable": {"thread_id": name}})


def remembered(store: perdure.Store) -> None:
    """A user with facts, one of them pinned, and a conversation with the manifest of its last prompt."""
    agent = AgentMemory(store, "alice", instructions="Be brief.", context=300)
    agent.facts.put("theme", {"fact": "Alice prefers light mode"})
    agent.facts.put("theme", {"fact": "Alice prefers dark mode"})
    agent.facts.put("hobby", {"fact": "Alice loves hiking in the mountains"})
    agent.facts.put("allergy", {"fact": "Alice is allergic to nuts", "api_key": "k-77"}, pinned=True)
    agent.record(agent.recall("Plan a hike for Saturday"), "The ridge trail, eight kilometres.")
    store.memory("orgs", "acme").put("plan", {"fact": "Acme has the team plan"})


def fill_threads(store: perdure.Store) -> None:
    """All of it, with a fork and a branch."""
    thread = plan(store)
    thread.fork(thread.at_step(3), name="plans/launch-cheaper").save({"goal": "Half the budget"}, note="half")
    thread.save({"goal": "another way"}, parent=thread.at_step(5))
    chat(store)
    remembered(store)
