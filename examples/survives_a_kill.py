"""Run an agent that dies in the middle of its work, and resumes when you run the same line again.

    python examples/survives_a_kill.py        # dies
    python examples/survives_a_kill.py        # resumes

It keeps its state in agent.db in the current directory. Delete that file to start over.
"""

from __future__ import annotations

import os
import signal

import perdure

CITIES = ["Lisbon", "Oslo", "Kyoto", "Quito", "Tunis"]


def research(city: str) -> str:
    """Stand in for a call of a model or a tool, which is slow and costs money."""
    return f"{len(city)} places to see"


with perdure.open("agent.db") as store:
    thread = store.thread("trip-42")
    first_run = thread.get_head() is None
    state = {"found": {}} if first_run else thread.load().state

    for city in CITIES:
        if city in state["found"]:
            print(f"{city}: known already")
            continue
        if first_run and city == "Quito":
            os.kill(os.getpid(), signal.SIGKILL)  # no exception, no cleanup: like a machine that loses power
        state["found"][city] = research(city)
        thread.save(state, note=city)  # durable when it returns
        print(f"{city}: {state['found'][city]}", flush=True)
