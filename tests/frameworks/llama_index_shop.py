"""Chat stores of LlamaIndex for the session contract."""

from __future__ import annotations

from agent_contract import work
from llama_index.core.llms import ChatMessage

import perdure
from perdure.llama_index import PerdureChatStore

__all__ = ["PerdureChatStore", "append", "texts", "work"]


def append(store: perdure.Store, session: str, text: str) -> None:
    PerdureChatStore(store).add_message(session, ChatMessage(text))


def texts(store: perdure.Store, session: str) -> list[str]:
    return [str(message.content) for message in PerdureChatStore(store).get_messages(session)]
