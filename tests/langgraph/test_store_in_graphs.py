"""A store in graphs: LangGraph gives it to nodes, tools and agents; it is in one file with the checkpoints, and shared
with `store.memory(…)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from graph_kit import MODES, Runner, at
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.config import get_store
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedStore
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore

import perdure
from perdure.langgraph import PerdureSaver, PerdureStore


@pytest.fixture
def opened(saver_url: str) -> Iterator[perdure.Store]:
    with perdure.open(saver_url, durability="normal") as store:
        yield store


def respond(state: MessagesState, *, store: BaseStore, config: RunnableConfig) -> dict[str, Any]:
    namespace = ("users", config["configurable"]["user_id"])
    said = str(state["messages"][-1].content)
    if "what do you know" in said.lower():
        return {"messages": [AIMessage("; ".join(item.value["fact"] for item in store.search(namespace)) or "nothing")]}
    store.put(namespace, f"fact-{len(state['messages'])}", {"fact": said})
    return {"messages": [AIMessage("noted")]}


async def respond_later(state: MessagesState, runtime: Runtime[None], config: RunnableConfig) -> dict[str, Any]:
    assert runtime.store is not None
    namespace = ("users", config["configurable"]["user_id"])
    said = str(state["messages"][-1].content)
    if "what do you know" in said.lower():
        found = await runtime.store.asearch(namespace)
        return {"messages": [AIMessage("; ".join(item.value["fact"] for item in found) or "nothing")]}
    await runtime.store.aput(namespace, f"fact-{len(state['messages'])}", {"fact": said})
    return {"messages": [AIMessage("noted")]}


@pytest.mark.parametrize("mode", MODES)
async def test_facts_of_one_thread_are_known_in_the_next_and_to_their_user_only(
    opened: perdure.Store, saver_url: str, mode: str
) -> None:
    builder = StateGraph(MessagesState)
    node: Any = respond if mode == "sync" else respond_later
    builder.add_node("respond", node)
    builder.add_edge(START, "respond")

    async def say(store: perdure.Store, text: str, thread: str, user: str) -> str:
        compiled = builder.compile(checkpointer=PerdureSaver(store), store=PerdureStore(store))
        done = await Runner(compiled, mode).invoke({"messages": [HumanMessage(text)]}, at(thread, user_id=user))
        return str(done["messages"][-1].content)

    await say(opened, "I love Python", "t1", "alice")
    await say(opened, "I live in Rome", "t1", "alice")
    assert await say(opened, "What do you know about me?", "t2", "alice") == "I live in Rome; I love Python"
    assert await say(opened, "What do you know about me?", "t3", "bob") == "nothing"
    with perdure.open(saver_url, create=False) as other:  # as another process does
        assert await say(other, "What do you know about me?", "t4", "alice") == "I live in Rome; I love Python"
    assert len(opened.thread("t1").load().state["messages"]) == 4
    assert opened.ops.verify().ok


class StandIn(BaseChatModel):
    """Calls the tool with what the user said, and repeats what it answered."""

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Any, **kwargs: Any) -> StandIn:
        assert [sorted(one.tool_call_schema.model_json_schema()["properties"]) for one in tools] == [["fact"]]
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        last = messages[-1]
        call = {"name": "remember", "args": {"fact": last.content}, "id": f"call-{len(messages)}"}
        answer = AIMessage(last.content) if isinstance(last, ToolMessage) else AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


@tool
def remember(fact: str, store: Annotated[BaseStore, InjectedStore()]) -> str:
    """Remember a fact."""
    store.put(("facts",), fact, {"fact": fact})
    return f"{len(store.search(('facts',)))} facts are known"


def test_an_agent_of_langchain_gives_the_store_to_its_tools(opened: perdure.Store) -> None:
    from langchain.agents import create_agent  # slow to import: not in each process that collects

    saver, store = PerdureSaver(opened), PerdureStore(opened)
    agent = create_agent(StandIn(), [remember], checkpointer=saver, store=store)
    for count, said in enumerate(("tea", "coffee"), 1):
        done = agent.invoke({"messages": [HumanMessage(said)]}, at(f"t{count}"))
        assert done["messages"][-1].content == f"{count} facts are known"
    assert {item.key for item in opened.memory("facts").list()} == {"tea", "coffee"}


def test_the_functional_api_finds_the_store(opened: perdure.Store) -> None:
    @task
    def note(text: str) -> None:
        get_store().put(("notes",), text, {"text": text})

    @entrypoint(checkpointer=PerdureSaver(opened), store=PerdureStore(opened))
    def work(text: str, *, store: BaseStore) -> list[str]:
        note(text).result()
        return sorted(item.key for item in store.search(("notes",)))

    assert work.invoke("a", at("t")) == ["a"]
    assert work.invoke("b", at("t")) == ["a", "b"]


def test_items_and_namespaces_are_those_of_memory(opened: perdure.Store) -> None:
    store, alice = PerdureStore(opened), opened.memory("users", "alice")
    alice.put("theme", {"fact": "dark"}, pinned=True)
    store.put(("users", "alice"), "hobby", {"fact": "hiking"})
    assert {item.key for item in store.search(("users",))} == {item.key for item in alice.list()} == {"theme", "hobby"}
    store.put(("users", "alice"), "theme", {"fact": "light"})
    store.delete(("users", "alice"), "hobby")
    assert [one.value for one in alice.history("theme")] == [{"fact": "dark"}, {"fact": "light"}]
    assert [one.gone for one in alice.history("hobby")] == [None, "deleted"]
    alice.put("old", {"fact": "lives in Rome"})
    alice.put("new", {"fact": "lives in Oslo"}, supersedes="old")
    assert {item.key for item in store.search(("users",))} == {"theme", "new"}  # what holds now
    store.put(("users", "alice"), "tea", {"fact": "green"}, ttl=1)
    before, after = alice.get("tea"), alice.update("tea", lambda value: {"fact": "black"})
    assert before is not None
    assert (after.ttl_s, after.expires_at) == (60, before.expires_at)
    other = PerdureStore(opened, tenant="other")
    assert other.search(()) == other.list_namespaces() == []
    with pytest.raises(perdure.UsageError, match="open already"):
        PerdureStore(opened, embedder="local")


def test_a_store_that_it_opened_is_closed_with_it(saver_url: str) -> None:
    with PerdureStore.from_conn_string(saver_url) as store:
        store.setup()
        store.put(("a",), "k", {"n": 1})
    with pytest.raises(perdure.errors.StoreClosed):
        store.get(("a",), "k")
    with perdure.open(saver_url) as opened:
        with PerdureStore(opened) as store:
            assert repr(store).startswith("<PerdureStore on <")
        assert PerdureStore(opened).get(("a",), "k") is not None
