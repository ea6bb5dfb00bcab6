"""`PerdureChatStore`: the chat histories of LlamaIndex in a store.

    from perdure.llama_index import PerdureChatStore

    memory = ChatMemoryBuffer.from_defaults(chat_store=PerdureChatStore(store), chat_store_key="ann")

It needs the extra `llama-index`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import perdure
from perdure.adapters import Writers, aamend, amend, arecall, checked_store, recall
from perdure.errors import ExtraMissing

try:
    import llama_index.core.storage.chat_store  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.llama_index", "llama-index") from error

from llama_index.core.llms import ChatMessage
from llama_index.core.storage.chat_store.base import BaseChatStore
from pydantic import PrivateAttr

__all__ = ["PerdureChatStore"]


class PerdureChatStore(BaseChatStore):
    """Chat histories in a store: the messages of a key are a thread.

    Writers in any number of processes lose nothing. In a durable function each change is made once. Deleted messages
    stay in the thread's history, as far as the store's retention keeps it.
    """

    _store: Any = PrivateAttr()
    _writers: Any = PrivateAttr()

    def __init__(self, store: perdure.Store) -> None:
        super().__init__()
        self._store = checked_store(store)
        self._writers = Writers(self._thread)

    @classmethod
    def class_name(cls) -> str:
        return "PerdureChatStore"

    def _thread(self, key: str) -> perdure.Thread:
        thread: perdure.Thread = self._store.thread(f"llama-index/{key}", metadata={"llama_index_key": key})
        return thread

    # --- blocking

    def set_messages(self, key: str, messages: list[ChatMessage]) -> None:
        amend(self._thread(key), _setting(messages))

    def get_messages(self, key: str) -> list[ChatMessage]:
        return _messages(recall(self._thread(key)))

    def add_message(self, key: str, message: ChatMessage) -> None:
        self._writers.extend(key, items=_plain([message]))

    def delete_messages(self, key: str) -> list[ChatMessage] | None:
        thread = self._thread(key)
        saved = amend(thread, _clear)
        return None if saved is None else _messages(thread.load(saved.parent))

    def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        thread = self._thread(key)
        saved = amend(thread, _deleting(idx))
        return None if saved is None else _messages(thread.load(saved.parent))[idx]

    def delete_last_message(self, key: str) -> ChatMessage | None:
        return self.delete_message(key, -1)

    def get_keys(self) -> list[str]:
        """Return the keys that have messages."""
        threads = self._store.threads(name_prefix="llama-index/", limit=None)
        keys = [info.metadata["llama_index_key"] for info in threads]
        return [key for key in keys if self.get_messages(key)]

    # --- the same, awaited

    async def aset_messages(self, key: str, messages: list[ChatMessage]) -> None:
        await aamend(self._thread(key), _setting(messages))

    async def aget_messages(self, key: str) -> list[ChatMessage]:
        return _messages(await arecall(self._thread(key)))

    async def async_add_message(self, key: str, message: ChatMessage) -> None:
        await self._writers.aextend(key, items=_plain([message]))

    async def adelete_messages(self, key: str) -> list[ChatMessage] | None:
        thread = self._thread(key)
        saved = await aamend(thread, _clear)
        return None if saved is None else _messages(await thread.aload(saved.parent))

    async def adelete_message(self, key: str, idx: int) -> ChatMessage | None:
        thread = self._thread(key)
        saved = await aamend(thread, _deleting(idx))
        return None if saved is None else _messages(await thread.aload(saved.parent))[idx]

    async def adelete_last_message(self, key: str) -> ChatMessage | None:
        return await self.adelete_message(key, -1)

    async def aget_keys(self) -> list[str]:
        threads = await self._store.athreads(name_prefix="llama-index/", limit=None)
        keys = [info.metadata["llama_index_key"] for info in threads]
        return [key for key in keys if await self.aget_messages(key)]


def _plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json") for message in messages]


def _messages(checkpoint: perdure.Checkpoint | None) -> list[ChatMessage]:
    return [] if checkpoint is None else [ChatMessage.model_validate(each) for each in checkpoint.state]


def _setting(messages: list[ChatMessage]) -> Callable[[Any], Any]:
    plain = _plain(messages)
    return lambda _: plain


def _clear(stored: list[Any] | None) -> list[Any] | None:
    return [] if stored else None


def _deleting(index: int) -> Callable[[Any], Any]:
    def change(stored: list[Any] | None) -> list[Any] | None:
        if not stored or not -len(stored) <= index < len(stored):
            return None
        at = index % len(stored)
        return [*stored[:at], *stored[at + 1 :]]

    return change
