"""What the tests of retention and erasing share: a store on either database with a clock that the test moves, a hook
that strikes at any point of the driver, and everything that can be seen of a store."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import striking

import perdure
from perdure.storage.program import Batch, Program, Sql, Transaction, drive, read

DAY_US = 86_400_000_000
PLACES = ["sqlite", "postgres"]
TABLES = ("thread", "record", "body", "tag", "pin", "label", "write", "run", "journal", "blob")


class Clock:
    """A clock that goes on by two milliseconds at each look: ids tell milliseconds apart."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000_000

    def __call__(self) -> int:
        self.now += 2_000
        return self.now

    def days(self, count: float) -> None:
        self.now += int(count * DAY_US)


class Fault(Exception):
    """What the hook raises."""


class Hook:
    """Counts the points that the driver comes by, and strikes at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.strike_at = 0

    def __call__(self, point: str) -> None:
        self.count += 1
        if self.count == self.strike_at:
            raise Fault(f"struck at {self.count}: {point}")

    def arm(self, at: int = 0) -> None:
        self.count, self.strike_at = 0, at


def stored_rows(store: perdure.Store, text: str, **params: Any) -> list[Any]:
    """The rows of a statement, as they are stored."""

    def program() -> Program[list[Any]]:
        [found] = yield Batch(Sql(text)(**params))
        return found

    return list(store._context.driver.run(Transaction(program, write=True)))


_places = itertools.count()


def place(request: pytest.FixtureRequest, where: str) -> str:
    """The URL of an empty store."""
    if where == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(request.getfixturevalue("tmp_path") / f"store-{next(_places)}.db")


@contextmanager
def opened(url: str, clock: Clock, **options: Any) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal", **options) as store:
        store._context.clock_us = clock
        yield store


def text(seed: object, size: int = 60) -> str:
    """Text that no compression changes: what is searched for in files."""
    return "".join(random.Random(str(seed)).choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", k=size))


def fill(thread: perdure.Thread, count: int, start: int = 0) -> list[perdure.Checkpoint]:
    """Save states that share most of their text."""
    return [
        thread.save({"log": [f"entry {i} " * 9 for i in range(n % 7 + 3)], "n": n}, note=f"step {n}")
        for n in range(start, start + count)
    ]


def steps(thread: perdure.Thread) -> list[int]:
    return [checkpoint.step for checkpoint in thread.history()]


def sound(store: perdure.Store) -> None:
    report = store.ops.verify()
    assert report.ok, [str(problem) for problem in report.problems]


def seen(store: perdure.Store) -> dict[str, Any]:
    """Everything that the public API shows of threads, without ids."""
    found: dict[str, Any] = {}
    for info in store.threads(limit=None):
        thread = store.thread(info.name)
        line = [(one.step, one.note, json.dumps(one.state)) for one in thread.history()]
        pins = [(pin.name, json.dumps(thread.load(pin.checkpoint).state)) for pin in thread.pins()]
        tips = sorted((tip.step, tip.note or "") for tip in thread.branches())
        found[info.name] = (line, pins, tips)
    return found


def hashes(store: perdure.Store) -> dict[tuple[int, int], bytes]:
    """The hash of every record by tree and id."""
    return {(tree, record): found for tree, record, found in query(store, "SELECT tree, id, hash FROM record")}


def query(store: perdure.Store, sql: str, **params: Any) -> list[Any]:
    def program() -> Program[list[Any]]:
        [rows] = yield Batch(Sql(sql)(**params))
        return rows

    return drive(store._context.driver, read(program))


def rows(store: perdure.Store) -> dict[str, int]:
    """How many rows each table has: leftovers show here, and only here."""
    return {table: query(store, f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}


def struck_everywhere(
    prepare: Callable[[], Any], operation: Callable[[Any], Any], hook: Hook, check: Callable[[Any, int], None]
) -> int:
    """Run an operation on a fresh scene once for each point that it can be struck at."""
    for _ in range(2):  # the first time it also looks up what it then knows
        scene = prepare_unarmed(prepare, hook)
        operation(scene)
        points = hook.count
    assert points > 3
    for point in itertools.takewhile(lambda at: at <= points, striking.points("keeping")):
        scene = prepare_unarmed(prepare, hook)
        hook.arm(point)
        with pytest.raises(Fault):
            operation(scene)
        hook.arm()
        check(scene, point)
    return points


def prepare_unarmed(prepare: Callable[[], Any], hook: Hook) -> Any:
    hook.arm()
    scene = prepare()
    hook.arm()
    return scene
