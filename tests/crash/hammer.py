"""The children of the process tests: eight threads that save as fast as they can, and a process that forks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import perdure

THREADS = 8
SHARED = "shared"


def state_of(name: str, number: int) -> dict[str, Any]:
    return {"by": name, "number": number, "log": [f"{name} {n}" for n in range(number % 20)]}


def hammer(path: str, process: str, seconds: float) -> None:
    """Save from eight threads until time is up; print how often, the longest wait, and every id with its number."""
    with perdure.open(path, durability="full") as store:
        print("ready", flush=True)
        sys.stdin.readline()
        stop = time.monotonic() + seconds
        done: list[list[Any]] = [[] for _ in range(THREADS)]
        longest = [0.0] * THREADS
        failures: list[str] = []

        def work(index: int) -> None:
            try:
                longest[index] = _save_until(stop, store, f"{process}-{index}", done[index])
            except BaseException as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    saved = [entry for entries in done for entry in entries]
    print(json.dumps({"saved": saved, "longest_s": max(longest), "failures": failures}), flush=True)


def _save_until(stop: float, store: perdure.Store, name: str, done: list[Any]) -> float:
    own, shared = store.thread(name), store.thread(SHARED)
    number, longest, now = 0, 0.0, time.monotonic()
    while now < stop:
        thread = shared if number % 5 == 4 else own
        saved = thread.save(state_of(name, number))
        done.append([thread.name, saved.id, name, number])
        before, now = now, time.monotonic()
        longest = max(longest, now - before)
        number += 1
    return longest


def fork(url: str) -> None:
    """A store, a fork, and what each of the two can do with it; one word per line."""
    store = perdure.open(url)
    thread = store.thread("parent")
    thread.save({"n": 1})
    child = os.fork()
    if child == 0:
        for call in (lambda: thread.save({"n": 0}), thread.load, store.threads):
            try:
                call()
                print("done", flush=True)
            except perdure.errors.ForkedProcess:
                print("refused", flush=True)
        try:
            with perdure.open(url) as own:
                print(own.thread("parent").load().state["n"], own.thread("child").save({"n": 9}).is_head, flush=True)
        except perdure.errors.ForkedProcess:  # SQLite: the same file cannot be opened on both sides of a fork
            print("refused", flush=True)
        store.close()
        sys.stdout.flush()
        sys.exit(0)  # with all that the interpreter does at its end
    assert os.waitpid(child, 0)[1] == 0
    thread.save({"n": 2})
    print(thread.load().state["n"], [info.name for info in store.threads()], store.ops.verify().ok, flush=True)
    store.close()
