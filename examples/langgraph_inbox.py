"""Answer an `interrupt()` of a LangGraph graph from outside: a worker that resumes it is killed, and another continues.

    python examples/langgraph_inbox.py        needs, in a clone: pip install '.[langgraph]'

The graph asks which flight to book. A person answers in a process without the graph's code. The first worker kills
itself after it booked; the second one resumes the thread with the same answer, and books nothing again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

import perdure
from perdure.langgraph import PerdureSaver

SCRIPT = os.path.abspath(__file__)
LEDGER = Path("ledger.txt")  # the airline's bookings, one per line


def find(key: perdure.IdempotencyKey, flight: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the booking up after a crash in the middle of it."""
    is_booked = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done(f"booked {flight}") if is_booked else perdure.outcome.NotDone()


@perdure.effect(reconcile=find)
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {flight}\n")
    print("the worker is killed, after it booked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return f"booked {flight}"


def travel(state: MessagesState) -> MessagesState:
    flight = interrupt({"question": "Which flight?", "price": 90})
    return {"messages": [AIMessage(book(flight))]}


builder = StateGraph(MessagesState)
builder.add_node("travel", travel)
builder.add_edge(START, "travel")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with PerdureSaver("agent.db") as saver:
            graph = builder.compile(checkpointer=saver)
            trip: RunnableConfig = {"configurable": {"thread_id": "trip-7"}}
            graph.invoke({"messages": [HumanMessage("to Lisbon")]}, trip)
            [question] = saver.store.questions()
            print(f"thread {question.thread} asks: {question.text} {question.arguments}", flush=True)
        command = [
            sys.executable,
            "-m",
            "perdure",
            "--store",
            "agent.db",
            "answer",
            "trip-7",
            "LH400",
            "--who",
            "maria",
        ]
        subprocess.run(command, check=True)
        for _ in range(2):
            subprocess.run([sys.executable, SCRIPT, "worker"], check=False)
        with PerdureSaver("agent.db") as saver:
            state = builder.compile(checkpointer=saver).get_state(trip)
            print(f"the graph says: {state.values['messages'][-1].content}")
        print(f"bookings: {len(LEDGER.read_text().splitlines())}")


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        with PerdureSaver("agent.db") as saver:
            perdure.Worker(saver.store, graphs=[builder.compile(checkpointer=saver)]).run(until_idle=True)
    else:
        main()
