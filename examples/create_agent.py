"""Give LangChain's `create_agent` an effect as a tool: killed in the middle of the booking, the agent books once.

    python examples/create_agent.py        needs, in a clone: pip install langchain '.[langgraph]'

The model needs no network. Write `@tool` above `@perdure.effect`: the model sees `flight` and not `key`. The agent runs
in a process of its own, which kills itself after it booked the flight. Then this script runs the same line again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

import perdure
from perdure.langgraph import PerdureSaver

LEDGER = Path("ledger.txt")  # the airline's bookings, one per line


def find(key: perdure.IdempotencyKey, flight: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the booking up after a crash in the middle of it."""
    is_booked = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done(f"booked {flight}") if is_booked else perdure.outcome.NotDone()


@tool
@perdure.effect(reconcile=find)
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    """Book a flight."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {flight}\n")
    os.kill(os.getpid(), signal.SIGKILL)  # the airline has booked, but this process dies before it knows
    return f"booked {flight}"


class StandIn(BaseChatModel):
    """A model that calls the tool, then repeats its result."""

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Any, **kwargs: Any) -> StandIn:
        print("the model sees:", [(each.name, sorted(each.args)) for each in tools], flush=True)
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        last = messages[-1]
        if isinstance(last, ToolMessage):
            said = AIMessage(f"Done: {last.content}.")
        else:
            said = AIMessage("", tool_calls=[{"name": "book", "args": {"flight": "LIS-0715"}, "id": "call-1"}])
        return ChatResult(generations=[ChatGeneration(message=said)])


def run() -> None:
    with PerdureSaver("agent.db") as saver:
        agent = create_agent(StandIn(), [book], checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "trip-1"}}
        started = saver.get_tuple(config) is not None
        task: Any = {"messages": [("user", "To Lisbon, please")]}
        result = agent.invoke(None if started else task, config)
        print(result["messages"][-1].content)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the same line twice
            agent = subprocess.run([sys.executable, str(Path(__file__).resolve()), "run"], cwd=folder, check=False)
            print("killed" if agent.returncode == -signal.SIGKILL else f"ended with {agent.returncode}", flush=True)
        print("the airline booked:", [line.split()[1] for line in Path(folder, LEDGER).read_text().splitlines()])


if __name__ == "__main__":
    run() if sys.argv[1:] == ["run"] else main()
