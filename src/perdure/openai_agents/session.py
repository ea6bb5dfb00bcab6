"""`PerdureSession`: a conversation of the OpenAI Agents SDK in a store."""

from __future__ import annotations

from typing import Any

from agents.items import TResponseInputItem
from agents.memory import SessionSettings

import perdure
from perdure.adapters import aamend, aextend, arecall, checked_store


class PerdureSession:
    """A conversation in a store: a thread whose state is the list of its items.

    Writers in any number of processes lose nothing. In a durable function each change is made once. `limit` in the
    settings is how many of the newest items an agent sees.
    """

    def __init__(
        self, session_id: str, store: perdure.Store, session_settings: SessionSettings | dict[str, Any] | None = None
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = SessionSettings().resolve(session_settings)
        self._thread = checked_store(store).thread(f"openai/{session_id}", metadata={"session": session_id})

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the newest items, in the order in which they were added."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        newest = await arecall(self._thread)
        items: list[TResponseInputItem] = [] if newest is None else newest.state
        return items if limit is None else items[-limit:] if limit > 0 else []

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        await aextend(self._thread, items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the newest item and return it."""
        saved = await aamend(self._thread, lambda items: items[:-1] if items else None)
        if saved is None or saved.parent is None:
            return None
        item: TResponseInputItem = (await self._thread.aload(saved.parent)).state[-1]
        return item

    async def clear_session(self) -> None:
        await aamend(self._thread, lambda items: [] if items else None)
