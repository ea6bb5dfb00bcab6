"""Compaction: what the main workload takes after it, what it costs to get there, and what others feel of it.

Bytes are what the file has grown by since it was an empty store (whose tables and indexes take a page each, whatever is
kept), after `compact(vacuum=True)`, over the steps. Loads are measured as in `loads`, on the compacted file.

The floor of the speed reads the same bodies with a bare connection, decompresses them and compresses what comes out with
the same settings, 64 differences together, and writes nothing. Memory is that of a process that opens a store and
compacts it, above one that only opens it, for a store and for one four times as large. Others are a process that saves
1 KB states with full durability: how long a save takes alone, and beside a process that compacts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import apsw

import perdure
from bench.loads import MEDIAN_BAR, WORST_BAR, _load, _save
from bench.measure import KB, MB, ROOT, BareTable, Row, Run, file_bytes, mean, milliseconds, seconds
from bench.workload import STEPS, steps
from perdure.log.packs import MEMBERS_MAX, Member, make_pack
from perdure.values.compress import decompress_full
from perdure.values.delta import Decoder, pack_splices
from perdure.values.dictionary import Dictionary

BYTES_BAR_KB = 0.65
SPEED_BAR = 1 / 3
MEMORY_BAR_MB = 100
WAIT_BAR = 3.0
HOUR_US = 3_600_000_000

_COMPACT = """
import sys, time
import perdure

def peak():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024

with perdure.open(sys.argv[1]) as store:
    store._context.clock_us = lambda: time.time_ns() // 1000 + 3_600_000_000  # an hour later: everything is cold
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
    count = run.count(STEPS, 80)
    path, peer = run.folder / "ours.db", BareTable(run.folder / "peer.db")
    empty = run.folder / "empty.db"
    perdure.open(str(empty)).close()
    saved = _save(path, peer, count)
    floor_s, handled = _floor(path)
    ours_s = _compact(path, vacuum=False)
    _compact(path, vacuum=True)
    whole = file_bytes(path)
    kb, peer_kb = (whole - file_bytes(empty)) / count / KB, mean(map(len, saved.blobs)) / KB
    loads_s, _, floors_s = _load(path, peer, saved)
    peer.close()
    ratios = [ours / floor for ours, floor in zip(loads_s, floors_s, strict=True)]
    rows = [
        Row("bytes per step after compact", kb, "KB", peer=peer_kb, ratio=kb / peer_kb, bar=BYTES_BAR_KB, judged="ours",
            note=f"{count} steps, beyond an empty store; the whole file: {whole / count / KB:.3f} KB"),
        Row("load after compact, median", milliseconds(loads_s), "ms", floor=milliseconds(floors_s),
            ratio=median(ratios), bar=MEDIAN_BAR),
        Row("load after compact, worst", max(loads_s) * 1000, "ms", floor=max(floors_s) * 1000, ratio=max(ratios),
            bar=WORST_BAR),
        Row("compaction", handled / ours_s / MB, "MB/s", floor=handled / floor_s / MB, ratio=floor_s / ours_s,
            bar=SPEED_BAR, sense="at least", note="floor: read, decompress, compress; bytes before compression"),
    ]  # fmt: skip
    return [*rows, *_memory(run), _waits(run)]


def _compact(path: Path, *, vacuum: bool) -> float:
    with perdure.open(str(path)) as store:
        store._context.clock_us = lambda: time.time_ns() // 1000 + HOUR_US
        return seconds(lambda: store.ops.compact(vacuum=vacuum))


def _floor(path: Path) -> tuple[float, int]:
    """Read, decompress and compress again: how long, and how many bytes that were."""
    handled = 0
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    start = time.perf_counter()
    rows = connection.execute(
        "SELECT r.keyframe, r.size, b.salt, b.diff, b.full_text FROM record r JOIN body b ON b.id = r.body ORDER BY r.id"
    )
    key, waiting = b"", list[tuple[bytes, bytes]]()

    def pack() -> int:
        decoder = Decoder(Dictionary(key))
        members = [Member(salt, pack_splices(splices)) for salt, diff in waiting for splices in decoder.decode([diff])]
        for at in range(0, len(members), MEMBERS_MAX):
            make_pack(members[at : at + MEMBERS_MAX], key)
        waiting.clear()
        return sum(len(member.diff) for member in members)

    for keyframe, size, salt, diff, full in rows:
        if not keyframe:
            waiting.append((salt, diff))
            continue
        handled += pack() + size
        key = decompress_full(full, size)
    handled += pack()
    took = time.perf_counter() - start
    connection.close()
    return took, handled


def _many(path: Path, threads: int, count: int) -> None:
    with perdure.open(str(path), durability="normal") as store:
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
