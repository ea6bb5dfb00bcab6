"""Backing up a store that is in use: how fast, against a plain copy of the same file, and what writers notice of it.

The store has 300 MB. The floor is a copy of its file by the kernel, synced, while no process writes; ours is measured in
turns with it. Then two processes save 1 KB states with full durability, without pause, while backups come and go:
their commits during a backup are held against those between two backups.

A backup is SQLite's online backup, page by page: it takes longer than a copy of the file, and costs writers the time in
which the disk is busy with its bytes, for every sync waits for what is under way.

Run as a module it is one of the writers: `python -m bench.backup PATH NAME`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from statistics import median

import perdure
from bench.measure import MB, Row, Run, answer_of, in_child, seconds, small_states

STATES = 220
STATE_BYTES = 1_400_000  # of hexadecimal digits: half of that when compressed
SPEED_BAR = 0.5
SLOWED_BAR = 1.2
WRITERS = 2
ROUNDS = 12
BETWEEN_S = 0.7


def backup(run: Run) -> list[Row]:
    path = run.folder / "store.db"
    _fill(path, run.count(STATES, 4))
    size = path.stat().st_size
    with perdure.open(str(path)) as store:
        pairs = [_pair(store, run) for _ in range(1 + run.count(7, 1))][1:]  # the first is to warm up
        speed, plain = (size / MB / median(times) for times in zip(*pairs, strict=True))
        during, between, live, live_plain = _under_load(store, run)
    return [
        Row("backup of a store in one file", speed, "MB/s", floor=plain, ratio=speed / plain, bar=SPEED_BAR,
            sense="at least", note=f"{size / MB:.0f} MB; floor: a copy of the file, synced"),
        Row("  while 2 processes write", size / MB / live, "MB/s", floor=size / MB / live_plain, ratio=live_plain / live,
            bar=SPEED_BAR, sense="at least", note="floor: a copy of the file at the same time"),
        Row("  their commits during it", during, "/s", floor=between, ratio=between / during, bar=SLOWED_BAR,
            note="floor: between two backups; ratio: slowed by"),
    ]  # fmt: skip


def _fill(path: Path, count: int) -> None:
    chance = random.Random(7)
    with perdure.open(str(path), durability="normal") as store:
        for number in range(count):
            store.thread(f"t{number % 8}").save({"n": number, "blob": chance.randbytes(STATE_BYTES // 2).hex()})


def _pair(store: perdure.Store, run: Run) -> tuple[float, float]:
    """How long a backup takes, and a copy of the file; each makes a new file, which is removed outside of that time."""
    ours, copy = run.folder / "backup.db", run.folder / "copy.db"
    times = seconds(lambda: store.ops.backup(ours)), seconds(lambda: _plain_copy(run.folder / "store.db", copy))
    ours.unlink()
    copy.unlink()
    return times


def _plain_copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def _under_load(store: perdure.Store, run: Run) -> tuple[float, float, float, float]:
    """Commits per second during backups and between them, and how long a backup took, and a copy of the file."""
    path = run.folder / "store.db"
    children = [in_child("bench.backup", path, f"writer-{number}") for number in range(WRITERS)]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    spans: list[tuple[float, float]] = []
    pauses: list[tuple[float, float]] = []
    copies: list[float] = []
    for _ in range(run.count(ROUNDS, 1)):
        start = time.monotonic()
        threading.Event().wait(BETWEEN_S)
        middle = time.monotonic()
        took_s, copied_s = _pair(store, run)
        spans.append((middle, middle + took_s))
        pauses.append((start, middle))
        copies.append(copied_s)
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"stop\n")
        child.stdin.flush()
    commits = sorted(at for child in children for at in answer_of(child))
    took = median(end - start for start, end in spans)
    return _rate(commits, spans), _rate(commits, pauses), took, median(copies)


def _rate(commits: list[float], spans: list[tuple[float, float]]) -> float:
    length_s = sum(end - start for start, end in spans)
    return sum(start <= at < end for at in commits for start, end in spans) / length_s


def _write(path: str, name: str) -> None:
    """One writer: saves until it is told to stop, then says when each save was acknowledged."""
    states = small_states(64)
    stopped = threading.Event()
    with perdure.open(path) as store:
        thread = store.thread(name)
        thread.save(states[0])
        print("ready", flush=True)
        threading.Thread(target=_wait_for_end, args=(stopped,), daemon=True).start()
        commits: list[float] = []
        while not stopped.is_set():
            thread.save(states[len(commits) % 64])
            commits.append(time.monotonic())
    print(json.dumps(commits))


def _wait_for_end(stopped: threading.Event) -> None:
    sys.stdin.readline()
    stopped.set()


if __name__ == "__main__":
    _write(sys.argv[1], sys.argv[2])
