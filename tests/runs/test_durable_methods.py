"""Durable methods: the object is an argument, which the run records and another process loads again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lab import Interrupt, Once

import perdure
from perdure.errors import RunMismatch, Unstorable, UsageError


class Agent:
    """An agent whose client cannot be stored: it is made again for the city."""

    once = Once()

    def __init__(self, city: str) -> None:
        self.city, self.client = city, object()

    @perdure.step
    def search(self, what: str) -> str:
        return f"{what} in {self.city}"

    @perdure.durable
    def search_all(self, *what: str) -> list[str]:
        found = [self.search(one) for one in what]
        self.once.interrupt()
        return found

    @perdure.durable
    def count(self, number: int) -> str:
        if number < 2:
            self.city += "!"
            perdure.continue_as_new(number + 1)
        return f"{number} {self.city}"

    @perdure.durable
    async def parent(self, what: str, /) -> Any:
        child = await perdure.spawn(self.search_all, what)
        return await child.result()

    @perdure.durable
    def model(self) -> Any:
        calls = [{"id": "a", "name": "inner", "args": {"number": 2}}]
        return perdure.tools({"inner": self.count}).call(calls)[0]["content"]


perdure.register(Agent, name="methods.Agent", dump=lambda agent: agent.city, load=Agent)


class Unregistered:
    @perdure.durable
    def work(self) -> None: ...


@pytest.fixture
def store() -> Iterator[perdure.Store]:
    with perdure.open(":memory:") as store:
        yield store


def test_a_worker_resumes_a_method_with_the_object_that_was_recorded(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "once", Once())
    agent = Agent("Oslo")
    with pytest.raises(Interrupt):
        store.run(agent.search_all, "pubs", "bars", id="r")
    agent.city = "Bergen"
    perdure.Worker(store, functions=[Agent.search_all]).run(until_idle=True)
    run = store.get_run("r")
    assert run.result() == ["pubs in Oslo", "bars in Oslo"]
    assert run.arguments(raw=True)["self"] == {"<type>": "methods.Agent", "<value>": "Oslo"}
    with pytest.raises(RunMismatch):
        store.run(agent.search_all, "pubs", "bars", id="r")


def test_methods_are_started_as_functions_are(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent.once, "reached", 1)
    agent = Agent("Oslo")
    runs = [store.start(agent.parent, "pubs"), store.run(agent.count, 0), store.run(agent.model)]
    store.schedule("hourly", agent.search_all, "0 * * * *", args=("cafes",)).trigger()
    perdure.Worker(store).run(until_idle=True)
    assert [run.result() for run in runs] == [["pubs in Oslo"], "2 Oslo!!", "2 Oslo"]
    [hourly] = store.runs(id_prefix="hourly@")
    assert store.get_run(hourly.id).result() == ["cafes in Oslo"]
    assert store.replay(runs[1]).result == "2 Oslo!!"
    assert agent.city == "Oslo"


def test_what_cannot_be_recorded_is_refused_with_the_reason(store: perdure.Store) -> None:
    with pytest.raises(Unstorable, match=r"work\(self=…\) cannot be saved: .*register"):
        store.run(Unregistered().work)
    assert store.runs() == []
    with pytest.raises(UsageError, match="class method, and its runs could not record for which class"):

        class Maker:
            @classmethod
            @perdure.durable
            def work(cls) -> None: ...
