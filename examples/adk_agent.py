"""Make an agent of Google's ADK durable: killed after it paid, the same line resumes it, and pays once.

    python examples/adk_agent.py       twice; needs, in a clone: pip install '.[adk]'

The model needs no network. The first time the process kills itself after the payment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types

import perdure
from perdure.adk import PerdureSessionService, durable

LEDGER = Path("payments.txt")  # the bank's, one line per payment


class StandIn(BaseLlm):
    """Search, pay, report. A real agent names a model: LlmAgent(model="gemini-3.5-flash", …)."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        parts = [part for content in llm_request.contents for part in content.parts or ()]
        results = [part.function_response.response for part in parts if part.function_response]
        print(f"the model is called after {len(results)} results", flush=True)
        if not results:
            said = types.Part(function_call=types.FunctionCall(name="search", args={"city": "Lisbon"}, id="call-1"))
        elif len(results) == 1:
            said = types.Part(function_call=types.FunctionCall(name="pay", args={"cents": 9000}, id="call-2"))
        else:
            said = types.Part(text=f"Your room is booked: {(results[-1] or {})['result']}.")
        yield LlmResponse(content=types.Content(role="model", parts=[said]))


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


agent = durable(LlmAgent(name="travel", model=StandIn(model="stand-in"), tools=[search, pay]))
store = perdure.open("adk.db")


@perdure.durable
async def travel(city: str) -> str:
    sessions = PerdureSessionService(store)
    session = await sessions.create_session(app_name="travel", user_id="ann")
    runner = Runner(agent=agent, app_name="travel", session_service=sessions)
    message, said = types.UserContent(f"A night in {city}, please"), ""
    async for event in runner.run_async(user_id="ann", session_id=session.id, new_message=message):
        said = "".join(part.text or "" for part in (event.content and event.content.parts) or ())
    return said


if __name__ == "__main__":
    with store:
        print(store.run(travel, "Lisbon", id="trip-1").result())
        print("payments:", len(LEDGER.read_text().splitlines()))
