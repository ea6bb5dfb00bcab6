"""`perdure.gather`, `perdure.map`, `perdure.first`: parallel branches that replay in order.

In a sync durable function a call is a function without arguments (`lambda: search("a")`), on a thread of the store's;
in an async one it is something to await (`search("a")`), and so is what these functions give. Each branch is numbered
when it is made, before any begins. One that waits for something outside lets the others finish; then the run parks.
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
    """Do all of this at the same time; return the results in the order of the calls. A sync run does 32 at a time.

    All branches come to their end before the first error, by position, is raised: what they did is recorded.
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
    """Call a function (a step, an effect, or one that calls some) with each item, at the same time; gives the results
    in the order of the items.

    At most `concurrency` branches work at once: by default 32 in a sync run and all in an async one. One that waits for
    something outside does not count. The first error, by position, is raised when all have come to their end.
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
    """Return what awaits a plain step or effect on a thread of the store; any other function as it is."""
    on_thread = getattr(fn, "on_thread", None)
    if on_thread is None:
        return fn
    # A method's attributes are those of its function, which does not know the instance.
    return partial(on_thread, fn.__self__) if isinstance(fn, MethodType) else on_thread


@overload
def first(*calls: Callable[[], T]) -> T: ...


@overload
def first(*calls: Awaitable[T]) -> Coroutine[Any, Any, T]: ...


def first(*calls: Any) -> Any:
    """Do all of this at the same time; gives the result of the one that succeeds first, which is recorded.

    The others are given up. In an async run they are cancelled; a thread comes to the end of the call that it is in.
    If all fail, the error of the first by position is raised.
    """
    scope = _checked("perdure.first", calls)
    if not calls:
        raise UsageError("perdure.first() wants at least one call")
    path = scope.take()
    return do(scope, first_operation(scope, path, branches_of(scope, calls), _pool_of(scope)))


def run_branches(scope: Scope, branches: Sequence[Branch], limit: int | None) -> Any:
    """Run branches, at most `limit` at once: their results in order, or in an async run something to await."""
    most = limit or (len(branches) if scope.is_async else _THREADS_MAX)
    return do(scope, gather_operation(scope, branches, _pool_of(scope)(scope, branches, most)))


def _pool_of(scope: Scope) -> Callable[[Scope, Sequence[Branch], int], Pool]:
    """How branches are run: as tasks or on threads."""
    if scope.is_async:
        from perdure.runs.parallel.tasks import TaskPool

        return TaskPool
    from perdure.runs.parallel.threads import ThreadPool

    return ThreadPool


def _checked(what: str, calls: Sequence[Any]) -> Scope:
    """The running branch, if the calls fit it: functions in a sync run, awaitables in an async one."""
    try:
        scope = need_scope(f"{what}()")
        scope.check()
        for call in calls:
            is_awaitable = hasattr(call, "__await__")
            if scope.is_async and not is_awaitable:
                raise UsageError(
                    f'{what}() in an async durable function takes awaitables, {what}(search("a"), …), not a '
                    f"{type(call).__name__}: leave out the lambda, make the step async, or use perdure.map"
                )
            if not scope.is_async and (is_awaitable or not callable(call)):
                raise UsageError(
                    f'{what}() in a sync durable function takes functions, {what}(lambda: search("a"), …), not a '
                    f"{type(call).__name__}; async steps need an async durable function"
                )
        return scope
    except BaseException:
        for call in calls:
            drop(call)
        raise
