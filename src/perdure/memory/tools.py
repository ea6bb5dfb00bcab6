"""Memory as tools of a model: `memory_search`, `memory_save`, `memory_forget`, and the editing of blocks.

They are plain functions with types and docstrings, for `perdure.tools`, agent frameworks and MCP. In a durable function
each call commits with the journal. An error that the model can fix is returned as an answer. No argument reaches
another namespace. A block is a pinned item of kind "block": a text that every prompt holds and that the model edits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

from perdure.agents.formats import error_text, text_of
from perdure.agents.tokens import token_counter
from perdure.errors import Conflict, UsageError, ValueProblem
from perdure.memory import flows, rows
from perdure.memory.facts import nearest, same_fact, sentence
from perdure.memory.labels import check_key
from perdure.runs.functions.specs import DurableSpec
from perdure.storage.program import Flow

if TYPE_CHECKING:
    from perdure.memory.handle import Memory
    from perdure.memory.models import Item

BLOCK = "block"
_FOUND_MAX = 50
_NAMED_MAX = 20  # keys of facts, where none is about a query
_SIMILAR_MAX = 3
_FIXABLE = (UsageError, Conflict, ValueProblem)
Tool = Callable[..., Any]
Key = Annotated[str, "a short name, such as favourite_colour"]
Block = Annotated[str, "the name of the block"]


def memory_tools(
    memory: Memory,
    read_only: bool,
    budget_tokens: int,
    *,
    blocks: Collection[str] = (),
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
        "match": "weak" may be about something else. If nothing is about it, the keys of other facts are named.
        """
        most = min(limit or 1, _FOUND_MAX)  # none at all would say that nothing is remembered
        items = yield from _flow(memory.search, query, limit=most, explain=True)
        if not any(map(_evidence, items)):
            return (yield from _nothing(memory, items, count, budget_tokens))
        lines: list[str] = []
        left = ""
        for n, item in enumerate(items):
            line = _line(item, is_weak=_evidence(item) < 1)
            omitted = f"({len(items) - n} more did not fit: ask for less at once)"
            if count("\n".join([*lines, line, omitted])) > budget_tokens:
                left = omitted
                break
            lines.append(line)
        return "\n".join([*lines, *([left] if left else [])])

    def memory_save(
        key: Key,
        fact: Annotated[str, "one fact, in a sentence"],
        replaces: Annotated[str, "the key of a fact that is no longer true since this one is"] = "",
    ) -> Flow[str]:
        """Remember a fact for later conversations. What was saved under the same key is replaced."""
        if (size := count(fact)) > budget_tokens // 2:
            raise UsageError(f"this fact has {size} tokens, and {budget_tokens // 2} are the most: save a shorter one")
        return _saved(memory, key, fact, replaces)

    def memory_forget(key: Key) -> Flow[str]:
        """Forget what was saved under a key, because it is wrong or not wanted any more."""
        if not (yield from _flow(memory.delete, key)):
            raise UsageError(f"nothing is remembered under {key!r}")
        return f"forgot {key!r}"

    every: list[Callable[..., Flow[str]]] = [memory_search, memory_save, memory_forget]
    every += _block_tools(memory, blocks, count, budget_tokens // 2) if blocks else []
    return [_tool(memory, flow, is_async, refuse) for flow in (every[:1] if read_only else every)]


def _saved(memory: Memory, key: str, fact: str, replaces: str) -> Flow[str]:
    """Save a fact, and return the answer to the model."""
    if replaces and replaces != key:
        yield from _own(memory, key)
        if (yield from _own(memory, replaces)) is None:
            raise UsageError(f"nothing is remembered under {replaces!r}")
        item = yield from _flow(memory.put, key, {"fact": fact}, supersedes=replaces)
        return f"saved {item.key!r}, which replaces {replaces!r}"
    same, similar = yield from _near(memory, key, fact)

    def change(old: Any) -> Any:
        _check_own(same or key, old)
        return {"fact": fact}

    item = yield from _flow(memory.update, same or key, change)
    if same:
        return f"saved as {same!r}, which said the same"
    lines = [text_of({"key": one, "value": value}) for one, value in similar.items()]
    note = "\nSimilar facts are known. If one is no longer true, save this one again with its key in `replaces`:\n"
    return f"saved {item.key!r}" + (note + "\n".join(lines) if lines else "")


def _block_tools(
    memory: Memory, blocks: Collection[str], count: Callable[[str], int], most: int
) -> list[Callable[..., Flow[str]]]:
    """Return the tools that edit blocks of at most `most` tokens each."""

    def memory_append(block: Block, text: Annotated[str, "the text to add, as a line of its own"]) -> Flow[str]:
        """Add a line to a block: a text that you see in every conversation."""
        return edited(block, lambda old: f"{old}\n{text}" if old else text)

    def memory_replace(
        block: Block,
        old: Annotated[str, "the text in the block, exactly as it is there"],
        new: Annotated[str, "the text to put in its place; empty removes it"],
    ) -> Flow[str]:
        """Replace a part of a block. The old text must be there once."""

        def change(text: str) -> str:
            if not old or (times := text.count(old)) != 1:
                there = "is not in it" if not old or not times else f"is in it {times} times: quote more of it"
                raise UsageError(f"the old text {there}; the block reads: {text}")
            return text.replace(old, new)

        return edited(block, change)

    def edited(block: str, change: Callable[[str], str]) -> Flow[str]:
        if block not in blocks:
            raise UsageError(f"there is no block {block!r}, only {', '.join(blocks)}")

        def value(old: Any) -> dict[str, str]:
            text = change("" if old is None else _block_text(block, old))
            if (size := count(text)) > most:
                raise UsageError(f"the block would have {size} tokens, and {most} are the most: replace a part of it")
            return {"text": text}

        if (yield from _flow(memory.get, block)) is None:
            options = {"kind": BLOCK, "pinned": True, "expect": 0}
            item = yield from _flow(memory.put, block, value(None), **options)
        else:
            item = yield from _flow(memory.update, block, value)
        return f"block {block!r} now reads:\n{item.value['text']}"

    return [memory_append, memory_replace]


def _check_own(key: str, value: Any) -> None:
    if value is not None and not (isinstance(value, dict) and value.keys() == {"fact"}):
        raise UsageError(f"what is under {key!r} was not saved by this tool: use another key")


def _own(memory: Memory, key: str) -> Flow[Any]:
    """Return the item of a key if a tool has saved it, or None if there is none. Raises UsageError."""
    item = yield from _flow(memory.get, key)
    _check_own(key, None if item is None else item.value)
    return item


def _block_text(block: str, value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(text := value.get("text"), str) or len(value) > 1:
        raise UsageError(f"what is under {block!r} is no block: its value is not a text")
    return text


def _near(memory: Memory, key: str, fact: str) -> Flow[tuple[str, dict[str, Any]]]:
    """Return the key of a saved fact that says the same, or "", and similar facts by key. In a run this is recorded.

    A key that is taken is overwritten: then there is nothing to look for.
    """

    def read() -> Flow[tuple[str, dict[str, Any]]]:
        ctx, path = memory._context, memory._here()
        [taken] = yield from flows.query(ctx, rows.read_keys, [(path, check_key(key))], ctx.clock_us())
        if taken is not None:
            return "", {}
        same = yield from same_fact(ctx, path, {"fact": fact})
        if same is not None:
            return same.key, {}
        near = yield from nearest(ctx, path, fact, _FOUND_MAX, relevant=True)
        return "", {item.key: item.value for item in near.items if sentence(item.value)}

    same, similar = yield from memory._read("memory.near", [key, fact], read())
    return same, dict([*similar.items()][:_SIMILAR_MAX])


def _evidence(item: Item) -> float:
    evidence: float = (item.explain or {}).get("evidence", 0)
    return evidence


def _nothing(memory: Memory, nearest: list[Item], count: Callable[[str], int], most: int) -> Flow[str]:
    """Return the answer to a query that no fact is about.

    A search without evidence does not prove that nothing is known ("what can she eat?" has no word of "Alice is
    vegetarian"). So the answer has the nearest facts by meaning, marked as weak, and the keys of the newest others.
    """
    newest = yield from memory._newest(_NAMED_MAX)
    shown = {item.key for item in nearest}
    keys = [item.key for item in newest if item.key not in shown]
    if not (nearest or keys):
        return "nothing is remembered yet"
    lines = ["nothing is remembered about this"]
    for item in nearest:
        weak = _line(item, is_weak=True)
        if count("\n".join([*lines, weak])) > most:
            break
        lines.append(weak)
    while keys:
        named = f"other facts have these keys; search for one if it may help: {', '.join(keys)}"
        if count("\n".join([*lines, named])) <= most:
            return "\n".join([*lines, named])
        keys.pop()
    return "\n".join(lines)


def _line(item: Item, *, is_weak: bool) -> str:
    match = {"match": "weak"} if is_weak else {}
    return text_of({"key": item.key, "value": item.value, "saved": item.at.date(), **match})


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
