"""`perdure.gather`, `perdure.map`, `perdure.first`: parallel branches that replay in order.

In a sync durable function a call is a function without arguments (`lambda: search("a")`), run on a thread. In an async
one it is an awaitable (`search("a")`), and these functions return awaitables. Each branch is numbered before any of
them begins. If a branch waits for an external event, the others finish first, and then the run parks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, overload

from perdure.errors import UsageError
from perdure.runs.calls.calls import do
from perdure.runs.execution.scope import Scope, need_scope
from perdure.runs.parallel.branches import Branch, Pool, branches_of, drop, first_operation, gather_operation
from perdure.values.safe_repr import shown

A = TypeVar("A")
T = TypeVar("T")
_THREADS_MAX = 32


@overload
def gather(*calls: Callable[[], T]) -> list[T]: ...


@overload
def gather(*calls: Awaitable[T]) -> Coroutine[Any, Any, list[T]]: ...


def gather(*calls: Any) -> Any:
    """Run calls in parallel and return their results in order. A sync run executes at most 32 at a time.

    All branches end, and their results are recorded, before the first error by position is raised.
    """
    scope = _checked("perdure.gather", calls)
    branches = branches_of(scope, calls)
    return run_branches(scope, branches, None)


@overload
def map(  # type: ignore[overload-overlap]
    fn: Callable[[A], Coroutine[Any, Any, T]], items: Iterable[A], *, concurrency: int | None = None
) -> Coroutine[Any, Any, list[T]]: ...


@overload
def map(fn: Callable[[A], T], items: Iterable[A], *, concurrency: int | None = None) -> list[T]: ...


def map(fn: Callable[[Any], Any], items: Iterable[Any], *, concurrency: int | None = None) -> Any:
    """Call a function with each item in parallel, and return the results in the order of the items.

    The function is a step, an effect, or a function that calls some. At most `concurrency` branches work at once: by
    default 32 in a sync run and all in an async one. A branch that waits for an external event does not count. The
    first error by position is raised when all branches have ended.
    """
    scope = need_scope("perdure.map()")
    scope.check()
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise UsageError(f"perdure.map(concurrency={concurrency!r}): how many at once, at least 1")
    if isinstance(items, set | frozenset):
        raise UsageError("perdure.map() was given a set: its order differs from process to process. Sort it first")
    if not callable(fn) or not hasattr(items, "__iter__"):
        raise UsageError(f"perdure.map() wants a function and items: perdure.map(search, ['a', 'b']), not {shown(fn)}")
    call = _on_thread(fn) if scope.is_async else fn
    branches = branches_of(scope, [partial(call, item) for item in items])
    return run_branches(scope, branches, concurrency)


def _on_thread(fn: Any) -> Any:
    """Return the awaitable form of a sync step or effect, which runs on a thread. Return other functions unchanged."""
    on_thread = getattr(fn, "on_thread", None)
    if on_thread is None:
        return fn
    # A method has the attributes of its function, so `on_thread` is not bound to the instance.
    return partial(on_thread, fn.__self__) if isinstance(fn, MethodType) else on_thread


@overload
def first(*calls: Callable[[], T]) -> T: ...


@overload
def first(*calls: Awaitable[T]) -> Coroutine[Any, Any, T]: ...


def first(*calls: Any) -> Any:
    """Run calls in parallel and return the result of the first that succeeds. The winner is recorded.

    The others are abandoned: cancelled in an async run, stopped after their current call in a sync one. If all fail,
    the error of the first by position is raised.
    """
    scope = _checked("perdure.first", calls)
    if not calls:
        raise UsageError("perdure.first() wants at least one call")
    path = scope.take()
    return do(scope, first_operation(scope, path, branches_of(scope, calls), _pool_of(scope)))


def run_branches(scope: Scope, branches: Sequence[Branch], limit: int | None) -> Any:
    """Run branches, at most `limit` at once, and return their results in order. An async run awaits them."""
    most = limit or (len(branches) if scope.is_async else _THREADS_MAX)
    return do(scope, gather_operation(scope, branches, _pool_of(scope)(scope, branches, most)))


def _pool_of(scope: Scope) -> Callable[[Scope, Sequence[Branch], int], Pool]:
    """Return the class that runs branches: on tasks or on threads."""
    if scope.is_async:
        from perdure.runs.parallel.tasks import TaskPool

        return TaskPool
    from perdure.runs.parallel.threads import ThreadPool

    return ThreadPool


def _checked(caller: str, calls: Sequence[Any]) -> Scope:
    """Return the current scope. Raise UsageError unless calls are functions (sync run) or awaitables (async run)."""
    try:
        scope = need_scope(f"{caller}()")
        scope.check()
        for call in calls:
            is_awaitable = hasattr(call, "__await__")
            if scope.is_async and not is_awaitable:
                raise UsageError(
                    f'{caller}() in an async durable function takes awaitables, {caller}(search("a"), …), not a '
                    f"{type(call).__name__}: leave out the lambda, make the step async, or use perdure.map"
                )
            if not scope.is_async and (is_awaitable or not callable(call)):
                raise UsageError(
                    f'{caller}() in a sync durable function takes functions, {caller}(lambda: search("a"), …), not a '
                    f"{type(call).__name__}; async steps need an async durable function"
                )
        return scope
    except BaseException:
        for call in calls:
            drop(call)
        raise
