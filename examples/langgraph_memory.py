"""A LangGraph agent that remembers: its conversations by a checkpointer, facts about its users by a store, in one file.

    python examples/langgraph_memory.py        needs, in a clone: pip install '.[langgraph,search]'

Needs no key and no network: rules answer in place of a model, and a small local one says what a fact means. What a user
says in one conversation is known in the next, to that user only, also after the file was closed. The agent finds facts
by their meaning, and forgets one on request. It leaves memory.db in the current directory.
"""

from __future__ import annotations

import uuid
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.base import BaseStore

import perdure
from perdure.langgraph import PerdureSaver, PerdureStore

FILE = "memory.db"
ABOUT = "what do you know about "
FORGET = "forget "


def respond(state: MessagesState, *, store: BaseStore, config: RunnableConfig) -> dict[str, Any]:
    """Stands for a model: learns a fact, tells what it knows, or forgets."""
    user = ("users", config["configurable"]["user_id"])
    said = str(state["messages"][-1].content)
    if said.lower().startswith(ABOUT):
        subject = said[len(ABOUT) :].rstrip("?")
        found = store.search(user) if subject == "me" else store.search(user, query=subject, limit=1)
        answer = f"I know: {', '.join(item.value['fact'] for item in found)}" if found else "I know nothing yet!"
    elif said.lower().startswith(FORGET):
        [fact] = store.search(user, query=said[len(FORGET) :], limit=1)
        store.delete(user, fact.key)
        answer = f"Forgotten: {fact.value['fact']}"
    else:
        store.put(user, str(uuid.uuid4()), {"fact": said})
        answer = "Got it! I'll remember that."
    return {"messages": [AIMessage(answer)]}


def agent(opened: perdure.Store) -> Any:
    """The graph. Conversations and facts are in the same store."""
    builder = StateGraph(MessagesState)
    builder.add_node("respond", respond)
    builder.add_edge(START, "respond")
    store = PerdureStore(opened, index={"fields": ["fact"]})
    return builder.compile(checkpointer=PerdureSaver(opened), store=store)


def at(thread: str, user: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "user_id": user}}


def say(graph: Any, text: str, config: RunnableConfig) -> None:
    result = graph.invoke({"messages": [HumanMessage(text)]}, config)
    thread, user = config["configurable"]["thread_id"], config["configurable"]["user_id"]
    print(f"{thread} {user:>5}: {text}\n         ai: {result['messages'][-1].content}")


def learn(graph: Any) -> None:
    for fact in ("I love hiking in the mountains", "I am a software engineer", "I prefer dark mode"):
        say(graph, fact, at("t1", "alice"))
    say(graph, "What do you know about me?", at("t2", "alice"))  # another conversation
    say(graph, "What do you know about me?", at("t3", "bob"))  # another user


def recall_and_forget(graph: Any) -> None:
    say(graph, "What do you know about outdoor activities?", at("t2", "alice"))
    say(graph, "Forget my job as a programmer", at("t2", "alice"))
    say(graph, "What do you know about me?", at("t2", "alice"))


def look_back(graph: Any) -> None:
    print("\nthe history of t2, the newest first:")
    for snapshot in graph.get_state_history(at("t2", "alice")):
        messages = snapshot.values.get("messages", [])
        print(
            f"  step {snapshot.metadata['step']:>2}: {len(messages)} messages, next: {', '.join(snapshot.next) or '-'}"
        )


def main() -> None:
    with perdure.open(FILE, embedder="local") as opened:
        for thread in opened.threads():  # of an earlier run
            opened.delete_thread(thread.name)
        opened.memory("users").forget({})
        learn(agent(opened))
    with perdure.open(FILE, embedder="local") as opened:  # as a process does that is started later
        graph = agent(opened)
        recall_and_forget(graph)
        look_back(graph)
    print(f"\nlook at it:  perdure memory items users/alice --store {FILE}")


if __name__ == "__main__":
    main()
