"""What a run costs: commits and reads, counted. One commit per step, two per effect, one to begin and one to end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import MODES, PLACES, Code, Interrupt, Once

import perdure
from perdure.storage.program import Batch, Transaction

LOOKING = 1  # the transaction that finds a run there, and writes nothing


class Meter:
    """A store on which commits and statements are counted: commits by the driver's own hook where it has one for them
    alone (SQLite), else by the transactions that write."""

    def __init__(self, url: str, place: str, mode: str) -> None:
        self.place, self.code = place, Code(mode)
        self.steps: Counter[str] = Counter()
        self.written = 0
        self.statements: Counter[str] = Counter()
        if place == "sqlite":
            self.store = perdure.open(url, hook=self._hear, durability="normal")
        else:
            self.store = perdure.open(url)
        driver: Any = self.store._context.driver
        self._run, self._arun, self._append = driver.run, driver.arun, driver.append
        driver.run, driver.arun, driver.append = self._counted, self._acounted, self._appended
        warm = self.code.durable(name="warm")(_nothing)
        self.store.run(warm, id="warm")  # the tenant, and what is made once

    @property
    def commits(self) -> int:
        return self.steps["commit"] if self.place == "sqlite" else self.written

    def _hear(self, step: str) -> None:
        self.steps[step] += 1

    def _counted(self, transaction: Transaction) -> Any:
        return self._run(self._watched(transaction))

    def _appended(self, *args: Any) -> bool:
        self.written += 1
        return bool(self._append(*args))

    async def _acounted(self, transaction: Transaction) -> Any:
        return await self._arun(self._watched(transaction))

    def _watched(self, transaction: Transaction) -> Transaction:
        self.written += transaction.write

        def op() -> Any:
            program = transaction.op()
            answer: Any = None
            while True:
                try:
                    step = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                assert isinstance(step, Batch)
                for statement in step.statements:
                    text = statement.sql.postgres
                    self.statements["journal read" if "FROM journal" in text else "other"] += 1
                answer = yield step

        return Transaction(op, transaction.write, transaction.solo)

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """What the block costs."""
        commits, reads = self.commits, self.statements["journal read"]
        found: Counter[str] = Counter()
        yield found
        found["commits"] = self.commits - commits
        found["journal reads"] = self.statements["journal read"] - reads


async def _nothing() -> None:
    pass


@pytest.fixture(params=[(place, mode) for place in PLACES for mode in MODES], ids="-".join)
def meter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meter]:
    place, mode = request.param
    url = str(tmp_path / "m.db") if place == "sqlite" else request.getfixturevalue("postgres_url")
    made = Meter(url, place, mode)
    yield made
    made.store.close()


Make = Callable[[Code], Any]


def nothing(code: Code) -> Any:
    return code.durable(name="agent")(_nothing)


def five_steps(code: Code) -> Any:
    @code.step()
    def work(number: int) -> int:
        return number

    @code.durable(name="agent")
    async def agent() -> None:
        for number in range(5):
            await code(work(number))

    return agent


def four_effects(code: Code) -> Any:
    @code.effect(reconcile=lambda key, number: perdure.outcome.NotDone(), undo=lambda number: None)
    def book(number: int, key: perdure.IdempotencyKey) -> int:
        return number

    @code.durable(name="agent")
    async def agent() -> None:
        for number in range(4):
            await code(book(number))

    return agent


def values(code: Code) -> Any:
    @code.step()
    def work(*drawn: Any) -> None: ...

    @code.durable(name="agent")
    async def agent() -> None:
        perdure.now(), perdure.random(), perdure.uuid(), perdure.patched("x")
        perdure.emit("y")
        await code(work())
        perdure.now(), perdure.random()  # at the end: with the finish

    return agent


def retried(code: Code) -> Any:
    failed: list[int] = []

    @code.step(retries=2, backoff_s=0)
    def work() -> None:
        failed.append(1)
        if len(failed) < 3:
            raise ValueError("again")

    @code.durable(name="agent")
    async def agent() -> None:
        await code(work())

    return agent


def retried_effect(code: Code) -> Any:
    failed: list[int] = []

    @code.effect(retries=2, backoff_s=0, definite=(ValueError,))
    def book() -> None:
        failed.append(1)
        if len(failed) < 3:
            raise ValueError("again")

    @code.durable(name="agent")
    async def agent() -> None:
        await code(book())

    return agent


def failing(code: Code) -> Any:
    @code.effect(undo=code.body(lambda: None))
    def book() -> None: ...

    @code.durable(name="agent", undo_on=ValueError)
    async def agent() -> None:
        await code(book())
        raise ValueError("no")

    return agent


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (nothing, 0),
        (five_steps, 5),
        (four_effects, 8),
        (values, 2),  # the values before the step's body, and its end
        (retried, 3),  # two failures, one end
        (retried_effect, 4),  # intent, failure and intent, failure and intent, end
        (failing, 5),  # the effect, that it is being undone, the undo
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_commits_of_a_run(meter: Meter, make: Make, between: int) -> None:
    """One to begin and one to end; between them what the journal needs, and no more."""
    agent = make(meter.code)
    with meter.counting() as cost:
        run = meter.store.run(agent, id="r")
    assert run.refresh().status in ("done", "failed")
    assert cost["commits"] == 1 + between + 1
    assert cost["journal reads"] == 0  # a new run has none
    with meter.counting() as cost:
        assert meter.store.run(agent, id="r").status == run.status
    assert cost["commits"] == LOOKING


def test_commits_of_waiting(meter: Meter) -> None:
    """A question: that it is asked, the parking, the claim, the answer. A message and a child are one commit each."""
    code = meter.code

    @code.durable(name="agent")
    async def agent() -> Any:
        return await code(perdure.ask("?"))

    with meter.counting() as cost:
        meter.store.run(agent, id="r")
    assert cost["commits"] == 1 + 1 + 1
    with meter.counting() as cost:
        meter.store.answer("r", 1)
    assert cost["commits"] == 1
    with meter.counting() as cost:
        assert meter.store.run(agent, id="r").result() == 1
    assert cost["commits"] == LOOKING + 1 + 1 + 1  # claim, the answer, finish
    assert cost["journal reads"] == 1

    @code.durable(name="speaker")
    async def speaker() -> None:
        await code(perdure.send("r", "hello"))
        await code(perdure.spawn(agent, id="child"))

    with meter.counting() as cost:
        meter.store.run(speaker, id="s")
    # Its own: begin, message, child, end. Its child, which is gone on with here: claim, question, parking.
    assert cost["commits"] in (4, 4 + 3)


@pytest.mark.parametrize("meter", [(place, "async") for place in PLACES], ids="-".join, indirect=True)
def test_branches_share_commits(meter: Meter) -> None:
    """Concurrent steps of an async run on SQLite are committed in groups: never more than one each, mostly fewer."""

    @perdure.step
    async def work(number: int) -> int:
        return number

    @perdure.durable
    async def agent() -> int:
        return sum(await asyncio.gather(*(work(number) for number in range(20))))

    with meter.counting() as cost:
        assert meter.store.run(agent, id="r").result() == 190
    assert cost["commits"] <= 22
    if meter.place == "sqlite":
        assert cost["commits"] < 15


@pytest.mark.parametrize("meter", [("sqlite", "sync"), ("postgres", "async")], ids="-".join, indirect=True)
def test_a_run_of_many_steps_resumes_with_one_read_of_its_journal(meter: Meter) -> None:
    code, once = meter.code, Once()
    steps = 1_000
    ran: list[int] = []

    @code.step()
    def work(number: int) -> int:
        if once.reached and number < steps:
            raise AssertionError("a finished step ran again")
        ran.append(number)
        return number

    @code.durable(name="agent")
    async def agent() -> int:
        total = 0
        for number in range(steps):
            total += await code(work(number))
        once.interrupt()
        return total + int(await code(work(steps)))

    with pytest.raises(Interrupt):
        meter.store.run(agent, id="r")
    assert len(ran) == steps
    with meter.counting() as cost:
        run = meter.store.run(agent, id="r")
    assert run.result() == sum(range(steps + 1))
    assert len(ran) == steps + 1  # no body but the new one
    assert cost["journal reads"] == 1
    assert cost["commits"] == LOOKING + 3  # claim, the new step, finish
    assert len(run.steps()) == steps + 1


def test_replay_runs_no_body(meter: Meter) -> None:
    """Every body raises the second time: steps, effects, questions and values answer from the record."""
    code, once = meter.code, Once()

    def first_time() -> None:
        if once.reached:
            raise AssertionError("a body ran in a replay")

    @code.step()
    def work() -> int:
        first_time()
        return 1

    @code.step(retries=3, backoff_s=0)
    def broken() -> None:
        first_time()
        raise ValueError("always")

    @code.effect(reconcile=lambda key: first_time())
    def book(key: perdure.IdempotencyKey) -> str:
        first_time()
        return "booked"

    @code.durable(name="agent")
    async def agent() -> list[Any]:
        found: list[Any] = [await code(work()), await code(book()), perdure.random()]
        try:
            await code(broken())
        except ValueError as error:
            found.append(str(error))
        await code(perdure.sleep(0.001))
        found.append(await code(perdure.ask("?", timeout_s=0.01, on_timeout="nobody")))
        once.interrupt()
        return found

    with pytest.raises(Interrupt):
        meter.store.run(agent, id="r").result(timeout_s=20)
    with meter.counting() as cost:
        run = meter.store.run(agent, id="r")
    one, booked, chance, said, nobody = run.result()
    assert (one, booked, said, nobody) == (1, "booked", "always", "nobody")
    assert 0 <= chance < 1
    assert (cost["commits"], cost["journal reads"]) == (LOOKING + 2, 1)
