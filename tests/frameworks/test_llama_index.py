"""Chat histories of LlamaIndex in a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_contract import SessionContract
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.storage.chat_store import SimpleChatStore
from llama_index_shop import PerdureChatStore

import perdure


class TestContract(SessionContract):
    module = "llama_index_shop"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "store.db"), durability="normal") as opened:
        yield opened


def messages(*texts: str) -> list[ChatMessage]:
    return [ChatMessage(text, role=MessageRole.USER) for text in texts]


def used(chats: Any) -> list[object]:
    """What each call returns."""
    a, b, c, d = messages("a", "b", "c", "d")
    return [
        list(chats.get_messages("ann")),
        chats.delete_messages("ann"),
        chats.delete_message("ann", 0),
        chats.delete_last_message("ann"),
        chats.get_keys(),
        [chats.add_message("ann", message) for message in (a, b, c)],
        chats.set_messages("bob", [d]),
        sorted(chats.get_keys()),
        chats.delete_message("ann", 1),
        chats.delete_message("ann", 2),
        list(chats.get_messages("ann")),
        chats.delete_last_message("ann"),
        chats.delete_messages("ann"),
        chats.get_keys(),
        [chats.add_message("ann", message) for message in (b, c)],
        list(chats.get_messages("ann")),
        list(chats.get_messages("bob")),
    ]


async def aused(chats: Any) -> list[object]:
    a, b, c, d = messages("a", "b", "c", "d")
    return [
        await chats.aget_messages("ann"),
        await chats.adelete_messages("ann"),
        await chats.adelete_message("ann", 0),
        await chats.adelete_last_message("ann"),
        await chats.aget_keys(),
        [await chats.async_add_message("ann", message) for message in (a, b, c)],
        await chats.aset_messages("bob", [d]),
        sorted(await chats.aget_keys()),
        await chats.adelete_message("ann", 1),
        await chats.adelete_message("ann", 2),
        await chats.aget_messages("ann"),
        await chats.adelete_last_message("ann"),
        await chats.adelete_messages("ann"),
        await chats.aget_keys(),
        [await chats.async_add_message("ann", message) for message in (b, c)],
        await chats.aget_messages("ann"),
        await chats.aget_messages("bob"),
    ]


async def test_a_chat_store_answers_as_the_one_of_llama_index(store: perdure.Store) -> None:
    stock = used(SimpleChatStore())
    assert used(PerdureChatStore(store)) == stock
    with perdure.open(":memory:") as other:
        assert await aused(PerdureChatStore(other)) == stock
    assert store.ops.verify().ok


def test_a_message_comes_back_whole(store: perdure.Store) -> None:
    blocks = [TextBlock(text="look: ☃"), ImageBlock(image=b"aW1hZ2U=", image_mimetype="image/png")]
    call = {"tool_calls": [{"id": "c1", "function": {"name": "pay", "arguments": '{"cents": 900}'}}]}
    memory = ChatMemoryBuffer.from_defaults(chat_store=PerdureChatStore(store), chat_store_key="ann", token_limit=9_000)
    said = [ChatMessage(blocks=blocks), ChatMessage(None, role=MessageRole.ASSISTANT, additional_kwargs=call)]
    memory.put_messages(said)
    assert PerdureChatStore(store).get_messages("ann") == said == memory.get_all()


def test_in_a_run_a_message_is_added_once(store: perdure.Store) -> None:
    [hello] = messages("hello")

    @perdure.durable(name="llama_index.history")
    def talk() -> list[Any]:
        chats = PerdureChatStore(store)
        seen = len(chats.get_messages("ann"))
        chats.add_message("ann", hello)
        perdure.ask("Go on?")
        last: Any = chats.delete_last_message("ann")
        return [seen, last.content]

    store.run(talk, id="talk")
    store.answer("talk", "yes")
    assert store.run(talk, id="talk").result() == [0, "hello"]
    assert PerdureChatStore(store).get_messages("ann") == []
