"""All uses of undocumented asyncio attributes. No other module uses any.

A run parks when all of its tasks wait for the run itself, and no public name of asyncio says what a task waits for.
`check_asyncio` refuses a Python that lacks these attributes. `tests/runs/test_asyncio_internals.py` fails on a Python
where they mean something else.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, Any

from perdure.errors import RunError
from perdure.runs.execution.scope import current

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution

_DEPTH_MAX = 4
_FRAMES_MAX = 4  # from a task factory up to asyncio.wait_for: create_task, ensure_future and its helper
_WAIT_FOR = asyncio.wait_for.__code__


def check_asyncio() -> None:
    """Raise RunError if asyncio does not show what a task waits for, because then no run would ever park."""
    task = asyncio.current_task()
    if isinstance(task, asyncio.Task) and not (hasattr(task, "_fut_waiter") and hasattr(task, "_callbacks")):
        version = sys.version.split()[0]
        raise RunError(
            f"asyncio of Python {version} does not show what a task waits for, so that async runs could never park; "
            "use a Python version that Perdure was tested with (3.11 to 3.13)"
        )


def awaited_future(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """Return the future that a task awaits; None if the task is running or about to run."""
    future: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    return future


def resolved_by(futures: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Return the futures that are resolved when these are, directly or through each other.

    A task that awaits `asyncio.gather`, `wait`, `shield`, a task group or `as_completed` awaits a future that asyncio
    made. The callbacks of the inner tasks refer to it. The network, a timer or another thread may resolve any other.
    """
    resolved: set[asyncio.Future[Any]] = set()
    todo = list(futures)
    while todo:
        for callback, _ in getattr(todo.pop(), "_callbacks", None) or ():
            new = {each for each in _futures_in(callback, _DEPTH_MAX) if each not in resolved and not each.done()}
            resolved |= new
            todo += new
    return resolved


def _futures_in(value: Any, depth: int) -> Iterator[asyncio.Future[Any]]:
    if isinstance(value, asyncio.Future):
        yield value
        return
    if depth == 0:
        return
    for part in _parts(value):
        yield from _futures_in(part, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """Return the object a callback is bound to, the cells it closes over, or the attributes of an asyncio object."""
    if isinstance(value, functools.partial):
        return value.args
    if isinstance(value, list | tuple | deque):
        return value
    owner = getattr(value, "__self__", None)
    if owner is not None:
        return (owner,)
    cells = getattr(value, "__closure__", None)
    if cells:
        return [cell.cell_contents for cell in cells if _is_filled(cell)]
    if type(value).__module__.startswith("asyncio.") and not isinstance(value, asyncio.AbstractEventLoop):
        return list(getattr(value, "__dict__", {}).values())
    return ()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_stirring(loop: asyncio.AbstractEventLoop, execution: Execution) -> bool:
    """Return whether the loop is about to continue code of this run. False on a loop that is not asyncio's own."""
    for handle in tuple(getattr(loop, "_ready", ())):
        scope = _context_of(handle).get(current)
        if scope is not None and scope.execution is execution and not handle.cancelled():
            return True
    return False


if sys.version_info >= (3, 12):

    def _context_of(handle: asyncio.Handle) -> Context:
        return handle.get_context()

else:

    def _context_of(handle: Any) -> Context:
        context: Context = handle._context
        return context


def has_timer(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], waiters: set[Any]) -> bool:
    """Return whether a timer (`asyncio.timeout`, `wait_for`), scheduled or due, will end the wait of a task.

    Returns False on a loop that is not asyncio's own, which does not show its timers.
    """
    for handle in (*getattr(loop, "_scheduled", ()), *getattr(loop, "_ready", ())):
        if handle.cancelled():
            continue
        owner = getattr(getattr(handle, "_callback", None), "__self__", None)
        if getattr(owner, "_task", None) in tasks or any(_is_in(part, waiters) for part in handle._args or ()):
            return True
    return False


def _is_in(value: Any, waiters: set[Any]) -> bool:
    return isinstance(value, asyncio.Future) and value in waiters


def is_made_by_wait_for() -> bool:
    """Return whether `asyncio.wait_for` is making a task. Only a task factory may call this, and directly.

    Up to Python 3.11 `wait_for` makes a task, and its caller only waits for it. The calls of both are one sequence, as
    in later versions, which make no task.
    """
    frame: FrameType | None = sys._getframe(2)  # above the task factory
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return False
        if frame.f_code is _WAIT_FOR:
            return True
        frame = frame.f_back
    return False
