"""Whether a task waits for nothing but other tasks of its run: what asyncio knows of that, it does not say.

A task that awaits `asyncio.gather`, `wait`, `shield`, a task group or `as_completed` waits for a future that is
resolved when some tasks end. The callbacks of those tasks lead to it. Any other future may be resolved by the network,
a timer, another thread: a task that awaits one is at work.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from perdure.runs.execution.scope import current

if TYPE_CHECKING:
    from perdure.runs.execution.execution import Execution

_DEPTH_MAX = 4


def resolved_by(futures: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """The futures that are resolved when these are, one through the other."""
    found: set[asyncio.Future[Any]] = set()
    todo = list(futures)
    while todo:
        for callback, _ in getattr(todo.pop(), "_callbacks", None) or ():
            new = {future for future in _futures_in(callback, _DEPTH_MAX) if future not in found and not future.done()}
            found |= new
            todo += new
    return found


def _futures_in(thing: Any, depth: int) -> Iterator[asyncio.Future[Any]]:
    if isinstance(thing, asyncio.Future):
        yield thing
        return
    if depth == 0:
        return
    for part in _parts(thing):
        yield from _futures_in(part, depth - 1)


def _parts(thing: Any) -> Iterable[Any]:
    """What a callback holds: what it was bound to, what it closes over, and what asyncio's own objects keep."""
    if isinstance(thing, functools.partial):
        return thing.args
    if isinstance(thing, list | tuple | deque):
        return thing
    owner = getattr(thing, "__self__", None)
    if owner is not None:
        return (owner,)
    cells = getattr(thing, "__closure__", None)
    if cells:
        return [cell.cell_contents for cell in cells if _is_filled(cell)]
    if type(thing).__module__.startswith("asyncio.") and not isinstance(thing, asyncio.AbstractEventLoop):
        return list(getattr(thing, "__dict__", {}).values())
    return ()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_stirring(loop: asyncio.AbstractEventLoop, execution: Execution) -> bool:
    """Whether code of a run is about to continue, in this turn of the loop."""
    for handle in tuple(getattr(loop, "_ready", ())):
        scope = handle._context.get(current)
        if scope is not None and scope.execution is execution and not handle.cancelled():
            return True
    return False


def has_timer(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], waiters: set[Any]) -> bool:
    """Whether a timer of asyncio's (`asyncio.timeout`, `wait_for`), scheduled or due, will end a task's wait."""
    for handle in (*getattr(loop, "_scheduled", ()), *getattr(loop, "_ready", ())):
        if handle.cancelled():
            continue
        owner = getattr(getattr(handle, "_callback", None), "__self__", None)
        if getattr(owner, "_task", None) in tasks or any(_is_in(part, waiters) for part in handle._args or ()):
            return True
    return False


def _is_in(thing: Any, waiters: set[Any]) -> bool:
    return isinstance(thing, asyncio.Future) and thing in waiters
