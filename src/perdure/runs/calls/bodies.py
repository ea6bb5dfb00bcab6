"""Calling a user's function body once, with a deadline if it has one.

An async body runs on the loop. A plain body runs on the caller's thread; with a deadline it runs on a helper thread,
which nothing can stop: at the deadline the caller continues. Nothing is retried, recorded or decided here. `usual_path`
returns a path if a call needs only its body and its commits, without an operation.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial, wraps
from threading import TIMEOUT_MAX, Event, Thread
from time import perf_counter_ns
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from perdure.runs.execution import hooks
from perdure.runs.execution.instrumentation import measured_body, measuring
from perdure.runs.execution.operation import Body, Operation
from perdure.runs.execution.scope import Scope, StepCall, current
from perdure.runs.execution.unwinds import Abandoned
from perdure.runs.functions.specs import StepSpec
from perdure.runs.streams.writer import await_stored, wait_until_stored
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.values.codec import encode

T = TypeVar("T")
_BLOCKED_US = 250_000  # a plain body that takes longer on a loop is reported by a warning
_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # functions, and the warnings that were logged for them
_log = logging.getLogger("perdure")


class BodyTimeout(TimeoutError):
    """A body did not end within its `timeout_s`. It is unknown whether it did its work."""

    def __init__(
        self, message: str, *, name: str = "", timeout_s: float = 0.0, still: BodyThread[Any] | None = None
    ) -> None:
        super().__init__(message)
        self.name, self.timeout_s = name, timeout_s
        self.still = still  # the thread that still runs the body, which nothing can stop


def usual_path(scope: Scope, spec: StepSpec) -> str:
    """Return the path of the next call of a blocking run if it needs no decision before its body runs; else ""."""
    if not spec.is_plain or type(scope) is not Scope or scope.deadlines or scope.parent or scope.stop:
        return ""
    execution = scope.execution
    if execution.stop or execution.closing or execution.state is not None or execution.replay or execution.row.cut:
        return ""
    if execution.index.ahead:
        return ""
    path = f"{scope.prefix}{scope.count + 1}"
    return "" if execution.journal.pending or execution.index.at(path) else path


def run_body(call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None) -> Operation[Any]:
    """Call the user's function once. The driver of the operation decides on which thread."""
    operation = _run_body(call, args, kwargs, limit)
    return operation if (sink := metrics.sink) is None else measured_body(sink, call, operation)


def _run_body(call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None) -> Operation[Any]:
    if call.execution.replay:
        raise call.execution.end_of_replay(call.path, call.name)
    state = call.execution.state
    before = None if state is None else state.before_body(call.caller)
    body = acall_body if call.spec.is_async else call_body
    try:
        return (yield Body(partial(body, call, args, kwargs, limit), call.spec.is_async))
    finally:
        if state is not None:
            state.after_body(before)


def call_body(call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None = None) -> Any:
    """Call a plain body with the call as its current scope."""
    if hooks.hook is not None:
        hooks.fault_point("body", call.path, call.name, call.attempt, "before")
    call.begun, call.outside = True, sys.exception()
    token = current.set(call)
    began = perf_counter_ns()
    try:
        if limit is None:
            return call.spec.body(*args, **kwargs)
        return call_in_time(call.spec.body, args, kwargs, timeout_s=limit, name=call.name)
    except StopIteration as error:  # it would end the operation's generator; Python does the same for coroutines
        raise RuntimeError(f"{call.name} raised StopIteration") from error
    except BodyTimeout as error:
        if call.spec.kind == "step":  # its thread may no longer use the run; an effect's thread is waited for
            call.stop = Abandoned(str(error))
        raise
    finally:
        call.duration_us = (perf_counter_ns() - began) // 1000
        current.reset(token)
        if call.emitted is not None:
            wait_until_stored(call.execution.stream.end(call))
        if call.duration_us > _BLOCKED_US and call.execution.is_async:
            _warn_if_blocked(call)
        if hooks.hook is not None:
            hooks.fault_point("body", call.path, call.name, call.attempt, "after")


def _warn_if_blocked(call: StepCall) -> None:
    """Warn once per function that a plain body blocked the event loop."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # it ran on a thread
        return
    warn_once(
        call.spec,
        "%s %s blocked the event loop for %.1f s: every other run and task of this loop stood still. In an async "
        "run write `await %s.on_thread(…)`, or make the function async",
        call.spec.kind,
        call.name,
        call.duration_us / 1e6,
        call.spec.fn.__name__,
        extra=event("loop.blocked", step=call.name, seconds=call.duration_us / 1e6),
    )


def warn_once(spec: StepSpec, message: str, *args: object, extra: dict[str, Any]) -> None:
    """Log a warning, once per function and message."""
    logged = _warned.setdefault(spec.fn, set())
    if message not in logged:
        logged.add(message)
        _log.warning(message, *args, extra=extra)


def measured_call(call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a plain body as `call_body` does, and report it to the metrics sink."""
    if (sink := metrics.sink) is None:
        return call_body(call, args, kwargs)
    with measuring(sink, call) as result:
        result.value = call_body(call, args, kwargs)
        return result.value


async def acall_body(call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float | None) -> Any:
    """Call an async body with the call as its current scope."""
    if hooks.hook is not None:
        hooks.fault_point("body", call.path, call.name, call.attempt, "before")
    call.begun, call.outside = True, sys.exception()
    token = current.set(call)
    began = perf_counter_ns()
    try:
        if limit is None:
            return await call.spec.body(*args, **kwargs)
        return await acall_in_time(call.spec.body, args, kwargs, timeout_s=limit, name=call.name)
    finally:
        call.duration_us = (perf_counter_ns() - began) // 1000
        current.reset(token)
        if call.emitted is not None:
            stored = call.execution.stream.end(call)
            if not isinstance(sys.exception(), GeneratorExit):  # a coroutine that is closed must not await
                await await_stored(stored)
        if hooks.hook is not None:
            hooks.fault_point("body", call.path, call.name, call.attempt, "after")


def call_in_time(
    fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], *, timeout_s: float, name: str
) -> T:
    """Call a plain function on a thread. Raises BodyTimeout if it does not end in time; the thread still runs it."""
    body = BodyThread(partial(fn, *args, **kwargs), name)
    if not body.wait(timeout_s):
        raise _late(name, timeout_s, "it still runs on its thread", body)
    return body.result()


async def acall_in_time(
    fn: Callable[..., Awaitable[T]], args: Sequence[Any], kwargs: Mapping[str, Any], *, timeout_s: float, name: str
) -> T:
    """Call an async function. Cancels it and raises BodyTimeout if it does not end in time."""
    import asyncio

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await fn(*args, **kwargs)
    except TimeoutError as error:
        if limit.expired():  # else the body itself raised TimeoutError
            raise _late(name, timeout_s, "it was cancelled") from error
        raise


def collected(fn: Callable[..., Generator[T, Any, Any]]) -> Callable[..., Any]:
    """Make a plain function of a generator function.

    It returns the generator's return value, or the list of its chunks if that is None. Each chunk is sent to the
    listeners of the run.
    """

    @wraps(fn)
    def collect(*args: Any, **kwargs: Any) -> Any:
        chunks: list[T] = []
        with closing(fn(*args, **kwargs)) as generator:
            while True:
                try:
                    chunk = next(generator)
                except StopIteration as stop:
                    return chunks if stop.value is None else stop.value
                send_chunk(_current_call(), chunk)
                chunks.append(chunk)

    return collect


def acollected(fn: Callable[..., AsyncGenerator[T, Any]]) -> Callable[..., Awaitable[list[T]]]:
    """Make a coroutine function of an async generator function; it returns the list of the chunks."""

    @wraps(fn)
    async def collect(*args: Any, **kwargs: Any) -> list[T]:
        chunks: list[T] = []
        async with aclosing(fn(*args, **kwargs)) as generator:
            async for chunk in generator:
                send_chunk(_current_call(), chunk)
                chunks.append(chunk)
        return chunks

    return collect


def send_chunk(call: StepCall | None, value: Any) -> None:
    """Pass a value on to the readers of the run; None: the body was called without a run."""
    if call is None:
        return
    if call.stop is not None:  # the body timed out, and still runs on a thread that the run does not wait for
        raise call.stop
    if call.execution.stream is not None:
        call.execution.stream.put(call, encode(value, call.execution.ctx.codec))


def _current_call() -> StepCall | None:
    scope = current.get()
    return None if scope is None else scope.body


def _late(name: str, timeout_s: float, consequence: str, still: BodyThread[Any] | None = None) -> BodyTimeout:
    message = f"{name} did not end within timeout_s={timeout_s:g}; {consequence}"
    return BodyTimeout(message, name=name, timeout_s=timeout_s, still=still)


class BodyThread(Generic[T]):
    """A call on a daemon thread, which does not keep the interpreter alive, with a copy of the caller's context."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._done = Event()
        self._value: list[T] = []
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        Thread(target=self._run, args=(context, work), name=f"perdure-{name}", daemon=True).start()

    def _run(self, context: contextvars.Context, work: Callable[[], T]) -> None:
        try:
            self._value.append(context.run(work))
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call. Return whether it has ended."""
        return self._done.wait(min(timeout_s, TIMEOUT_MAX))

    def result(self) -> T:
        if self._error is None:
            return self._value[0]
        try:
            raise self._error
        finally:
            self._error = None  # its traceback refers to this frame: break the cycle
