"""A worker whose agent dies of one message, and a sender of it: `python deadly_worker.py URL`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import perdure

if __name__ == "__main__":
    store = perdure.open(sys.argv[1], lease_s=0.5)
    team = store.team("deadly")

    @team.agent(state={"got": []}, attempts=1)
    def agent(state: Any, message: Any) -> None:
        if message == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        state["got"].append(message)

    team.send("agent", "deadly", key="1")
    team.send("agent", "harmless", key="2")
    while team.members()[0].turn < 2:
        team.work(until_idle=True, poll_s=0.05)
