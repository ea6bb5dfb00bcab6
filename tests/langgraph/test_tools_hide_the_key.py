"""A model never sees the idempotency key: not in a tool that LangChain makes of an effect, and not in perdure.tools."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
from langchain_core.tools import StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool

import perdure


def plain(flight: str, key: perdure.IdempotencyKey, seats: int = 1) -> str:
    """Book a flight."""
    return flight


async def awaited(flight: str, key: perdure.IdempotencyKey | None = None, *, seats: int = 1) -> str:
    """Book a flight."""
    return flight


@pytest.mark.parametrize("body", [plain, awaited])
def test_the_schema_of_a_tool_has_no_key(body: Any) -> None:
    effect: Any = perdure.effect(name=f"hide.{body.__name__}")(body)
    assert list(inspect.signature(effect).parameters) == ["flight", "seats"]
    assert "key" not in get_type_hints(effect)
    made = [tool(effect)]
    if body is plain:
        made.append(StructuredTool.from_function(effect))
    for each in made:
        shown = convert_to_openai_tool(each)["function"]["parameters"]
        assert sorted(shown["properties"]) == ["flight", "seats"]
    [schema] = perdure.tools({"book": effect}).schemas()
    assert sorted(schema["function"]["parameters"]["properties"]) == ["flight", "seats"]
