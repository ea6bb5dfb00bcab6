"""The main workload: 1500 steps of an agent whose state grows to 1.4 MB. Bytes per step, and loading any version.

Both bars belong to one run, because each alone is easy: keyframes everywhere load fast, keyframes nowhere are
small. Bytes are the size of the file after closing, indexes and all, over the steps.

Loads go through the store, by id, in a shuffled order, five times over, best of five for each version: nothing that
Perdure could keep in memory from one load to the next helps. The floor has its blob in memory already and only
decompresses and decodes it (zstd, orjson). The peer stores the full state of every step as one row and reads it
back by its key.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import perdure
from bench.measure import KB, BareTable, Row, Run, file_bytes, mean, milliseconds, pack, seconds, unpack
from bench.workload import STEPS, steps

BYTES_BAR_KB = 0.85
MEDIAN_BAR = 2.5
WORST_BAR = 4.5
EVERY = 5  # every fifth version is loaded, and saved by the peer
BEST_OF = 5


@dataclass(slots=True)
class _Saved:
    """What saving the workload took, and what loading it needs."""

    ids: list[str] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)


def workload(run: Run) -> list[Row]:
    count = run.count(STEPS, 60)
    path = run.folder / "ours.db"
    peer = BareTable(run.folder / "peer.db")
    saved = _save(path, peer, count)
    ours_kb, peer_kb = file_bytes(path) / count / KB, mean(map(len, saved.blobs)) / KB
    ours_s, peer_s, floor_s = _load(path, peer, saved)
    peer.close()
    ratios = [ours / floor for ours, floor in zip(ours_s, floor_s, strict=True)]
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return [
        Row("bytes per step, main workload", ours_kb, "KB", peer=peer_kb, ratio=ours_kb / peer_kb,
            bar=BYTES_BAR_KB, judged="ours", note=f"{count} steps; ratio: to the peer"),
        Row("  its saves, full durability", milliseconds(saved.ours_s), "ms", peer=milliseconds(saved.peer_s),
            ratio=median(saved.ours_s) / median(saved.peer_s), note="ratio: to the peer; no bar"),
        Row("load any version, median", milliseconds(ours_s), "ms", peer=milliseconds(peer_s),
            floor=milliseconds(floor_s), ratio=median(ratios), bar=MEDIAN_BAR, note=f"{len(ratios)} versions"),
        Row("load any version, worst", ours_s[worst] * 1000, "ms", peer=peer_s[worst] * 1000,
            floor=floor_s[worst] * 1000, ratio=ratios[worst], bar=WORST_BAR, note=f"version {worst * EVERY + 1}"),
    ]  # fmt: skip


def _save(path: Path, peer: BareTable, count: int) -> _Saved:
    saved = _Saved()
    with perdure.open(str(path)) as store:
        thread = store.thread("agent")
        for number, state in enumerate(steps(count)):
            start = time.perf_counter()
            checkpoint = thread.save(state)
            took = time.perf_counter() - start
            if number % EVERY:
                continue
            start = time.perf_counter()
            blob = pack(state)
            peer.insert(blob)
            saved.peer_s.append(time.perf_counter() - start)
            saved.ours_s.append(took)
            saved.ids.append(checkpoint.id)
            saved.blobs.append(blob)
    return saved


def _load(path: Path, peer: BareTable, saved: _Saved) -> tuple[list[float], list[float], list[float]]:
    """The best time for each version: ours, the peer's, the floor's."""
    count = len(saved.ids)
    best = [[float("inf")] * count for _ in range(3)]
    order = list(range(count))
    with perdure.open(str(path)) as store:
        thread = store.thread("agent")
        loaders: tuple[Callable[[int], object], ...] = (
            lambda version: thread.load(saved.ids[version]).state,
            lambda version: unpack(peer.select(version + 1)),
            lambda version: unpack(saved.blobs[version]),
        )
        for attempt in range(BEST_OF):
            random.Random(attempt).shuffle(order)
            for position in range(count):
                for which, load in enumerate(loaders):
                    # Another version each: none finds in the processor's cache what another has just brought there.
                    version = order[(position + which * count // 3) % count]
                    best[which][version] = min(best[which][version], seconds(partial(load, version)))
        first = order[0]
        if thread.load(saved.ids[first]).state != unpack(saved.blobs[first]):
            raise RuntimeError("what was loaded is not what was saved")
    return best[0], best[1], best[2]
