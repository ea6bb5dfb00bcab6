"""The interface for adapters of other frameworks. An adapter imports only `perdure`, `perdure.errors` and this module.

`Lines`: checkpoints under the framework's own ids. A state is passed as it is, or as text that the adapter has encoded
(`Encoded`); an adapter may cache its own data about a part of that text in `Part.known`.
`Tasks` and `add_provider`: steps and effects that a framework's tasks call.
`Items`: long-term memory, in any number of namespaces at once.
`agent_call`, `agent_branch`, `tool_call`, `journaled`, `hold`: calls of an agent as steps and effects of its run.
`amend`, `extend`, `recall`: states that many writers change, such as sessions; in a run, each exactly once.
`register_agents`, `remembering`, `member_turn` and `apart`: an agent of a framework as a member of a team.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from perdure.adapters.agents import (
    agent_branch,
    agent_call,
    apart,
    hold,
    in_run,
    io_only_in_units,
    is_journaled,
    journaled,
    member_turn,
    refuse_without_run,
    register_agents,
    remembering,
    tool_call,
    within,
)
from perdure.adapters.amending import Writers, aamend, aextend, amend, extend
from perdure.errors import NotFound, UsageError
from perdure.log.envelopes import ENVELOPE, envelope_text
from perdure.log.label_ids import pack_id
from perdure.log.pending import Write
from perdure.log.task_questions import ANSWERED
from perdure.memory import batches, maintenance
from perdure.memory.batches import ItemChange
from perdure.memory.filters import Condition, Filter, checked_filter, field_condition
from perdure.memory.labels import Labels
from perdure.memory.models import Item
from perdure.ops.store import Store
from perdure.runs.calls.decorators import step
from perdure.runs.execution.scope import Scope, add_provider
from perdure.runs.functions.specs import StepSpec
from perdure.runs.workers.resumers import Await, OtherGraph, Resumer, add_resumer
from perdure.storage.closing import AsyncClosing
from perdure.storage.events import event, said
from perdure.storage.program import Call, Flow, adrive, drive
from perdure.storage.urls import is_postgres, sqlite_path
from perdure.tasks.handle import Tasks
from perdure.threads import line_saves, lines
from perdure.threads.checks import check_metadata, check_name, check_namespace
from perdure.threads.line_reads import LineCheckpoint, LineFilters
from perdure.threads.line_saves import Encoded, Part
from perdure.threads.lines import Line, SaveOptions
from perdure.threads.models import Checkpoint
from perdure.threads.save_engine import PreparedSave
from perdure.threads.thread import Thread
from perdure.values.accelerator import speed as accelerator
from perdure.values.codec import SIZE_MAX, Codec, decode, encode
from perdure.values.diff import common_size
from perdure.values.external import encode_noting, keys_of, noting
from perdure.values.model_tags import ModelShape, model_texts
from perdure.values.registry import REGISTRY

__all__ = [
    "ANSWERED",
    "ENVELOPE",
    "SIZE_MAX",
    "AsyncClosing",
    "Await",
    "Call",
    "Codec",
    "Condition",
    "Encoded",
    "Filter",
    "Flow",
    "Item",
    "ItemChange",
    "Items",
    "Labels",
    "Line",
    "LineCheckpoint",
    "Lines",
    "ModelShape",
    "Part",
    "OtherGraph",
    "PreparedSave",
    "Resumer",
    "SaveOptions",
    "Scope",
    "StepSpec",
    "Tasks",
    "Write",
    "Writers",
    "add_provider",
    "add_resumer",
    "aamend",
    "apart",
    "accelerator",
    "aextend",
    "agent_branch",
    "agent_call",
    "amend",
    "arecall",
    "checked_filter",
    "checked_store",
    "common_size",
    "decode",
    "encode",
    "encode_noting",
    "envelope_text",
    "event",
    "extend",
    "field_condition",
    "hold",
    "in_run",
    "io_only_in_units",
    "is_journaled",
    "is_postgres",
    "journaled",
    "keys_of",
    "member_turn",
    "model_texts",
    "noting",
    "recall",
    "refuse_without_run",
    "register_agents",
    "register_foreign",
    "register_models",
    "remembering",
    "said",
    "sqlite_path",
    "tool_call",
    "within",
]

T = TypeVar("T")


def register_foreign(cls: type) -> None:
    """Let a data class of another package be saved and loaded across versions of that package.

    Fields that the installed version does not have are dropped, and missing ones get their defaults.
    """
    REGISTRY.add(cls, foreign=True)


def checked_store(store: object) -> Store:
    """Return a store that a user has passed. Raises UsageError for what is none, such as its path."""
    if not isinstance(store, Store):
        raise UsageError(f'store is an open store, perdure.open("agent.db"), not {store!r:.100}')
    return store


def register_models(prefix: str, package: str, tags: Mapping[str, str]) -> None:
    """Let every store save and load the data classes under a module prefix, some of them under short tags.

    `tags` maps a tag ("^msg.human") to a pydantic model below the prefix ("human.HumanMessage"). Models under a tag
    are written and read in batches. Errors name `package` as the package to install. A class is imported when a value
    of it is first read.
    """
    REGISTRY.add_models(prefix, package, tags)


class Lines:
    """The lines of all threads of a store."""

    def __init__(self, store: Store) -> None:
        self._ctx = store._context
        if self._ctx.driver.capabilities.path == ":memory:":
            lines.warn_in_memory()

    @property
    def codec(self) -> Codec:
        """The codec of the states."""
        return self._ctx.codec

    def line(self, thread: str, namespace: str, tags: Mapping[str, Any] | None = None) -> Line:
        """Return `store.thread(thread, metadata=tags).line(namespace)`, with the checks of names cached."""
        return Line(self._ctx, _check_name(thread), _check_namespace(namespace), check_metadata(tags or None))

    def history(self, **which: str | None) -> Iterator[LineCheckpoint]:
        """Iterate over checkpoints, the greatest id first. Filters: `thread`, `namespace`, `id`, ids below `before`."""
        return lines.history(self._ctx, _filters(**which))

    def ahistory(self, **which: str | None) -> AsyncIterator[LineCheckpoint]:
        """`history`, as an async iterator."""
        return lines.ahistory(self._ctx, _filters(**which))

    def delete_runs(self, runs: Iterable[str]) -> None:
        """Delete the checkpoints that runs saved (`save(run=…)`), except those that a later one is rebuilt from."""
        drive(self._ctx.driver, line_saves.delete_runs(self._ctx, runs))

    async def adelete_runs(self, runs: Iterable[str]) -> None:
        """`delete_runs`, awaited."""
        await adrive(self._ctx.driver, line_saves.delete_runs(self._ctx, runs))


_check_name, _check_namespace = lru_cache(1024)(check_name), lru_cache(1024)(check_namespace)


def _filters(
    thread: str | None = None, namespace: str | None = None, id: str | None = None, before: str | None = None
) -> LineFilters:
    return LineFilters(
        None if thread is None else check_name(thread),
        None if namespace is None else check_namespace(namespace),
        None if id is None else pack_id(id),
        None if before is None else pack_id(before),
    )


class Items:
    """The items of all namespaces of a store's memory. Methods that return a flow do nothing before `run` or `arun`."""

    def __init__(self, store: Store) -> None:
        self._ctx = store._context

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end, blocking."""
        return drive(self._ctx.driver, flow)

    async def arun(self, flow: Flow[T]) -> T:
        """Run a flow to its end on the running event loop."""
        return await adrive(self._ctx.driver, flow)

    def use_embedder(self, embedder: object, dimension: int | None = None) -> None:
        """Set the store's embedder, as `perdure.open` does. Raises UsageError if it has another one."""
        batches.use_embedder(self._ctx, embedder, dimension)

    def get(self, places: Iterable[tuple[Labels, str]]) -> Flow[list[Item | None]]:
        """Return the items at these namespaces and keys, in order, with None for each that does not exist."""
        return batches.get(self._ctx, places)

    def find(
        self,
        namespace: Labels,
        query: str | None = None,
        *,
        matches: Callable[[Any], bool] | None = None,
        limit: int,
        offset: int = 0,
    ) -> Flow[list[Item]]:
        """Return items of a namespace and of all below it: the best match for `query` first, or else the newest."""
        return batches.find(self._ctx, namespace, query, matches, limit, offset)

    def namespaces(self, namespace: Labels) -> Flow[list[Labels]]:
        """Return this namespace and those below it, as far as they hold items."""
        return batches.namespaces(self._ctx, namespace)

    def end_expired(self) -> Flow[int]:
        """End the items whose time is over, and return how many. Their history stays as long as the policy says."""
        tenant = yield from self._ctx.tenant()
        return 0 if tenant is None else (yield from maintenance.end_expired(self._ctx, tenant))

    def write(self, changes: Sequence[ItemChange], refreshed: Sequence[Item] = ()) -> Flow[None]:
        """Write all changes, or none, and restart the expiry of the `refreshed` items."""
        return batches.write_items(self._ctx, changes, refreshed)


# --- states that many writers change


def recall(thread: Thread) -> Checkpoint | None:
    """Load the newest checkpoint; None if there is none. In a durable function, a replay loads the same one."""
    try:
        if not in_run():
            return thread.load()
        at = _head(thread.name, thread)
        return None if at is None else thread.load(at)
    except NotFound:
        return None
    except Exception as error:
        hold(error)
        raise


async def arecall(thread: Thread) -> Checkpoint | None:
    """`recall`, awaited."""
    try:
        if not in_run():
            return await thread.aload()
        at = await _ahead(thread.name, thread)
        return None if at is None else await thread.aload(at)
    except NotFound:
        return None
    except Exception as error:
        hold(error)
        raise


@step(name="thread.head", ignore=("thread",))
def _head(name: str, thread: Thread) -> str | None:
    head = thread.get_head()
    return None if head is None else head.id


@step(name="thread.head", ignore=("thread",))
async def _ahead(name: str, thread: Thread) -> str | None:
    head = await thread.aget_head()
    return None if head is None else head.id
