"""Resources: clients and connections, which are opened again on resume and never stored.

    db = perdure.resource(lambda: psycopg.connect(URL))     # at module level: nothing is opened yet

    @perdure.step
    def customers() -> list[str]:
        return [row[0] for row in db().execute("SELECT name FROM customer")]

`db()` gives this process's instance, opened at the first call. If the factory is async, or gives something to
await, it is `await db()`, and there is one instance per event loop, because connections belong to their loop.
A forked child opens its own: the parent's would be two processes on one socket.

A resource is refused where values are stored (Unstorable, with what to do instead); pickling one, for a step in
a process of its own, takes the factory along and nothing else. No instance is ever closed behind the back of
whoever uses it: `close()` and `reset()` are calls.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar, cast, overload

from perdure.errors import UsageError
from perdure.values.registry import register
from perdure.values.sorts import CannotTake

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

__all__ = ["Resource", "resource"]

T = TypeVar("T")
A = TypeVar("A")

_UNOPENED: Final[Any] = object()

_LIVE: weakref.WeakSet[Resource[Any]] = weakref.WeakSet()
# What a child got by fork. It is kept, because letting go of it would run destructors, and those may say goodbye
# on a connection that the parent still uses.
_INHERITED: Final[list[Any]] = []


def resource(factory: Callable[[], T], *, close: Callable[[Any], object] | None = None) -> Resource[T]:
    """Something that is opened by `factory` when it is first needed, once per process, and never stored.

    `close` closes an instance; without it, its own `close` or `aclose` does.
    """
    return Resource(factory, close=close)


class _PerLoop:
    """The instance of one event loop; the lock lets one task open it while the others wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lock: asyncio.Lock) -> None:
        self.loop = loop
        self.lock = lock
        self.instance: Any = _UNOPENED


class Resource(Generic[T]):
    """See `resource`. Threads share an instance; whether it can be shared is up to what the factory makes."""

    def __init__(self, factory: Callable[[], T], *, close: Callable[[Any], object] | None = None) -> None:
        if not callable(factory):
            raise UsageError(
                f"resource takes a function that opens it, such as perdure.resource(lambda: connect()), "
                f"not a {type(factory).__qualname__}"
            )
        if close is not None and not callable(close):
            raise UsageError(f"close= takes a function of the instance, not a {type(close).__qualname__}")
        self._factory = factory
        self._close = close
        self._start_afresh()
        _LIVE.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()
        self._opening = False
        self._asynchronous = False  # learnt from what the factory gives
        self._instance: Any = _UNOPENED
        self._loops: dict[int, _PerLoop] = {}

    def __repr__(self) -> str:
        name = getattr(self._factory, "__qualname__", type(self._factory).__qualname__)
        return f"<perdure.resource {name}: {'open' if self.is_open() else 'not open'}>"

    def is_open(self) -> bool:
        """Whether this process holds an instance, of whichever event loop."""
        return self._instance is not _UNOPENED or any(
            entry.instance is not _UNOPENED for entry in list(self._loops.values())
        )

    def __call__(self) -> T:
        """This process's instance; opened now if it is not yet. To be awaited if the factory is async."""
        if self._instance is not _UNOPENED:
            return cast(T, self._instance)
        made = self._take()
        return cast(T, self._of_this_loop(made) if self._asynchronous else made)

    def _take(self) -> Any:
        """The instance; of an async factory what it made, for the loop to await, or _UNOPENED."""
        with self._lock:
            if self._instance is not _UNOPENED or self._asynchronous:
                return self._instance
            made = self._make()
            if hasattr(made, "__await__"):
                self._asynchronous = True
            else:
                self._instance = made
            return made

    def _make(self) -> Any:
        if self._opening:
            raise UsageError(f"the factory of {self!r} calls the resource that it is to open")
        self._opening = True
        try:
            return self._factory()
        finally:
            self._opening = False

    async def _of_this_loop(self, made: Any) -> Any:
        entry = self._entry()
        async with entry.lock:
            if entry.instance is _UNOPENED:
                opening: Any = self._factory() if made is _UNOPENED else made
                entry.instance = await opening
            elif isinstance(made, CoroutineType):
                made.close()  # another task was faster
            return entry.instance

    def _entry(self) -> _PerLoop:
        import asyncio

        loop = asyncio.get_running_loop()
        with self._lock:
            # A closed loop's connections cannot be used or closed any more; its id may come again.
            self._loops = {key: entry for key, entry in self._loops.items() if not entry.loop.is_closed()}
            return self._loops.setdefault(id(loop), _PerLoop(loop, asyncio.Lock()))

    def close(self) -> None:
        """Close this process's instance. The next call opens a new one."""
        if self._asynchronous:
            raise UsageError(f"{self!r} is async: await its aclose()")
        with self._lock:
            instance = self._instance
            if instance is _UNOPENED:
                return
            result = self._close_one(instance)
            if hasattr(result, "__await__"):
                if isinstance(result, CoroutineType):
                    result.close()
                raise UsageError(f"{self!r} is closed by something to await, and is still open: await its aclose()")
            self._instance = _UNOPENED

    async def aclose(self) -> None:
        """Close the instance of this event loop, or this process's if the factory is blocking."""
        instance = self._forget(_UNOPENED)
        if instance is not _UNOPENED:
            result = self._close_one(instance)
            if hasattr(result, "__await__"):
                await result

    def reset(self, broken: object = _UNOPENED) -> None:
        """After a failure: let go of the instance, so that the next call opens a new one.

        It is closed too, and an error of closing is ignored: it is broken. With `broken`, only if that is still
        the instance, so that threads that fail together do not throw away each other's new one. Use `areset` if
        the factory is async, or closing is.
        """
        instance = self._forget(broken)
        if instance is not _UNOPENED:
            try:
                result = self._close_one(instance)
            except Exception:
                return
            if isinstance(result, CoroutineType):
                result.close()

    async def areset(self, broken: object = _UNOPENED) -> None:
        """`reset`, for this event loop's instance."""
        instance = self._forget(broken)
        if instance is not _UNOPENED:
            try:
                result = self._close_one(instance)
                if hasattr(result, "__await__"):
                    await result
            except Exception:
                return

    def _forget(self, broken: object) -> Any:
        """Take the instance out, if it is the broken one or none is named."""
        holder: Any = self
        attribute = "_instance"
        if self._asynchronous:
            holder, attribute = self._entry(), "instance"
        with self._lock:
            instance = getattr(holder, attribute)
            if broken is not _UNOPENED and broken is not instance:
                return _UNOPENED
            setattr(holder, attribute, _UNOPENED)
            return instance

    def _close_one(self, instance: Any) -> Any:
        close = self._close
        if close is not None:
            return close(instance)
        method = getattr(instance, "close", None) or getattr(instance, "aclose", None)
        return method() if callable(method) else None

    def __enter__(self) -> T:
        made = self._take()
        if self._asynchronous:
            if isinstance(made, CoroutineType):
                made.close()
            raise UsageError(f"{self!r} is async: use `async with`")
        return cast(T, made)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @overload
    async def __aenter__(self: Resource[Coroutine[Any, Any, A]]) -> A: ...
    @overload
    async def __aenter__(self: Resource[Awaitable[A]]) -> A: ...
    @overload
    async def __aenter__(self) -> T: ...

    async def __aenter__(self) -> Any:
        instance: Any = self()
        return await instance if self._asynchronous else instance

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remake, (self._factory, self._close))

    def __copy__(self) -> Resource[T]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Resource[T]:
        return self


def _remake(factory: Callable[[], T], close: Callable[[Any], object] | None) -> Resource[T]:
    return Resource(factory, close=close)


def _refuse(value: Resource[Any]) -> NoReturn:
    raise CannotTake(
        "a resource is opened again on resume and never stored; keep it at module level and call it where it is "
        'used, or, if it has to be an argument, leave it out of what is recorded: ignore=("client",)'
    )


def _not_stored(body: Any) -> NoReturn:
    raise ValueError("a resource is never stored, so this is not one")


def _forked() -> None:
    for held in list(_LIVE):
        _INHERITED.append((held._instance, held._loops))
        held._start_afresh()


register(Resource, name="perdure.resource", dump=_refuse, load=_not_stored)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
