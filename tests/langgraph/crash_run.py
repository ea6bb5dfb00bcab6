"""The children of the crash tests: runs with side effects, and operations, that kill their own process.

A run has ten tasks; each writes its number to a log and its result to the saver, in the background. When the run is
over LangGraph puts the checkpoint that supersedes those results. There the process dies: after whatever `put` waits
for, before its commit. If a result was not stored by then, the next run does that task again.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

from checkpoints import config_of, everything, numbered_id, put
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.func import entrypoint, task

import perdure.storage.postgres.driver  # noqa: F401  the fork server imports everything once
from perdure.langgraph import PerdureSaver
from perdure.langgraph.inflight import InFlight, Key, UnderWay
from perdure.storage.program import Batch, Program, Transaction
from perdure.testing.processes import Say

TASKS = 10
WAIT_S = 30.0  # of what must come; reached only by a defect
TOTAL = sum(range(TASKS))
SIZE_CHARACTERS = 100_000
Durability = Literal["sync", "async", "exit"]

_doing: contextvars.ContextVar[str] = contextvars.ContextVar("doing", default="")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


class Moment:
    """The superseding put: writes wait until it is called, and the process dies before it is committed."""

    releases = True  # False: the writes wait until the process is dead

    def __init__(self, *, hold_writes: bool) -> None:
        self.hold_writes = hold_writes
        self.called = threading.Event()
        self.called_on_loop = asyncio.Event()

    def call(self) -> None:
        if self.releases:
            self.called.set()
            self.called_on_loop.set()

    def watch(self, driver: Any) -> None:
        """Look at each transaction that the driver is given."""
        run, arun, append, aappend = driver.run, driver.arun, driver.append, driver.aappend

        def watched_append(statements: Any, counts: Any) -> bool:
            if self.hold_writes and _doing.get() == "writes":
                assert self.called.wait(WAIT_S), "the put was never called"
            return bool(die() if _doing.get() == "put" else append(statements, counts))

        async def awatched_append(statements: Any, counts: Any) -> bool:
            if self.hold_writes and _doing.get() == "writes":
                await asyncio.wait_for(self.called_on_loop.wait(), WAIT_S)
            return bool(die() if _doing.get() == "put" else await aappend(statements, counts))

        def watched(transaction: Transaction) -> Any:
            if self._is_held(transaction):
                assert self.called.wait(WAIT_S), "the put was never called"
            return run(self._deadly(transaction))

        async def awatched(transaction: Transaction) -> Any:
            if self._is_held(transaction):
                await asyncio.wait_for(self.called_on_loop.wait(), WAIT_S)
            return await arun(self._deadly(transaction))

        driver.run, driver.arun = watched, awatched
        driver.append, driver.aappend = watched_append, awatched_append

    def _is_held(self, transaction: Transaction) -> bool:
        return self.hold_writes and transaction.write and _doing.get() == "writes"

    def _deadly(self, transaction: Transaction) -> Transaction:
        if transaction.write and _doing.get() == "put":
            return replace(transaction, op=deadly(transaction.op))
        return transaction


def deadly(op: Callable[[], Program[Any]]) -> Callable[[], Program[Any]]:
    """The same program, but the process dies when all is done that comes before the commit."""

    def program() -> Program[Any]:
        running = op()
        try:
            batch: Batch = next(running)
            while not batch.last:
                batch = running.send((yield batch))
        except StopIteration:
            pass
        die()

    return program


def is_superseding(metadata: Any) -> bool:
    return bool(metadata["source"] == "loop")


class DyingSaver(PerdureSaver):
    """Dies in the put that supersedes the tasks' writes. The writes are in flight when that put is called."""

    moment: Moment

    def die_at(self, moment: Moment) -> None:
        self.moment = moment
        moment.watch(self.store._context.driver)

    def put(self, config: RunnableConfig, checkpoint: Any, metadata: Any, new_versions: Any) -> RunnableConfig:
        if is_superseding(metadata):
            _doing.set("put")
            self.moment.call()
        return super().put(config, checkpoint, metadata, new_versions)

    async def aput(self, config: RunnableConfig, checkpoint: Any, metadata: Any, new_versions: Any) -> RunnableConfig:
        if is_superseding(metadata):
            _doing.set("put")
            self.moment.call()
        return await super().aput(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        _doing.set("writes")  # LangGraph runs each call in a context of its own
        super().put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        _doing.set("writes")
        await super().aput_writes(config, writes, task_id, task_path)


class Unwaiting(InFlight):
    """Knows what is under way and waits for none of it."""

    def _all(self, key: Key) -> list[UnderWay]:
        return []


class DyingSaverWithoutBarrier(DyingSaver):
    """The same, but its puts wait for nothing."""

    def die_at(self, moment: Moment) -> None:
        super().die_at(moment)
        moment.releases = False
        self._in_flight = Unwaiting()


class DyingStockSaver(SqliteSaver):
    """LangGraph's own, killed at the same moment."""

    moment: Moment

    def die_at(self, moment: Moment) -> None:
        self.moment = moment

    def put(self, config: RunnableConfig, checkpoint: Any, metadata: Any, new_versions: Any) -> RunnableConfig:
        if is_superseding(metadata):
            self.conn.set_trace_callback(lambda sql: die() if "INTO checkpoints" in sql else None)
            self.moment.call()
        return super().put(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        assert self.moment.called.wait(WAIT_S), "the put was never called"
        super().put_writes(config, writes, task_id, task_path)


# --- the run


class AfterTheTasks(Exception):
    """What a run raises that is to fail when its tasks are done."""


def application(saver: BaseCheckpointSaver[Any], log: str, size: int, fail: bool) -> Any:
    """Ten tasks with side effects, all at once, and then their sum; or an error instead of it."""

    @task
    def act(number: int) -> list[Any]:
        note(log, str(number))
        return [number, os.urandom(size // 2).hex()]

    @entrypoint(checkpointer=saver)
    def run(count: int) -> int:
        results = [future.result() for future in [act(number) for number in range(count)]]
        if fail:
            raise AfterTheTasks
        return sum(number for number, _ in results)

    return run


def aapplication(saver: BaseCheckpointSaver[Any], log: str, size: int, fail: bool) -> Any:
    """The same, in async code."""

    @task
    async def act(number: int) -> list[Any]:
        note(log, str(number))
        return [number, os.urandom(size // 2).hex()]

    @entrypoint(checkpointer=saver)
    async def run(count: int) -> int:
        results = await asyncio.gather(*(act(number) for number in range(count)))
        if fail:
            raise AfterTheTasks
        return sum(number for number, _ in results)

    return run


def note(log: str, line: str) -> None:
    """A side effect: a line in a file, on the disk."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.fsync(file)
    os.close(file)


def go_on(
    saver: BaseCheckpointSaver[Any], thread: str, durability: Durability, log: str, *, size: int, fail: bool, way: str
) -> Any:
    """The line that is run again after a crash: begins the run, or goes on with it."""
    config: RunnableConfig = {**config_of(thread), "max_concurrency": 4 * TASKS}
    if way == "blocking":
        begun = saver.get_tuple(config) is not None
        run = application(saver, log, size, fail)
        return run.invoke(None if begun else TASKS, config, durability=durability)

    async def arun() -> Any:
        begun = await saver.aget_tuple(config) is not None
        run = aapplication(saver, log, size, fail)
        return await run.ainvoke(None if begun else TASKS, config, durability=durability)

    return asyncio.run(arun())


def crash(
    say: Say, kind: str, url: str, thread: str, durability: Durability, log: str, way: str, hold_writes: bool
) -> None:
    """Run until the superseding put is about to commit, and die there."""
    moment = Moment(hold_writes=hold_writes)
    size = 0 if hold_writes else SIZE_CHARACTERS  # not held: large, so that they take longer than the put
    saver = DyingStockSaver(sqlite3.connect(url, check_same_thread=False)) if kind == "stock" else KINDS[kind](url)
    saver.die_at(moment)
    fail = durability == "exit"  # there LangGraph calls the saver only when the run ends, well or badly
    try:
        go_on(saver, thread, durability, log, size=size, fail=fail, way=way)
    except AfterTheTasks:
        die()
    say("not killed")


def finish(say: Say, kind: str, url: str, thread: str, durability: Durability, log: str, way: str) -> None:
    """Run the same line again, to its end, and say what came out."""
    if kind == "stock":
        saver: BaseCheckpointSaver[Any] = SqliteSaver(sqlite3.connect(url, check_same_thread=False))
        say(go_on(saver, thread, durability, log, size=0, fail=False, way=way))
        return
    with PerdureSaver(url) as own:
        say(go_on(own, thread, durability, log, size=0, fail=False, way=way))


KINDS: dict[str, type[DyingSaver]] = {"perdure": DyingSaver, "without barrier": DyingSaverWithoutBarrier}


# --- single operations


def op_put(saver: BaseCheckpointSaver[Any]) -> None:
    put(saver, "main", {"log": ["entry"] * 9, "n": 9}, id=numbered_id(9), parent=config_of("main", id=numbered_id(5)))


def op_put_again(saver: BaseCheckpointSaver[Any]) -> None:
    parent = config_of("main", id=numbered_id(2))
    put(saver, "main", {"log": ["again"], "n": 3}, id=numbered_id(3), parent=parent)


def op_first_put(saver: BaseCheckpointSaver[Any]) -> None:
    put(saver, "new", {"n": 1}, id=numbered_id(1))


def op_put_in_namespace(saver: BaseCheckpointSaver[Any]) -> None:
    put(saver, "main", {"n": 1}, ns="new:1", id=numbered_id(1))


def op_put_writes(saver: BaseCheckpointSaver[Any]) -> None:
    writes = [("a", 1), ("b", "x" * 500), ("__interrupt__", "new"), ("c", None)]
    saver.put_writes(config_of("main", id=numbered_id(5)), writes, "task 5", "~path")


def op_put_writes_first(saver: BaseCheckpointSaver[Any]) -> None:
    saver.put_writes(config_of("new", ns="child:1", id=numbered_id(1)), [("a", 1), ("b", 2)], "task")


def op_delete_thread(saver: BaseCheckpointSaver[Any]) -> None:
    saver.delete_thread("main")


def op_delete_for_runs(saver: BaseCheckpointSaver[Any]) -> None:
    saver.delete_for_runs(["run 1", "run 3"])


def op_copy_thread(saver: BaseCheckpointSaver[Any]) -> None:
    saver.copy_thread("main", "copy")


def op_prune(saver: BaseCheckpointSaver[Any]) -> None:
    saver.prune(["main"], strategy="keep_latest")


def op_prune_all(saver: BaseCheckpointSaver[Any]) -> None:
    saver.prune(["main"], strategy="delete")


OPERATIONS: dict[str, Callable[[BaseCheckpointSaver[Any]], None]] = {
    name.removeprefix("op_"): value for name, value in list(globals().items()) if name.startswith("op_")
}


def prepare(saver: BaseCheckpointSaver[Any]) -> None:
    """A line, a fork of it, a subgraph's line, pending writes, runs, and a thread that nobody touches."""
    bystander = put(saver, "bystander", {"n": 1}, id=numbered_id(1), run_id="run 1")
    put(saver, "bystander", {"n": 2}, id=numbered_id(2), parent=bystander)
    parent = None
    for number in range(1, 6):
        values = {"log": [f"entry {n}" for n in range(number)], "n": number}
        parent = put(saver, "main", values, id=numbered_id(number), parent=parent, run_id=f"run {number}")
    saver.put_writes(config_of("main", id=numbered_id(3)), [("a", 3)], "task 3")
    saver.put_writes(config_of("main", id=numbered_id(5)), [("a", 5), ("__interrupt__", "old")], "task 5", "~path")
    put(saver, "main", {"n": "fork"}, id=numbered_id(40), parent=config_of("main", id=numbered_id(2)))
    await_next_millisecond()  # ids of records count milliseconds: the fork must be older, whatever their random part
    put(saver, "main", {"n": 5}, id=numbered_id(50), parent=parent, run_id="run 5")
    inner = put(saver, "main", {"n": 1}, ns="child:1", id=numbered_id(1), run_id="run 1")
    inner = put(saver, "main", {"n": 2}, ns="child:1", id=numbered_id(2), run_id="run 2", parent=inner)
    saver.put_writes(inner, [("a", 1)], "task")


def await_next_millisecond() -> None:
    begun = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == begun:
        pass


def strike(say: Say, url: str, tenant: str, operation: str, at: int) -> None:
    """Do an operation and die at the point of that number (begin, each statement, commit, right after); or say done."""
    points = 0

    def hook(point: str) -> None:
        nonlocal points
        points += 1
        if points == at:
            die()

    with PerdureSaver(url, tenant=tenant, hook=hook, durability="normal") as saver:
        # The same calls as in the process that counted the points: it knows its tenant and its threads.
        everything(saver)
        saver.get_tuple(config_of("main"))
        points = 0
        OPERATIONS[operation](saver)
    say("done")


def child(say: Say, what: str, *arguments: Any) -> None:
    """What the fork server calls."""
    targets: dict[str, Callable[..., None]] = {"crash": crash, "finish": finish, "strike": strike}
    targets[what](say, *arguments)
