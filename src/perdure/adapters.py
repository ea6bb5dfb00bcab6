"""The interface for adapters of other frameworks. An adapter imports only `perdure`, `perdure.errors` and this module.

`Lines`: checkpoints under the framework's own ids. A state is passed as it is, or as text that the adapter has encoded
(`Encoded`); an adapter may cache its own data about a part of that text in `Part.known`.
`Tasks` and `add_provider`: steps and effects that a framework's tasks call.
`Items`: long-term memory, in any number of namespaces at once.
`agent_call`, `tool_call`, `journaled`, `hold`: calls of an agent's framework as steps and effects of its run.
`amend`, `extend`, `recall`: states that many writers change, such as sessions; in a run, each exactly once.
`member_turn` and `apart`: an agent of a framework as a member of a team.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from perdure.errors import InDoubt, NotFound, PerdureError, RunStuck, UsageError
from perdure.log.envelopes import ENVELOPE, envelope_text
from perdure.log.label_ids import pack_id
from perdure.log.pending import Write
from perdure.memory import batches, maintenance
from perdure.memory.batches import ItemChange
from perdure.memory.filters import OPERATORS as FILTER_OPERATORS
from perdure.memory.labels import Labels
from perdure.memory.models import Item
from perdure.ops.store import Store
from perdure.runs.calls.decorators import effect, step
from perdure.runs.execution.scope import Scope, ToolName, add_provider, current, need_scope
from perdure.runs.functions.specs import StepSpec
from perdure.storage.closing import AsyncClosing
from perdure.storage.events import event, said
from perdure.storage.program import Call, Flow, adrive, drive
from perdure.storage.urls import is_postgres, sqlite_path
from perdure.tasks import executions
from perdure.tasks.policy import Task, scope_of
from perdure.threads import line_saves, lines
from perdure.threads.amending import aamend, aextend, amend, extend
from perdure.threads.attachments import Ending
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
from perdure.values.model_tags import ModelShape, model_texts
from perdure.values.registry import REGISTRY

__all__ = [
    "ENVELOPE",
    "FILTER_OPERATORS",
    "SIZE_MAX",
    "AsyncClosing",
    "Call",
    "Codec",
    "Encoded",
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
    "PreparedSave",
    "SaveOptions",
    "Scope",
    "StepSpec",
    "Tasks",
    "Write",
    "add_provider",
    "aamend",
    "apart",
    "accelerator",
    "aextend",
    "agent_call",
    "amend",
    "arecall",
    "common_size",
    "decode",
    "encode",
    "envelope_text",
    "event",
    "extend",
    "hold",
    "in_run",
    "io_only_in_units",
    "is_journaled",
    "is_postgres",
    "journaled",
    "member_turn",
    "model_texts",
    "recall",
    "register_foreign",
    "register_models",
    "said",
    "sqlite_path",
    "tool_call",
]

T = TypeVar("T")


class MemberTurn(NamedTuple):
    """The turn of a team's member that the caller is in."""

    member: str  # the id of its run
    message: str  # of the message: the same when the turn is repeated, another one for every other message


def member_turn(call: str) -> MemberTurn:
    """Return the turn that the caller is in. Raises NotInRun, UsageError; `call` is named in the error."""
    execution = need_scope(call).execution
    if execution.turn is None:
        raise UsageError(f"{call} belongs to the turn of a team's member")
    return MemberTurn(execution.row.id, execution.row.incarnation.hex())


def apart(call: Callable[[], T]) -> T:
    """Make a call outside the run that the caller is in: what it runs is recorded by a framework's own tasks."""
    context = contextvars.copy_context()
    context.run(current.set, None)
    return context.run(call)


def register_foreign(cls: type) -> None:
    """Let a data class of another package be saved and loaded across versions of that package.

    Fields that the installed version does not have are dropped, and missing ones get their defaults.
    """
    REGISTRY.add(cls, foreign=True)


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
        return lines.history(self._ctx, _wanted(**which))

    def ahistory(self, **which: str | None) -> AsyncIterator[LineCheckpoint]:
        """`history`, as an async iterator."""
        return lines.ahistory(self._ctx, _wanted(**which))

    def delete_runs(self, runs: Iterable[str]) -> None:
        """Delete the checkpoints that runs saved (`save(run=…)`), except those that a later one is rebuilt from."""
        drive(self._ctx.driver, line_saves.delete_runs(self._ctx, runs))

    async def adelete_runs(self, runs: Iterable[str]) -> None:
        """`delete_runs`, awaited."""
        await adrive(self._ctx.driver, line_saves.delete_runs(self._ctx, runs))


_check_name, _check_namespace = lru_cache(1024)(check_name), lru_cache(1024)(check_namespace)


def _wanted(
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


class Tasks:
    """The tasks of a framework that run in a store's threads and call steps and effects."""

    def __init__(self, store: Store) -> None:
        self._store, self._ctx = store, store._context

    def scope(self, alive: Any, describe: Callable[[], dict[str, Any]]) -> Scope:
        """Return the scope of one execution of a task, which the object `alive` identifies.

        `describe` returns all fields of `Task` but the first. It is called once per execution.
        """
        return scope_of(alive, lambda: Task(self._ctx, **describe()))

    def ending(self, thread: str, task: str, *, is_over: bool) -> Ending | None:
        """Return the end of a task whose writes are about to be attached, or None if it called no step or effect."""
        return executions.ending(self._ctx, thread, task, is_over)

    def attaching(self, thread: str, namespace: str, id: str, writes: Sequence[Write]) -> Flow[None]:
        """Attach values to a checkpoint from inside a call of a task."""
        return self._store.thread(thread).line(namespace)._attach(id, writes)

    def unsettled(self, thread: str, namespace: str, id: str) -> InDoubt | RunStuck | None:
        """Return the error that a task of this checkpoint left for a person to settle, or None.

        Until it is settled, no checkpoint may follow this one.
        """
        return executions.unsettled_in(self._ctx, thread, (namespace, id))

    def running(self, thread: str, namespace: str, id: str) -> PerdureError | None:
        """Return the error for a new run that would follow this checkpoint while a task of it is in a call, or None."""
        is_busy = executions.is_busy_on(self._ctx, thread, (namespace, id))
        return executions.runs_elsewhere(self._ctx, thread) if is_busy else None


# --- agents of other frameworks, called in a durable function


def in_run() -> bool:
    """Return whether this code is in a run, and not in the body of a step or an effect."""
    scope = current.get()
    return scope is not None and scope.body is None


def is_journaled(fn: object) -> bool:
    """Return whether a function is a step, an effect or a durable function by itself."""
    return hasattr(fn, "perdure") or hasattr(fn, "perdure_durable")


def io_only_in_units() -> None:
    """Say that the code of this run waits for the world in steps and effects alone, as `journaled` calls them.

    Then a run whose tasks wait for a person, or for each other, is parked. asyncio does not show that tasks of anyio,
    or of a queue, wait for each other. Without this call such a run would hold its process until the answer comes.
    """
    scope = current.get()
    if scope is not None and scope.execution.supervisor is not None:
        scope.execution.supervisor.io_only_in_units = True


async def journaled(
    kind: Literal["step", "effect"],
    name: str,
    key: Mapping[str, Any],
    body: Callable[[], Awaitable[T]],
    **options: Any,
) -> T:
    """Call `body` as a step or an effect of the run. Outside of a run, and in the body of a step, just call it.

    The call is found again by its name, whichever task of the framework makes it: `agent.model` by its number in the
    `agent_call`, and a call in a `tool_call` by that one's id. The key is recorded as its arguments. `options` are
    those of `@perdure.step` and `@perdure.effect`. An error of the run itself ends the run, even if the framework
    catches it.
    """
    if not in_run():
        return await body()
    unit: Callable[..., Awaitable[T]] = _unit(kind, name, options)
    scope = current.get()
    if scope is not None and scope.tool is not None:
        return await unit(body, **key)
    with _branch(name.rpartition(".")[2]):
        return await unit(body, **key)


def agent_call(name: str) -> AbstractContextManager[Scope | None]:
    """Begin a call of an agent: its calls have paths of their own, whichever tasks its framework makes."""
    return _branch(name, is_agent=True)


def tool_call(name: str, id: str | None = None) -> AbstractContextManager[Scope | None]:
    """Run a tool's own code in the run, in a branch named by the id of the tool call: it may ask, sleep, have effects.

    An error of the run itself in one of its calls ends the run, whatever catches the error. If a person did not
    approve an effect, `declined` of the branch says so; frameworks would tell the model to try again.
    """
    return _branch(name, id, ToolName(name, id))


# The branch of the agent that is called. Tasks that its framework makes inherit it.
_agent: ContextVar[Scope | None] = ContextVar("perdure_agent", default=None)


@contextmanager
def _branch(
    name: str, id: str | None = None, tool: ToolName | None = None, *, is_agent: bool = False
) -> Iterator[Scope | None]:
    scope, agent = current.get(), _agent.get()
    if scope is None or scope.body is not None:
        yield None
        return
    io_only_in_units()
    is_inside = agent is not None and agent.execution is scope.execution and not is_agent
    own = (agent if agent is not None and is_inside else scope).for_call(name, id)
    own.tool = tool
    tokens = current.set(own), _agent.set(own if is_agent else None)
    try:
        yield own
    finally:
        current.reset(tokens[0])
        _agent.reset(tokens[1])
        own.end()


def hold(error: Exception) -> None:
    """End the run if an error is of the run itself: InDoubt, NonDeterministic, LeaseLost, RunStuck, StoreError.

    Frameworks return the errors of tools to the model, which would try again.
    """
    scope = current.get()
    if scope is not None and scope.body is None:
        scope.hold(error)


_units: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {}


def _unit(kind: str, name: str, options: dict[str, Any]) -> Any:
    """Return the step or effect of a name. It is made again only if the options have changed."""
    known, unit = _units.get((kind, name), (None, None))
    if known != options:
        unit = (effect if kind == "effect" else step)(name=name, ignore=("perdure_body",), **options)(_call_body)
        _units[kind, name] = (options, unit)
    return unit


async def _call_body(perdure_body: Callable[[], Awaitable[Any]], /, **key: Any) -> Any:
    return await perdure_body()


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


async def arecall(thread: Thread) -> Checkpoint | None:
    """`recall`, awaited."""
    try:
        if not in_run():
            return await thread.aload()
        at = await _ahead(thread.name, thread)
        return None if at is None else await thread.aload(at)
    except NotFound:
        return None


@step(name="thread.head", ignore=("thread",))
def _head(name: str, thread: Thread) -> str | None:
    head = thread.get_head()
    return None if head is None else head.id


@step(name="thread.head", ignore=("thread",))
async def _ahead(name: str, thread: Thread) -> str | None:
    head = await thread.aget_head()
    return None if head is None else head.id
