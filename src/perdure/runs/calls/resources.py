"""`@perdure.resource`: a client, a browser or a connection that a run opens when it first needs it.

An execution has one object of each resource and arguments. It is closed when the run parks or ends, before another
process may resume the run, and opened again by the next execution that needs it. Nothing of it is recorded.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, overload

from perdure.errors import NotInRun, UsageError
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.scope import current
from perdure.storage.events import event, said

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("perdure")


class Resource(Generic[P, R_co]):
    """A resource of durable runs. Call it in a run to get its object; `direct` is a context manager for other code."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.is_async = inspect.isasyncgenfunction(fn)
        if not self.is_async and not inspect.isgeneratorfunction(fn):
            raise UsageError(
                f"@perdure.resource: {getattr(fn, '__qualname__', fn)} is a function that yields the object once; "
                "what follows the yield closes it"
            )
        self.direct: Callable[P, Any] = asynccontextmanager(fn) if self.is_async else contextmanager(fn)
        functools.update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<resource {self.__qualname__}>"  # type: ignore[attr-defined]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        scope = current.get()
        if scope is None or not scope.execution.policy.is_run:
            raise NotInRun(
                f"{self!r} belongs to durable runs: call it in one, or in its steps. In other code, write "
                f"`{'async ' if self.is_async else ''}with {self.__name__}.direct() as …`"  # type: ignore[attr-defined]
            )
        if self.is_async and not scope.execution.is_async:
            raise UsageError(f"{self!r} is async: use it in an async durable function")
        opened = _opened(scope.execution)
        get: Any = opened.aget if self.is_async else opened.get
        return get(self, args, kwargs)  # type: ignore[no-any-return]


@overload
def resource(fn: Callable[P, Iterator[R]], /) -> Resource[P, R]: ...


@overload
def resource(fn: Callable[P, AsyncIterator[R]], /) -> Resource[P, Awaitable[R]]: ...


def resource(fn: Callable[..., Any], /) -> Resource[..., Any]:
    """Make a function that yields an object once a resource of durable runs: a client, a browser, a connection.

    Called in a durable function or a step, it returns the object. The first call of an execution opens it, and later
    ones with the same arguments return the same object, in all branches. It is closed when the run parks or ends. A
    run that resumes opens it again. It is never stored. If the function is an async generator, await the call.
    """
    return Resource(fn)


class _OpenedObject:
    """The object of one resource and arguments. The locks let one branch open it, and the others wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.manager: AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None = None
        self.value: Any = None

    @functools.cached_property
    def alock(self) -> Any:
        import asyncio

        return asyncio.Lock()


class OpenedResources:
    """The resources that an execution has opened, in the order of opening."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._entries: dict[Any, _OpenedObject] = {}
        self._opened: list[_OpenedObject] = []

    def get(self, of: Resource[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self._entry(of, args, kwargs)
        with entry.lock:
            if entry.manager is None:
                manager: AbstractContextManager[Any] = of.direct(*args, **kwargs)
                token = current.set(None)  # steps that it calls are plain calls, not the run's
                try:
                    entry.value = manager.__enter__()
                finally:
                    current.reset(token)
                self._keep(entry, manager)
            return entry.value

    async def aget(self, of: Resource[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self._entry(of, args, kwargs)
        async with entry.alock:
            if entry.manager is None:
                manager: AbstractAsyncContextManager[Any] = of.direct(*args, **kwargs)
                token = current.set(None)
                try:
                    entry.value = await manager.__aenter__()
                finally:
                    current.reset(token)
                self._keep(entry, manager)
            return entry.value

    def close(self) -> None:
        """Close what is open, the newest first. Log an error: the run has done its work."""
        for entry, manager in self._take():
            try:
                assert isinstance(manager, AbstractContextManager)
                manager.__exit__(None, None, None)
            except Exception as error:
                self._warn(entry, error)

    async def aclose(self) -> None:
        """`close` on an event loop."""
        for entry, manager in self._take():
            try:
                if isinstance(manager, AbstractAsyncContextManager):
                    await manager.__aexit__(None, None, None)
                else:
                    manager.__exit__(None, None, None)
            except Exception as error:
                self._warn(entry, error)

    def _entry(self, of: Resource[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenedObject:
        key = (of, args, frozenset(kwargs.items()))
        try:
            with self._lock:
                return self._entries.setdefault(key, _OpenedObject(repr(of)))
        except TypeError as error:
            raise UsageError(f"{of!r}: its arguments name one object, so they must be hashable: {error}") from error

    def _keep(self, entry: _OpenedObject, manager: Any) -> None:
        with self._lock:
            entry.manager = manager
            self._opened.append(entry)

    def _take(self) -> list[tuple[_OpenedObject, Any]]:
        """Return what is open, the newest first, and forget it: a later call opens it again."""
        with self._lock:
            opened, self._opened, self._entries = self._opened[::-1], [], {}
        return [(entry, entry.manager) for entry in opened]

    def _warn(self, entry: _OpenedObject, error: Exception) -> None:
        message = "run %s: %s could not be closed: %s"
        fields = event("resource.not_closed", run=self._run, resource=entry.name, error=type(error).__name__)
        _log.warning(message, self._run, entry.name, said(error), extra=fields)


def _opened(execution: Execution) -> OpenedResources:
    with execution.counting:
        if execution.resources is None:
            execution.resources = OpenedResources(execution.row.id)
        opened: OpenedResources = execution.resources
        return opened
