"""Sessions of the Claude Agent SDK for the session contract."""

from __future__ import annotations

import asyncio

from agent_contract import work

import perdure
from perdure.claude_agent import PerdureSessionStore

__all__ = ["append", "texts", "work"]


def append(store: perdure.Store, session: str, text: str) -> None:
    key = {"project_key": "shop", "session_id": session}
    asyncio.run(PerdureSessionStore(store).append(key, [{"type": "user", "uuid": text}]))  # type: ignore[arg-type]


def texts(store: perdure.Store, session: str) -> list[str]:
    entries = asyncio.run(PerdureSessionStore(store).load({"project_key": "shop", "session_id": session}))
    return [entry["uuid"] for entry in entries or ()]
