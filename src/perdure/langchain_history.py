"""`PerdureChatMessageHistory`: the messages of a LangChain conversation in a store.

    from perdure.langchain_history import PerdureChatMessageHistory

    chain = RunnableWithMessageHistory(model, lambda session_id: PerdureChatMessageHistory(session_id, store))

It needs the extra `langgraph`, which brings LangChain's core.
"""

from __future__ import annotations

from collections.abc import Sequence

import perdure
from perdure.adapters import aamend, aextend, amend, arecall, checked_store, extend, recall
from perdure.errors import ExtraMissing

try:
    from langchain_core.chat_history import BaseChatMessageHistory
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.langchain_history", "langgraph") from error

from langchain_core.messages import BaseMessage

__all__ = ["PerdureChatMessageHistory"]


class PerdureChatMessageHistory(BaseChatMessageHistory):
    """A thread whose state is the list of messages of a session.

    Writers in any number of processes lose nothing. In a durable function each change is made once.
    """

    def __init__(self, session_id: str, store: perdure.Store) -> None:
        self._thread = checked_store(store).thread(f"chat/{session_id}", metadata={"session": session_id})

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]
        newest = recall(self._thread)
        return [] if newest is None else list(newest.state)

    async def aget_messages(self) -> list[BaseMessage]:
        newest = await arecall(self._thread)
        return [] if newest is None else list(newest.state)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        extend(self._thread, messages)

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        await aextend(self._thread, messages)

    def clear(self) -> None:
        amend(self._thread, lambda messages: [] if messages else None)

    async def aclear(self) -> None:
        await aamend(self._thread, lambda messages: [] if messages else None)
