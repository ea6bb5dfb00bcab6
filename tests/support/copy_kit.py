"""What the tests of copies share: threads with everything in them, all that is known of one, and child processes."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
from striking import die_at

import perdure
from perdure import Store
from perdure.storage.program import Batch, Program, Rows, Sql, drive, read
from perdure.testing.processes import Say


def grown(number: int) -> dict[str, Any]:
    """A state that grows with its number, and starts over."""
    size = number % 40
    return {"number": number, "log": [f"entry {n} {n * 7919 % 1000003} " * 4 for n in range(number - size, number + 1)]}


def make_thread(store: Store, name: str = "rich", count: int = 90) -> None:
    """A thread with branches, forks, notes, metadata, and a line whose beginning was pruned."""
    thread = store.thread(name, metadata={"user": "alice", "n": 1})
    ids = []
    for number in range(count):
        saved = thread.save(grown(number), note=f"note {number}" if number % 7 == 0 else None, metadata={"k": number})
        ids.append(saved.id)
    for start in (count // 3, count // 2, count // 2):
        other = store.thread(name)
        for number in range(5):
            other.save(
                {"branch": start, "number": number, **grown(number + start)}, parent=ids[start] if not number else None
            )
    fork = thread.fork(ids[count // 2], name=f"{name} fork")
    for number in range(7):
        fork.save({"fork": number})
    store.thread(name).rollback(ids[count // 4], note="back")


def everything(store: Store, name: str) -> dict[str, Any]:
    """All that can be seen of a thread's checkpoints, by their ids: the lines of all its branches."""
    thread = store.thread(name)
    found: dict[str, Any] = {}
    for tip in thread.branches():
        for one in thread.history(start=tip):
            if one.id in found:
                break
            kept = one._record
            found[one.id] = (one.parent, one.step, one.kind, one.at, one.note, one.metadata, kept.hash, one.state)
    info = thread.info()
    return {"checkpoints": found, "metadata": info.metadata, "head": info.head, "created": info.created_at}


def query(store: Store, text: str) -> Rows:
    """The rows of a statement that both databases understand."""

    def look() -> Program[Rows]:
        [rows] = yield Batch(Sql(text)(), last=True)
        return rows

    rows: Rows = drive(store._context.driver, read(look))
    return rows


TABLES = {
    "record": "tree, id",
    "body": "id",
    "thread": "thread",
    "tag": "key, thread",
    "label": "thread, space, id",
    "write": "thread, space, id, task, idx",
    "space": "thread, name",
    "run": "run",
    "run_value": "run, kind",
    "journal": "run, seq",
    "ask": "run, path",
    "mail": "run, seq",
    "tenant": "tenant",
    "blob": "hash",
}


def tables(store: Store) -> dict[str, list[Any]]:
    """Every row that is data."""
    return {name: query(store, f'SELECT * FROM "{name}" ORDER BY tenant, {order}') for name, order in TABLES.items()}


# --- in child processes


def transfer_and_die(say: Say, source: str, target: str, tenant: str, given: str, side: str, at: int) -> None:
    """Transfer, and die by SIGKILL at the n-th step of the source's or the target's transactions."""
    hooks: dict[str, dict[str, Any]] = {side: {"hook": die_at(at)}}
    with perdure.open(source, **hooks.get("source", {})) as store:
        store.tenant(tenant).ops.transfer(target, **orjson.loads(given), **hooks.get("target", {}))
    say("done")


def restore_and_die(say: Say, backup: str, target: str, at: int) -> None:
    """Restore, and die by SIGKILL at the n-th time that a file of the folder is opened, linked or removed."""
    steps = itertools.count(1)

    def audit(event: str, args: Any) -> None:
        if (
            event in ("open", "os.link", "os.remove", "os.rename")
            and Path(target).name in str(args[0])
            and next(steps) == at
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    perdure.ops.restore_backup(backup, target)
    say("done")


def backup_slowly(say: Say, url: str, file: str) -> None:
    """Back up, and say how far it is; the parent kills it."""
    with perdure.open(url) as store:
        store.ops.backup(file, progress=lambda done, total: say([done, total]))
        say("done")


def write_for_ever(url: str, name: str, told: str) -> None:
    """Save without pause, into a thread of its own and one that all share; tell of each save once it has returned."""
    with perdure.open(url) as store, open(told, "ab", buffering=0) as acknowledged:
        own, shared = store.thread(name), store.thread("shared")
        number = 0
        while True:
            try:
                saved = (own if number % 3 else shared).save({"who": name, **grown(number)})
            except perdure.NotFound:
                # Two writers of one thread branch, and a prune keeps the head's line: the other's is gone.
                assert number % 3 == 0
                shared = store.thread("shared")
                continue
            acknowledged.write(orjson.dumps([saved.thread, saved.id]) + b"\n")
            number += 1


def prune_for_ever(url: str, name: str, told: str) -> None:
    """Prune those threads again and again."""
    with perdure.open(url) as store, open(told, "ab", buffering=0) as acknowledged:
        number = 0
        while True:
            for info in store.threads():
                store.thread(info.name).prune(keep=20)
            acknowledged.write(b"%d\n" % number)
            number += 1


def acknowledged(told: Path) -> list[list[str]]:
    """The saves that a writer told of, whole lines only."""
    text = told.read_bytes() if told.exists() else b""
    return [orjson.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


if __name__ == "__main__":
    {"write": write_for_ever, "prune": prune_for_ever}[sys.argv[1]](*sys.argv[2:])
