"""Workers in processes of their own that a test can stop, continue and kill, and functions for them to run.

A body that must not go on yet waits at a gate: a named pipe, which `open_gate` opens. Only the first who comes waits
there. Everything that a body did is a line in a log file, with the process that did it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import perdure
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.testing.processes import ChildProcess, ForkServer, Say

PATIENCE_S = 30.0


# --- what is run


def note(folder: str, what: str) -> None:
    """One line, in one write: never mixed with another's."""
    descriptor = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{what} {os.getpid()}\n".encode())
    finally:
        os.close(descriptor)


def notes(folder: Path | str) -> list[tuple[str, int]]:
    """What was done, and by which process."""
    path = Path(folder) / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def done(folder: Path | str) -> list[str]:
    return [what for what, _ in notes(folder)]


def gate(folder: str, name: str = "gate") -> None:
    """Wait until the test opens the gate; whoever comes later passes."""
    try:
        os.mkfifo(f"{folder}/{name}")
    except FileExistsError:
        return
    with open(f"{folder}/{name}") as pipe:
        pipe.read()


def somebody_waits(folder: Path, name: str = "gate") -> None:
    """Wait until somebody is at the gate, or on his last step to it."""
    until((folder / name).exists)


def open_gate(folder: Path, name: str = "gate") -> None:
    """Let the one who waits go on. Blocks until he is there."""
    somebody_waits(folder, name)
    with open(folder / name, "w"):
        pass


@perdure.step
def mark(folder: str, what: str) -> str:
    note(folder, what)
    return what


@perdure.step
def hold(folder: str) -> str:
    note(folder, "hold")
    gate(folder)
    return "held"


@perdure.step
async def amark(folder: str, what: str) -> str:
    note(folder, what)
    return what


@perdure.effect
def pay(folder: str, key: perdure.IdempotencyKey) -> str:
    note(folder, "pay")
    return str(key)


@perdure.effect
def pay_slowly(folder: str, key: perdure.IdempotencyKey) -> str:
    note(folder, "pay")
    gate(folder)
    return str(key)


@perdure.durable
def errand(folder: str) -> list[str]:
    return [mark(folder, "first"), hold(folder), mark(folder, "last")]


@perdure.durable
def short(folder: str, what: str = "short") -> str:
    return mark(folder, what)


@perdure.durable
async def ashort(folder: str, what: str = "ashort") -> str:
    return await amark(folder, what)


@perdure.durable
def paid(folder: str) -> str:
    mark(folder, "before")
    pay(folder)
    return mark(folder, "after")


@perdure.durable
def paid_slowly(folder: str) -> str:
    mark(folder, "before")
    pay_slowly(folder)
    return mark(folder, "after")


@perdure.durable
def asked(folder: str) -> str:
    mark(folder, "before")
    answer = perdure.ask("Go on?", options=["yes", "no"])
    return mark(folder, str(answer))


# --- workers


def work(say: Say, url: str, options: dict[str, Any]) -> None:
    """In a child: a worker, until it is stopped. Says the points that it comes to."""
    lease_s = options.pop("lease_s", 30.0)
    until_idle = options.pop("until_idle", False)

    def hook(point: Point) -> None:
        if point.kind in ("claim", "body") and not stopping.is_set():
            say([point.kind, point.name, point.when])

    stopping = threading.Event()
    hooks.hook = hook
    with perdure.open(url, lease_s=lease_s, durability="normal") as store:
        worker = perdure.Worker(store, **options)
        say("ready")
        worker.run(until_idle=until_idle)
        stopping.set()
        say(dict(worker.counts))


class Hand:
    """A worker in a process of its own."""

    def __init__(self, fork_server: ForkServer, url: str, **options: Any) -> None:
        self.child: ChildProcess = fork_server.start(url, options)
        self._lines = self.child.lines()
        self.wait_for("ready")

    def wait_for(self, said: Any) -> None:
        for line in self._lines:
            if line == said:
                return
        raise AssertionError(f"the worker ended without saying {said!r}")

    def stop(self) -> None:
        os.kill(self.child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.child.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        list(self._lines)

    def ask_to_end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGTERM)

    def counts(self) -> dict[str, int]:
        """What became of its runs, when it has ended."""
        said = list(self._lines)
        assert said, "it was killed, or said nothing"
        counts: dict[str, int] = said[-1]
        return counts

    def end(self) -> dict[str, int]:
        self.ask_to_end()
        return self.counts()


@contextmanager
def hands(count: int = 1) -> Iterator[list[ForkServer]]:
    nurseries = [ForkServer("workshop:work") for _ in range(count)]
    try:
        yield nurseries
    finally:
        for fork_server in nurseries:
            fork_server.close()


@contextmanager
def working(worker: perdure.Worker) -> Iterator[perdure.Worker]:
    """A worker on a thread of this process; it is drained when the block ends."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            worker.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield worker
    finally:
        if not worker._stopping:  # a second time would give its runs back at once
            worker.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def until(happened: Callable[[], Any]) -> Any:
    """Wait for something that other processes or threads do."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found


def end_leases(store: perdure.Store) -> None:
    """Let the time of all leases pass: where only the lease tells that an owner is dead, it is over now."""

    def program() -> Program[None]:
        yield Batch(Sql("UPDATE run SET lease_until = 0")(), last=True)

    store._context.driver.run(Transaction(program, write=True))


def names(run: perdure.Run) -> list[tuple[str, str]]:
    """The steps of a run and how they stand: one line for each, or it was recorded twice."""
    return [(step.name, step.status) for step in run.steps()]
