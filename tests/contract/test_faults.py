"""A fault at each kind of point of every operation: all of it happened, or none of it; and trying again works.

Each operation runs once to count the points at which the driver can be struck (begin, each statement, commit, and
right after the commit). Then, for points of each kind (in a soak for all), it runs on a fresh copy of the same threads
with a fault there. What is visible afterwards must equal "before" or "after"; everything must verify; and a second try
must lead to "after".
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from soak import of_each_kind, spread

import perdure
from perdure import Checkpoint, Store, Thread
from perdure.storage.program import Batch, Program, Sql, Transaction, drive, read

Dump = list[Any]
_copies = itertools.count()


class Fault(Exception):
    """What the hook raises."""


class Hook:
    """Counts the points it is called at, and raises at one of them."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.strike_at: int | None = None
        self.strike_where: str | None = None
        self.error: Exception = Fault("injected")
        self.writing = False

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.strike_at or (self.writing and point == self.strike_where):
            self.strike_where = None
            raise self.error

    def watch(self, driver: Any) -> None:
        """Know which transactions write: PostgreSQL commits those that only read, too."""
        run = driver.run

        def watched(transaction: Transaction) -> Any:
            self.writing = transaction.write
            return run(transaction)

        driver.run = watched

    def arm(self, *, at: int | None = None, where: str | None = None, error: Exception | None = None) -> None:
        self.points, self.strike_at, self.strike_where = [], at, where
        self.error = error or Fault(f"injected at point {at or where}")


@dataclass
class Database:
    """One database with a plain store and one that can be struck. Each copy of the scene is a tenant of its own."""

    plain: Store
    struck: Store
    hook: Hook

    def copy(self, prepare: Callable[[Store], None]) -> tuple[Store, Store]:
        name = f"copy {next(_copies)}"
        prepare(self.plain.tenant(name))
        return self.plain.tenant(name), self.struck.tenant(name)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = str(tmp_path / "a.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    hook = Hook()
    with (
        perdure.open(url, durability="normal") as plain,
        perdure.open(url, durability="normal", hook=hook) as struck,
    ):
        hook.watch(struck._context.driver)
        yield Database(plain, struck, hook)


def prepare_nothing(store: Store) -> None:
    """A tenant that has never saved anything."""


def prepare_scene(store: Store) -> None:
    """A line with keyframes, branches old and new, a fork in the middle, a fork of the fork, another thread.

    The clock is ours: what a prune calls recent goes by ids, which tell milliseconds apart."""
    ticks = itertools.count(1_700_000_000_000_000, 2_000)
    store._context.clock_us = lambda: next(ticks)
    thread = store.thread("main", metadata={"kind": "main"})
    saved = [thread.save(state(n), note=f"step {n}") for n in range(9)]
    for at in (1, 5, 6):
        store.thread("main").save({"branch": at, **state(at)}, parent=saved[at], note=f"branch at {at}")
    thread.save(state(9), note="step 9")
    fork = thread.fork(saved[4], name="fork", metadata={"kind": "fork"})
    for n in range(3):
        fork.save({"fork": n, **state(4)}, note=f"fork {n}")
    fork.fork(name="fork of fork").save({"deep": 1}, note="deep")
    store.thread("other").save({"n": 0}, note="other")


def state(n: int) -> dict[str, Any]:
    return {"log": [f"entry {i} " * 20 for i in range(n + 3)], "n": n}


def labelled(thread: Thread, note: str) -> Checkpoint:
    return next(checkpoint for checkpoint in thread.history() if checkpoint.note == note)


def show(checkpoint: Checkpoint) -> Any:
    """A checkpoint without what differs between copies: ids and times."""
    return (checkpoint.step, checkpoint.kind, checkpoint.note, checkpoint.metadata, checkpoint.state)


def dump(store: Store) -> Dump:
    """Everything that the public API shows, in a form that is equal for equal copies."""
    found: Dump = []
    for info in sorted(store.threads(limit=None), key=lambda info: info.name):
        thread = store.thread(info.name)
        line = list(thread.history())
        origin = thread.load(info.forked_at).note if info.forked_at in {c.id for c in line} else None
        tips = sorted((show(tip) for tip in thread.branches()), key=repr)
        tagged = [name for i in store.threads(where=info.metadata) if (name := i.name) == info.name]
        found.append((info.name, info.metadata, origin, [show(one) for one in line], tips, tagged))
    return found


def rows(store: Store) -> tuple[int, ...]:
    """How many rows the tables hold for a tenant: leftovers show here, and only here."""
    number = drive(store._context.driver, store._context.tenant())

    def count() -> Program[tuple[int, ...]]:
        answers = yield Batch(
            *(Sql(f"SELECT count(*) FROM {t} WHERE tenant = :t")(t=number) for t in ("record", "body", "tag"))
        )
        return tuple(answer[0][0] for answer in answers)

    return drive(store._context.driver, read(count))


Operation = Callable[[Store], Any]


def first_save(store: Store) -> None:
    store.thread("new", metadata={"a": 1, "b": 2}).save({"first": 1}, note="first", metadata={"m": 1})


def next_save(store: Store) -> None:
    store.thread("main").save(state(10), note="next")


def save_after_load(store: Store) -> None:
    thread = store.thread("main")
    thread.load()
    thread.save(state(10), note="next")


def save_with_metadata(store: Store) -> None:
    store.thread("main", metadata={"kind": "changed", "more": [1]}).save(state(10), note="next")


def save_expecting(store: Store) -> None:
    thread = store.thread("main")
    thread.save({"expected": 1}, expect=thread.get_head(), note="expected")


def save_branch(store: Store) -> None:
    thread = store.thread("main")
    thread.save({"branch": 1}, parent=labelled(thread, "step 3"), note="branch")


def update(store: Store) -> None:
    store.thread("main").update({"deep": {"er": 1}}, remove=["n"], note="updated")


def rollback(store: Store) -> None:
    thread = store.thread("main")
    thread.rollback(labelled(thread, "step 2"), note="back")


def fork(store: Store) -> None:
    thread = store.thread("main")
    thread.fork(labelled(thread, "step 5"), name="new fork", metadata={"kind": None, "x": 1})


def annotate(store: Store) -> None:
    store.thread("main").annotate({"kind": "annotated", "a": 1, "b": {"c": 2}})


def prune(store: Store) -> None:
    store.thread("main").prune(keep=3)


def prune_fork(store: Store) -> None:
    store.thread("fork").prune(keep=1)


def delete_origin(store: Store) -> None:
    store.delete_thread("main")


def delete_fork(store: Store) -> None:
    store.delete_thread("fork")


def delete_alone(store: Store) -> None:
    store.delete_thread("other")


def read_everything(store: Store) -> None:
    thread = store.thread("fork")
    thread.load()
    list(thread.history())
    thread.get_head()
    thread.branches()
    thread.info()
    thread.diff(labelled(thread, "step 1"))
    store.threads(where={"kind": "fork"})
    store.ops.stats()
    thread.verify()
    store.ops.verify()


WRITES: list[Operation] = [
    first_save,
    next_save,
    save_after_load,
    save_with_metadata,
    save_expecting,
    save_branch,
    update,
    rollback,
    fork,
    annotate,
]
REMOVALS: list[Operation] = [prune, prune_fork, delete_origin, delete_fork, delete_alone]
LOGGED: list[Operation] = [first_save, next_save, save_branch, save_with_metadata, update, rollback]


def on_both(operations: list[Operation], most: int) -> list[tuple[str, Operation]]:
    """All of them on SQLite, some on PostgreSQL (in a soak all): the transactions are the same."""
    return [("sqlite", one) for one in operations] + [("postgres", one) for one in spread(operations, most)]


def named(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


def expected(
    database: Database, operation: Operation, prepare: Callable[[Store], None]
) -> tuple[Dump, Dump, list[int]]:
    """What is to be seen before, what after, and at which points the operation is struck."""
    plain, struck = database.copy(prepare)
    before = dump(plain)
    database.hook.arm()
    operation(struck)
    points = of_each_kind(database.hook.points)
    assert points
    return before, dump(plain), points


def sound(store: Store) -> bool:
    report = store.ops.verify()
    assert report.ok, [str(problem) for problem in report.problems]
    return True


@pytest.mark.parametrize(("database", "operation"), on_both(WRITES, 3), ids=named, indirect=["database"])
def test_a_fault_at_any_point_leaves_before_or_after(database: Database, operation: Operation) -> None:
    prepare = prepare_nothing if operation is first_save else prepare_scene
    before, after, points = expected(database, operation, prepare)
    assert before != after
    outcomes = []
    for point in points:
        plain, struck = database.copy(prepare)
        database.hook.arm(at=point)
        with pytest.raises(Fault):
            operation(struck)
        database.hook.arm()
        seen = dump(plain)
        assert seen in (before, after), f"half done after a fault at {point}"
        assert sound(plain)
        outcomes.append(seen == after)
        if seen == before:
            operation(struck)
        assert dump(plain) == after
        assert sound(plain)
    # Nothing before the commit, everything after: only the very last point finds it done.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(True) == 1 or operation is annotate


@pytest.mark.parametrize(("database", "operation"), on_both(REMOVALS, 2), ids=named, indirect=["database"])
def test_a_fault_in_a_removal_leaves_all_or_nothing(database: Database, operation: Operation) -> None:
    """What can be seen is "before" or "after"."""
    before, after, points = expected(database, operation, prepare_scene)
    plain, struck = database.copy(prepare_scene)
    operation(struck)
    clean = rows(plain)
    for point in points:
        plain, struck = database.copy(prepare_scene)
        database.hook.arm(at=point)
        with pytest.raises(Fault):
            operation(struck)
        database.hook.arm()
        seen = dump(plain)
        assert seen in (before, after), f"half done after a fault at {point}"
        assert sound(plain)
        if seen == before:
            operation(struck)
        assert dump(plain) == after
        assert rows(plain) == clean
        assert sound(plain)


def test_a_fault_in_reading_changes_nothing(database: Database) -> None:
    before, after, points = expected(database, read_everything, prepare_scene)
    assert before == after
    plain, struck = database.copy(prepare_scene)
    for point in points:
        struck = database.struck.tenant(struck._context.tenant_name)  # one that has looked up nothing yet
        database.hook.arm(at=point)
        with pytest.raises(Fault):
            read_everything(struck)
    database.hook.arm()
    assert dump(plain) == before
    read_everything(struck)
    next_save(struck)
    assert sound(plain)


@pytest.mark.parametrize("where", ["commit", "committed"])
@pytest.mark.parametrize("operation", LOGGED, ids=lambda operation: operation.__name__)
def test_a_commit_whose_answer_was_lost_is_looked_up(database: Database, operation: Operation, where: str) -> None:
    """Written or not, the save finds out, and what it saves is there once."""
    prepare = prepare_nothing if operation is first_save else prepare_scene
    _, after, _ = expected(database, operation, prepare)
    plain, struck = database.copy(prepare)
    if operation is first_save:
        struck.thread("warm").save({})  # or the lost answer is that of the tenant's own row
        struck.delete_thread("warm")
    database.hook.arm(where=where, error=perdure.errors.OutcomeUnknown("injected"))
    operation(struck)
    database.hook.arm()
    assert dump(plain) == after
    assert sound(plain)


@pytest.mark.parametrize(
    ("database", "operation"),
    [("sqlite", "asave"), ("postgres", "aupdate"), ("sqlite", "aprune")],
    indirect=["database"],
)
async def test_faults_strike_async_operations_alike(database: Database, operation: str) -> None:
    choices: dict[str, dict[str, Any]] = {
        "asave": {"state": state(10)},
        "aupdate": {"patch": {"a": 1}},
        "aprune": {"keep": 2},
    }
    arguments = choices[operation]

    async def run(store: Store) -> None:
        await getattr(store.thread("main"), operation)(**arguments)

    plain, struck = database.copy(prepare_scene)
    before = dump(plain)
    database.hook.arm()
    await run(struck)
    after, points = dump(plain), of_each_kind(database.hook.points)
    for point in points:
        plain, struck = database.copy(prepare_scene)
        database.hook.arm(at=point)
        with pytest.raises(Fault):
            await run(struck)
        database.hook.arm()
        seen = dump(plain)
        assert seen in (before, after)
        if seen == before:
            await run(struck)
        assert dump(plain) == after
        assert sound(plain)
    await asyncio.sleep(0)


def test_an_id_that_somebody_else_took_is_never_mistaken_for_ones_own(tmp_path: Path) -> None:
    """Two writers that draw the same id at the same moment: both records are kept, each under an id of its own."""
    store = perdure.open(str(tmp_path / "store.db"))
    context = store._context
    now = context.clock_us()
    context.clock_us = lambda: now
    salts = (bytes([number]) * 16 for number in range(100))
    context.entropy = lambda size: next(salts) if size == 16 else b"same"
    one, two = store.thread("t"), store.thread("t")
    one.save({"n": 0})
    two.load()
    first = one.save({"n": 1})
    context.entropy = lambda size: next(salts) if size == 16 else drawn.pop()
    drawn = [b"else", b"same"]
    second = two.save({"n": 2})
    assert first.id != second.id
    assert {checkpoint.state["n"] for checkpoint in store.thread("t").branches()} == {1, 2}
    assert store.ops.verify().ok
    store.close()
