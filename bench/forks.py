"""Forks: one row, whatever the state's size and the history's length.

Two stores: a small one (10 records of 1 KB) and a large one (500 records of a state of 1 MB). Forks of the one and
of the other are made in turns, from the head and from the middle of the history, with full durability. Bytes are
what the closed file grows by over many forks, because a file grows in whole pages. The floor of the time is a bare
commit; copying is what a peer would do, and has no row here: one state of 1 MB is already a thousand forks.

`forks`: what one of 10,000 forks of a template costs, beside one of 10: each has saved five times. What a fork at 900 of
1,000 checkpoints takes, idle and after one save, beside a copy of the thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import median

import perdure
from bench.measure import KB, BareTable, Prose, Row, Run, file_bytes, in_turns, milliseconds, small_states

TIME_BAR = 1.5
SIBLINGS_BAR = 2
COPY_BAR = 0.01
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


def siblings(run: Run) -> list[Row]:
    few, many = run.folder / "few.db", run.folder / "many.db"
    count = run.count(10_000, 30)
    _fill_siblings(few, 10)
    _fill_siblings(many, count)
    rounds = run.count(9, 2)
    with perdure.open(str(few)) as one, perdure.open(str(many)) as other:
        rows = [
            _compared(f"{what} one of {count:,} forks", in_turns(rounds, _each(other, act), _each(one, act), warm_up=1))
            for what, act in _ACTS.items()
        ]
    return [*rows, *_sizes(run)]


def _save(thread: perdure.Thread) -> object:
    return thread.save({"prompt": "x" * 500, "n": 6})


_ACTS: dict[str, Callable[[perdure.Thread], object]] = {
    "load": lambda thread: thread.load(),
    "verify": lambda thread: thread.verify(),
    "prune": lambda thread: [_save(thread), thread.prune(keep=3)],
    "save in": _save,
}


def _each(store: perdure.Store, act: Callable[[perdure.Thread], object]) -> Callable[[], object]:
    """Does something to one fork after the other."""
    numbers = itertools.count()

    def do() -> object:
        number = next(numbers) % 10
        thread = store.thread(f"u{number}")
        return act(thread)

    return do


def _compared(name: str, times: list[list[float]]) -> Row:
    many, few = times
    ratio = min(many) / min(few)
    return Row(name, milliseconds(many), "ms", floor=milliseconds(few), ratio=ratio, bar=SIBLINGS_BAR,
               note="floor: one of 10; the ratio is of the fastest")  # fmt: skip


def _fill_siblings(path: Path, count: int) -> None:
    with perdure.open(str(path), durability="normal") as store:
        template = store.thread("template")
        template.save({"prompt": "x" * 500})
        for number in range(count):
            fork = template.fork(name=f"u{number}")
            for step in range(5):
                fork.save({"prompt": "x" * 500, "n": step})


def _sizes(run: Run) -> list[Row]:
    """A fork at 900 of 1,000, beside a copy."""
    path, records, forked = run.folder / "sized.db", run.count(1000, 40), run.count(50, 3)
    ids = _fill(path, records, 10 * KB)
    copied = file_bytes(path)
    at = ids[records * 9 // 10]
    rows = []
    for saves in range(3):
        before = file_bytes(path)
        with perdure.open(str(path), durability="normal") as store:
            state = store.thread("agent").load(at).state
            for number in range(forked):
                fork = store.thread("agent").fork(at, name=f"{saves}-{number}")
                for step in range(saves):
                    fork.save({**state, "step": step})
        ours = (file_bytes(path) - before) / forked
        what = ["idle", "one save", "two saves"][saves]
        name = f"fork at 900 of 1,000, {what}"
        rows.append(Row(name, ours, "B", peer=copied, ratio=ours / copied, bar=COPY_BAR, note="the peer is a copy"))
    return rows


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
