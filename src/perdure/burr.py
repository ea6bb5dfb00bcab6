"""`PerdurePersister` and `AsyncPerdurePersister`: the states of Burr's applications in a store.

    from perdure.burr import PerdurePersister

    persister = PerdurePersister(store)
    builder = ApplicationBuilder().with_identifiers(app_id="trip-1").with_state_persister(persister)
    app = builder.initialize_from(persister, resume_at_next_action=True, …).build()

It needs the extra `burr`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

import perdure
from perdure.adapters import aamend, amend, arecall, checked_store, recall
from perdure.errors import Conflict, ExtraMissing

try:
    import burr.core  # noqa: F401
except ModuleNotFoundError as error:
    raise ExtraMissing("perdure.burr", "burr") from error

from burr.core.persistence import AsyncBaseStatePersister, BaseStatePersister, PersistedStateData
from burr.core.state import State

__all__ = ["AsyncPerdurePersister", "PerdurePersister"]

Status = Literal["completed", "failed"]


class _Threads:
    """The threads of applications: a thread per application, a checkpoint per action."""

    def __init__(self, store: perdure.Store) -> None:
        self._store = checked_store(store)

    def _thread(self, partition_key: str | None, app_id: str) -> perdure.Thread:
        tags = {"burr_partition": partition_key or "", "burr_app": app_id}
        return self._store.thread("/".join(["burr", *(quote(part, safe="") for part in tags.values())]), metadata=tags)


class PerdurePersister(_Threads, BaseStatePersister):
    """Persists the states of applications, and loads them after a kill.

    Of two processes that run the same application, the slower one gets `Conflict`.
    """

    def is_initialized(self) -> bool:
        return True

    def save(
        self,
        partition_key: str | None,
        app_id: str,
        sequence_id: int,
        position: str,
        state: State[Any],
        status: Status,
        **kwargs: Any,
    ) -> None:
        thread, saved = self._thread(partition_key, app_id), _saved(sequence_id, position, state, status)
        if amend(thread, _following(saved), note=_note(saved)) is None:
            _check(recall(thread), app_id, saved)

    def load(
        self, partition_key: str | None, app_id: str | None, sequence_id: int | None = None, **kwargs: Any
    ) -> PersistedStateData | None:
        """Return the state after an action, or the newest one. Without `app_id`, that of the newest application."""
        app = app_id or next(iter(self.list_app_ids(partition_key)), None)
        if app is None:
            return None
        thread = self._thread(partition_key, app)
        checkpoint = recall(thread)
        if checkpoint is not None and sequence_id is not None:
            each = thread.history(start=checkpoint)
            checkpoint = next((one for one in each if _is_at(one, sequence_id)), None)
        return None if checkpoint is None else _loaded(checkpoint, partition_key, app)

    def list_app_ids(self, partition_key: str | None, **kwargs: Any) -> list[str]:
        """Return the ids of the applications of a partition, the newest first."""
        infos = self._store.threads(where={"burr_partition": partition_key or ""}, limit=None)
        return [info.metadata["burr_app"] for info in infos]


class AsyncPerdurePersister(_Threads, AsyncBaseStatePersister):
    """`PerdurePersister` for applications that run on an event loop."""

    async def is_initialized(self) -> bool:
        return True

    async def save(
        self,
        partition_key: str | None,
        app_id: str,
        sequence_id: int,
        position: str,
        state: State[Any],
        status: Status,
        **kwargs: Any,
    ) -> None:
        thread, saved = self._thread(partition_key, app_id), _saved(sequence_id, position, state, status)
        if await aamend(thread, _following(saved), note=_note(saved)) is None:
            _check(await arecall(thread), app_id, saved)

    async def load(
        self, partition_key: str | None, app_id: str | None, sequence_id: int | None = None, **kwargs: Any
    ) -> PersistedStateData | None:
        app = app_id or next(iter(await self.list_app_ids(partition_key)), None)
        if app is None:
            return None
        thread = self._thread(partition_key, app)
        checkpoint = await arecall(thread)
        if checkpoint is not None and sequence_id is not None:
            each = thread.ahistory(start=checkpoint)
            checkpoint = await anext((one async for one in each if _is_at(one, sequence_id)), None)
            checkpoint = checkpoint and await thread.aload(checkpoint)  # its state, without blocking the loop
        return None if checkpoint is None else _loaded(checkpoint, partition_key, app)

    async def list_app_ids(self, partition_key: str | None, **kwargs: Any) -> list[str]:
        infos = await self._store.athreads(where={"burr_partition": partition_key or ""}, limit=None)
        return [info.metadata["burr_app"] for info in infos]


def _saved(sequence_id: int, position: str, state: State[Any], status: Status) -> dict[str, Any]:
    return {"sequence_id": sequence_id, "position": position, "status": status, "state": state.serialize()}


def _note(saved: dict[str, Any]) -> str:
    return f"{saved['sequence_id']} {saved['position']} {saved['status']}"


def _is_at(checkpoint: perdure.Checkpoint, sequence_id: int) -> bool:
    return (checkpoint.note or "").partition(" ")[0] == str(sequence_id)


def _following(saved: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the change that saves a state after those of earlier actions alone."""
    return lambda newest: saved if newest is None or newest["sequence_id"] < saved["sequence_id"] else None


def _check(newest: perdure.Checkpoint | None, app_id: str, saved: dict[str, Any]) -> None:
    """Check a state that was not saved: it is the newest already, as after a call that is repeated. Raises Conflict."""
    if newest is None or newest.state != saved:
        raise Conflict(f"application {app_id!r} continued in another process: load it again")


def _loaded(checkpoint: perdure.Checkpoint, partition_key: str | None, app: str) -> PersistedStateData:
    saved = checkpoint.state
    return {
        "partition_key": partition_key or "",
        "app_id": app,
        "sequence_id": saved["sequence_id"],
        "position": saved["position"],
        "state": State.deserialize(saved["state"]),
        "created_at": checkpoint.at.isoformat(),
        "status": saved["status"],
    }
