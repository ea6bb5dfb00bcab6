"""Many savers at once in one process: 64 tasks that each save to a thread of their own, against one task alone.

With full durability one saver waits for the disk after every save; many share a commit and its fsync. The two are
run in turns, on the real disk, for the ratio of their throughput; once more through a VFS that counts every fsync
SQLite asks for (of the log and of the file: checkpoints count too); and once more through a VFS whose fsync takes
2 ms longer, as on a slow disk. States are 1 KB, all new each time. The floor is what a bare apsw insert reaches
when it commits each.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import orjson
from power_loss import PowerLossVfs

import perdure
from bench.measure import BareTable, Row, Run, small_states

SAVERS = 64
TIMES_BAR = 3.0
TIMES_SLOW_BAR = 8.0
SAVES_PER_SYNC_BAR = 16.0
SLOW_SYNC_S = 0.002
STATES = 256


def savers(run: Run) -> list[Row]:
    return [_throughput(run), _syncs(run), _slow_disk(run)]


def _throughput(run: Run) -> Row:
    one, many, bare = asyncio.run(_compare(run.folder / "fast.db", None, run.count(4, 1), 0.1 if run.quick else 0.7))
    return Row("64 async savers", many, "saves/s", floor=one, ratio=many / one, bar=TIMES_BAR, sense="at least",
               note=f"floor: one async saver; bare apsw commits {bare:.0f}/s")  # fmt: skip


def _slow_disk(run: Run) -> Row:
    with _vfs("bench-slow", SLOW_SYNC_S):
        path = run.folder / "slow.db"
        one, many, bare = asyncio.run(_compare(path, "bench-slow", run.count(3, 1), 0.1 if run.quick else 0.7))
    return Row("64 async savers, fsync + 2 ms", many, "saves/s", floor=one, ratio=many / one, bar=TIMES_SLOW_BAR,
               sense="at least", note=f"floor: one async saver; bare apsw commits {bare:.0f}/s")  # fmt: skip


def _syncs(run: Run) -> Row:
    with _vfs("bench-count", 0.0) as vfs:
        saves, syncs = asyncio.run(_counted(run.folder / "count.db", vfs, 0.1 if run.quick else 1.5))
    return Row("64 async savers: saves per fsync", saves / max(1, syncs), "saves", floor=1.0,
               ratio=saves / max(1, syncs), bar=SAVES_PER_SYNC_BAR, sense="at least",
               note=f"{syncs} fsyncs, of log and file, for {saves} saves")  # fmt: skip


async def _compare(path: Path, vfs: str | None, rounds: int, length_s: float) -> tuple[float, float, float]:
    """Saves per second: one saver's, 64 savers', and the bare table's commits."""
    states = small_states(STATES)
    text = orjson.dumps(states[0])
    bare = BareTable(path.with_suffix(".bare.db"), vfs=vfs)
    one: list[float] = []
    many: list[float] = []
    floor: list[float] = []
    async with perdure.open(str(path), vfs=vfs) as store:
        threads = [store.thread(f"agent-{number}") for number in range(SAVERS)]
        await _save_for(threads, states, 0.05)
        for _ in range(rounds):
            one.append(await _save_for(threads[:1], states, length_s))
            many.append(await _save_for(threads, states, length_s))
            floor.append(_insert_for(bare, text, length_s / 2))
    bare.close()
    return median(one), median(many), median(floor)


async def _counted(path: Path, vfs: PowerLossVfs, length_s: float) -> tuple[int, int]:
    states = small_states(STATES)
    async with perdure.open(str(path), vfs=vfs.name) as store:
        threads = [store.thread(f"agent-{number}") for number in range(SAVERS)]
        await _save_for(threads, states, 0.05)
        before, start = vfs.syncs, time.perf_counter()
        rate = await _save_for(threads, states, length_s)
        return round(rate * (time.perf_counter() - start)), vfs.syncs - before


async def _save_for(threads: list[perdure.Thread], states: list[dict[str, object]], length_s: float) -> float:
    """Saves per second, of one task for each thread."""
    numbers = itertools.count()
    saves = 0
    start = time.perf_counter()
    deadline = start + length_s

    async def saver(thread: perdure.Thread) -> None:
        nonlocal saves
        while time.perf_counter() < deadline:
            await thread.asave(states[next(numbers) % STATES])
            saves += 1

    await asyncio.gather(*map(saver, threads))
    return saves / (time.perf_counter() - start)


def _insert_for(bare: BareTable, text: bytes, length_s: float) -> float:
    start = time.perf_counter()
    inserts = 0
    while time.perf_counter() < start + length_s:
        bare.insert(text)
        inserts += 1
    return inserts / (time.perf_counter() - start)


@contextmanager
def _vfs(name: str, delay_s: float) -> Iterator[PowerLossVfs]:
    vfs = PowerLossVfs(name, sync_delay_s=delay_s, record=False)
    try:
        yield vfs
    finally:
        vfs.unregister()
