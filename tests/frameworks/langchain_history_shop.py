"""Histories of LangChain for the session contract."""

from __future__ import annotations

from agent_contract import work

import perdure
from perdure.langchain_history import PerdureChatMessageHistory

__all__ = ["PerdureChatMessageHistory", "append", "texts", "work"]


def append(store: perdure.Store, session: str, text: str) -> None:
    PerdureChatMessageHistory(session, store).add_user_message(text)


def texts(store: perdure.Store, session: str) -> list[str]:
    return [str(message.content) for message in PerdureChatMessageHistory(session, store).messages]
