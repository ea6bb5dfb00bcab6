"""The types of `store.run` and `store.start`: a run of a function that returns a T, sync or async, is a `Run[T]`.

Nothing happens here when a program runs. A type checker cannot unwrap the result of an async function in the signature
of the method itself, so these types add it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from perdure.runs.handle import Run

Q = ParamSpec("Q")  # the arguments of the function, and the options
R = TypeVar("R")


class Starting(Protocol[Q]):
    """A method that starts a durable function."""

    @overload
    def __call__(self, fn: Callable[..., Coroutine[Any, Any, R]], /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...

    @overload
    def __call__(self, fn: Callable[..., R], /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...


class AStarting(Protocol[Q]):
    """The async twin of a method that starts a durable function."""

    @overload
    async def __call__(
        self, fn: Callable[..., Coroutine[Any, Any, R]], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> Run[R]: ...

    @overload
    async def __call__(self, fn: Callable[..., R], /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...


def starting(method: Callable[Concatenate[Any, Callable[..., Any], Q], Run]) -> Starting[Q]:
    """Return the method, unchanged."""
    return method  # type: ignore[return-value]


def astarting(
    method: Callable[Concatenate[Any, Callable[..., Any], Q], Coroutine[Any, Any, Run]],
) -> AStarting[Q]:
    """Return the method, unchanged."""
    return method  # type: ignore[return-value]
