"""ADK's sessions and long-term memory in a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from google.adk.errors._stale_session_error import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.memory.base_memory_service import BaseMemoryService, SearchMemoryResponse
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.sessions.base_session_service import BaseSessionService, GetSessionConfig, ListSessionsResponse
from google.adk.sessions.session import Session
from google.adk.sessions.state import State

import perdure
from perdure.adapters import Writers, aextend, arecall, checked_store, in_run
from perdure.errors import Conflict, NotFound

Change = Callable[[Any], Any]


class PerdureSessionService(BaseSessionService):
    """Sessions in a store: a session is a thread with its first state and its events, each event one save.

    A writer whose session is not the newest is refused. State of users and apps is in threads of their own, which are
    saved with the event that changes it.
    """

    def __init__(self, store: perdure.Store) -> None:
        self._store = checked_store(store)
        self._writers = Writers(self._session)

    def _thread(self, *parts: str, **tags: str) -> perdure.Thread:
        return self._store.thread("/".join(["adk", *(quote(part, safe="") for part in parts)]), metadata=tags)

    def _session(self, app: str, user: str, session: str) -> perdure.Thread:
        return self._thread("session", app, user, session, adk_app=app, adk_user=user, adk_session=session)

    def _shared(self, app: str, user: str) -> dict[str, perdure.Thread]:
        return {State.APP_PREFIX: self._thread("app", app), State.USER_PREFIX: self._thread("user", app, user)}

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        id = (session_id or "").strip() or str(perdure.uuid() if in_run() else uuid4())
        own = {name: value for name, value in (state or {}).items() if _is_own(name)}
        first = {"state": own, "at": perdure.now().timestamp() if in_run() else time.time()}
        along = self._sharing(app_name, user_id, state or {})
        try:
            saved = await aextend(self._session(app_name, user_id, id), [first], expect=False, along=along)
            assert saved is not None
        except Conflict as error:
            raise AlreadyExistsError(f"Session with id {id} already exists.") from error
        return await self._opened(app_name, user_id, id, [first], saved.id)

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        thread = self._session(app_name, user_id, session_id)
        newest = await arecall(thread)
        if newest is None:
            return None
        session = await self._opened(app_name, user_id, session_id, newest.state, newest.id)
        if config is not None and config.after_timestamp is not None:
            session.events = [each for each in session.events if each.timestamp >= config.after_timestamp]
        if config is not None and config.num_recent_events is not None:
            session.events = session.events[-config.num_recent_events :] if config.num_recent_events else []
        return session

    async def _opened(self, app: str, user: str, id: str, items: list[Any], at: str) -> Session:
        """Make a session of what is stored. Its state is the first one, and what its events changed since."""
        first, *stored = items
        events = [Event.model_validate(each) for each in stored]
        state = dict(first["state"])
        for event in events:
            state |= {name: value for name, value in event.actions.state_delta.items() if _is_own(name)}
        for prefix, thread in self._shared(app, user).items():
            newest = await arecall(thread)
            state |= {prefix + name: value for name, value in (newest.state if newest else {}).items()}
        session = Session(app_name=app, user_id=user, id=id, state=state, events=events)
        session.last_update_time = events[-1].timestamp if events else first["at"]
        session._storage_update_marker = at
        return session

    def _sharing(self, app: str, user: str, state: Mapping[str, Any]) -> list[tuple[perdure.Thread, Change]]:
        """Return the changes of what belongs to the user or the app."""
        shared: list[tuple[perdure.Thread, Change]] = []
        for prefix, thread in self._shared(app, user).items():
            changed = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
            if changed:
                shared.append((thread, partial(_updated, changed)))
        return shared

    async def append_event(self, session: Session, event: Event) -> Event:
        """Append an event. Raise StaleSessionError if another writer has changed the session since it was read."""
        if event.partial or event.id in [each.id for each in session.events]:
            return event
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        try:
            saved = await self._extend(session, event)
        except Conflict as error:
            raise StaleSessionError(f"session {session.id} was changed by another writer: get it again") from error
        session._storage_update_marker = saved.id if saved is not None else None
        session.last_update_time = event.timestamp
        return self._commit_event_to_session(session, event)

    async def _extend(self, session: Session, event: Event) -> perdure.Checkpoint | None:
        """Save the event, and in the same transaction what it changes of the user's and the app's state."""
        items = [event.model_dump(mode="json", exclude_none=True)]
        along = self._sharing(session.app_name, session.user_id, event.actions.state_delta)
        options = {"expect": session._storage_update_marker, "along": along}
        return await self._writers.aextend(session.app_name, session.user_id, session.id, items=items, **options)

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        where = {"adk_app": app_name} | ({} if user_id is None else {"adk_user": user_id})
        infos = await self._store.athreads(where=where, limit=None)
        return ListSessionsResponse(
            sessions=[
                Session(
                    app_name=app_name,
                    user_id=info.metadata["adk_user"],
                    id=info.metadata["adk_session"],
                    last_update_time=info.updated_at.timestamp(),
                )
                for info in reversed(infos)
            ]
        )

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        with suppress(NotFound):
            await self._store.adelete_thread(self._session(app_name, user_id, session_id).name)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        newest = await arecall(self._shared(app_name, user_id)[State.USER_PREFIX])
        return {} if newest is None else dict(newest.state)


def _is_own(name: str) -> bool:
    return not name.startswith((State.APP_PREFIX, State.USER_PREFIX, State.TEMP_PREFIX))


def _updated(changed: Mapping[str, Any], state: dict[str, Any] | None) -> dict[str, Any]:
    return {**(state or {}), **changed}


class PerdureMemoryService(BaseMemoryService):
    """Long-term memory in a store: what was said in sessions, found by words or, with an embedder, by meaning."""

    def __init__(self, store: perdure.Store) -> None:
        self._store = checked_store(store)

    async def add_session_to_memory(self, session: Session) -> None:
        await self.add_events_to_memory(app_name=session.app_name, user_id=session.user_id, events=session.events)

    async def add_events_to_memory(
        self, *, app_name: str, user_id: str, events: Sequence[Event], **options: Any
    ) -> None:
        memory = self._store.memory("adk", app_name, user_id)
        for event in events:
            texts = [part.text for part in (event.content and event.content.parts) or () if part.text]
            if texts:
                await memory.aput(event.id, event.model_dump(mode="json", exclude_none=True), text=" ".join(texts))

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> SearchMemoryResponse:
        items = await self._store.memory("adk", app_name, user_id).asearch(query)
        events = [Event.model_validate(item.value) for item in items]
        return SearchMemoryResponse(
            memories=[
                MemoryEntry(
                    id=event.id,
                    content=event.content,
                    author=event.author,
                    timestamp=datetime.fromtimestamp(event.timestamp, UTC).isoformat(),
                )
                for event in events
                if event.content is not None
            ]
        )
