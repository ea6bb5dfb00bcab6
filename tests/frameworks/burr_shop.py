"""Persisters of Burr for the session contract: each append is the next state of one application."""

from __future__ import annotations

from contextlib import suppress

from agent_contract import work
from burr.core.state import State

import perdure
from perdure.burr import PerdurePersister

__all__ = ["PerdurePersister", "append", "texts", "work"]


def append(store: perdure.Store, session: str, text: str) -> None:
    persister = PerdurePersister(store)
    while True:
        newest = persister.load("", session)
        number, said = (newest["sequence_id"] + 1, newest["state"]["said"]) if newest else (0, [])
        with suppress(perdure.Conflict):
            return persister.save("", session, number, "say", State({"said": [*said, text]}), "completed")


def texts(store: perdure.Store, session: str) -> list[str]:
    newest = PerdurePersister(store).load("", session)
    assert newest is not None
    return list(newest["state"]["said"])
