"""The bounds of the log, proved: what is written stays near what changed, what is read stays near what is wanted.

First on the pure policy, with simulated sizes and 10,000 records; then on a real store, by looking into its tables.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perdure
from perdure.log.keyframes import (
    RECORD_COST_BYTES,
    SMALL_BYTES,
    SPLICE_COST_BYTES,
    difference_cost,
    keyframe_is_due,
)

RECORDS = 10_000
OVERHEAD_BYTES = 24  # what a difference costs beside the bytes it inserts
LARGE_BYTES = SMALL_BYTES  # below it a state is read in the time that finding it takes

Change = tuple[int, int]  # bytes inserted, bytes taken out


@dataclass(frozen=True)
class Row:
    """A record, as far as sizes go."""

    size: int
    key_size: int
    cost: int
    keyframe: bool

    @property
    def read_cost(self) -> int:
        return self.key_size + self.cost


@dataclass
class Log:
    """What the policy makes of a history."""

    written: int = 0
    changed: int = 0
    records: int = 0
    worst_read: float = 0.0

    def append(self, base: Row | None, change: Change, *, branching: bool = False) -> Row:
        inserted, removed = change
        size = max(2, (base.size if base else 0) + inserted - removed)
        self.records += 1
        self.changed += max(inserted, removed)
        if base is None:
            self.written += size
            return Row(size, size, 0, True)
        difference = inserted + OVERHEAD_BYTES
        cost = base.cost + difference_cost(difference, difference, 1)
        keyframe = keyframe_is_due(cost=cost, size=size, key_size=base.key_size, branching=branching)
        self.written += difference + (size if keyframe else 0)
        row = Row(size, size, 0, True) if keyframe else Row(size, base.key_size, cost, False)
        if size >= LARGE_BYTES:
            self.worst_read = max(self.worst_read, row.read_cost / size)
        return row

    def line(self, changes: Iterable[Change], base: Row | None = None) -> list[Row]:
        rows: list[Row] = []
        for change in changes:
            base = self.append(base, change)
            rows.append(base)
        return rows

    def check(self, *, extra: int = 0) -> None:
        assert self.written <= 2 * (self.changed + RECORD_COST_BYTES * self.records) + extra
        assert self.worst_read <= 3


def growing() -> Iterator[Change]:
    yield from ((400, 0) for _ in range(RECORDS))


def shrinking() -> Iterator[Change]:
    yield 4_000_000, 0
    yield from ((0, 399) for _ in range(RECORDS - 1))


def alternating() -> Iterator[Change]:
    yield 20_000, 0
    for number in range(RECORDS - 1):
        yield (480_000, 0) if number % 2 == 0 else (0, 480_000)


def constant() -> Iterator[Change]:
    yield 100_000, 0
    yield from ((0, 0) for _ in range(RECORDS - 1))


def rewritten() -> Iterator[Change]:
    yield 50_000, 0
    yield from ((50_000, 50_000) for _ in range(RECORDS - 1))


def collapsing() -> Iterator[Change]:
    """Grows step by step, then falls to almost nothing, again and again."""
    for number in range(RECORDS):
        yield (2_000, 0) if number % 100 != 99 else (0, 197_000)


HISTORIES = [growing, shrinking, alternating, constant, rewritten, collapsing]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__)
def test_a_line_of_10000_records_stays_within_the_bounds(history: Callable[[], Iterator[Change]]) -> None:
    log = Log()
    log.line(history())
    assert log.records == RECORDS
    log.check()


def test_forks_add_at_most_one_keyframe_each() -> None:
    log = Log()
    trunk = log.line((600, 0) for _ in range(5_000))
    extra = 0
    for origin in trunk[::10]:  # 500 forks of 10 records each
        row = log.append(origin, (600, 0), branching=True)
        log.line(((600, 0) for _ in range(9)), row)
        extra += row.size + 6_000
    assert log.records == RECORDS
    log.check(extra=extra)


def test_many_forks_of_one_checkpoint_do_not_each_write_a_keyframe_at_once() -> None:
    """The slack: what is tried and dropped after one record costs what changed."""
    log = Log()
    trunk = log.line((600, 0) for _ in range(2_000))
    for origin in trunk[-60:]:
        before = log.written
        log.append(origin, (600, 0), branching=True)
        assert log.written - before < 1_000


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    start=st.integers(0, 1_000_000),
    insert_max=st.integers(0, 100_000),
    remove_max=st.integers(0, 100_000),
    collapse=st.floats(0, 0.05),
    fork=st.floats(0, 0.02),
)
def test_random_histories_stay_within_the_bounds(
    seed: int, start: int, insert_max: int, remove_max: int, collapse: float, fork: float
) -> None:
    chance = random.Random(seed)
    log = Log()
    rows = [log.append(None, (start, 0))]
    extra = 0
    while log.records < RECORDS:
        row = rows[-1]
        inserted = chance.randint(0, insert_max)
        removed = row.size if chance.random() < collapse else min(row.size, chance.randint(0, remove_max))
        branching = chance.random() < fork
        if branching:
            row = chance.choice(rows)
            removed = min(row.size, removed)
            extra += 2 * row.size + inserted
        rows.append(log.append(row, (inserted, removed), branching=branching))
    log.check(extra=extra)


# --- the same on a real store


def messages(count: int) -> list[Any]:
    chance = random.Random(3)
    texts = ["".join(chance.choices("abcdefghij klmnop", k=300)) for _ in range(count)]
    return [{"messages": texts[: n + 1], "step": n} for n in range(count)]


def see_saw(count: int) -> list[Any]:
    chance = random.Random(4)
    big = "".join(chance.choices("abcdefghij", k=30_000))
    return [{"text": big if n % 2 else big[:6_000], "step": n} for n in range(count)]


REAL: dict[str, Callable[[], list[Any]]] = {
    "growing": lambda: messages(400),
    "shrinking": lambda: messages(400)[::-1],
    "alternating": lambda: see_saw(400),
    "constant": lambda: [{"text": "same words " * 1_000}] * 400,
}


def changed_bytes(states: list[Any]) -> int:
    """Bytes inserted or removed, whichever is more: these states differ by heads, tails and one number."""
    texts = [repr(state) for state in states]
    steps = sum(abs(len(after) - len(before)) + 8 for before, after in itertools.pairwise(texts))
    return len(texts[0]) + steps


def rows_of(path: Path) -> list[tuple[int, int | None, int, int, int, int, int, int]]:
    connection = apsw.Connection(str(path))
    rows = list(
        connection.execute(
            """SELECT r.id, r.base, r.keyframe, r.key, r.size, r.cost, coalesce(length(b.diff), 0),
                coalesce(length(b.full_text), 0) FROM record r JOIN body b ON b.id = r.body ORDER BY r.id"""
        )
    )
    connection.close()
    return rows


def check_tables(path: Path, changed: int, extra: int = 0) -> None:
    rows = rows_of(path)
    written = sum(row[6] + row[7] for row in rows)
    per_record = RECORD_COST_BYTES + SPLICE_COST_BYTES  # two places change in each of these states
    assert written <= 2 * (changed + per_record * len(rows)) + extra
    by_id = {row[0]: row for row in rows}
    for _, base, keyframe, key, size, cost, diff, _ in rows:
        if keyframe:
            assert cost == 0
            continue
        assert base is not None
        own_cost = cost - by_id[base][5]
        assert difference_cost(diff, diff, 1) <= own_cost <= difference_cost(diff, 2**40, 3)
        assert by_id[base][3] == key
        if size >= LARGE_BYTES:
            assert by_id[key][4] + cost <= 3 * size


@pytest.mark.parametrize("history", REAL)
def test_a_real_store_stays_within_the_bounds(tmp_path: Path, history: str) -> None:
    states = REAL[history]()
    with perdure.open(str(tmp_path / "a.db"), durability="normal") as store:
        thread = store.thread("t")
        for state in states:
            thread.save(state)
    check_tables(tmp_path / "a.db", changed_bytes(states))


def test_a_real_store_with_forks_stays_within_the_bounds(tmp_path: Path) -> None:
    states = messages(120)
    extra = 0
    with perdure.open(str(tmp_path / "a.db"), durability="normal") as store:
        thread = store.thread("t")
        saved = [thread.save(state) for state in states]
        for number in range(0, 120, 5):
            fork = thread.fork(saved[number], name=f"fork {number}")
            for step in range(10):
                extra += fork.save({**states[number], "step": -step}).size_bytes if step == 0 else 0
    check_tables(tmp_path / "a.db", changed_bytes(states), extra)


def test_a_keyframe_is_due_exactly_at_its_limits() -> None:
    size = 2 * SMALL_BYTES
    for cost, key_size, due in [
        (size - 1, size, False),
        (size, size, True),
        (0, 2 * size, False),
        (0, 2 * size + 1, True),
    ]:
        assert keyframe_is_due(cost=cost, size=size, key_size=key_size, branching=False) is due
