"""Make an agent of the Microsoft Agent Framework durable: killed after it paid, the same line resumes and pays once.

    python examples/agent_framework_agent.py   twice; needs, in a clone: pip install '.[agent-framework]'

The model needs no network. The first time the process kills itself after the payment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from agent_framework import Agent, BaseChatClient, ChatResponse, Content, Message, tool
from agent_framework._middleware import ChatMiddlewareLayer
from agent_framework._tools import FunctionInvocationLayer

import perdure
from perdure.agent_framework import PerdureHistoryProvider, durability

LEDGER = Path("payments.txt")  # the bank's, one line per payment


class StandIn(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """Search, pay, report. A real agent has a client such as OpenAIChatClient()."""

    def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Awaitable[Any]:
        async def respond() -> ChatResponse:
            contents = [content for message in messages for content in message.contents]
            results = [content.result for content in contents if content.type == "function_result"]
            print(f"the model is called after {len(results)} results", flush=True)
            if not results:
                said = Content.from_function_call("call-1", "search", arguments={"city": "Lisbon"})
            elif len(results) == 1:
                said = Content.from_function_call("call-2", "pay", arguments={"cents": 9000})
            else:
                said = Content.from_text(f"Your room is booked: {results[-1]}.")
            return ChatResponse(messages=[Message(role="assistant", contents=[said])], response_id="r")

        return respond()


@tool(approval_mode="never_require")
def search(city: str) -> str:
    """Find a hotel. A plain tool is a step: its result is recorded."""
    return f"Pension Sol in {city}, 90 EUR"


def find(key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look the payment up after a crash in the middle of it."""
    is_paid = LEDGER.exists() and key in LEDGER.read_text()
    return perdure.outcome.Done("paid") if is_paid else perdure.outcome.NotDone()


@tool(approval_mode="never_require")
@perdure.effect(reconcile=find)
async def pay(cents: int, key: perdure.IdempotencyKey) -> str:
    """Pay the hotel."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{key} {cents}\n")
    os.kill(os.getpid(), signal.SIGKILL)  # the bank has paid, but this process dies before it knows
    return "paid"


store = perdure.open("agent_framework.db")
history = PerdureHistoryProvider(store)
agent = Agent(StandIn(), name="travel", tools=[search, pay], middleware=durability(), context_providers=[history])


@perdure.durable
async def travel(city: str) -> str:
    session = agent.create_session(session_id="ann")
    return (await agent.run(f"A night in {city}, please", session=session)).text


if __name__ == "__main__":
    with store:
        print(store.run(travel, "Lisbon", id="trip-1").result())
        print("payments:", len(LEDGER.read_text().splitlines()))
