"""`PerdureSessionManager`: sessions of Strands in a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from strands.multiagent import MultiAgentBase
from strands.session import RepositorySessionManager, SessionRepository
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage

import perdure
from perdure.adapters import amend, checked_store, extend, recall
from perdure.errors import NotFound

_TIMES = ("created_at", "updated_at")


class PerdureSessionManager(RepositorySessionManager, SessionRepository):
    """A session in a store. The messages of each of its agents are a thread, and so is the state of each.

    Writers in any number of processes lose nothing. In a durable function each change is made once.
    """

    def __init__(self, session_id: str, store: perdure.Store) -> None:
        self._store = checked_store(store)
        self._written: dict[str, dict[str, Any]] = {}
        super().__init__(session_id=session_id, session_repository=self)

    def _thread(self, session: str, *parts: str) -> perdure.Thread:
        name = "/".join(["strands", *(quote(part, safe="") for part in (session, *parts))])
        return self._store.thread(name, metadata={"strands_session": session})

    def _read(self, session: str, *parts: str) -> Any:
        newest = recall(self._thread(session, *parts))
        return None if newest is None else newest.state

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Create a session, unless another process has created it since it was looked for."""
        _create(self._thread(session.session_id), {**session.to_dict(), "session_type": session.session_type.value})
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        known = self._read(session_id)
        return None if known is None else Session.from_dict(known)

    def delete_session(self, session_id: str, **kwargs: Any) -> None:
        """Delete a session with its agents and their messages."""
        infos = self._store.threads(where={"strands_session": session_id}, limit=None)
        if not infos:
            raise SessionException(f"session {session_id} does not exist")
        for info in infos:
            with suppress(NotFound):  # another process deletes it too
                self._store.delete_thread(info.name)

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        _create(self._thread(session_id, "agents", session_agent.agent_id), session_agent.to_dict())

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        known = self._read(session_id, "agents", agent_id)
        return None if known is None else SessionAgent.from_dict(known)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Save what an agent remembers. Nothing is saved if only the times are new, as in a replay."""
        plain = session_agent.to_dict()
        content = {name: value for name, value in plain.items() if name not in _TIMES}
        if self._written.get(session_agent.agent_id) != content:
            thread = self._thread(session_id, "agents", session_agent.agent_id)
            amend(thread, _updated(f"agent {session_agent.agent_id}", plain))
            self._written[session_agent.agent_id] = content

    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        extend(self._thread(session_id, "messages", agent_id), [session_message.to_dict()])

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        same = [each for each in self.list_messages(session_id, agent_id) if each.message_id == message_id]
        return same[-1] if same else None

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        plain = session_message.to_dict()

        def change(known: list[Any] | None) -> list[Any]:
            messages = known or []
            for index, old in reversed(list(enumerate(messages))):
                if _identity(old) == _identity(plain):
                    return [*messages[:index], {**plain, "created_at": old["created_at"]}, *messages[index + 1 :]]
            raise SessionException(f"message {session_message.message_id} does not exist")

        amend(self._thread(session_id, "messages", agent_id), change)

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        messages = self._read(session_id, "messages", agent_id) or []
        return [SessionMessage.from_dict(each) for each in messages[offset:][:limit]]

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        _create(self._thread(session_id, "multi", multi_agent.id), multi_agent.serialize_state())

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        known: dict[str, Any] | None = self._read(session_id, "multi", multi_agent_id)
        return known

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        thread = self._thread(session_id, "multi", multi_agent.id)
        amend(thread, _updated(f"multi-agent {multi_agent.id}", multi_agent.serialize_state()))


def _identity(message: dict[str, Any]) -> Any:
    """Return what tells messages apart: two processes may give messages the same number."""
    return message["message"].get("tracking_id") or message["message_id"]


def _create(thread: perdure.Thread, new: dict[str, Any]) -> None:
    amend(thread, lambda known: new if known is None else None)


def _updated(what: str, new: dict[str, Any]) -> Callable[[Any], Any]:
    def change(known: dict[str, Any] | None) -> dict[str, Any]:
        if known is None:
            raise SessionException(f"{what} does not exist")
        return {**new, "created_at": known["created_at"]} if "created_at" in known else new

    return change
