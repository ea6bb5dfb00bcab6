"""What encryption costs: the same saves, loads and steps of runs with a key and without, in turns on the same disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import perdure
from bench.measure import Row, Run, in_turns, milliseconds, small_states
from bench.workload import steps

SAVE_BAR = 1.25
WARM_UP = 3
_KEY = bytes(range(32))


@contextmanager
def _stores(run: Run, name: str, **options: Any) -> Iterator[tuple[perdure.Store, perdure.Store]]:
    with ExitStack() as stack:
        path = run.folder / name
        sealed = stack.enter_context(perdure.open(f"{path}-sealed.db", keys=_KEY, **options))
        plain = stack.enter_context(perdure.open(f"{path}-plain.db", **options))
        yield sealed, plain


def encryption(run: Run) -> list[Row]:
    """Encrypted against plain: the ratio is what a key costs."""
    return [
        _small(run, "encrypted save of a 1 KB state", "full", SAVE_BAR),
        _small(run, "  without waiting for the disk", "normal", None),
        *_workload(run),
        _steps(run),
    ]


def _small(run: Run, name: str, durability: str, bar: float | None) -> Row:
    rounds = run.count(2000, 20)
    states = small_states(rounds + WARM_UP)
    with _stores(run, f"small-{durability}", durability=durability) as (sealed, plain):
        ours, same = iter(states), iter(states)
        with_key, without = sealed.thread("agent"), plain.thread("agent")
        ours_s, plain_s = in_turns(
            rounds, lambda: with_key.save(next(ours)), lambda: without.save(next(same)), warm_up=WARM_UP
        )
    return Row(name, milliseconds(ours_s), "ms", floor=milliseconds(plain_s), ratio=median(ours_s) / median(plain_s),
               bar=bar, note=f"{rounds} saves; floor: the same without a key")  # fmt: skip


def _workload(run: Run) -> list[Row]:
    count = run.count(1500, 20)
    with _stores(run, "workload") as (sealed, plain):
        states = steps(count)
        state: dict[str, object] = {}

        def step() -> None:
            nonlocal state
            state = next(states)

        with_key, without = sealed.thread("agent"), plain.thread("agent")
        _, ours_s, plain_s = in_turns(
            count - WARM_UP, step, lambda: with_key.save(state), lambda: without.save(state), warm_up=WARM_UP
        )
        loads = run.count(40, 3)
        ours_load_s, plain_load_s = in_turns(
            loads, lambda: with_key.load(strict=True), lambda: without.load(strict=True), warm_up=WARM_UP
        )
        ratio_bytes = sealed.ops.stats().stored_bytes / plain.ops.stats().stored_bytes
    return [
        Row("encrypted save of the main workload", milliseconds(ours_s), "ms", floor=milliseconds(plain_s),
            ratio=median(ours_s) / median(plain_s), bar=SAVE_BAR,
            note=f"{count} steps; bodies take {ratio_bytes:.2f} times the bytes"),
        Row("  load of its head", milliseconds(ours_load_s), "ms", floor=milliseconds(plain_load_s),
            ratio=median(ours_load_s) / median(plain_load_s), note=f"{loads} loads; no bar"),
    ]  # fmt: skip


@perdure.step(name="bench.encryption.step")
def _step(number: int) -> int:
    return number


@perdure.durable(name="bench.encryption.run")
def _run_of(count: int) -> int:
    return sum(_step(number) for number in range(count))


def _steps(run: Run) -> Row:
    count = run.count(100, 5)
    ids = itertools.count()
    with _stores(run, "runs") as (sealed, plain):
        ours_s, plain_s = in_turns(
            run.count(12, 2),
            lambda: sealed.run(_run_of, count, id=f"r{next(ids)}"),
            lambda: plain.run(_run_of, count, id=f"r{next(ids)}"),
            warm_up=1,
        )
    ours, floor = milliseconds(ours_s) / count, milliseconds(plain_s) / count
    return Row("  a step of a run", ours, "ms", floor=floor, ratio=ours / floor, note=f"runs of {count} steps; no bar")
