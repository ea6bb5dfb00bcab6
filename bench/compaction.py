"""Compaction: how much memory it takes, and what others feel of it.

Every thread keeps its newest 20 checkpoints, so that compaction has most of the store to remove. Memory is that of a
process that opens a store and compacts it, above one that only opens it, for a store and for one four times as large.
Others are a process that saves 1 KB states with full durability: how long a save takes alone, and beside a process that
compacts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

import perdure
from bench.measure import MB, ROOT, Row, Run, file_bytes, milliseconds
from bench.workload import steps

KEEP_LAST = 20
MEMORY_BAR_MB = 100
WAIT_BAR = 3.0

_COMPACT = """
import sys, time
import perdure

def peak():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024

with perdure.open(sys.argv[1]) as store:
    store.threads(limit=1)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts here
    before = peak()
    print("ready", flush=True)
    sys.stdin.readline()
    store.ops.compact()
print(peak() - before)
"""
_SAVE = """
import json, sys, threading, time
import perdure
from bench.measure import small_states
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
states, times = small_states(200), []
with perdure.open(sys.argv[1]) as store:
    thread = store.thread("writer")
    for state in states[:20]:
        thread.save(state)
    print("ready", flush=True)
    while not stop.is_set() and len(times) < 5000:
        start = time.perf_counter()
        thread.save(states[len(times) % 200])
        times.append(time.perf_counter() - start)
        time.sleep(0.001)  # an agent that saves often, not a flood
print(json.dumps(times))
"""


def compaction(run: Run) -> list[Row]:
    return [*_memory(run), _waits(run)]


def _many(path: Path, threads: int, count: int) -> None:
    with perdure.open(str(path), durability="normal") as store:
        store.ops.retention(checkpoints=KEEP_LAST)
        for number in range(threads):
            thread = store.thread(f"t{number}")
            for state in steps(count, seed=number):
                thread.save(state)


def _memory(run: Run) -> list[Row]:
    """Peak memory of compacting a store, and one four times as large."""
    count = run.count(300, 10)
    used = []
    for threads in (run.count(10, 2), run.count(40, 4)):
        large = run.folder / f"many-{threads}.db"
        _many(large, threads, count)
        size = file_bytes(large)
        process = _child(_COMPACT, large)
        _go(process)
        used.append((int(process.communicate()[0]), size))
    (small, _), (large_bytes, size) = used
    return [
        Row("compaction, memory", large_bytes / MB, "MB", floor=small / MB, ratio=large_bytes / max(small, 1),
            bar=MEMORY_BAR_MB, judged="ours", note=f"of {size / MB:.0f} MB; floor: of a quarter of that"),
    ]  # fmt: skip


def _waits(run: Run) -> Row:
    """How long saves take alone, and beside a compaction."""
    path = run.folder / "waits.db"
    _many(path, run.count(30, 3), run.count(120, 10))
    alone = _saves(path, None, run)
    beside = _saves(path, _child(_COMPACT, path), run)
    usual, during = (quantiles(times, n=100)[98] for times in (alone, beside))
    return Row(
        "saves beside a compaction, 99 of 100", during * 1000, "ms", floor=usual * 1000, ratio=during / usual,
        bar=WAIT_BAR, note=f"median {milliseconds(beside):.2f} ms, alone {milliseconds(alone):.2f}; longest "
        f"{max(beside) * 1000:.1f} ms, alone {max(alone) * 1000:.1f}",
    )  # fmt: skip


def _saves(path: Path, compacting: subprocess.Popen[str] | None, run: Run) -> list[float]:
    writer = _child(_SAVE, path)
    if compacting is None:
        time.sleep(run.count(3, 1))
    else:
        _go(compacting)
        compacting.communicate()
    return list(json.loads(writer.communicate("stop\n")[0]))


def _child(script: str, path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise RuntimeError("a child process did not start")
    return child


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
