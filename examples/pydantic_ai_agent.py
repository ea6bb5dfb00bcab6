"""Make an agent of Pydantic AI durable: killed after it paid, the same line resumes it, and pays once.

    python examples/pydantic_ai_agent.py       twice; needs, in a clone: pip install '.[pydantic-ai]'

The model needs no network. The first time the process kills itself after the payment.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import perdure
from perdure.pydantic_ai import PerdureDurability

LEDGER = Path("payments.txt")  # the bank's, one line per payment


def stand_in(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Search, pay, report. A real agent names a model: Agent("openai:gpt-5", …)."""
    results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    print(f"the model is called after {len(results)} results", flush=True)
    if not results:
        return ModelResponse([ToolCallPart("search", {"city": "Lisbon"}, "call-1")])
    if len(results) == 1:
        return ModelResponse([ToolCallPart("pay", {"cents": 9000}, "call-2")])
    return ModelResponse([TextPart(f"Your room is booked: {results[-1].content}.")])


def search(city: str) -> str:
    """Find a hotel. A plain tool is a step: its result is recorded."""
    return f"Pension Sol in {city}, 90 EUR"


def find(key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the payment up after a crash in the middle of it."""
    is_paid = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done("paid") if is_paid else perdure.outcome.NotDone()


@perdure.effect(reconcile=find)
async def pay(cents: int, key: perdure.IdempotencyKey) -> str:
    """Pay the hotel."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {cents}\n")
    os.kill(os.getpid(), signal.SIGKILL)  # the bank has paid, but this process dies before it knows
    return "paid"


agent = Agent(FunctionModel(stand_in), name="travel", tools=[search, pay], capabilities=[PerdureDurability()])


@perdure.durable
async def travel(city: str) -> str:
    return (await agent.run(f"A night in {city}, please")).output


if __name__ == "__main__":
    with perdure.open("pydantic_ai.db") as store:
        print(store.run(travel, "Lisbon", id="trip-1").result())
        print("payments:", len(LEDGER.read_text().splitlines()))
