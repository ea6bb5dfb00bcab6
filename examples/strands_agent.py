"""Make an agent of Strands durable: killed after it paid, the same line resumes it, and pays once.

    python examples/strands_agent.py   twice; needs, in a clone: pip install '.[strands]'

The model needs no network. The first time the process kills itself after the payment.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

from strands import Agent, tool
from strands.models import Model

import perdure
from perdure.strands import PerdureSessionManager, durability

LEDGER = Path("payments.txt")  # the bank's, one line per payment


class StandIn(Model):
    """Search, pay, report. A real agent has a model such as BedrockModel()."""

    def update_config(self, **config: Any) -> None:
        pass

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterable[Any]:
        contents = [content for message in messages for content in message["content"]]
        results = [content["toolResult"]["content"][0]["text"] for content in contents if "toolResult" in content]
        print(f"the model is called after {len(results)} results", flush=True)
        calls = [("search", {"city": "Lisbon"}), ("pay", {"cents": 9000})]
        start: dict[str, Any] = {}
        delta: dict[str, Any] = {"text": f"Your room is booked: {results[-1]}." if results else ""}
        if len(results) < 2:
            name, arguments = calls[len(results)]
            start = {"toolUse": {"toolUseId": f"call-{len(results)}", "name": name}}
            delta = {"toolUse": {"input": json.dumps(arguments)}}
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": start}}
        yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if len(results) < 2 else "end_turn"}}


@tool
def search(city: str) -> str:
    """Find a hotel. A plain tool is a step: its result is recorded."""
    return f"Pension Sol in {city}, 90 EUR"


def find(key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the payment up after a crash in the middle of it."""
    is_paid = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done("paid") if is_paid else perdure.outcome.NotDone()


@tool
@perdure.effect(reconcile=find)
async def pay(cents: int, key: perdure.IdempotencyKey) -> str:
    """Pay the hotel."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {cents}\n")
    os.kill(os.getpid(), signal.SIGKILL)  # the bank has paid, but this process dies before it knows
    return "paid"


store = perdure.open("strands.db")


@perdure.durable
async def travel(city: str) -> str:
    session = PerdureSessionManager("ann", store)
    agent = Agent(
        StandIn(), name="travel", tools=[search, pay], plugins=[durability()], session_manager=session,
        callback_handler=None,
    )  # fmt: skip
    return str(await agent.invoke_async(f"A night in {city}, please")).strip()


if __name__ == "__main__":
    with store:
        print(store.run(travel, "Lisbon", id="trip-1").result())
        print("payments:", len(LEDGER.read_text().splitlines()))
