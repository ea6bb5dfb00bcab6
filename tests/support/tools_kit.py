"""What the tests of tools share."""

from __future__ import annotations

import json
from typing import Annotated, Any


class SoldOut(Exception):
    """Nothing left."""


def chat(call_id: str | None, name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call as OpenAI's chat API has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def said(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


def search(city: Annotated[str, "where to look"], nights: int = 1) -> list[str]:
    """Find hotels in a city."""
    return [f"{city} {nights}"]
