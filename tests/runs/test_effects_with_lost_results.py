"""An effect that returns what cannot be stored has happened: it is in doubt until its result is known."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab, hooked

import perdure
from perdure.runs.execution.hooks import Point


class Charge:
    """An object of a payment provider's SDK."""

    def __init__(self, id: str) -> None:
        self.id = id


class Shop:
    """An agent that pays once, and what reached the provider."""

    def __init__(self, lab: Lab, **options: Any) -> None:
        self.charged: list[str] = []
        self.refunded: list[Any] = []
        self.returns: Any = Charge("ch_1")

        def refund(result: Any) -> Any:
            self.refunded.append(result)
            return Charge("re_1")  # nobody asks for it: it need not be stored

        @lab.effect(name="pay", undo=lab.body(refund), timeout_s=0.01, **options)
        def pay(key: perdure.IdempotencyKey) -> Any:
            self.charged.append(key)
            return self.returns

        @lab.durable(name="agent")
        async def agent() -> str:
            return str((await lab(pay()))["id"])

        self.agent = agent


def test_a_person_says_what_it_returned_and_it_is_not_done_again(lab: Lab) -> None:
    shop = Shop(lab, on_doubt="retry")
    run = lab.run(shop.agent, id="r")
    assert (run.refresh().status, run.steps()[0].status) == ("waiting", "in doubt")
    [asked] = lab.store.questions("r")
    assert asked.text.startswith("What did pay() return? It happened")
    assert "Charge" in (asked.reason or "")
    with pytest.raises(TimeoutError, match=r"perdure run resolve r 1 --done"):
        run.result(timeout_s=0)
    shop.returns = {"id": "ch_1"}  # the code is fixed: what happened is still in doubt
    assert lab.run(shop.agent, id="r").status == "waiting"
    run.resolve(1, done={"id": "ch_1"})
    assert lab.run(shop.agent, id="r").result() == "ch_1"
    assert len(shop.charged) == 1
    assert run.undo() == "queued"
    assert lab.run(shop.agent, id="r").status == "undone"
    assert shop.refunded == [{"id": "ch_1"}]


def test_reconcile_says_what_it_returned(lab: Lab) -> None:
    unfit = perdure.outcome.Done(Charge("ch_1"))
    verdicts: list[Any] = [perdure.outcome.NotDone(), unfit, perdure.outcome.NotDone()]

    def find(key: str) -> Any:
        return verdicts.pop(0) if verdicts else perdure.outcome.Done({"id": "ch_1"})

    shop = Shop(lab, reconcile=lab.body(find))
    for why in ("reconcile says that it did not happen", "reconcile returned", "reconcile says that it did not"):
        assert lab.run(shop.agent, id="r").status == "waiting"
        assert why in (lab.store.questions("r")[0].reason or "")
    assert lab.run(shop.agent, id="r").result() == "ch_1"
    assert len(shop.charged) == 1


def test_a_process_that_dies_before_it_could_ask_leaves_an_ordinary_doubt(lab: Lab) -> None:
    class Killed(BaseException):
        pass

    def kill(point: Point) -> None:
        if (point.kind, point.when) == ("wait", "before"):
            raise Killed

    shop = Shop(lab)
    with hooked(kill), pytest.raises(Killed):
        lab.run(shop.agent, id="r")
    assert lab.run(shop.agent, id="r").status == "waiting"
    assert lab.store.questions("r")[0].text.startswith("Did pay() happen?")
    assert len(shop.charged) == 1


def test_the_code_may_take_the_doubt_and_undo(lab: Lab) -> None:
    shop = Shop(lab, on_doubt="fail")

    @lab.durable
    async def agent() -> str:
        try:
            return str(await lab(shop.agent()))
        except perdure.InDoubt as doubt:
            return str(doubt)

    assert "happened, and its result is lost" in lab.run(agent, id="r").result()
