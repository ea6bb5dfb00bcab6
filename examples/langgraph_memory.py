"""Run a LangGraph agent that keeps conversations in a checkpointer and facts about users in a store, in one file.

    python examples/langgraph_memory.py        needs, in a clone: pip install '.[langgraph,search]'

Needs no key and no network: rules stand in for the model, and a small local model embeds the facts. The agent remembers
in later conversations what a user said, for that user only, also after the file was closed. It finds facts by meaning,
and forgets one on request. It leaves memory.db in the current directory.
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
    """Stand in for a model: learn a fact, say what is known, or forget."""
    user = ("users", config["configurable"]["user_id"])
    said = str(state["messages"][-1].content)
    if said.lower().startswith(ABOUT):
        subject = said[len(ABOUT) :].rstrip("?")
        facts = store.search(user) if subject == "me" else store.search(user, query=subject, limit=1)
        answer = f"I know: {', '.join(item.value['fact'] for item in facts)}" if facts else "I know nothing yet!"
    elif said.lower().startswith(FORGET):
        [fact] = store.search(user, query=said[len(FORGET) :], limit=1)
        store.delete(user, fact.key)
        answer = f"Forgotten: {fact.value['fact']}"
    else:
        store.put(user, str(uuid.uuid4()), {"fact": said})
        answer = "Got it! I'll remember that."
    return {"messages": [AIMessage(answer)]}


def agent(opened: perdure.Store) -> Any:
    """Return the graph. It keeps conversations and facts in the same store."""
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
    with perdure.open(FILE, embedder="local") as opened:  # open it again, as a later process does
        graph = agent(opened)
        recall_and_forget(graph)
        look_back(graph)
    print(f"\nlook at it:  perdure memory items users/alice --store {FILE}")


if __name__ == "__main__":
    main()
