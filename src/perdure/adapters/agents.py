"""Agents of other frameworks: their calls in a durable function, and as members of a team."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar

from perdure.errors import UsageError
from perdure.runs.calls.decorators import effect, step
from perdure.runs.execution.scope import Scope, ToolName, current, need_scope, outside_scope
from perdure.runs.functions.specs import StepSpec
from perdure.teams import members

T = TypeVar("T")


def in_run() -> bool:
    """Return whether this code is in a run, and not in the body of a step or an effect."""
    scope = current.get()
    return scope is not None and scope.body is None


def is_journaled(fn: object) -> bool:
    """Return whether a function is a step, an effect or a durable function by itself."""
    return hasattr(fn, "perdure") or hasattr(fn, "perdure_durable")


def refuse_without_run(tools: Iterable[object]) -> None:
    """Raise NotInRun if one of an agent's tools is an effect and there is no run.

    The effect would raise it too. But most frameworks return the errors of tools to the model, which may say that all
    is done.
    """
    for spec in (getattr(tool, "perdure", None) for tool in tools):
        if not isinstance(spec, StepSpec) or spec.kind != "effect":
            continue
        if current.get() is None and outside_scope(spec) is None:
            need_scope(f"an agent with the effect {spec.name!r}")


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
    _check_loop(name)
    unit: Callable[..., Awaitable[T]] = _unit(kind, name, options)
    scope = current.get()
    if scope is not None and scope.tool is not None:
        return await unit(body, **key)
    with _branch(name.rpartition(".")[2]):
        return await unit(body, **key)


def _check_loop(name: str) -> None:
    """Raise UsageError on an event loop that is not the run's: it would not be parked there."""
    scope = current.get()
    supervisor = None if scope is None else scope.execution.supervisor
    if supervisor is not None and supervisor.loop is not asyncio.get_running_loop():
        raise UsageError(f"{name!r} is called on an event loop of its own, and blocks the run: await the agent instead")


def agent_call(name: str) -> AbstractContextManager[Scope | None]:
    """Begin a call of an agent: its calls have paths of their own, whichever tasks its framework makes."""
    return _branch(name, is_agent=True)


def agent_branch(name: str) -> Scope | None:
    """Begin a call of an agent, as `agent_call`, for a framework with hooks. `within` has its calls; `end` it."""
    scope = current.get()
    return None if scope is None or scope.body is not None else scope.for_call(name)


@contextmanager
def within(branch: Scope | None) -> Iterator[None]:
    """Let calls that this code makes be those of the agent of a branch."""
    token = _agent.set(branch)
    try:
        yield
    finally:
        _agent.reset(token)


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


# --- members of teams


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


def register_agents(package: str, as_agent: Callable[[Any], Callable[[Any, Any], Any]]) -> None:
    """Let `team.agent` take the graphs or agents of a package. `as_agent` makes the handler of one: state, message."""
    members.as_agents[package] = as_agent


def remembering(ask: Callable[[str, Any], Awaitable[tuple[Any, Any]]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a handler for an agent that talks: it keeps the history in the member's state, under "history".

    `ask` gets the message and the history, None at first, and returns the answer and the new history. A message that is
    no text reaches the agent as JSON.
    """

    async def handler(state: dict[str, Any], message: Any) -> Any:
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False, default=str)
        answer, state["history"] = await ask(text, state.get("history"))
        return answer

    return handler


def apart(call: Callable[[], T]) -> T:
    """Make a call outside the run that the caller is in: what it runs is recorded by a framework's own tasks."""
    context = contextvars.copy_context()
    context.run(current.set, None)
    return context.run(call)
