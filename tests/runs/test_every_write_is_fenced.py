"""A process whose run was taken over writes nothing for it: not to its children, not to its questions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

import perdure
from perdure.runs.engine.flows import locate
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point
from perdure.runs.journal import control, rows
from perdure.storage.program import drive, write

PATIENCE_S = 30.0
asks, won = threading.Event(), threading.Event()
stores: list[perdure.Store] = []


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as opened:
        stores[:] = [opened]
        asks.clear()
        won.clear()
        yield opened
        hooks.hook = None


def take_over(run_id: str) -> None:
    """Another process claims the run, as it does when the lease has run out."""
    ctx = stores[0]._context
    tenant, row = drive(ctx.driver, locate(ctx, run_id))
    claim = partial(rows.claim, tenant, row.run, fence=row.fence, owner="another", lease=60_000_000)
    assert drive(ctx.driver, write(partial(claim, now=ctx.clock_us(), dead=True))) is not None


def cancel(run_id: str) -> None:
    """An operator cancels the run; what becomes of its children is left to its owner."""
    ctx = stores[0]._context
    tenant, row = drive(ctx.driver, locate(ctx, run_id))
    drive(ctx.driver, write(partial(control.ask_for, tenant, row.run, "cancel", ctx.clock_us())))


@perdure.step
def small() -> int:
    return 1


@perdure.durable
def child() -> int:
    return small()


@perdure.durable(name="fenced.parent", undo_on=ValueError)
def parent() -> None:
    perdure.spawn(child, id="child").result()
    raise ValueError("the parent fails, so that its child is undone")


@perdure.durable
def cancelled_parent() -> None:
    perdure.spawn(child, id="child", queue="of no worker")
    cancel("parent")
    try:
        small()
        small()
    except BaseException:
        take_over("parent")
        raise


def quick() -> str:
    assert asks.wait(PATIENCE_S)
    return "quick"


def slow() -> str:
    assert perdure.ask("Is it too late?")
    return "slow"


@perdure.durable
def asking() -> str:
    return str(perdure.first(quick, slow))


def test_a_child_is_not_undone(store: perdure.Store) -> None:
    def hook(point: Point) -> None:
        if (point.name, point.when) == ("perdure.undo", "after"):
            take_over("parent")

    store.start(parent, id="parent")
    hooks.hook = hook
    perdure.Worker(store).run(until_idle=True)
    assert store.get_run("parent").status == "running"
    assert store.get_run("child").status == "done"


def test_children_are_not_cancelled(store: perdure.Store) -> None:
    store.start(cancelled_parent, id="parent")
    perdure.Worker(store).run(until_idle=True)
    assert store.get_run("parent").status == "running"
    assert store.get_run("child").status == "queued"


def test_the_question_of_a_branch_that_lost_is_not_closed(store: perdure.Store) -> None:
    def hook(point: Point) -> None:
        """The branch that loses is about to ask when the other one wins; then the run is taken over."""
        if (point.name, point.when) == ("perdure.first", "after"):
            won.set()
        elif (point.name, point.when) == ("perdure.ask", "before"):
            asks.set()
            assert won.wait(PATIENCE_S)
        elif (point.name, point.when) == ("perdure.ask", "after"):
            take_over("run")

    store.start(asking, id="run")
    hooks.hook = hook
    perdure.Worker(store).run(until_idle=True)
    assert store.get_run("run").status == "running"
    [ask] = store.questions("run")
    assert ask.status == "open"
