"""Run a team that is killed in the middle of its work, was cut while it worked, and resumes.

    python examples/team.py        # works, takes a cut, and is killed
    python examples/team.py        # resumes; then goes back to the cut, and does it again

It keeps everything in team.db in the current directory. Delete that file to start over.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import perdure

TOPICS = ["tides", "moons", "orbits", "comets", "eclipses"]
is_first_run = not os.path.exists("team.db")

with perdure.open("team.db") as store:
    team = store.team("research")

    @perdure.step
    def search(topic: str) -> str:
        """Stand in for a call of a model or a tool, which is slow and costs money."""
        print(f"  searching for {topic}", flush=True)
        return f"{len(topic)} papers about {topic}"

    @team.agent(state={"notes": []})
    def researcher(state: Any, message: Any) -> None:
        state["notes"].append(search(message))
        if is_first_run and message == "orbits":
            team.snapshot("while-it-works")
        if is_first_run and message == "comets":
            os.kill(os.getpid(), signal.SIGKILL)  # no exception, no cleanup: like a machine that loses power
        perdure.send("writer", state["notes"][-1])

    @team.agent(state={"lines": []})
    def writer(state: Any, message: Any) -> None:
        state["lines"].append(message)

    if is_first_run:
        for topic in TOPICS:
            team.send("researcher", topic)
    team.work(until_idle=True)
    print("written:", store.thread("run:research/writer").load().state["lines"])

    snap = team.get_snapshot("while-it-works")
    print("in flight at the cut:", [one.message for one in snap.in_flight()])
    team.restore(snap)
    print("back at the cut:", store.thread("run:research/writer").load().state["lines"])
    team.work(until_idle=True)
    print("written again:", store.thread("run:research/writer").load().state["lines"])
