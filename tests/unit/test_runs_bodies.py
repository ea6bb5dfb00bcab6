"""Calling a body once: deadlines, threads, processes of their own, generators; and when a failed one is tried again."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from perdure.errors import Unstorable, UsageError
from perdure.runs.calls.bodies import BodyDied, BodyTimeout, acall, call

T = TypeVar("T")
SHORT_S = 0.05


async def nothing() -> None: ...


current = contextvars.ContextVar("current", default="nothing")


# Bodies that run in processes of their own: found by their names.
def add(one: int, two: int = 0) -> int:
    return one + two


def own_pid() -> int:
    return os.getpid()


def hang(path: str) -> None:
    """Says its number and that of a process that it started, and never ends."""
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(path + ".part").write_text(f"{os.getpid()} {helper.pid}")
    os.rename(path + ".part", path)
    while True:
        signal.pause()


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


def exit_at_once(code: int) -> None:
    os._exit(code)


class Refused(Exception):
    """Survives pickling."""


class Stubborn(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")


def refuse(kind: str) -> None:
    if kind == "refused":
        raise Refused("no")
    if kind == "stubborn":
        raise Stubborn(7, "no")
    error = Refused("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def unsendable() -> Any:
    return threading.Lock()


def large(size: int) -> bytes:
    return bytes(size)


def measure(data: bytes) -> int:
    return len(data)


def start_another() -> int:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(add, (20, 1))


def shouting(fn: Callable[..., T]) -> Callable[..., str]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> str:
        return f"{fn(*args)}!"

    return wrapper


@shouting
@shouting
def shouted(word: str) -> str:
    return word


class Tools:
    @shouting
    def method(self, word: str) -> str:
        return f"method {word}"

    @staticmethod
    def static(word: str) -> str:
        return f"static {word}"


class Spec:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn


def _original() -> str:
    return "original"


_original.__qualname__ = "decorated"


def decorated() -> str:
    return "wrapper"


decorated.perdure = Spec(_original)  # type: ignore[attr-defined]


# On the caller's thread
def test_without_a_deadline_a_body_runs_on_the_callers_thread() -> None:
    assert call(threading.get_ident) == threading.get_ident()
    assert call(add, (1,), {"two": 2}) == 3


async def test_a_plain_body_in_an_async_run_runs_on_the_loops_thread() -> None:
    assert await acall(threading.get_ident) == threading.get_ident()


async def test_an_async_body_is_awaited() -> None:
    async def body(word: str) -> str:
        await asyncio.sleep(0)
        return word

    assert await acall(body, ("a",)) == "a"
    assert await acall(body, (), {"word": "b"}, timeout_s=10) == "b"


# Deadlines of async bodies
async def test_an_async_body_is_cancelled_at_its_deadline() -> None:
    seen: list[str] = []

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(BodyTimeout, match=r"look did not end within timeout_s=0.05") as caught:
        await acall(body, timeout_s=SHORT_S, name="look")
    assert (caught.value.name, caught.value.timeout_s) == ("look", SHORT_S)
    assert seen == ["cancelled"]


async def test_a_timeout_error_of_the_bodys_own_is_not_ours() -> None:
    async def body() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine") as caught:
        await acall(body, timeout_s=10)
    assert not isinstance(caught.value, BodyTimeout)


async def test_cancelling_an_async_body_from_outside_is_no_timeout() -> None:
    begun = asyncio.Event()

    async def body() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(acall(body, timeout_s=10))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_timeout_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(BodyTimeout("late", name="look", timeout_s=2.0)))
    assert (str(copy), copy.name, copy.timeout_s) == ("late", "look", 2.0)


# Deadlines of plain bodies
@pytest.mark.parametrize("mode", ["call", "acall"])
async def test_a_plain_body_that_is_late_goes_on_while_the_caller_does(mode: str) -> None:
    release, ended = threading.Event(), threading.Event()

    def body() -> str:
        release.wait(10)
        ended.set()
        return "dropped"

    with pytest.raises(BodyTimeout, match="goes on on its thread"):
        _ = call(body, timeout_s=SHORT_S) if mode == "call" else await acall(body, timeout_s=SHORT_S)
    assert not ended.is_set()
    release.set()
    assert ended.wait(10)


@pytest.mark.parametrize("mode", ["call", "acall"])
async def test_a_plain_body_within_its_deadline_gives_its_result_or_error_and_sees_the_context(mode: str) -> None:
    async def either(fn: Callable[..., T], *args: Any) -> T:
        result: T = call(fn, args, timeout_s=10) if mode == "call" else await acall(fn, args, timeout_s=10)
        return result

    current.set("the run")
    assert await either(current.get) == "the run"
    assert await either(threading.get_ident) != threading.get_ident()
    with pytest.raises(Refused, match="no"):
        await either(refuse, "refused")
    with pytest.raises(SystemExit):
        await either(sys.exit, 3)


def test_a_timeout_beyond_what_threads_can_wait_is_a_long_one() -> None:
    assert call(add, (1, 2), timeout_s=1e30) == 3


async def test_a_late_body_may_end_after_its_loop() -> None:
    release, ended = threading.Event(), threading.Event()
    failed: list[Any] = []

    def body() -> None:
        release.wait(10)

    def watch() -> None:
        for thread in threading.enumerate():
            if thread.name == "perdure-slow":
                thread.join(10)
        ended.set()

    def session() -> None:
        with pytest.raises(BodyTimeout):
            asyncio.run(acall(body, timeout_s=SHORT_S, name="slow"))

    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        await asyncio.to_thread(session)
        release.set()
        await asyncio.to_thread(watch)
    finally:
        threading.excepthook = hook
    assert ended.is_set()
    assert failed == []


def test_a_late_body_does_not_keep_the_interpreter_from_ending() -> None:
    script = """
from threading import Event
from perdure.runs.calls.bodies import BodyTimeout, call
try:
    call(Event().wait, timeout_s=0.01)
except BodyTimeout:
    print("late")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "late\n")


# Processes of their own
@pytest.mark.parametrize("mode", ["call", "acall"])
async def test_a_body_in_a_process_of_its_own_gives_its_result(mode: str) -> None:
    if mode == "call":
        assert call(own_pid, process=True) != os.getpid()
        assert call(add, (1,), {"two": 2}, process=True, timeout_s=60) == 3
    else:
        assert await acall(own_pid, process=True) != os.getpid()
        assert await acall(add, (1,), {"two": 2}, process=True, timeout_s=60) == 3


@pytest.mark.parametrize("mode", ["call", "acall"])
async def test_errors_come_back_as_their_own_type_or_as_text(mode: str) -> None:
    async def run(kind: str) -> None:
        if mode == "call":
            call(refuse, (kind,), process=True)
        else:
            await acall(refuse, (kind,), process=True)

    with pytest.raises(Refused, match="no") as caught:
        await run("refused")
    assert "in refuse" in caught.value.__notes__[0]  # where it was raised
    with pytest.raises(RuntimeError, match=r"test_runs_bodies\.Stubborn: 7 no"):
        await run("stubborn")
    with pytest.raises(RuntimeError, match=r"test_runs_bodies\.Refused: holds a lock"):
        await run("with a lock")


def test_a_process_that_is_killed_or_ends_by_itself_is_said_to_have_died() -> None:
    with pytest.raises(
        BodyDied, match=r"end_by was killed by signal 11 \(Segmentation fault\) without an answer"
    ) as caught:
        call(end_by, (signal.SIGSEGV,), process=True)
    assert (caught.value.exit_code, caught.value.started) == (-signal.SIGSEGV, True)
    with pytest.raises(BodyDied, match=r"exited \(3\)") as caught:
        call(exit_at_once, (3,), process=True, name="leave")
    assert (caught.value.exit_code, caught.value.name) == (3, "leave")


def await_file(path: Path) -> list[int]:
    """The numbers that `hang` wrote."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


def await_end(pids: list[int]) -> None:
    """All of them are gone, or zombies that nobody has reaped yet."""
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(listed) and not listed.startswith("Z")


async def test_a_cancelled_call_kills_its_process_and_what_that_started(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    task = asyncio.create_task(acall(hang, (str(path),), process=True))
    pids = await asyncio.to_thread(await_file, path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(await_end, pids)


@pytest.mark.parametrize("mode", ["call", "acall"])
async def test_at_its_deadline_a_process_is_dead_when_the_caller_hears_of_it(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is made to pass once the body hangs, however slow this machine is."""
    from perdure.runs.calls import bodies

    path, waits = tmp_path / "pids", [0]
    wait, await_ = bodies._Pending.wait, bodies._Pending.await_

    def late(pending: bodies._Pending[Any], timeout_s: float | None) -> bool:
        waits[0] += 1
        if waits[0] == 1:
            await_file(path)
            return wait(pending, 0)
        return wait(pending, timeout_s)

    async def alate(pending: bodies._Pending[Any], timeout_s: float | None) -> bool:
        waits[0] += 1
        if waits[0] == 1:
            await asyncio.to_thread(await_file, path)
            return await await_(pending, 0)
        return await await_(pending, timeout_s)

    monkeypatch.setattr(bodies._Pending, "wait", late)
    monkeypatch.setattr(bodies._Pending, "await_", alate)
    with pytest.raises(BodyTimeout, match="its process was killed"):
        _ = (
            call(hang, (str(path),), process=True, timeout_s=1)
            if mode == "call"
            else await acall(hang, (str(path),), process=True, timeout_s=1)
        )
    body, helper = await_file(path)
    with pytest.raises(ProcessLookupError):
        os.kill(body, 0)  # reaped
    await_end([helper])


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, SHORT_S])
def test_a_deadline_before_the_process_has_even_started(timeout_s: float, tmp_path: Path) -> None:
    with pytest.raises(BodyTimeout):
        call(hang, (str(tmp_path / "pids"),), process=True, timeout_s=timeout_s)


def test_a_body_does_not_outlive_a_caller_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    script = """
import sys, test_runs_bodies
from perdure.runs.calls.bodies import call
call(test_runs_bodies.hang, sys.argv[1:], process=True)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", script, str(path)], env=environment) as caller:
        pids = await_file(path)
        caller.kill()
    await_end(pids)


def test_large_arguments_and_results_go_through() -> None:
    assert call(measure, (bytes(5_000_000),), process=True) == 5_000_000
    assert len(call(large, (5_000_000,), process=True)) == 5_000_000


def test_what_cannot_be_sent_says_so_and_whether_the_body_ran() -> None:
    with pytest.raises(UsageError, match="arguments of measure cannot be sent"):
        call(measure, (threading.Lock(),), process=True)
    with pytest.raises(Unstorable, match="unsendable ended, but its result") as caught:
        call(unsendable, process=True)
    assert caught.value.path == "result"


def test_a_body_may_start_processes_of_its_own() -> None:
    assert call(start_another, process=True) == 21


def test_decorated_functions_are_found_at_the_layer_that_was_asked_for() -> None:
    inner: Any = shouted
    assert call(inner, ("a",), process=True) == "a!!"
    assert call(inner.__wrapped__, ("a",), process=True) == "a!"
    assert call(inner.__wrapped__.__wrapped__, ("a",), process=True) == "a"
    assert call(_original, process=True) == "original"


def test_methods_are_found_in_their_class() -> None:
    method: Any = Tools.method
    assert call(method.__wrapped__, (Tools(), "a"), process=True) == "method a"
    assert call(Tools.static, ("a",), process=True) == "static a"


def test_a_function_that_has_no_name_to_be_found_by_is_refused_before_anything_starts() -> None:
    def local() -> None: ...

    def impostor() -> None: ...

    impostor.__qualname__, impostor.__module__ = "add", __name__
    for fn in (local, lambda: 1, functools.partial(add, 1), Tools().method):
        with pytest.raises(UsageError, match="cannot be found by its name"):
            call(fn, process=True)
    with pytest.raises(UsageError, match="another function"):
        call(impostor, process=True)


async def test_an_async_body_in_a_process_of_its_own_is_refused() -> None:
    with pytest.raises(UsageError, match="is for plain functions"):
        await acall(nothing, process=True)


def test_several_threads_at_once_and_no_descriptor_stays() -> None:
    call(add, (0, 0), process=True)  # starts what Python keeps for itself
    results: list[int] = []
    before = len(os.listdir("/dev/fd"))

    def several(number: int) -> None:
        results.append(call(add, (number, 1), process=True))
        with pytest.raises(BodyDied, match="signal 15"):
            call(end_by, (signal.SIGTERM,), process=True)

    threads = [threading.Thread(target=several, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [1, 2, 3, 4]
    assert len(os.listdir("/dev/fd")) <= before  # others may have closed theirs meanwhile
