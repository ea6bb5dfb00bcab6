"""Effects in doubt: what became of one is found out or asked, never guessed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from effects_kit import Receiver, booking
from lab import Interrupt, Lab, hooked

import perdure
from perdure.runs.execution.hooks import Point

DEADLINE_S = 0.2  # how long a request may be under way, where a test must wait for that


def interrupted(lab: Lab, agent: Callable[..., Any], *args: Any, at: str, id: str = "r") -> None:
    """Run it, and end this process's part at a point ("before done"), as Ctrl-C there would."""

    def strike(point: Point) -> None:
        if f"{point.when} {point.kind}" == at:
            raise Interrupt

    with hooked(strike), pytest.raises(Interrupt):
        lab.run(agent, *args, id=id)


# --- doubt: what became of it is found out, never guessed


@pytest.mark.parametrize("at", ["after intent", "before body", "after body", "before done"])
def test_reconcile_decides_what_became_of_it(lab: Lab, at: str) -> None:
    receiver, looks = Receiver(), list[datetime]()

    def find(key: str, flight: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
        looks.append(datetime.now(UTC))
        return receiver.find(key, flight)

    agent = booking(lab, receiver, reconcile=find, timeout_s=DEADLINE_S)
    interrupted(lab, agent, "LH400", at=at)
    happened = len(receiver.done)
    begun = datetime.now(UTC)
    run = lab.run(agent, "LH400", id="r")
    assert run.result() == "done: LH400"
    assert len(receiver.done) == 1
    [step] = run.steps()
    [(key, _)] = receiver.done
    assert step.key == key
    assert set(receiver.asked) == {(key, "LH400")}
    if happened:
        assert (step.attempts, step.note) == (1, {"settled": "reconciled"})
        assert len(receiver.asked) == 1
    else:
        # Not done is acted on only when the request can no longer arrive. An earlier look is followed by one then.
        assert step.attempts == 2
        # 50 ms: the start is told by an estimate of the clock of PostgreSQL's server
        deadline = step.started_at + timedelta(seconds=DEADLINE_S - 0.05)
        assert looks[-1] >= deadline
        assert len(looks) == 2 or looks[0] >= deadline
    assert begun < datetime.now(UTC)


def test_a_request_that_lands_late_is_found_by_the_second_look(lab: Lab) -> None:
    receiver = Receiver()
    asked: list[str] = []

    def find(key: str, flight: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
        asked.append(key)
        if len(asked) == 2:  # the deadline has passed: by now it has arrived
            receiver.act(key, flight)
        return receiver.find(key, flight)

    agent = booking(lab, receiver, reconcile=find, timeout_s=DEADLINE_S)
    interrupted(lab, agent, "LH400", at="before body")
    run = lab.run(agent, "LH400", id="r")
    assert run.result() == "done: LH400"
    assert len(receiver.done) == 1
    assert len(asked) == 2


@pytest.mark.parametrize("verdict", ["unknown", "raises", "nonsense"])
def test_a_reconcile_that_does_not_know_leaves_it_to_the_policy(lab: Lab, verdict: str) -> None:
    receiver = Receiver()

    def find(key: str, flight: str) -> Any:
        if verdict == "raises":
            raise OSError("the airline does not answer")
        return perdure.outcome.Unknown("it is night") if verdict == "unknown" else None

    agent = booking(lab, receiver, reconcile=find)
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status in ("waiting", "stuck")
    assert len(receiver.done) == 1
    if verdict == "nonsense":  # a defect of the code: said as such, and nothing was decided
        with pytest.raises(perdure.RunStuck, match=r"perdure\.outcome\.Done"):
            run.result()
        return
    [ask] = lab.store.questions()
    assert ask.kind == "doubt"
    run.resolve("1", done="done: LH400")
    assert run.result() == "done: LH400"
    assert len(receiver.done) == 1


def test_while_a_person_is_asked_reconcile_is_asked_again(lab: Lab) -> None:
    receiver, answers = Receiver(), [perdure.outcome.Unknown("not yet"), perdure.outcome.Done("found later")]
    agent = booking(lab, receiver, reconcile=lambda key, flight: answers.pop(0))
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "waiting"
    assert lab.run(agent, "LH400", id="r").result() == "found later"
    assert lab.store.questions() == []  # nobody needs to answer any more


def test_nobody_knows_so_the_run_parks_and_asks(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver)
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    info = run.refresh()
    assert info.status == "waiting"
    [(key, _)] = receiver.done
    assert info.waiting_for is not None
    waiting = info.waiting_for
    assert (waiting.kind, waiting.step, waiting.name, waiting.key) == ("doubt", "1", "book", key)
    [ask] = lab.store.questions("r")
    assert (ask.kind, ask.step, ask.key) == ("doubt", "1", key)
    assert "LH400" in ask.text
    assert key in ask.text
    [step] = run.steps()
    assert step.status == "in doubt"
    assert lab.run(agent, "LH400", id="r").status == "waiting"  # the same line again asks nobody twice
    assert len(lab.store.questions("r")) == 1
    run.resolve("1", done="booked by hand", who="ann")
    assert run.result() == "booked by hand"
    assert len(receiver.done) == 1
    [ask] = lab.store.questions("r", all=True)
    assert [(who, value) for who, value, _ in ask.answers] == [("ann", {"done": "booked by hand"})]
    assert abs(ask.answers[0][2] - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_person_who_says_not_done_lets_it_run_after_its_deadline(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, timeout_s=DEADLINE_S)
    interrupted(lab, agent, "LH400", at="before body")
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "waiting"
    run.resolve("1", not_done=True)
    assert run.result() == "done: LH400"
    [step] = run.steps()
    assert (step.attempts, len(receiver.done)) == (2, 1)
    assert step.key == receiver.done[0][0]


def test_each_attempt_can_be_in_doubt_again(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, timeout_s=0.01)
    for attempt in (1, 2, 3):
        interrupted(lab, agent, "LH400", at="before body")
        run = lab.run(agent, "LH400", id="r")
        assert run.refresh().status == "waiting"
        [step] = run.steps()
        assert step.attempts == attempt
        run.resolve("1", not_done=True)
    assert run.result() == "done: LH400"
    assert len(lab.store.questions("r", all=True)) == 3


def test_on_doubt_retry_runs_it_again_after_the_deadline_with_the_same_key(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, on_doubt="retry", timeout_s=DEADLINE_S)
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    assert run.result() == "done: LH400"
    assert len(receiver.done) == 2
    assert receiver.done[0] == receiver.done[1]  # who honours the key does it once
    [step] = run.steps()
    assert datetime.now(UTC) - step.started_at >= timedelta(seconds=DEADLINE_S - 0.05)


def test_a_long_deadline_parks_the_run_until_it_has_passed(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, on_doubt="retry", timeout_s=3600)
    interrupted(lab, agent, "LH400", at="before body")
    run = lab.run(agent, "LH400", id="r")
    info = run.refresh()
    assert info.status == "waiting"
    assert getattr(info.waiting_for, "kind", None) == "deadline"
    assert info.wake_at is not None
    assert timedelta(minutes=59) < info.wake_at - datetime.now(UTC) < timedelta(minutes=61)
    assert receiver.done == []


def test_on_doubt_fail_raises_in_doubt_for_good(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver, on_doubt="fail")
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    with pytest.raises(perdure.RunFailed) as caught:
        run.result()
    doubt = caught.value.__cause__
    assert isinstance(doubt, perdure.InDoubt)
    assert (doubt.run, doubt.step, doubt.key) == ("r", "1", receiver.done[0][0])
    assert "for the key" in str(doubt)
    assert len(receiver.done) == 1


# --- an error out of the body leaves the outcome unknown, unless it is definite


class SoldOut(Exception):
    """An error of the effect's own package: its code says that nothing was booked."""


def unlucky(lab: Lab, receiver: Receiver, error: Exception, *, acts: bool, **options: Any) -> Any:
    """An agent whose effect acts, or not, and then raises, once."""
    raised: list[int] = []

    @lab.effect(name="book", timeout_s=DEADLINE_S, **options)
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        lab.ran.append("book")
        if raised:
            return receiver.act(key, flight)
        raised.append(1)
        if acts:
            receiver.act(key, flight)
        raise error

    @lab.durable(name="agent")
    async def agent(flight: str) -> Any:
        return await lab(book(flight))

    return agent


@pytest.mark.parametrize("acts", [True, False])
@pytest.mark.parametrize("error", [TimeoutError("slow"), asyncio.IncompleteReadError(b"HTTP/1.1 20", 512)], ids=repr)
def test_an_error_that_leaves_the_outcome_open_is_reconciled(lab: Lab, error: Exception, acts: bool) -> None:
    receiver = Receiver()
    agent = unlucky(lab, receiver, error, acts=acts, retries=1, backoff_s=0, reconcile=receiver.find)
    run = lab.run(agent, "LH400", id="r")
    assert run.result() == "done: LH400"
    assert len(receiver.done) == 1
    assert lab.count("book") == (1 if acts else 2)


def test_an_unknown_outcome_asks_a_person_without_reconcile(lab: Lab) -> None:
    receiver = Receiver()
    agent = unlucky(lab, receiver, TimeoutError("slow"), acts=True)
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "waiting"
    run.resolve("1", done="it is booked")
    assert run.result() == "it is booked"
    assert len(receiver.done) == 1


def test_an_unknown_outcome_fails_where_that_is_the_policy(lab: Lab) -> None:
    receiver = Receiver()
    agent = unlucky(lab, receiver, TimeoutError("slow"), acts=True, on_doubt="fail")
    with pytest.raises(perdure.RunFailed) as caught:
        lab.run(agent, "LH400", id="r").result()
    assert isinstance(caught.value.__cause__, perdure.InDoubt)
    assert "TimeoutError: slow" in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"definite": (ValueError,)}], ids=["own class", "named"])
def test_a_definite_error_fails_at_once(lab: Lab, options: dict[str, Any]) -> None:
    receiver = Receiver()
    error = ValueError("no such flight") if options else SoldOut("none left")
    agent = unlucky(lab, receiver, error, acts=False, reconcile=receiver.find, **options)
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "failed"
    assert receiver.asked == []


def test_a_definite_error_does_not_settle_an_earlier_attempt(lab: Lab) -> None:
    """on_doubt="retry": a refused repetition says nothing of the first request, also after a crash in between."""
    receiver = Receiver()

    @lab.effect(name="book", timeout_s=0.01, on_doubt="retry", retries=0)
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        lab.ran.append("book")
        if lab.count("book") > 1:
            raise SoldOut("the first request took the last seat")
        return receiver.act(key, flight)

    @lab.durable(name="agent")
    async def agent(flight: str) -> Any:
        return await lab(book(flight))

    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    assert run.refresh().status == "waiting"  # for a person, after as many attempts as an open outcome gets
    run.resolve("1", done="booked")
    assert run.result() == "booked"
    assert len(receiver.done) == 1


def test_an_attempt_that_reconcile_settled_leaves_a_definite_error_definite(lab: Lab) -> None:
    receiver = Receiver()
    errors = iter([TimeoutError("slow"), SoldOut("none left")])

    @lab.effect(name="book", timeout_s=0.01, on_doubt="retry", reconcile=receiver.find)
    def book(flight: str, key: perdure.IdempotencyKey) -> str:
        raise next(errors)

    @lab.durable(name="agent")
    async def agent(flight: str) -> Any:
        return await lab(book(flight))

    assert lab.run(agent, "LH400", id="r").status == "failed"


def test_an_attempt_that_ended_late_is_settled_by_its_own_error(sync_lab: Lab) -> None:
    is_over = threading.Event()

    @perdure.effect(name="late", timeout_s=0.05, on_doubt="retry")
    def book() -> None:
        sync_lab.ran.append("book")
        is_over.wait(0.2)
        raise SoldOut("none left")

    @perdure.durable(name="agent")
    def agent() -> None:
        book()

    assert sync_lab.run(agent, id="r").status == "failed"
    assert sync_lab.count("book") == 1


def test_a_failure_before_the_body_began_is_definite(sync_lab: Lab) -> None:
    @perdure.effect
    def book(flight: str) -> None: ...

    @perdure.durable
    def agent() -> None:
        book()

    assert sync_lab.run(agent, id="r").status == "failed"
    assert sync_lab.store.questions() == []


def test_a_body_beyond_its_deadline_is_in_doubt(lab: Lab) -> None:
    receiver, release = Receiver(), threading.Event()

    async def aslow(flight: str, key: perdure.IdempotencyKey) -> str:
        receiver.act(key, flight)
        await asyncio.sleep(60)
        return ""

    def slow(flight: str, key: perdure.IdempotencyKey) -> str:
        receiver.act(key, flight)
        release.wait(60)
        return ""

    body: Callable[..., Any] = aslow if lab.is_async else slow
    book = perdure.effect(name="book", timeout_s=0.05, reconcile=receiver.find)(body)

    @lab.durable
    async def agent() -> Any:
        return await lab(book("LH400"))

    try:
        run = lab.run(agent, id="r")
        assert run.result() == "done: LH400"
    finally:
        release.set()
    assert len(receiver.done) == 1
    assert run.steps()[0].note == {"settled": "reconciled"}


def test_a_cancelled_task_leaves_its_effect_to_be_settled(store: perdure.Store) -> None:
    """asyncio.wait_for stops a booking: the run is not done before it is known what became of it."""
    lab, receiver = Lab(store, "async"), Receiver()

    @perdure.effect(reconcile=receiver.find, timeout_s=2)
    async def book(flight: str, key: perdure.IdempotencyKey) -> str:
        receiver.act(key, flight)
        await asyncio.sleep(60)
        return ""

    @perdure.durable
    async def agent() -> str:
        try:
            return await asyncio.wait_for(book("LH400"), 0.5)
        except TimeoutError:
            return "too slow"

    run = lab.run(agent, id="r")
    assert run.result() == "too slow"
    [step] = run.steps()
    assert (step.status, step.result) == ("done", "done: LH400")
    assert len(receiver.done) == 1


def test_an_effect_under_way_is_not_broken_off_because_another_branch_failed(store: perdure.Store) -> None:
    """What could end by itself is not made a doubt: its end is recorded first."""
    lab, receiver = Lab(store, "async"), Receiver()
    begun = asyncio.Event()

    @perdure.effect
    async def book(flight: str, key: perdure.IdempotencyKey) -> str:
        begun.set()
        await asyncio.sleep(0.05)
        return receiver.act(key, flight)

    @perdure.step
    async def breaks() -> None:
        await begun.wait()
        raise ValueError("no")

    @perdure.durable
    async def agent() -> None:
        await asyncio.gather(book("LH400"), breaks())

    run = lab.run(agent, id="r")
    assert run.refresh().status == "failed"
    assert [(step.name, step.status) for step in run.steps() if step.kind == "effect"] == [("book", "done")]
    assert lab.store.questions() == []


# --- resolving


def test_only_what_is_in_doubt_can_be_resolved(lab: Lab) -> None:
    receiver = Receiver()
    agent = booking(lab, receiver)
    run = lab.run(agent, "LH400", id="r")
    with pytest.raises(perdure.NotFound, match="not in doubt"):
        run.resolve("1", done=1)
    with pytest.raises(perdure.UsageError, match="one of them"):
        run.resolve("1")
    with pytest.raises(perdure.UsageError, match="one of them"):
        run.resolve("1", done=1, not_done=True)
    interrupted(lab, agent, "UA88", at="before done", id="s")
    doubtful = lab.run(agent, "UA88", id="s")
    with pytest.raises(perdure.errors.AnswerRefused, match="resolve"):
        lab.store.answer("s", "yes")
    doubtful.resolve("1", done=None)  # a result may be None
    assert doubtful.result() is None
    with pytest.raises(perdure.NotFound, match="not in doubt"):
        doubtful.resolve("1", not_done=True)


def test_a_run_with_an_open_doubt_is_cancelled_when_that_is_settled(lab: Lab) -> None:
    receiver = Receiver()
    undone: list[str] = []
    agent = booking(lab, receiver, undo=lab.body(lambda result: undone.append(result)))
    interrupted(lab, agent, "LH400", at="before done")
    run = lab.run(agent, "LH400", id="r")
    assert run.cancel() == "queued"
    assert lab.run(agent, "LH400", id="r").status == "waiting"
    [ask] = lab.store.questions()
    assert ask.kind == "doubt"
    run.resolve("1", done="booked LH400")
    with pytest.raises(perdure.RunCancelled):
        run.result(timeout_s=20)
    assert (undone, lab.store.questions()) == (["booked LH400"], [])


def test_continue_as_new_does_not_forget_a_doubt(store: perdure.Store) -> None:
    lab, receiver = Lab(store, "async"), Receiver()

    @perdure.effect
    async def book(flight: str, key: perdure.IdempotencyKey) -> str:
        receiver.act(key, flight)
        await asyncio.sleep(60)
        return ""

    @perdure.durable
    async def agent(round: int) -> int:
        if round == 2:
            return round
        try:
            await asyncio.wait_for(book("LH400"), 0.5)
        except TimeoutError:
            pass
        return perdure.continue_as_new(2)

    run = lab.run(agent, 1, id="r")
    assert run.refresh().status == "waiting"
    assert [ask.kind for ask in lab.store.questions("r")] == ["doubt"]
    run.resolve("1.1" if "1.1" in {step.path for step in run.steps()} else "1", done="ok")
    assert run.result() == 2
    assert len(receiver.done) == 1
