"""What a namespace offers to others: tools for a model, and its items as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

from perdure.errors import UsageError
from perdure.storage.program import Flow
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Handle

if TYPE_CHECKING:
    from perdure.memory.copies import Form
    from perdure.memory.handle import Memory


class MemoryOffers(Handle):
    """The part of a namespace's handle for models and for other programs."""

    def tools(
        self, *, read_only: bool = False, budget_tokens: int = 1000, blocks: Collection[str] = ()
    ) -> list[Callable[..., Any]]:
        """Return memory as tools of a model: the functions `memory_search`, `memory_save` and `memory_forget`.

        With `blocks`, names of texts that every prompt holds, `memory_append` and `memory_replace` edit these. They
        work with `perdure.tools`, agent frameworks and MCP. With `read_only`, only `memory_search` is returned. An
        answer has at most `budget_tokens`. Use `atools` in an async run. Does no I/O.
        """
        return self._tools(read_only, budget_tokens, blocks, is_async=False)

    def atools(
        self, *, read_only: bool = False, budget_tokens: int = 1000, blocks: Collection[str] = ()
    ) -> list[Callable[..., Any]]:
        """Return what `tools` returns, as async functions."""
        return self._tools(read_only, budget_tokens, blocks, is_async=True)

    def _tools(
        self, read_only: bool, budget_tokens: int, blocks: Collection[str], is_async: bool
    ) -> list[Callable[..., Any]]:
        from perdure.memory.tools import memory_tools  # imported late: few programs need it

        if isinstance(blocks, str):
            raise UsageError(f"tools(blocks=…) wants names in a list, [{blocks!r}]")
        return memory_tools(cast("Memory", self), read_only, budget_tokens, blocks=blocks, is_async=is_async)

    @blocking
    def export_lines(self) -> Flow[list[str]]:
        """Return the items of this namespace and of all below it as lines of JSON, the oldest first.

        A line has an item's value as it is stored, and its options. Histories and vectors are not exported.
        """
        from perdure.memory.copies import export_lines

        memory = cast("Memory", self)
        return memory._read("memory.export", [], export_lines(self._context, memory._query(), memory.namespace))

    aexport_lines = awaited(export_lines)

    @blocking
    def import_lines(self, lines: Iterable[Any], *, form: Form = "perdure") -> Flow[int]:
        """Put the items of lines of JSON below this namespace, and return how many are new or have changed.

        `form` is "perdure" for lines of `export_lines`. "items" is for items of another store, with a namespace, a key
        and a value: objects with `dict()`, dicts or lines. "mem0" is for what its `get_all` returns: memories become
        facts below ("users", user_id), ("agents", agent_id), ("runs", run_id) or ("shared",). All lines are read before
        the first item is put. Importing them again changes nothing.
        """
        from perdure.memory.copies import import_lines

        memory = cast("Memory", self)
        return memory._change("import_lines", import_lines(self._context, memory.namespace, lines, form))

    aimport_lines = awaited(import_lines)
