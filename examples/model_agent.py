"""Book a flight with a model of OpenAI or Anthropic. Kill it anywhere, run the same line again, and it resumes.

Needs `pip install openai anthropic`, and OPENAI_API_KEY or ANTHROPIC_API_KEY. The answers of the model are recorded,
so none is paid for twice. The bookings are lines of bookings.txt.

python examples/model_agent.py openai
perdure drill examples/model_agent.py:ask_openai --args "Book a flight to Lisbon"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import perdure

BOOKINGS = Path("bookings.txt")
TASK = "Book a flight to Lisbon around noon"


@perdure.step
def search(city: str) -> list[str]:
    """Find flights to a city."""
    return [f"{city} 07:15", f"{city} 12:40"]


def find(key: perdure.IdempotencyKey) -> perdure.outcome.Done | perdure.outcome.NotDone:
    """Look a booking up by its key, after a crash in the middle of it."""
    lines = BOOKINGS.read_text().splitlines() if BOOKINGS.exists() else []
    booked = [line.removeprefix(f"{key} ") for line in lines if line.startswith(key)]
    return perdure.outcome.Done(f"booked {booked[0]}") if booked else perdure.outcome.NotDone()


@perdure.effect(reconcile=find)
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    """Book a flight."""
    with BOOKINGS.open("a") as file:
        file.write(f"{key} {flight}\n")
    return f"booked {flight}"


tools = perdure.tools([search, book])


# The clients are imported by the steps that use them: a replay of recorded answers does not need them.


@perdure.step(retries=3)
def think_openai(messages: list[Any]) -> dict[str, Any]:
    """Stream an answer of the model to the readers of the run, and record it."""
    from openai import OpenAI
    from openai.lib.streaming.chat import ChatCompletionStreamState

    answer, request = ChatCompletionStreamState[None](), {"messages": messages, "tools": tools.schemas()}
    for chunk in OpenAI(max_retries=0).chat.completions.create(model="gpt-5", **request, stream=True):  # type: ignore[call-overload]
        answer.handle_chunk(chunk)
        perdure.emit(chunk.choices[0].delta.content)
    message = answer.get_final_completion().choices[0].message
    return message.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"index"}}})


@perdure.durable
def ask_openai(task: str) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        messages.append(think_openai(messages))
        if not (results := tools.call(messages[-1].get("tool_calls"))):
            return str(messages[-1]["content"])
        messages += results


@perdure.step(retries=3)
def think_anthropic(messages: list[Any]) -> dict[str, Any]:
    """Stream an answer of the model to the readers of the run, and record it."""
    from anthropic import Anthropic

    request: Any = {"max_tokens": 1000, "messages": messages, "tools": tools.schemas("anthropic")}
    with Anthropic(max_retries=0).messages.stream(model="claude-sonnet-5", **request) as stream:
        for token in stream.text_stream:
            perdure.emit(token)
        return stream.get_final_message().model_dump(exclude_none=True, include={"role", "content"})


@perdure.durable
def ask_anthropic(task: str) -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        messages.append(think_anthropic(messages))
        if not (results := tools.call(messages[-1]["content"])):
            return str(messages[-1]["content"][-1]["text"])
        messages += results


def main(provider: str) -> None:
    """Start or resume the run; every process executes the same line."""
    with perdure.open("agent.db") as store:
        print(store.run(ask_openai if provider == "openai" else ask_anthropic, TASK, id=f"trip-{provider}").result())


if __name__ == "__main__":
    main(sys.argv[1])
