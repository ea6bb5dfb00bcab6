"""A page of 100 steps from anywhere in a run of 100,000, and a checkpoint anywhere in a thread of 100,000.

On SQLite and PostgreSQL, the 95th percentile.
"""

from __future__ import annotations

import random
from functools import partial

import perdure
from bench.listings import p95
from bench.measure import Row, Run
from perdure.testing.postgres_server import PostgresServer

STEPS = 100_000
BAR_MS = 5.0


@perdure.step(name="bench.one")
def one(number: int) -> int:
    return number


@perdure.durable(name="bench.many")
def many(count: int) -> None:
    for number in range(count):
        one(number)


def _page(made: perdure.Run, chance: random.Random, cursors: list[str]) -> None:
    assert made.steps(after=chance.choice(cursors[:-100]), limit=100)


def _at(thread: perdure.Thread, chance: random.Random, count: int) -> None:
    step = chance.randrange(count)
    assert thread.at_step(step).step == step


def steps(run: Run) -> list[Row]:
    count = run.count(STEPS, 300)
    rows = []
    with PostgresServer(fsync=False) as server:
        for name, url in (("SQLite", str(run.folder / "steps.db")), ("PostgreSQL", server.create_database("steps"))):
            with perdure.open(url, durability="normal") as store:
                made = store.run(many, count, id="many")
                cursors = [step.cursor for step in made.steps(values=False)]
                took = p95(partial(_page, made, random.Random(1), cursors))
                thread = store.thread("many")
                for number in range(count):
                    thread.save({"n": number})
                found = p95(partial(_at, thread, random.Random(1), count))
                sampled = p95(thread.sizes)
            rows += [
                Row(f"{name}: page of 100 of {count:,} steps", took, "ms", bar=BAR_MS, judged="ours", note="p95"),
                Row(
                    f"{name}: checkpoint at a position of {count:,}", found, "ms", bar=BAR_MS, judged="ours", note="p95"
                ),
                Row(f"{name}: sizes of a thread of {count:,}", sampled, "ms", judged="ours", note="p95"),
            ]
    return rows
