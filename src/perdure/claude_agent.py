"""Perdure for the Claude Agent SDK: transcripts of sessions in a store, which any machine can resume.

    from perdure.claude_agent import PerdureSessionStore

    options = ClaudeAgentOptions(session_store=PerdureSessionStore(store), resume=session_id)

The SDK runs its agent in a process of its own, and mirrors its transcript here. So a session survives its machine; the
steps of the agent are not steps of a run. It needs the extra `claude-agent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import quote

import perdure
from perdure.adapters import aamend, arecall, checked_store
from perdure.errors import ExtraMissing, NotFound

try:
    import claude_agent_sdk  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.claude_agent", "claude-agent") from error

from claude_agent_sdk import (
    SessionKey,
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
    fold_session_summary,
)

__all__ = ["PerdureSessionStore"]


class PerdureSessionStore(SessionStore):
    """Transcripts in a store: that of a session is a thread, and so is that of each of its subagents.

    Writers in several processes lose nothing. An entry with a known `uuid` is not added again. The store's retention
    and encryption apply.
    """

    def __init__(self, store: perdure.Store) -> None:
        self._store = checked_store(store)

    def _thread(self, key: SessionKey) -> perdure.Thread:
        tags = {**_session(key), "claude_subpath": key.get("subpath") or ""}
        name = "/".join(["claude", *(quote(part, safe="") for part in tags.values())])
        return self._store.thread(name, metadata=tags)

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries to a transcript in one save, and fold those of a session itself into its summary."""

        def change(state: dict[str, Any] | None) -> dict[str, Any] | None:
            known = state or {"entries": [], "summary": None}
            seen = {entry.get("uuid") for entry in known["entries"]} - {None}
            new = [entry for entry in entries if entry.get("uuid") not in seen]
            if not new:
                return None
            summary = None if key.get("subpath") else fold_session_summary(known["summary"], key, new)
            return {"entries": [*known["entries"], *new], "summary": summary}

        await aamend(self._thread(key), change)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        newest = await arecall(self._thread(key))
        return None if newest is None else list(newest.state["entries"])

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        sessions = await self._list({"claude_project": project_key, "claude_subpath": ""})
        return [{"session_id": info.metadata["claude_session"], "mtime": _ms(info.updated_at)} for info in sessions]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        summaries: list[SessionSummaryEntry] = []
        for info in await self._list({"claude_project": project_key, "claude_subpath": ""}):
            newest = await arecall(self._store.thread(info.name))
            if newest is not None and newest.state["summary"] is not None:
                stored: SessionSummaryEntry = newest.state["summary"]
                summaries.append({**stored, "mtime": _ms(info.updated_at)})
        return summaries

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        subkeys = await self._list(_session(key))
        return [info.metadata["claude_subpath"] for info in subkeys if info.metadata["claude_subpath"]]

    async def delete(self, key: SessionKey) -> None:
        """Delete a transcript. With that of a session go those of its subagents."""
        if key.get("subpath"):
            names = [self._thread(key).name]
        else:
            names = [info.name for info in await self._list(_session(key))]
        for name in names:
            with suppress(NotFound):
                await self._store.adelete_thread(name)

    async def _list(self, where: Mapping[str, str]) -> list[perdure.ThreadInfo]:
        return await self._store.athreads(where=where, limit=None)


def _session(key: SessionKey | SessionListSubkeysKey) -> dict[str, str]:
    return {"claude_project": key["project_key"], "claude_session": key["session_id"]}


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
