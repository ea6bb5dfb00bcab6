"""Memory as tools of a model: `memory_search`, `memory_save`, `memory_forget`, of one namespace.

They are plain functions with types and docstrings, for `perdure.tools`, agent frameworks and MCP. In a durable function
each call commits with the journal. An error that the model can fix is returned as an answer. No argument reaches
another namespace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

from perdure.agents.formats import error_text, text_of
from perdure.errors import Conflict, UsageError, ValueProblem
from perdure.memory.tokens import token_counter
from perdure.runs.functions.specs import DurableSpec
from perdure.storage.program import Flow

if TYPE_CHECKING:
    from perdure.memory.handle import Memory
    from perdure.memory.models import Item

_FOUND_MAX = 50
_FIXABLE = (UsageError, Conflict, ValueProblem)
Tool = Callable[..., Any]
Key = Annotated[str, "a short name, such as favourite_colour"]


def memory_tools(
    memory: Memory,
    read_only: bool,
    budget_tokens: int,
    *,
    is_async: bool,
    refuse: Callable[[str], str] = lambda why: error_text(why, ""),
) -> list[Tool]:
    """Return the tools of a namespace. `refuse` returns the answer to an error that the model can fix, or raises."""
    if type(budget_tokens) is not int or budget_tokens < 50:
        raise UsageError(f"tools(budget_tokens={budget_tokens!r}): at least 50, so that an item fits")
    count = token_counter()

    def memory_search(
        query: Annotated[str, "what to look for, in a few words"],
        limit: Annotated[int, f"at most so many facts, up to {_FOUND_MAX}"] = 5,
    ) -> Flow[str]:
        """Search what was remembered in earlier conversations. Gives one fact per line, the best first. A fact with
        "match": "weak" may be about something else; of "match": "none" no word was found, and it is among the newest.
        """
        items = yield from _matches(memory, query, min(limit, _FOUND_MAX))
        lines: list[str] = []
        left = ""
        for n, (item, match) in enumerate(items):
            line = text_of({"key": item.key, "value": item.value, "saved": item.at.date(), **match})
            omitted = f"({len(items) - n} more did not fit: ask for less at once)"
            if count("\n".join([*lines, line, omitted])) > budget_tokens:
                left = omitted
                break
            lines.append(line)
        return "\n".join([*lines, *([left] if left else [])]) or "nothing is remembered yet"

    def memory_save(key: Key, fact: Annotated[str, "one fact, in a sentence"]) -> Flow[str]:
        """Remember a fact for later conversations. What was saved under the same key is replaced."""
        if (size := count(fact)) > budget_tokens // 2:
            raise UsageError(f"this fact has {size} tokens, and {budget_tokens // 2} are the most: save a shorter one")

        def change(old: Any) -> Any:
            if old is not None and not (isinstance(old, dict) and old.keys() == {"fact"}):
                raise UsageError(f"what is under {key!r} was not saved by this tool: use another key")
            return {"fact": fact}

        item = yield from _flow(memory.update, key, change)
        return f"saved {item.key!r}"

    def memory_forget(key: Key) -> Flow[str]:
        """Forget what was saved under a key, because it is wrong or not wanted any more."""
        if not (yield from _flow(memory.delete, key)):
            raise UsageError(f"nothing is remembered under {key!r}")
        return f"forgot {key!r}"

    every: list[Callable[..., Flow[str]]] = [memory_search, memory_save, memory_forget]
    return [_tool(memory, flow, is_async, refuse) for flow in (every[:1] if read_only else every)]


def _matches(memory: Memory, query: str, limit: int) -> Flow[list[tuple[Item, dict[str, str]]]]:
    """Return the facts about a query and then, labelled, those that may be about it.

    A search that finds little does not prove that nothing is known. The model reads the others too, and decides.
    """
    matching = yield from _flow(memory.search, query, limit=limit, relevant=True)
    known = {(item.namespace, item.key) for item in matching}
    others, match = [], "weak"
    if len(matching) < limit:
        others = yield from _flow(memory.search, query, limit=limit)
        if not others:
            others, match = (yield from memory._newest(limit)), "none"
    new = [item for item in others if (item.namespace, item.key) not in known]
    return [*((item, {}) for item in matching), *((item, {"match": match}) for item in new[: limit - len(matching)])]


def _flow(method: Any, *args: Any, **options: Any) -> Flow[Any]:
    """Return the flow of a method of a handle (`storage/twins.py`)."""
    return method.__wrapped__(method.__self__, *args, **options)  # type: ignore[no-any-return]


def _tool(memory: Memory, flow: Callable[..., Flow[str]], is_async: bool, refuse: Callable[[str], str]) -> Tool:
    flow.__annotations__["return"] = "str"
    tool: Any
    if is_async:

        @wraps(flow)
        async def tool(*args: Any, **kwargs: Any) -> str:
            try:
                return await memory._arun(flow(*args, **kwargs))
            except _FIXABLE as error:
                return refuse(str(error))

    else:

        @wraps(flow)
        def tool(*args: Any, **kwargs: Any) -> str:
            try:
                return memory._run(flow(*args, **kwargs))
            except _FIXABLE as error:
                return refuse(str(error))

    # perdure.tools calls it as a part of the run, not as a step: memory itself journals its calls.
    tool.perdure_durable = DurableSpec(tool, flow.__name__)
    return tool  # type: ignore[no-any-return]
