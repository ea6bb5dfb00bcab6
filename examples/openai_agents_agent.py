"""Make an agent of the OpenAI Agents SDK durable: killed after it paid, the same line resumes it, and pays once.

    python examples/openai_agents_agent.py     twice; needs, in a clone: pip install '.[openai-agents]'

The model needs no network. The first time the process kills itself after the payment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, Usage, function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call

import perdure
from perdure.openai_agents import PerdureSession, durable, run

LEDGER = Path("payments.txt")  # the bank's, one line per payment
set_tracing_disabled(True)


class StandIn(Model):
    """Search, pay, report. A real agent names a model: Agent(model="gpt-5", …)."""

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        results = [item["output"] for item in input if item.get("type") == "function_call_output"]
        print(f"the model is called after {len(results)} results", flush=True)
        if not results:
            output = function_call("search", {"city": "Lisbon"}, call_id="call-1")
        elif len(results) == 1:
            output = function_call("pay", {"cents": 9000}, call_id="call-2")
        else:
            output = assistant_message(f"Your room is booked: {results[-1]}.")
        return ModelResponse([output], Usage(), None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


@function_tool
def search(city: str) -> str:
    """Find a hotel. A plain tool is a step: its result is recorded."""
    return f"Pension Sol in {city}, 90 EUR"


def find(key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the payment up after a crash in the middle of it."""
    is_paid = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done("paid") if is_paid else perdure.outcome.NotDone()


@function_tool
@perdure.effect(reconcile=find)
async def pay(cents: int, key: perdure.IdempotencyKey) -> str:
    """Pay the hotel."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {cents}\n")
    os.kill(os.getpid(), signal.SIGKILL)  # the bank has paid, but this process dies before it knows
    return "paid"


agent = durable(Agent(name="travel", model=StandIn(), tools=[search, pay]))
store = perdure.open("openai_agents.db")


@perdure.durable
async def travel(city: str) -> str:
    result = await run(agent, f"A night in {city}, please", session=PerdureSession("ann", store))
    return str(result.final_output)


if __name__ == "__main__":
    with store:
        print(store.run(travel, "Lisbon", id="trip-1").result())
        print("payments:", len(LEDGER.read_text().splitlines()))
