"""Calling a user's function body once, with a deadline if it has one.

    async body                 on the loop; cancelled at its deadline
    plain body                 on the caller's thread
    plain body, deadline       on a helper thread, which nothing can stop: at the deadline the caller goes on
    plain body, process=True   in a process of its own, which is killed at the deadline with all that it started, and
                               also if the caller dies

A body on a helper thread sees the caller's context variables, so a run's functions work there. One in a process of its
own does not see the run. That process is spawned, not forked: it starts clean and inherits no connection, lock or
thread. As always when spawning, it imports the user's script again, under another name, so that functions of the
script are found: what a script does must stand below `if __name__ == "__main__":`.

Arguments, results and errors go through pickle there, which runs code when it is read. That is sound only because
both ends are the same program of the same user, joined by a pipe that no other process has; nothing that was
stored, or came from elsewhere, is ever unpickled.

Nothing is retried, recorded or decided here."""

from __future__ import annotations

import contextvars
import importlib
import inspect
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from perdure.errors import Unstorable, UsageError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

T = TypeVar("T")
Work = Callable[[], T]

_REAP_S = 5.0  # for a process that was killed
_DEPTH_MAX = 32  # of decorators
_LINGER_S = 1.0  # for a process that has answered
_LOOK_S = 1.0  # between looks at a process whose descriptors others may have inherited
_DONE, _FAILED, _LOST = b"d", b"f", b"l"  # the first byte of an answer; an empty message says that the body begins
_GUARD = 'is the `if __name__ == "__main__":` of the script missing?'


class BodyTimeout(TimeoutError):
    """A body did not end within its `timeout_s`. Whether it did its work is unknown."""

    def __init__(self, message: str, *, name: str = "", timeout_s: float = 0.0, still: Any = None) -> None:
        super().__init__(message)
        self.name, self.timeout_s = name, timeout_s
        self.still = still  # on a thread, which cannot be stopped: it goes on


class BodyDied(RuntimeError):
    """The process of a body ended without an answer. If the body had `started`, whether it did its work is unknown."""

    def __init__(self, message: str, *, name: str = "", exit_code: int | None = None, started: bool = True) -> None:
        super().__init__(message)
        self.name, self.exit_code, self.started = name, exit_code, started


def call(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    process: bool = False,
    name: str = "",
) -> T:
    """Call a plain function. `name` is what errors call it."""
    kwargs, name = kwargs or {}, name or _name(fn)
    if process:
        return _Child(fn, args, kwargs, name).call(timeout_s)
    if timeout_s is None:
        return fn(*args, **kwargs)
    pending = _Pending(lambda: fn(*args, **kwargs), name)
    if not pending.wait(timeout_s):
        raise _late(name, timeout_s, "it goes on on its thread", pending)
    return pending.result()


async def acall(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    process: bool = False,
    name: str = "",
) -> Any:
    """Call an async function, or a plain one: on this thread, unless it has a deadline or a process of its own.

    Cancelling this cancels an async body and kills a process; a body on a helper thread goes on.
    """
    kwargs, name = kwargs or {}, name or _name(fn)
    if inspect.iscoroutinefunction(fn):
        if process:
            raise UsageError(f"{name} is async, and process=True is for plain functions; make it `def`")
        return await _acall_on_loop(fn, args, kwargs, timeout_s, name)
    if process:
        return await _Child(fn, args, kwargs, name).acall(timeout_s)
    if timeout_s is None:
        return fn(*args, **kwargs)
    pending = _Pending(lambda: fn(*args, **kwargs), name)
    if not await pending.await_(timeout_s):
        raise _late(name, timeout_s, "it goes on on its thread", pending)
    return pending.result()


async def _acall_on_loop(
    fn: Callable[..., Awaitable[T]], args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None, name: str
) -> T:
    if timeout_s is None:
        return await fn(*args, **kwargs)
    import asyncio

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await fn(*args, **kwargs)
    except TimeoutError as error:
        if limit.expired():  # and not a TimeoutError of the body's own
            raise _late(name, timeout_s, "it was cancelled") from error
        raise


def collect(generator: Generator[T, Any, Any], on_chunk: Callable[[T], object]) -> Any:
    """Run a generator to its end. What it returns, or the list of its chunks if it returns nothing."""
    chunks: list[T] = []
    with closing(generator):
        while True:
            try:
                chunk = next(generator)
            except StopIteration as stop:
                return chunks if stop.value is None else stop.value
            on_chunk(chunk)
            chunks.append(chunk)


async def acollect(generator: AsyncGenerator[T, Any], on_chunk: Callable[[T], object]) -> list[T]:
    """Run an async generator to its end, and give its chunks. `on_chunk` may be async."""
    chunks: list[T] = []
    async with aclosing(generator):
        async for chunk in generator:
            waiting = on_chunk(chunk)
            if inspect.isawaitable(waiting):
                await waiting
            chunks.append(chunk)
    return chunks


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _late(name: str, timeout_s: float, what: str, still: _Pending[Any] | None = None) -> BodyTimeout:
    said = f"{name} did not end within timeout_s={timeout_s:g}; {what}"
    return BodyTimeout(said, name=name, timeout_s=timeout_s, still=still)


# On a helper thread


class _Pending(Generic[T]):
    """Work on a daemon thread (it does not keep the interpreter from ending), with a copy of the caller's context."""

    def __init__(self, work: Work[T], name: str) -> None:
        from threading import Event, Lock, Thread

        self._done, self._mutex = Event(), Lock()
        self._notify: Callable[[], object] | None = None
        self._value: list[T] = []
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        Thread(target=self._run, args=(context, work), name=f"perdure-{name}", daemon=True).start()

    def _run(self, context: contextvars.Context, work: Work[T]) -> None:
        try:
            self._value.append(context.run(work))
        except BaseException as error:
            self._error = error
        with self._mutex:
            self._done.set()
            notify = self._notify
        if notify is not None:
            try:
                notify()
            except RuntimeError:
                pass  # the loop is closed: nobody waits

    def wait(self, timeout_s: float | None) -> bool:
        """True if it has ended."""
        from threading import TIMEOUT_MAX

        return self._done.wait(None if timeout_s is None else min(timeout_s, TIMEOUT_MAX))

    async def await_(self, timeout_s: float | None) -> bool:
        """The same, on a loop."""
        import asyncio

        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._mutex:
            if self._done.is_set():
                return True
            self._notify = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            async with asyncio.timeout(timeout_s):
                await woken.wait()
        except TimeoutError:
            pass
        return self._done.is_set()

    def result(self) -> T:
        if self._error is None:
            return self._value[0]
        try:
            raise self._error
        finally:
            self._error = None  # its traceback leads back here: no cycle


# In a process of its own


class _Reference(NamedTuple):
    """Where a function is found. Below its name may stand a decorated one, so many layers deep."""

    module: str
    qualname: str
    depth: int


def _refer(fn: Callable[..., Any], name: str) -> _Reference:
    """The function as a reference, checked to lead back to this very function."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname or not inspect.isroutine(fn) or inspect.ismethod(fn):
        raise UsageError(
            f"{name} cannot be found by its name, and process=True needs that; define it with `def` in a module, "
            "not inside another function"
        )
    try:
        found = _lookup(module, qualname)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{module}.{qualname} does not exist, and process=True needs to find it: {error}") from error
    for depth in range(_DEPTH_MAX):
        if found is fn:
            return _Reference(module, qualname, depth)
        found = _below(found)
        if found is None:
            break
    raise UsageError(
        f"{module}.{qualname} is another function than {name}, and process=True finds it by its name; "
        "give it a name of its own, or use functools.wraps in its decorator"
    )


def _lookup(module: str, qualname: str, depth: int = 0) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    found = getattr(found, "__func__", found)  # of a class method
    for _ in range(depth):
        found = _below(found)
    return found


def _below(found: Any) -> Any:
    """What a decorator was put on, or None."""
    below = getattr(found, "__wrapped__", None)
    return getattr(getattr(found, "perdure", None), "fn", None) if below is None else below


class _Child(Generic[T]):
    """One call in a process of its own."""

    def __init__(self, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
        import multiprocessing
        from multiprocessing.reduction import ForkingPickler
        from threading import Lock

        if multiprocessing.current_process().daemon:
            raise UsageError(f"{name} has process=True, but this is a daemonic process, which may not start others")
        self._name, self._reference = name, _refer(fn, name)
        try:
            self._arguments = bytes(ForkingPickler.dumps((tuple(args), dict(kwargs))))
        except Exception as error:
            raise UsageError(f"the arguments of {name} cannot be sent to its process: {error}") from error
        self._mutex = Lock()
        self._process: SpawnProcess | None = None
        self._killed = False

    def call(self, timeout_s: float | None) -> T:
        pending = _Pending(self._converse, self._name)
        try:
            if pending.wait(timeout_s):
                return pending.result()
            self._kill()
            return self._after_kill(pending, timeout_s, pending.wait(_REAP_S))
        except BaseException:  # KeyboardInterrupt, too
            self._kill()
            raise

    async def acall(self, timeout_s: float | None) -> T:
        pending = _Pending(self._converse, self._name)
        try:
            if await pending.await_(timeout_s):
                return pending.result()
            self._kill()
            return self._after_kill(pending, timeout_s, await pending.await_(_REAP_S))
        except BaseException:  # CancelledError, too
            self._kill()
            raise

    def _after_kill(self, pending: _Pending[T], timeout_s: float | None, ended: bool) -> T:
        """It may have answered in the last moment: then that counts."""
        late = _late(self._name, timeout_s or 0.0, "its process was killed")
        if not ended:
            raise late
        try:
            return pending.result()
        except BodyDied:
            raise late from None

    def _kill(self) -> None:
        with self._mutex:
            self._killed = True
            process = self._process
            if process is None or process.exitcode is not None:
                return
            assert process.pid is not None
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass  # it has not made its group yet, and so started nothing
            process.kill()

    def _converse(self) -> T:
        """Start the process, and wait for its answer or its end."""
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with ours:
            # Small, so that starting cannot block on a child that does not read. Daemonic, so that it ends with us.
            process = context.Process(target=_serve, args=(theirs, self._reference), daemon=True)
            with theirs:
                self._start(process)
            started, answer = self._exchange(ours, process)
        process.join(_LINGER_S if answer else _REAP_S)
        if process.exitcode is None and process.is_alive():
            process.kill()  # it has answered, and has threads that do not end
            process.join(_REAP_S)
        exit_code = _exit_code(process)
        with self._mutex:
            self._process = None
        if answer is None:
            raise self._died(exit_code, started)
        return self._read(answer)

    def _start(self, process: SpawnProcess) -> None:
        with self._mutex:
            if self._killed:
                raise BodyDied(f"{self._name} was stopped before it began", name=self._name, started=False)
            process.start()
            self._process = process

    def _exchange(self, ours: Connection, process: SpawnProcess) -> tuple[bool, bytes | None]:
        """Whether the body was begun, and what it answered."""
        from multiprocessing.connection import wait

        started = False
        try:
            ours.send_bytes(self._arguments)
            while True:
                ready = wait([ours, process.sentinel], _LOOK_S)
                if ours in ready or ours.poll():
                    message = ours.recv_bytes()
                    if message:
                        return True, message
                    started = True
                elif ready or process.exitcode is not None:
                    return started, None
        except (EOFError, OSError):
            return started, None

    def _died(self, code: int | None, started: bool) -> BodyDied:
        number = -(code or 0)
        how = f"was killed by signal {number} ({signal.strsignal(number)})" if number > 0 else f"exited ({code})"
        when = "without an answer" if started else f"before {self._name} began; {_GUARD}"
        message = f"the process of {self._name} {how} {when}"
        return BodyDied(message, name=self._name, exit_code=code, started=started)

    def _read(self, answer: bytes) -> T:
        import pickle

        kind, packed = answer[:1], answer[1:]
        if kind == _FAILED:
            raise _revive(packed)
        try:
            if kind == _DONE:
                return pickle.loads(packed)  # type: ignore[no-any-return]
            why = packed.decode()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        raise Unstorable(f"{self._name} ended, but its result cannot come back from its process: {why}", path="result")


def _exit_code(process: SpawnProcess) -> int | None:
    """None if it cannot be known: whoever else waits for children took it."""
    from time import monotonic, sleep

    deadline = monotonic() + _LINGER_S
    while process.exitcode is None and monotonic() < deadline:
        sleep(0.005)  # another thread that starts a process may reap this one, and has not written it down yet
    return process.exitcode


# What runs in that process


def _serve(theirs: Connection, reference: _Reference) -> None:
    import multiprocessing
    import pickle
    from threading import Thread

    os.setpgid(0, 0)  # what the body starts is killed with it, and Ctrl-C reaches only the caller
    multiprocessing.current_process().daemon = False  # the body may start processes of its own
    Thread(target=_die_with_parent, name="perdure-parent", daemon=True).start()
    with theirs:
        arguments = theirs.recv_bytes()
        try:
            fn = _lookup(*reference)
            args, kwargs = pickle.loads(arguments)
        except Exception as error:
            why = f"{reference.module}.{reference.qualname} cannot be called in a process of its own: {error}"
            theirs.send_bytes(_failure(UsageError(f"{why}; it must be importable there, not typed in at a prompt")))
            return
        theirs.send_bytes(b"")  # from here on something may have been done
        theirs.send_bytes(_perform(fn, args, kwargs))


def _perform(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    try:
        value = fn(*args, **kwargs)
    except BaseException as error:
        return _failure(error)
    try:
        return _DONE + bytes(ForkingPickler.dumps(value))
    except Exception as error:
        return _LOST + f"{type(error).__name__}: {error}".encode(errors="replace")


def _failure(error: BaseException) -> bytes:
    """An error, as itself if it can be pickled, and as texts that stand in for it."""
    import pickle
    import traceback

    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    except Exception:  # its __str__ fails
        text = f"{type(error).__module__}.{type(error).__qualname__}"
    try:
        packed = pickle.dumps(error)
    except Exception:
        packed = b""
    return _FAILED + pickle.dumps((packed, text, trace))


def _revive(answer: bytes) -> BaseException:
    """The caller's side of it. Many exceptions can be pickled and not unpickled."""
    import pickle

    packed, text, trace = pickle.loads(answer)
    try:
        error = pickle.loads(packed)
    except Exception:
        error = None
    revived = error if isinstance(error, BaseException) else RuntimeError(text)
    revived.add_note(f"In its own process:\n{trace}")
    return revived


def _die_with_parent() -> None:
    """A body whose caller was killed must not go on: the run is taken up elsewhere."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None
    # Looks at the parent's number as well: a forked sibling may have inherited the other end of the pipe.
    while not wait([parent.sentinel], _LOOK_S) and os.getppid() == parent.pid:
        pass
    os.killpg(0, signal.SIGKILL)
