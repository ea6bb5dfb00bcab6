"""`PerdureFlowPersistence`: the states of CrewAI's flows in a store.

    from perdure.crewai import PerdureFlowPersistence

    @persist(PerdureFlowPersistence(store))
    class Trip(Flow): ...

It needs the extra `crewai`.
"""

from __future__ import annotations

from typing import Any

import perdure
from perdure.adapters import amend, checked_store, recall
from perdure.errors import ExtraMissing

try:
    import crewai.flow.persistence  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.crewai", "crewai") from error

from crewai.flow.async_feedback import PendingFeedbackContext
from crewai.flow.persistence import FlowPersistence
from pydantic import BaseModel, Field, PrivateAttr

__all__ = ["PerdureFlowPersistence"]


class PerdureFlowPersistence(FlowPersistence):
    """The states of flows in a store: a thread per flow, a checkpoint per method, with the method's name as its note.

    A flow that waits for a person's feedback is saved with its question, in one save.
    """

    persistence_type: str = Field(default="PerdureFlowPersistence")
    _store: Any = PrivateAttr()

    def __init__(self, store: perdure.Store, **fields: Any) -> None:
        super().__init__(**fields)
        self._store = checked_store(store)

    def init_db(self) -> None:
        """Do nothing: the store has its tables."""

    def save_state(self, flow_uuid: str, method_name: str, state_data: dict[str, Any] | BaseModel) -> None:
        plain = _plain(state_data)
        amend(self._thread(flow_uuid), lambda saved: {**(saved or {"pending": None}), "state": plain}, note=method_name)

    def load_state(self, flow_uuid: str) -> dict[str, Any] | None:
        newest = recall(self._thread(flow_uuid))
        return None if newest is None else dict(newest.state["state"])

    def save_pending_feedback(
        self, flow_uuid: str, context: PendingFeedbackContext, state_data: dict[str, Any] | BaseModel
    ) -> None:
        saved = {"state": _plain(state_data), "pending": context.to_dict()}
        amend(self._thread(flow_uuid), lambda _: saved, note=context.method_name)

    def load_pending_feedback(self, flow_uuid: str) -> tuple[dict[str, Any], PendingFeedbackContext] | None:
        newest = recall(self._thread(flow_uuid))
        if newest is None or newest.state["pending"] is None:
            return None
        return dict(newest.state["state"]), PendingFeedbackContext.from_dict(newest.state["pending"])

    def clear_pending_feedback(self, flow_uuid: str) -> None:
        amend(self._thread(flow_uuid), lambda saved: {**saved, "pending": None} if saved and saved["pending"] else None)

    def _thread(self, flow: str) -> perdure.Thread:
        thread: perdure.Thread = self._store.thread(f"crewai/{flow}", metadata={"flow": flow})
        return thread


def _plain(state: dict[str, Any] | BaseModel) -> dict[str, Any]:
    return state.model_dump(mode="json") if isinstance(state, BaseModel) else dict(state)
