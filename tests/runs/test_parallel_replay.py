"""Branches of a sync run that is resumed: a new effect waits for the branch that still comes to a recorded one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import perdure
from perdure.runs.execution import matching
from perdure.runs.execution.matching import BranchThreads
from perdure.runs.execution.scope import current
from perdure.runs.parallel.threads import ThreadPool

PATIENCE_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[perdure.Store]:
    """What is tested lies above the SQL."""
    with perdure.open(tmp_path / "runs.db") as opened:
        yield opened


@perdure.step
def look(what: str) -> str:
    return what


@perdure.effect
def replayed_pay(what: str, key: perdure.IdempotencyKey) -> str:
    return what


def test_a_branch_counts_from_the_moment_that_those_inside_it_have_ended(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that joins them may be scheduled late. The call that waits for it must not be refused meanwhile."""
    looks: list[bool] = []
    looked = threading.Condition()
    is_last = BranchThreads._is_last
    pools: list[ThreadPool] = []

    def noted_is_last(threads: BranchThreads) -> bool:
        answer = is_last(threads)
        with looked:
            looks.append(answer)
            looked.notify_all()
        return answer

    class LateQueue(SimpleQueue[Any]):
        """In the branch that has paid: returns after the threads that it joins are gone and the other has looked."""

        def get(self, *args: Any) -> Any:
            branch = super().get(*args)
            scope = current.get()
            if scope is not None and scope.prefix == "2.":
                inner = [pool for pool in pools if pool.branches[0].scope.parent is scope]
                for pool in inner:
                    pool.join()
                with looked:
                    wanted = len(looks) + 3
                    assert looked.wait_for(lambda: len(looks) >= wanted or any(looks), PATIENCE_S)
            return branch

    @perdure.durable
    def paying() -> list[str]:
        def one(what: str) -> str:
            perdure.gather(lambda: look(what + "1"), lambda: look(what + "2"))
            if what == "a":
                perdure.ask("pay, too?")
            return replayed_pay(what)

        return perdure.map(one, ["a", "b"])

    assert store.run(paying, id="r").status == "waiting"  # b has paid, a has not
    store.answer("r", True)
    monkeypatch.setattr(BranchThreads, "_is_last", noted_is_last)
    monkeypatch.setattr(BranchThreads, "add", lambda threads, pool: pools.append(pool))
    monkeypatch.setattr(matching, "SimpleQueue", LateQueue)
    run = store.run(paying, id="r")
    assert run.result(timeout_s=PATIENCE_S) == ["a", "b"]
    assert len(looks) >= 3
    assert not any(looks)


def test_a_branch_that_lost_does_not_wait_for_a_recorded_effect(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run waits for its thread: the two would wait for each other."""
    paid = []
    waits = threading.Event()
    is_last = BranchThreads._is_last

    def noted_is_last(threads: BranchThreads) -> bool:
        waits.set()
        return is_last(threads)

    @perdure.effect
    def replayed_pay(what: str, key: perdure.IdempotencyKey) -> None:
        paid.append(what)

    def old() -> Any:
        return perdure.gather(lambda: perdure.ask("ok?"), lambda: replayed_pay("a"))

    def new() -> Any:
        def race() -> Any:
            return perdure.first(lambda: waits.wait(PATIENCE_S), lambda: replayed_pay("b"))

        return perdure.gather(lambda: (perdure.ask("ok?"), race()), lambda: None)

    assert store.run(perdure.durable(name="race")(old), id="r").status == "waiting"
    store.answer("r", True)
    monkeypatch.setattr(BranchThreads, "_is_last", noted_is_last)
    assert store.run(perdure.durable(name="race")(new), id="r").result(timeout_s=PATIENCE_S) == [(True, True), None]
    assert paid == ["a"]
