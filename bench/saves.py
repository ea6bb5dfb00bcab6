"""How long a save takes: a small state, an append to a large one, the first on a cold handle, after 10,000 others.

All with full durability, each next to a bare apsw commit on the same disk, in turns. The bare table is what any
library on SQLite has to do at least: one INSERT of the bytes in WAL mode with synchronous=FULL. The peer packs the
whole state (JSON, zstd level 3) and inserts that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson

import perdure
from bench.measure import KB, MB, BareTable, Prose, Row, Run, in_turns, milliseconds, pack, seconds, small_states
from bench.workload import steps

SMALL_BAR = 1.6
APPEND_BAR = 2.5
COLD_BAR = 1.0
LATER_BAR = 1.2
HISTORY = 10_000
WARM_UP = 3  # rounds whose times are not taken


def small(run: Run) -> list[Row]:
    """A state of 1 KB, all of it new in every save, against a bare insert of the same JSON with its commit."""
    rounds = run.count(2500, 20)
    states = small_states(rounds + WARM_UP)
    texts = [orjson.dumps(state) for state in states]
    bare, peer = BareTable(run.folder / "bare.db"), BareTable(run.folder / "peer.db")
    with perdure.open(str(run.folder / "ours.db")) as store:
        thread = store.thread("agent")
        thread.save({"step": 0, "text": ""})
        ours, same, full = iter(states), iter(texts), iter(states)
        ours_s, floor_s = in_turns(
            rounds, lambda: thread.save(next(ours)), lambda: bare.insert(next(same)), warm_up=WARM_UP
        )
        # Not in turns with the others: it is no part of the bar, and its work would empty their caches.
        (peer_s,) = in_turns(rounds, lambda: peer.insert(pack(next(full))), warm_up=WARM_UP)
    bare.close()
    peer.close()
    return [
        Row("save of a 1 KB state", milliseconds(ours_s), "ms", peer=milliseconds(peer_s), floor=milliseconds(floor_s),
            ratio=median(ours_s) / median(floor_s), bar=SMALL_BAR, note=f"{rounds} saves; floor: bare apsw insert")
    ]  # fmt: skip


def append(run: Run) -> list[Row]:
    """A message appended to a state of 1 MB, against `orjson.dumps` of that state plus one bare commit.

    The state is the workload's (messages of 0.9 KB, files, counters). The same with messages of 200 B, five times
    as many, has no bar: it shows what many small values cost.
    """
    size = run.count(MB, 30 * KB)
    rounds = run.count(150, 5)
    return [
        _append(run.folder / "large", "append to a 1 MB state", _workload_state(size), 900, rounds, APPEND_BAR),
        _append(run.folder / "small", "  with messages of 200 B", _short_messages(size), 200, rounds, None),
    ]


def _workload_state(size: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, state in enumerate(steps()):
        if number % 25 == 0 and len(orjson.dumps(state)) >= size:
            break
    return state


def _short_messages(size: int) -> dict[str, Any]:
    prose = Prose(4)
    return {"agent": "chat", "messages": [_message(prose, 200) for _ in range(size // 200)]}


def _message(prose: Prose, size: int) -> dict[str, object]:
    """A message whose JSON has about `size` bytes."""
    message = prose.message(0)
    room = size - len(orjson.dumps(message)) - 1
    return {**message, "content": prose.words_of(size // 2)[:room]}


def _append(folder: Path, name: str, state: dict[str, Any], size: int, rounds: int, bar: float | None) -> Row:
    folder.mkdir()
    prose = Prose(5)
    bare, peer = BareTable(folder / "bare.db"), BareTable(folder / "peer.db")
    added = orjson.dumps(_message(prose, size))
    ours_s: list[float] = []
    dumps_s: list[float] = []
    bare_s: list[float] = []
    peer_s: list[float] = []
    with perdure.open(str(folder / "ours.db")) as store:
        thread = store.thread("agent")
        for _ in range(rounds + WARM_UP):
            state["messages"].append(_message(prose, size))
            for action, times in (
                (lambda: thread.save(state), ours_s),
                (lambda: orjson.dumps(state), dumps_s),
                (lambda: bare.insert(added), bare_s),
            ):
                # Before each the same work, so that none finds the state in the processor's cache more than another.
                peer_s.append(seconds(lambda: peer.insert(pack(state))))
                times.append(seconds(action))
    bare.close()
    peer.close()
    ours, dumps, commit, packed = (milliseconds(times[WARM_UP:]) for times in (ours_s, dumps_s, bare_s, peer_s))
    return Row(name, ours, "ms", peer=packed, floor=dumps + commit, ratio=(ours - commit) / dumps, bar=bar,
               note=f"dumps {dumps:.2f} ms, commit {commit:.2f} ms; ratio: (ours - commit) / dumps")  # fmt: skip


def cold(run: Run) -> list[Row]:
    """The first save through a handle that has loaded nothing, in a store just opened, against load plus save.

    The load is measured in a store just opened too; the save is that store's third call, with everything warm, which
    makes the bar harder: whatever a first write has to set up counts against us. The state is the workload's after
    400 steps, half a megabyte; opening is not counted on either side.
    """
    path = str(run.folder / "ours.db")
    states = steps(run.count(400, 40) + 200)
    with perdure.open(path, durability="normal") as store:
        thread = store.thread("agent")
        for _ in range(run.count(400, 40)):
            thread.save(next(states))
    times: list[tuple[float, float, float]] = []
    for _ in range(run.count(50, 3)):
        with perdure.open(path) as store:
            state = next(states)
            handle = store.thread("agent")
            first_s = seconds(lambda handle=handle, state=state: handle.save(state))  # type: ignore[misc]
        with perdure.open(path) as store:
            other = store.thread("agent")
            load_s = seconds(lambda other=other: other.load().state)  # type: ignore[misc]
            other.save(next(states))
            state = next(states)
            save_s = seconds(lambda other=other, state=state: other.save(state))  # type: ignore[misc]
        times.append((first_s, load_s, save_s))
    first, load, save = (milliseconds(column) for column in zip(*times, strict=True))
    return [
        Row("first save on a cold handle", first, "ms", floor=load + save, ratio=first / (load + save), bar=COLD_BAR,
            note=f"floor: load {load:.2f} ms + warm save {save:.2f} ms")
    ]  # fmt: skip


@dataclass(slots=True)
class _Window:
    """A state of constant size, about 20 KB: the last 50 messages."""

    prose: Prose
    messages: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=50))

    def states(self) -> Iterator[dict[str, object]]:
        self.messages.extend(self.prose.message() for _ in range(50))
        while True:
            self.messages.append(self.prose.message())
            yield {"messages": list(self.messages)}


def later(run: Run) -> list[Row]:
    """Saves of a state of constant size after 10,000 checkpoints, against the first 100.

    In turns: a save of the old thread, then one of a thread in a new store that has had fewer than 100. There are
    several such stores, one after the other. The floor is a bare insert of what one step adds.
    """
    old_path = run.folder / "old.db"
    states = _Window(Prose(6)).states()
    with perdure.open(str(old_path), durability="normal") as store:
        thread = store.thread("agent")
        for _ in range(run.count(HISTORY, 200)):
            thread.save(next(states))
    bare = BareTable(run.folder / "bare.db")
    added = orjson.dumps(Prose(7).message())
    young_s: list[float] = []
    old_s: list[float] = []
    bare_s: list[float] = []
    with perdure.open(str(old_path)) as store:
        old = store.thread("agent")
        old.load()
        for number in range(run.count(5, 1)):
            with perdure.open(str(run.folder / f"young{number}.db")) as other:
                young = other.thread("agent")
                fresh = _Window(Prose(8 + number)).states()
                for _ in range(run.count(100, 10)):
                    young_s.append(_timed_save(young, next(fresh)))
                    old_s.append(_timed_save(old, next(states)))
                    bare_s.append(seconds(lambda: bare.insert(added)))
    bare.close()
    return [
        Row("save after 10,000 checkpoints", milliseconds(old_s), "ms", floor=milliseconds(young_s),
            ratio=median(old_s) / median(young_s), bar=LATER_BAR,
            note=f"floor: the first 100; bare insert {milliseconds(bare_s):.2f} ms")
    ]  # fmt: skip


def _timed_save(thread: perdure.Thread, state: object) -> float:
    start = time.perf_counter()
    thread.save(state)
    return time.perf_counter() - start
