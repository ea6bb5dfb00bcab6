"""The SQLite driver between processes: fair turns, deadlines, killed holders, forked children."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from perdure.errors import Busy
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.storage.sqlite.file_lock import FileLock

PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, 'v')")
KEYS = Sql("SELECT key FROM meta WHERE key <> 'store' ORDER BY key")

PREAMBLE = """
import json, os, sys, time
from functools import partial
from perdure.errors import ForkedProcess
from perdure.storage.program import Batch, Sql, Transaction
from perdure.storage.sqlite.driver import SqliteDriver
PUT = Sql("INSERT INTO meta (key, value) VALUES (:key, 'v')")
KEYS = Sql("SELECT key FROM meta WHERE key <> 'store' ORDER BY key")
def put(key):
    yield Batch(PUT(key=key), last=True)
def keys():
    [rows] = yield Batch(KEYS())
    return [key for (key,) in rows]
def write(key):
    return Transaction(partial(put, key), write=True)
"""


def put(key: str) -> Program[None]:
    yield Batch(PUT(key=key), last=True)


def keys() -> Program[list[str]]:
    [rows] = yield Batch(KEYS(), last=True)
    return [key for (key,) in rows]


def write(key: str) -> Transaction:
    return Transaction(partial(put, key), write=True)


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    return process.communicate()[0]


HOLDER = """
def hook(name):
    if name == "commit":
        print("holding", flush=True)
        sys.stdin.readline()
SqliteDriver(sys.argv[1], hook=hook).run(write("holder"))
"""


def test_a_held_store_is_busy_at_the_deadline_and_free_when_the_holder_is_killed(tmp_path: Path) -> None:
    holder = start(HOLDER, tmp_path / "a.db")
    assert line(holder) == "holding"
    driver = SqliteDriver(tmp_path / "a.db", timeout_s=0.05)
    for key in ("a", "b"):  # the second takes over the place in the queue that the first gave up
        with pytest.raises(Busy, match=r"a\.db for longer than the deadline of 0\.05 s"):
            driver.run(write(key))
    assert driver.run(Transaction(keys)) == []  # readers go on
    waiting = SqliteDriver(tmp_path / "a.db", timeout_s=30)
    holder.kill()
    end(holder)
    waiting.run(write("c"))
    driver.run(write("d"))
    assert driver.run(Transaction(keys)) == ["c", "d"]
    driver.close()
    waiting.close()


def test_who_just_released_the_gate_waits_behind_who_waits(tmp_path: Path) -> None:
    first, second = (FileLock(str(tmp_path / "a.db"), 0.01) for _ in range(2))
    first.acquire(1e9)
    with pytest.raises(Busy):
        second.acquire(0)  # gives up, but its helper still stands in the queue
    with pytest.raises(Busy):
        second.acquire(0)
    first.release()
    second.acquire(1e9)
    with pytest.raises(Busy):
        first.acquire(0)
    second.release()
    first.acquire(1e9)
    first.close()
    second.close()


FORK = """
driver = SqliteDriver(sys.argv[1])
driver.run(write("parent"))
driver.run(Transaction(keys))
sys.stdout.flush()
if (child := os.fork()) == 0:
    for transaction in (write("child"), Transaction(keys)):
        try:
            driver.run(transaction)
        except ForkedProcess as error:
            print("ForkedProcess", flush=True)
    driver.close()
    try:
        SqliteDriver(sys.argv[1])
    except ForkedProcess as error:
        print("after forking" in str(error), flush=True)
    del driver
    sys.exit(0)  # the interpreter ends in the usual way and clears everything it can
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(os.path.exists(sys.argv[1] + "-wal"), flush=True)
driver.run(write("parent again"))
print(driver.run(Transaction(keys)), flush=True)
driver.close()
"""


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    answer = end(start(FORK, tmp_path / "a.db")).splitlines()
    assert answer == ["ForkedProcess", "ForkedProcess", "True", "0", "True", "['parent', 'parent again']"]


ORPHAN = """
def hook(name):
    if name == "commit":
        if os.fork() == 0:
            print("child", flush=True)
            sys.stdin.readline()  # lives on, with copies of the parent's descriptors
        os.kill(os.getpid(), 9)
SqliteDriver(sys.argv[1], hook=hook).run(write("killed"))
"""


def test_a_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path) -> None:
    parent = start(ORPHAN, tmp_path / "a.db")
    assert line(parent) == "child"
    parent.wait()
    driver = SqliteDriver(tmp_path / "a.db", timeout_s=5)
    driver.run(write("a"))
    assert driver.run(Transaction(keys)) == ["a"]
    driver.close()
    end(parent)  # closes its input: the child ends
