"""What is asked is read in one round trip for runs and one for graphs, however many questions there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab import Lab

import perdure
from perdure.storage.program import Transaction


@perdure.effect(timeout_s=0.01)
def transfer(number: int) -> None:
    raise TimeoutError


@perdure.durable(name="asks.many")
def many(count: int) -> list[Any]:
    found: list[Any] = perdure.map(lambda number: perdure.ask(f"Pay {number}?", quorum=2), range(count))
    return found


@perdure.durable(name="asks.doubts")
def doubts(count: int) -> list[Any]:
    return perdure.map(transfer, range(count))


def batches(store: perdure.Store, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batches of statements a call sends."""
    driver: Any = store._context.driver
    run, sent = driver.run, 0

    def counted(transaction: Transaction) -> Any:
        def op() -> Any:
            nonlocal sent
            program: Any = transaction.op()
            answer: Any = None
            while True:
                try:
                    batch = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                sent += 1
                answer = yield batch

        return run(Transaction(op, transaction.write, transaction.solo))

    with monkeypatch.context() as patch:
        patch.setattr(driver, "run", counted)
        call()
    return sent


def test_questions_come_with_their_answers(sync_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sync_lab.store
    store.run(many, 12, id="many")
    first, second = (ask.path for ask in store.questions("many")[:2])
    for path, who, value in ((first, "ann", 1), (second, "ann", 2), (second, "bob", 3)):
        store.answer("many", value, step=path, who=who)
    given = {ask.path: [(who, value) for who, value, _ in ask.answers] for ask in store.questions("many")}
    assert (len(given), given[first], given[second]) == (12, [("ann", 1)], [("ann", 2), ("bob", 3)])
    assert batches(store, store.questions, monkeypatch) == 2
    assert [ask.path for ask in store.questions(limit=2)] == [first, second]


def test_resolving_looks_for_one_question(sync_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(count: int) -> int:
        run = sync_lab.store.run(doubts, count, id=f"doubts-{count}")
        path = next(step.path for step in run.steps() if step.status == "in doubt")
        return batches(sync_lab.store, lambda: run.resolve(path, not_done=True), monkeypatch)

    assert cost(12) == cost(2)
