"""One code for a blocking method and its async twin: a method that is written as a flow, and driven either way.

`@blocking` above a method that returns a flow, then `asteps = awaited(steps)`. To callers, type checkers and `inspect`
these are a method that returns `list[Step]` and a coroutine function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from perdure.storage.program import Flow

T = TypeVar("T")
P = ParamSpec("P")
Whole = TypeVar("Whole")
Part = TypeVar("Part")


class Driven(Protocol):
    """A handle: it runs flows in its store."""

    def _run(self, flow: Flow[T]) -> T: ...

    async def _arun(self, flow: Flow[T]) -> T: ...


H = TypeVar("H", bound=Driven)


def blocking(method: Callable[Concatenate[H, P], Flow[T]]) -> Callable[Concatenate[H, P], T]:
    """Make a blocking method of one that returns a flow: it drives the flow to its end."""
    # What it returns is what its flow does: `Flow[list[Step]]` becomes `list[Step]`.
    method.__annotations__["return"] = method.__annotations__["return"].removeprefix("Flow[").removesuffix("]")

    @wraps(method)
    def call(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self, *args, **kwargs))

    return call


def awaited(call: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], Coroutine[Any, Any, T]]:
    """Make the async twin of a method that `blocking` made."""
    method: Callable[Concatenate[H, P], Flow[T]] = call.__wrapped__  # type: ignore[attr-defined]

    @wraps(call)
    async def acall(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._arun(method(self, *args, **kwargs))

    acall.__doc__ = f"`{call.__name__}`, awaited."
    acall.__name__ = f"a{call.__name__}"
    acall.__qualname__ = f"{call.__qualname__.rpartition('.')[0]}.{acall.__name__}"
    return acall


def of_part(
    part: Callable[[Whole], Part], method: Callable[Concatenate[Part, P], T]
) -> Callable[Concatenate[Whole, P], T]:
    """Make a method of a whole from one of its part: `threads = of_part(_threads, ThreadStore.threads)`."""

    @wraps(method)
    def call(self: Whole, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(part(self), *args, **kwargs)

    @wraps(method)
    async def acall(self: Whole, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await method(part(self), *args, **kwargs)  # type: ignore[misc]

    return acall if iscoroutinefunction(method) else call  # type: ignore[return-value]
