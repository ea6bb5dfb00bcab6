"""Forks: one row, whatever the state's size and the history's length.

Two stores: a small one (10 records of 1 KB) and a large one (500 records of a state of 1 MB). Forks of the one and
of the other are made in turns, from the head and from the middle of the history, with full durability. Bytes are
what the closed file grows by over many forks, because a file grows in whole pages. The floor of the time is a bare
commit; copying is what a peer would do, and has no row here: one state of 1 MB is already a thousand forks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import median

import perdure
from bench.measure import KB, BareTable, Prose, Row, Run, file_bytes, in_turns, milliseconds, small_states

TIME_BAR = 1.5
BYTES_BAR = 1.02  # equal, but for how full the last page of each index happens to be


def forks(run: Run) -> list[Row]:
    small, large = run.folder / "small.db", run.folder / "large.db"
    small_ids = _fill(small, 10, KB)
    large_ids = _fill(large, run.count(500, 12), run.count(1000, 20) * KB)
    rounds = run.count(150, 5)
    bare = BareTable(run.folder / "bare.db")
    with perdure.open(str(small)) as one, perdure.open(str(large)) as other:
        small_s, large_s, bare_s = in_turns(
            rounds, _forker(one, small_ids, "timed"), _forker(other, large_ids, "timed"), lambda: bare.insert(b"fork")
        )
    bare.close()
    count = run.count(2000, 50)
    small_bytes, large_bytes = _growth(small, small_ids, count), _growth(large, large_ids, count)
    return [
        Row("fork of 500 x 1 MB: time", milliseconds(large_s), "ms", floor=milliseconds(small_s),
            ratio=median(large_s) / median(small_s), bar=TIME_BAR,
            note=f"floor: fork of 10 x 1 KB; bare commit {milliseconds(bare_s):.2f} ms"),
        Row("fork of 500 x 1 MB: bytes", large_bytes, "B", floor=small_bytes, ratio=large_bytes / small_bytes,
            bar=BYTES_BAR, note=f"file growth over {count} forks; floor: fork of 10 x 1 KB"),
    ]  # fmt: skip


def _fill(path: Path, records: int, size: int) -> list[str]:
    """A thread of so many records, each a state of `size` bytes of which one part in 20 is new."""
    prose = Prose(9)
    parts = [str(state["text"]) for state in small_states(20, size // 20 + 30)]
    ids: list[str] = []
    with perdure.open(str(path), durability="normal") as store:
        thread = store.thread("agent")
        for number in range(records):
            parts[number % 20] = prose.words_of(8) + parts[number % 20][60:]
            ids.append(thread.save({"parts": parts}).id)
    return ids


def _forker(store: perdure.Store, ids: list[str], prefix: str) -> Callable[[], object]:
    """Makes a fork at each call, from the head and from the middle by turns."""
    thread = store.thread("agent")
    places = itertools.cycle([None, ids[len(ids) // 2]])
    numbers = itertools.count()
    return lambda: thread.fork(next(places), name=f"{prefix}-{next(numbers):06}")


def _growth(path: Path, ids: list[str], count: int) -> float:
    """Bytes per fork."""
    before = file_bytes(path)
    with perdure.open(str(path), durability="normal") as store:
        fork = _forker(store, ids, "sized")
        for _ in range(count):
            fork()
    return (file_bytes(path) - before) / count
