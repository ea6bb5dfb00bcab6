"""What the benchmarks share: rows and their bars, interleaved timing, the bare SQLite they are held against.

A row is one line of the table. Whatever is compared is measured in the same run, in turns (A, B, A, B, …), so
that a noisy neighbour hits both, and medians are taken. What must never happen here: a figure from another run
or another machine.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles, stdev
from typing import Any, Literal, NamedTuple

import apsw
import orjson

from bench.workload import Writer
from perdure.values.compress import zstd

ROOT = Path(__file__).parents[1]
PEER_LEVEL = 3
KB = 1000  # bytes
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """How to run: where files may go (one folder per benchmark, removed afterwards), and whether only to try it out."""

    folder: Path
    quick: bool = False
    locomo: Path | None = None
    beam: Path | None = None
    beam_size: str = "100K"

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ours`, `peer` and `floor` are in `unit`; the bar judges `ratio`, or `ours` itself."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    floor: float | None = None
    ratio: float | None = None
    bar: float | None = None
    sense: Literal["at most", "at least"] = "at most"
    judged: Literal["ratio", "ours"] = "ratio"
    note: str = ""

    @property
    def value(self) -> float | None:
        """What the bar is compared with."""
        return self.ours if self.judged == "ours" else self.ratio

    @property
    def passed(self) -> bool | None:
        """None where there is no bar."""
        if self.bar is None or self.value is None:
            return None
        return self.value <= self.bar if self.sense == "at most" else self.value >= self.bar

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


class Compared(NamedTuple):
    """What two actions take, in milliseconds, and the first by the second, with its 95 % interval."""

    ours: float
    floor: float
    ratio: float
    interval: str


Benchmark = Callable[[Run], list[Row]]


Clock = Callable[[], float]


def seconds(action: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """How long one call takes."""
    start = clock()
    action()
    return clock() - start


def in_turns(
    rounds: int, *actions: Callable[[], object], warm_up: int = 3, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """The times of each action, called one after the other, round by round.

    The order turns with each round, so that no action always runs in the wake of the same other one.
    """
    times: list[list[float]] = [[] for _ in actions]
    gc.collect()
    for number in range(-warm_up, rounds):
        for turn in range(len(actions)):
            which = (turn + number) % len(actions)
            took = seconds(actions[which], clock)
            if number >= 0:
                times[which].append(took)
    return times


def compare(
    rounds: int, ours: Callable[[], object], floor: Callable[[], object], clock: Clock = time.perf_counter
) -> Compared:
    """Compares two actions whose times differ by a few per cent: by the fastest tenths, because a busy machine and a
    busy disk make the others longer by multiples of that. The interval: of 20 parts of the rounds, each alone."""
    times = in_turns(rounds, ours, floor, clock=clock)
    low = [quantiles(each, n=10)[0] for each in times]
    parts = [[quantiles(each[part::20], n=10)[0] for each in times] for part in range(20)]
    around = 2 * stdev(one / other for one, other in parts) / math.sqrt(20)
    ratio = low[0] / low[1]
    return Compared(low[0] * 1000, low[1] * 1000, ratio, f"{ratio - around:.3f} to {ratio + around:.3f}")


def milliseconds(times: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return median(times) * 1000


def file_bytes(path: Path) -> int:
    """The size of a closed store. Its log must be gone: what is in there would not have been counted."""
    log = Path(f"{path}-wal")
    if log.exists() and log.stat().st_size:
        raise RuntimeError(f"{path} is not closed: its log has {log.stat().st_size} bytes")
    return path.stat().st_size


def pack(state: object) -> bytes:
    """The peer's way of storing a state, which is what frameworks do: all of it, as JSON, by zstd level 3."""
    return zstd.compress(orjson.dumps(state), PEER_LEVEL)


def unpack(blob: bytes) -> Any:
    return orjson.loads(zstd.decompress(blob))


class BareTable:
    """A table of bytes in an SQLite file, with apsw and nothing else: WAL, synchronous=FULL, a commit per insert.

    The floor of every durable save, and with `pack` the peer.
    """

    def __init__(self, path: Path, *, synchronous: str = "FULL", vfs: str | None = None) -> None:
        self.path = path
        self.connection = apsw.Connection(str(path), vfs=vfs)
        self.connection.pragma("journal_mode", "wal")
        self.connection.pragma("synchronous", synchronous)
        self.connection.set_busy_timeout(30_000)
        self.connection.execute("CREATE TABLE IF NOT EXISTS bare (id INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        self._cursor = self.connection.cursor()

    def insert(self, data: bytes) -> None:
        self._cursor.execute("INSERT INTO bare (data) VALUES (?)", (data,))

    def select(self, number: int) -> bytes:
        [(data,)] = self._cursor.execute("SELECT data FROM bare WHERE id = ?", (number,))
        return bytes(data)

    def close(self) -> None:
        self._cursor.close()
        self.connection.close()


class Prose(Writer):
    """Text without stock phrases, so that a difference cannot profit from what was said before more than zstd can."""

    def words_of(self, count: int) -> str:
        return " ".join(self.random.choices(self.words, cum_weights=self.weights, k=count))

    def message(self, words: int = 60) -> dict[str, object]:
        """A message of 60 words, about 0.4 KB: what people type and short answers have."""
        return {
            "id": f"msg_{self.random.getrandbits(48):012x}",
            "role": self.random.choice(("user", "assistant", "tool")),
            "content": self.words_of(words),
        }


def small_states(count: int, size: int = KB, *, seed: int = 1) -> list[dict[str, object]]:
    """States whose JSON has `size` bytes, with nothing in common but their keys: nothing for a difference to save."""
    prose = Prose(seed)
    states: list[dict[str, object]] = []
    for number in range(count):
        state: dict[str, object] = {"step": 100_000 + number, "text": ""}
        room = size - len(orjson.dumps(state))
        state["text"] = prose.words_of(room // 2)[:room]
        states.append(state)
    return states


def in_child(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    """`python -m module arguments…`, with pipes to talk to it."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)


def answer_of(child: subprocess.Popen[bytes], timeout_s: float = 120.0) -> Any:
    """What a child printed as JSON. Raises if it failed."""
    try:
        output, _ = child.communicate(timeout=timeout_s)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode:
        raise RuntimeError(f"{child.args!r} failed with code {child.returncode}")
    return json.loads(output)


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
