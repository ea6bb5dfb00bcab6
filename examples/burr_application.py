"""Keep an application of Burr in a store: killed in its second action, it goes on with the state of the first.

    python examples/burr_application.py    twice; needs, in a clone: pip install '.[burr]'

The first time the process kills itself in the middle.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from burr.core import Application, ApplicationBuilder, State, action

import perdure
from perdure.burr import PerdurePersister


@action(reads=[], writes=["hotel"])
def search(state: State[Any]) -> State[Any]:
    print("searching", flush=True)
    return state.update(hotel="Pension Sol in Lisbon")


@action(reads=["hotel"], writes=["booked"])
def book(state: State[Any]) -> State[Any]:
    if not Path("was_killed").exists():
        Path("was_killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return state.update(booked=True)


def travel(store: perdure.Store) -> State[Any]:
    persister = PerdurePersister(store)
    app: Application[Any] = (
        ApplicationBuilder()
        .with_actions(search, book)
        .with_transitions(("search", "book"))
        .with_identifiers(app_id="trip-1")
        .with_state_persister(persister)
        .initialize_from(persister, resume_at_next_action=True, default_state={}, default_entrypoint="search")
        .build()
    )
    _, _, state = app.run(halt_after=["book"])
    return state


if __name__ == "__main__":
    with perdure.open("burr.db") as store:
        print("booked:", travel(store)["hotel"])
        print([saved.note for saved in store.thread("burr//trip-1").history()])
