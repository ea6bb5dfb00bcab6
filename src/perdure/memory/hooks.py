"""Calls of functions that the user passes, such as models: plain or async, in blocking or awaited flows."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any

from perdure.errors import UsageError
from perdure.runs.calls.decorators import step
from perdure.runs.execution.scope import current
from perdure.storage.program import Flow, either

if TYPE_CHECKING:  # imported where it is used: opening a store stays quick
    import asyncio

Calls = tuple[Callable[..., Any], Callable[..., Awaitable[Any]]]


def as_step(name: str, hook: Callable[..., Any] | None) -> Any:
    """Return a user's function as a step, unless it is one or None. In a run, a replay does not call it again."""
    return hook if hook is None or hasattr(hook, "perdure") else step(name=name)(hook)


def takes(hook: Callable[..., Any] | None, name: str, place: int) -> bool:
    """Return whether a function has a parameter of this name, or one without a default at this place."""
    if hook is None:
        return False
    parameters = [*inspect.signature(hook).parameters.values()]
    needed = [one for one in parameters if one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD]
    return any(one.name == name for one in parameters) or len(needed) > place


def call(hook: Any, wants: type | UnionType, *args: Any) -> Flow[Any]:
    """Call a function that `as_step` returned, and return its result. Raises UsageError if its type is not `wants`."""
    name, is_async = hook.perdure.name.rpartition(".")[2], hook.perdure.is_async

    def blocking() -> Any:
        if is_async:
            raise UsageError(
                f"{name}() is async: call the awaited twin, such as arecord(), aadd(), acompact_history() or an "
                "agent's ainvoke()"
            )
        return hook(*args)

    async def awaiting() -> Any:
        return await hook(*args) if is_async else hook(*args)

    answer = yield from either(blocking, awaiting)
    if not isinstance(answer, wants):
        raise UsageError(f"{name}() returns a {getattr(wants, '__name__', wants)}, not a {type(answer).__name__}")
    return answer


def ask_outside(hook: Callable[..., Any], *args: Any) -> Flow[Any]:
    """Call a hook outside of the current run, and return its result.

    The run does not record the call. A replay does not repeat it, because a replay writes nothing.
    """
    call, acall = calls_of(hook)
    outside = copy_context()
    outside.run(current.set, None)

    async def asked() -> Any:
        return await acall(*args)

    def in_a_task() -> Awaitable[Any]:
        import asyncio

        return asyncio.create_task(asked(), context=outside)

    return either(lambda: outside.run(call, *args), in_a_task)


def calls_of(call: Callable[..., Any], acall: Any = None) -> Calls:
    """Return a function as a blocking call and as an async call. Its result is awaited in both if it is awaitable."""

    def blocking(*args: Any) -> Any:
        answer = call(*args)
        if not inspect.isawaitable(answer):
            return answer
        import asyncio

        return asyncio.run_coroutine_threadsafe(_awaited(answer), _loop(os.getpid())).result()

    async def in_a_thread(*args: Any) -> Any:
        import asyncio

        answer = await asyncio.to_thread(call, *args)
        return await answer if inspect.isawaitable(answer) else answer

    return blocking, acall or in_a_thread


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop that runs async functions for blocking callers.

    There is one per process, because the connections of such functions belong to their loop.
    """
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="perdure-async", daemon=True).start()
    return loop
