"""A course's lesson on checkpointers and memory, with PerdureSaver in the place of every saver that it teaches.

The code of its examples is run as it stands, one after the other in one namespace, as a reader would type it; only
the imports of the savers, the server's URL and OpenAI's embeddings are replaced. What it prints must be what it says.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings

from perdure.langgraph import PerdureSaver

# --- what stands in for what the lesson imports


class FakeEmbeddings(Embeddings):
    """Counts words by theme: the same text has the same place, and what is alike is near."""

    THEMES = (("hiking", "mountains", "outdoor", "activities"), ("software", "engineer"), ("dark", "mode"))

    def __init__(self, model: str) -> None:
        assert model == "text-embedding-3-small"

    def embed_query(self, text: str) -> list[float]:
        words = re.findall(r"\w+", text.lower())
        themes = [float(sum(word in theme for word in words)) for theme in self.THEMES]
        return themes + [0.01] * (1536 - len(themes))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


SAVERS = {
    "from langgraph.checkpoint.memory import MemorySaver": "MemorySaver = in_memory",
    "from langgraph.checkpoint.sqlite import SqliteSaver": "SqliteSaver = PerdureSaver",
    "from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver": "AsyncSqliteSaver = PerdureSaver",
    "from langgraph.checkpoint.postgres import PostgresSaver": "PostgresSaver = PerdureSaver",
    "from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver": "AsyncPostgresSaver = PerdureSaver",
    "from langchain_openai import OpenAIEmbeddings": "OpenAIEmbeddings = FakeEmbeddings",
}
POSTGRES = "postgresql://user:pass@localhost:5432/langgraph"


class Reader:
    """Somebody who types the lesson's code into one session, and sees what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], server: str) -> None:
        self.capsys = capsys
        self.server = server
        self.made: list[PerdureSaver] = []
        self.names: dict[str, Any] = {
            "PerdureSaver": PerdureSaver,
            "FakeEmbeddings": FakeEmbeddings,
            "in_memory": self._in_memory,
        }

    def _in_memory(self) -> PerdureSaver:
        self.made.append(PerdureSaver(":memory:"))
        return self.made[-1]

    async def runs(self, code: str) -> str:
        """Run an example, its `await` too; what it printed."""
        for line, ours in SAVERS.items():
            code = re.sub(rf"^{re.escape(line)}$", ours, code, flags=re.MULTILINE)
        code = code.replace(POSTGRES, self.server)
        compiled = compile(code, "the lesson", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, self.names)
        if inspect.isawaitable(result):
            await result
        return self.capsys.readouterr().out

    def close(self) -> None:
        found = {id(value): value for value in self.names.values() if isinstance(value, PerdureSaver)}
        for saver in [*self.made, *found.values()]:
            saver.close()


@pytest.fixture
def reader(
    capsys: pytest.CaptureFixture[str], postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)  # the lesson writes "checkpoints.db" into the current directory
    made = Reader(capsys, postgres_url)
    yield made
    made.close()


# --- the lesson's examples, in its order

ENABLING = """
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import StateGraph, START, END, MessagesState
from langchain_core.messages import HumanMessage, AIMessage

def respond(state: MessagesState):
    last = state["messages"][-1]
    return {"messages": [AIMessage(content=f"Echo: {last.content}")]}

builder = StateGraph(MessagesState)
builder.add_node("respond", respond)
builder.add_edge(START, "respond")
builder.add_edge("respond", END)

# Compile WITH a checkpointer
graph = builder.compile(checkpointer=MemorySaver())
"""

THREADS = """
# Thread 1: Alice's conversation
config_alice = {"configurable": {"thread_id": "alice-001"}}

result = graph.invoke(
    {"messages": [HumanMessage(content="Hello!")]},
    config=config_alice,
)
print(result["messages"][-1].content)

result = graph.invoke(
    {"messages": [HumanMessage(content="How are you?")]},
    config=config_alice,
)
print(f"Alice has {len(result['messages'])} messages")

# Thread 2: Bob's conversation
config_bob = {"configurable": {"thread_id": "bob-001"}}

result = graph.invoke(
    {"messages": [HumanMessage(content="Hi there!")]},
    config=config_bob,
)
print(f"Bob has {len(result['messages'])} messages")
"""

THREADS_OUTPUT = """\
Echo: Hello!
Alice has 4 messages
Bob has 2 messages
"""

MEMORY = """
from langgraph.checkpoint.memory import MemorySaver

# Also aliased as InMemorySaver
checkpointer = MemorySaver()
graph = builder.compile(checkpointer=checkpointer)
"""

SQLITE = """
from langgraph.checkpoint.sqlite import SqliteSaver

# File-based SQLite
checkpointer = SqliteSaver.from_conn_string("checkpoints.db")
graph = builder.compile(checkpointer=checkpointer)

# Async version
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

async_checkpointer = AsyncSqliteSaver.from_conn_string("checkpoints.db")
"""

POSTGRESQL = """
from langgraph.checkpoint.postgres import PostgresSaver

checkpointer = PostgresSaver.from_conn_string(
    "postgresql://user:pass@localhost:5432/langgraph"
)

# Required: create the checkpoint tables
checkpointer.setup()

graph = builder.compile(checkpointer=checkpointer)

# Async version
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

async_checkpointer = AsyncPostgresSaver.from_conn_string(
    "postgresql://user:pass@localhost:5432/langgraph"
)
await async_checkpointer.setup()
"""

SNAPSHOT = """
config = {"configurable": {"thread_id": "thread-1"}}

# Run the graph
graph.invoke({"messages": [HumanMessage(content="Hello")]}, config=config)

# Get the current state snapshot
snapshot = graph.get_state(config)
print(f"Values: {snapshot.values}")
print(f"Next nodes: {snapshot.next}")
print(f"Config: {snapshot.config}")
"""

HISTORY = """
# Get all state snapshots in reverse chronological order
for snapshot in graph.get_state_history(config):
    print(f"Step: {snapshot.metadata.get('step', '?')}")
    print(f"  Next: {snapshot.next}")
    print(f"  Messages: {len(snapshot.values.get('messages', []))}")
    print()
"""

HISTORY_OUTPUT = """\
Step: 1
  Next: ()
  Messages: 2

Step: 0
  Next: ('respond',)
  Messages: 1

Step: -1
  Next: ('__start__',)
  Messages: 0

"""

REPLAY = """
# Get a previous checkpoint
history = list(graph.get_state_history(config))
old_checkpoint = history[-1]  # The earliest state

# Replay from that point
replay_config = old_checkpoint.config
result = graph.invoke(None, config=replay_config)
"""

UPDATE = """
# Update the state as if a specific node produced the update
graph.update_state(
    config,
    values={"messages": [AIMessage(content="Injected message")]},
    as_node="respond",
)

# The next invocation will see the injected message
result = graph.invoke(
    {"messages": [HumanMessage(content="What was your last message?")]},
    config=config,
)
"""

STORE = """
from langgraph.store.memory import InMemoryStore
from langgraph.graph import StateGraph, START, END, MessagesState
from langchain_core.messages import AIMessage

# Create a store
store = InMemoryStore()

def respond(state: MessagesState, *, store):
    user_id = "user-123"
    namespace = ("users", user_id)

    # Read from the store
    memories = store.search(namespace)
    memory_text = "; ".join(m.value.get("fact", "") for m in memories)

    # Save a new fact
    store.put(namespace, key="greeting", value={"fact": "User said hello"})

    return {"messages": [AIMessage(content=f"Known facts: {memory_text}")]}

builder = StateGraph(MessagesState)
builder.add_node("respond", respond)
builder.add_edge(START, "respond")
builder.add_edge("respond", END)

# Pass the store at compile time
graph = builder.compile(
    checkpointer=MemorySaver(),
    store=store,
)
"""

NAMESPACES = """
# User preferences
store.put(("users", "alice"), "preferences", {"theme": "dark", "language": "en"})

# Project data
store.put(("projects", "project-1"), "config", {"model": "claude-sonnet"})

# Search within a namespace
results = store.search(("users", "alice"))
for item in results:
    print(f"  {item.key}: {item.value}")
"""

SEMANTIC = """
from langchain_openai import OpenAIEmbeddings

store = InMemoryStore(
    index={
        "embed": OpenAIEmbeddings(model="text-embedding-3-small"),
        "dims": 1536,
        "fields": ["fact"],  # Which fields to embed
    }
)

# Store some facts
store.put(("users", "alice"), "fact-1", {"fact": "Alice loves hiking in the mountains"})
store.put(("users", "alice"), "fact-2", {"fact": "Alice is a software engineer"})
store.put(("users", "alice"), "fact-3", {"fact": "Alice prefers dark mode"})

# Semantic search
results = store.search(
    ("users", "alice"),
    query="outdoor activities",
    limit=1,
)
print(results[0].value["fact"])
"""

SOLUTION = """
from langgraph.graph import StateGraph, START, END, MessagesState
from langgraph.checkpoint.memory import MemorySaver
from langgraph.store.memory import InMemoryStore
from langchain_core.messages import HumanMessage, AIMessage
import uuid


store = InMemoryStore()


def respond(state: MessagesState, *, store, config):
    user_id = config.get("configurable", {}).get("user_id", "default")
    namespace = ("users", user_id)
    last_msg = state["messages"][-1].content.lower()

    if "what do you know" in last_msg:
        memories = store.search(namespace)
        facts = [m.value.get("fact", "") for m in memories]
        response = f"I know: {', '.join(facts)}" if facts else "I don't know anything yet!"
    else:
        # Store the fact
        store.put(namespace, str(uuid.uuid4()), {"fact": last_msg})
        response = f"Got it! I'll remember that."

    return {"messages": [AIMessage(content=response)]}


builder = StateGraph(MessagesState)
builder.add_node("respond", respond)
builder.add_edge(START, "respond")
builder.add_edge("respond", END)

graph = builder.compile(checkpointer=MemorySaver(), store=store)

# Thread 1
config_1 = {"configurable": {"thread_id": "t1", "user_id": "alice"}}
graph.invoke({"messages": [HumanMessage(content="I love Python")]}, config=config_1)

# Thread 2: different thread, same user
config_2 = {"configurable": {"thread_id": "t2", "user_id": "alice"}}
result = graph.invoke(
    {"messages": [HumanMessage(content="What do you know about me?")]},
    config=config_2,
)
print(result["messages"][-1].content)
"""

TASK = """
# Thread 1
graph.invoke({"messages": [HumanMessage(content="I love Python")]}, config=thread_1_config)

# Thread 2 (different conversation, same user)
result = graph.invoke({"messages": [HumanMessage(content="What do you know about me?")]}, config=thread_2_config)
"""

CHECKPOINTERS = {"memory": MEMORY, "sqlite": SQLITE, "postgres": POSTGRESQL}


# --- the tests


async def test_enabling_persistence_and_threads(reader: Reader) -> None:
    assert await reader.runs(ENABLING) == ""
    assert await reader.runs(THREADS) == THREADS_OUTPUT


@pytest.mark.parametrize("library", CHECKPOINTERS)
async def test_every_checkpointer_of_the_lesson(reader: Reader, library: str) -> None:
    """Chosen as the lesson says, each runs the threads, the snapshots, the replay and the update."""
    await reader.runs(ENABLING)
    assert await reader.runs(CHECKPOINTERS[library]) == ""
    assert await reader.runs(THREADS) == THREADS_OUTPUT
    await snapshots(reader)
    if library == "sqlite":
        assert Path("checkpoints.db").stat().st_size > 0
    if library != "memory":
        await async_twin(reader)


async def snapshots(reader: Reader) -> None:
    values, following, config = (await reader.runs(SNAPSHOT)).splitlines()
    assert re.fullmatch(
        r"Values: \{'messages': \[HumanMessage\(content='Hello'.*\), AIMessage\(content='Echo: Hello'.*\)\]\}", values
    )
    assert following == "Next nodes: ()"
    assert re.fullmatch(
        r"Config: \{'configurable': \{'thread_id': 'thread-1', .*'checkpoint_id': '[0-9a-f-]{36}'\}\}", config
    )
    assert await reader.runs(HISTORY) == HISTORY_OUTPUT

    await reader.runs(REPLAY)
    assert [message.content for message in reader.names["result"]["messages"]] == ["Hello", "Echo: Hello"]

    await reader.runs(UPDATE)
    assert [message.content for message in reader.names["result"]["messages"]] == [
        "Hello",
        "Echo: Hello",
        "Injected message",
        "What was your last message?",
        "Echo: What was your last message?",
    ]


async def async_twin(reader: Reader) -> None:
    """The lesson only makes the async checkpointer. It is of the same database: it goes on with Alice."""
    graph = reader.names["builder"].compile(checkpointer=reader.names["async_checkpointer"])
    given = {"messages": [reader.names["HumanMessage"](content="Still there?")]}
    result = await graph.ainvoke(given, reader.names["config_alice"])
    assert len(result["messages"]) == 6
    assert len(reader.names["graph"].get_state(reader.names["config_alice"]).values["messages"]) == 6


async def test_the_memory_store_beside_the_checkpointer(reader: Reader) -> None:
    await reader.runs(ENABLING)
    assert await reader.runs(STORE) == ""
    said = []
    for thread in ("one", "two"):
        config = {"configurable": {"thread_id": thread}}
        result = reader.names["graph"].invoke({"messages": [reader.names["HumanMessage"](content="Hello")]}, config)
        said.append(result["messages"][-1].content)
    assert said == ["Known facts: ", "Known facts: User said hello"]
    assert await reader.runs(NAMESPACES) == "  preferences: {'theme': 'dark', 'language': 'en'}\n"
    assert await reader.runs(SEMANTIC) == "Alice loves hiking in the mountains\n"


async def test_the_exercise_and_its_solution(reader: Reader) -> None:
    assert await reader.runs(SOLUTION) == "I know: i love python\n"
    reader.names["thread_1_config"] = {"configurable": {"thread_id": "again 1", "user_id": "bob"}}
    reader.names["thread_2_config"] = {"configurable": {"thread_id": "again 2", "user_id": "bob"}}
    await reader.runs(TASK)
    assert reader.names["result"]["messages"][-1].content == "I know: i love python"
    # Requirement 4: a conversation's history persists within its thread. The bonus: its state history.
    history = await reader.runs("print(len(list(graph.get_state_history(config_1))), graph.get_state(config_1).values)")
    assert re.match(r"3 \{'messages': \[HumanMessage\(content='I love Python'", history)
