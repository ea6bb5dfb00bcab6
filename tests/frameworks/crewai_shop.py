"""Flows of CrewAI, in an interpreter that has CrewAI: `python crewai_shop.py PART STORE`. Prints what happened as JSON.

CrewAI needs older versions of what other frameworks need, so this is no module of the tests' own process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from crewai.flow import Flow, HumanFeedbackPending, human_feedback, listen, start
from crewai.flow.persistence import persist

import perdure
from perdure.crewai import PerdureFlowPersistence

APPENDED = 20  # by each of three processes


class Asks:
    """A provider that asks nobody: the flow is paused until somebody answers."""

    def request_feedback(self, context: Any, flow: Any) -> str:
        raise HumanFeedbackPending(context=context)


def feedback(store: perdure.Store) -> list[Any]:
    persistence = PerdureFlowPersistence(store)

    @persist(persistence)
    class Review(Flow):
        @start()
        @human_feedback(message="Book it?", provider=Asks())
        def propose(self) -> str:
            self.state["hotel"] = "Pension Sol"
            return "Pension Sol"

        @listen(propose)
        def book(self, result: Any) -> str:
            return f"{self.state['hotel']}: {result.feedback}"

    paused = Review(suppress_flow_events=True).kickoff(inputs={"id": "trip-1"})
    loaded = persistence.load_pending_feedback("trip-1")
    assert isinstance(paused, HumanFeedbackPending)
    assert loaded is not None
    assert (loaded[0]["hotel"], loaded[1].message) == ("Pension Sol", "Book it?")
    booked = Review.from_pending("trip-1", persistence, suppress_flow_events=True).resume("yes")
    assert persistence.load_pending_feedback("trip-1") is None
    assert persistence.load_pending_feedback("other") is None
    assert persistence.load_state("other") is None
    return [booked, [saved.note for saved in store.thread("crewai/trip-1").history()]]


def append(url: str) -> list[int]:
    """Let three processes save states of one flow at the same time. Return their exit codes."""
    pids = []
    for process in range(3):
        if (pid := os.fork()) == 0:
            with perdure.open(url, durability="normal") as store:
                for number in range(APPENDED):
                    PerdureFlowPersistence(store).save_state("chat", "say", {"text": f"{process}-{number}"})
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main(part: str, url: str) -> None:
    if part == "append":
        print(json.dumps(append(url)))
        return
    with perdure.open(url) as store:
        print(json.dumps(feedback(store)))


if __name__ == "__main__":
    main(*sys.argv[1:])
