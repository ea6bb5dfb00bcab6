"""Keep a flow of CrewAI in a store: killed between two methods, the same flow goes on with the state of the first.

    python examples/crewai_flow.py    twice; needs, in a clone: pip install '.[crewai]'

It needs no model and no network. The first time the process kills itself in the second method.
"""

from __future__ import annotations

import os
import signal

from crewai.flow.flow import Flow, listen, start
from crewai.flow.persistence import persist
from pydantic import BaseModel

import perdure
from perdure.crewai import PerdureFlowPersistence

store = perdure.open("crewai.db")


class Trip(BaseModel):
    id: str = "trip-1"
    city: str = "Lisbon"
    hotel: str | None = None
    booked: bool = False


@persist(PerdureFlowPersistence(store))
class Travel(Flow[Trip]):
    @start()
    def search(self) -> None:
        if self.state.hotel is None:  # a crew would search here
            print("searching", flush=True)
            self.state.hotel = f"Pension Sol in {self.state.city}"

    @listen(search)
    def book(self) -> str:
        if not os.path.exists("was_killed"):
            open("was_killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.state.booked = True
        return f"{self.state.hotel} is booked"


if __name__ == "__main__":
    with store:
        print(Travel(suppress_flow_events=True).kickoff(inputs={"id": "trip-1"}))
        print([saved.note for saved in store.thread("crewai/trip-1").history()])
