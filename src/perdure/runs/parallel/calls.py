"""`perdure.gather`, `perdure.map`, `perdure.first`: parallel branches that replay in order.

In a sync durable function a call is a function without arguments (`lambda: search("a")`) and has a thread of its own;
in an async one it is something to await (`search("a")`), and so is what these functions give. Each branch is numbered
when it is made, before any begins. One that waits for something outside lets the others finish; then the run parks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from perdure.errors import UsageError
from perdure.runs.execution.scope import Scope, need_scope
from perdure.runs.parallel.branches import branches_of
from perdure.values.showing import shown

A = TypeVar("A")
T = TypeVar("T")
_THREADS_MAX = 32
_Calls = list[tuple[Callable[[], Any], Callable[[], object] | None]]


@overload
def gather(*calls: Callable[[], T]) -> list[T]: ...


@overload
def gather(*calls: Awaitable[T]) -> Coroutine[Any, Any, list[T]]: ...


def gather(*calls: Any) -> Any:
    """Do all of this at the same time; gives the results in the order of the calls.

    All branches come to their end before the first error, by position, is raised: what they did is recorded.
    """
    scope, checked = _checked("perdure.gather", calls)
    branches = branches_of(scope, checked)
    return _module(scope).gather(scope, branches, len(branches))


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
    branches = branches_of(scope, [(partial(fn, item), None) for item in items])
    limit = concurrency or (len(branches) if scope.is_async else _THREADS_MAX)
    return _module(scope).gather(scope, branches, limit)


@overload
def first(*calls: Callable[[], T]) -> T: ...


@overload
def first(*calls: Awaitable[T]) -> Coroutine[Any, Any, T]: ...


def first(*calls: Any) -> Any:
    """Do all of this at the same time; gives the result of the one that succeeds first, which is recorded.

    The others are given up. In an async run they are cancelled; a thread comes to the end of the call that it is in.
    If all fail, the error of the first by position is raised.
    """
    scope, checked = _checked("perdure.first", calls)
    if not checked:
        raise UsageError("perdure.first() wants at least one call")
    path = scope.take()
    return _module(scope).first(scope, path, branches_of(scope, checked))


def _module(scope: Scope) -> Any:
    """How branches are run: as tasks or on threads."""
    if scope.is_async:
        from perdure.runs.parallel import tasks

        return tasks
    from perdure.runs.parallel import threads

    return threads


def _checked(what: str, calls: Sequence[Any]) -> tuple[Scope, _Calls]:
    """The running branch, and the calls if they fit it."""
    try:
        scope = need_scope(f"{what}()")
        scope.check()
        _check_kinds(what, scope, calls)
    except BaseException:
        for call in calls:
            _drop(call)
        raise
    if not scope.is_async:
        return scope, [(call, None) for call in calls]
    return scope, [(partial(_itself, call), partial(_drop, call)) for call in calls]


def _check_kinds(what: str, scope: Scope, calls: Sequence[Any]) -> None:
    """Functions in a sync run, awaitables in an async one."""
    wrong = [call for call in calls if not _fits(scope, call)]
    if not wrong:
        return
    kind = type(wrong[0]).__name__
    if scope.is_async:
        because = (
            f'it was given a function: without the lambda, {what}(search("a"), …)'
            if callable(wrong[0])
            else f"it was given a {kind}: a sync step runs before {what}; make it async, or use perdure.map"
        )
        raise UsageError(f"{what}() in an async durable function takes awaitables, and {because}")
    because = (
        f"it was given a {kind}: async steps need an async durable function"
        if hasattr(wrong[0], "__await__")
        else f'it was given a {kind}: the step was called already; write {what}(lambda: search("a"), …)'
    )
    raise UsageError(f"{what}() in a sync durable function takes functions without arguments, and {because}")


def _fits(scope: Scope, call: Any) -> bool:
    is_awaitable = hasattr(call, "__await__")
    return is_awaitable if scope.is_async else callable(call) and not is_awaitable


def _itself(awaitable: Any) -> Any:
    return awaitable


def _drop(call: Any) -> None:
    """A coroutine that will not be awaited is closed, so that Python does not warn; a task is cancelled."""
    if hasattr(call, "__await__"):
        end = getattr(call, "close", None) or getattr(call, "cancel", None)
        if end is not None:
            end()
