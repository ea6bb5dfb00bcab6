"""What an attack on durable runs found: each defect with the test that shows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.runs.engine.following import Follower
from perdure.runs.execution import hooks
from perdure.runs.journal.entries import DONE, Entry, Recorded

_done: list[str] = []
_undone: list[str] = []


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[perdure.Store]:
    _done.clear()
    _undone.clear()
    url = str(tmp_path / "runs.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as opened:
        yield opened


def take_back(what: str) -> None:
    _undone.append(what)


@perdure.effect(undo=take_back, name="attacked.pay")
def pay(what: str) -> str:
    _done.append(what)
    return what


# --- a body that goes on on its thread after its time


def test_an_effect_is_not_run_again_while_its_body_still_runs(store: perdure.Store) -> None:
    begun, may_end = threading.Event(), threading.Event()
    bodies: list[int] = []

    def looks(key: str) -> perdure.outcome.NotDone:
        may_end.set()  # the receiver does not know of it yet: and the request is still under way
        return perdure.outcome.NotDone()

    @perdure.effect(timeout_s=0.05, reconcile=looks, name="attacked.slow")
    def slow() -> str:
        bodies.append(1)
        begun.set()
        threading.Timer(0.3, may_end.set).start()
        may_end.wait(60)
        return "paid"

    @perdure.durable(name="attacked.slow_run")
    def run() -> str:
        return slow()

    assert store.run(run, id="slow").result(timeout_s=20) == "paid"
    assert len(bodies) == 1


# --- one message, two receivers


def test_a_message_is_received_once_by_parallel_branches(store: perdure.Store) -> None:
    @perdure.durable(name="attacked.receivers")
    def run() -> list[str]:
        found: list[str] = perdure.gather(
            lambda: perdure.receive(timeout_s=0.2, default="none"),
            lambda: perdure.receive(timeout_s=0.2, default="none"),
        )
        return found

    handle = store.start(run, id="receivers")
    store.send("receivers", "the only one")
    assert sorted(store.run(run, id="receivers").result(timeout_s=20)) == ["none", "the only one"]
    assert handle.refresh().status == "done"


# --- a run that is there already is not a child


@perdure.durable(name="attacked.job")
def job(what: str) -> str:
    return pay(what)


def test_a_failing_parent_does_not_undo_a_run_that_is_not_its_child(store: perdure.Store) -> None:
    assert store.run(job, "A", id="shared").result() == "A"

    @perdure.durable(name="attacked.parent")
    def parent() -> str:
        perdure.spawn(job, "A", id="shared").result()
        raise ValueError("the parent fails")

    handle = store.run(parent, id="parent")
    with pytest.raises(perdure.RunFailed, match="the parent fails"):
        handle.result(timeout_s=20)
    assert store.get_run("shared").status == "done"
    assert _undone == []


# --- undoing


def test_an_undo_in_doubt_is_not_taken_for_done(store: perdure.Store) -> None:
    @perdure.effect(on_doubt="fail", timeout_s=0.05, name="attacked.refund")
    def refund(what: str) -> None:
        raise TimeoutError("no answer")

    @perdure.effect(undo=refund, name="attacked.charge")
    def charge(what: str) -> str:
        return what

    @perdure.durable(name="attacked.refunded", undo_on=ValueError)
    def run() -> None:
        charge("card")
        raise ValueError("sold out")

    handle = store.run(run, id="refunded")
    assert handle.refresh().status == "waiting"
    assert [ask.kind for ask in store.questions("refunded")] == ["doubt"]
    handle.resolve("undo:1", done=None)
    with pytest.raises(perdure.RunFailed, match="sold out"):
        handle.result(timeout_s=20)


# --- errors of a body are the run's own, whatever their class


@pytest.mark.parametrize(
    "error", [ImportError("no such module"), perdure.errors.Unavailable("another database is away")]
)
def test_a_run_fails_by_the_recorded_error_of_a_step_and_is_undone(store: perdure.Store, error: Exception) -> None:
    bodies: list[int] = []

    @perdure.step(name="attacked.imports")
    def imports() -> None:
        bodies.append(1)
        raise error

    @perdure.durable(name="attacked.importer", undo_on=Exception)
    def run() -> None:
        pay("flight")
        imports()

    with pytest.raises(perdure.RunFailed, match=str(error)):
        store.run(run, id="importer").result()
    assert (len(bodies), _undone) == (1, ["flight"])


def test_an_effect_is_not_undone_by_another_ones_undo(store: perdure.Store) -> None:
    def first_undo(what: str) -> None:
        _undone.append(f"first {what}")

    def second_undo(what: str) -> None:
        _undone.append(f"second {what}")

    first = perdure.effect(name="attacked.twin", undo=first_undo)(lambda what: what)

    @perdure.durable(name="attacked.twins", undo_on=ValueError)
    def run() -> None:
        first("A")
        perdure.effect(name="attacked.twin", undo=second_undo)(lambda what: what)  # the name is another's from here on
        raise ValueError("sold out")

    handle = store.run(run, id="twins")
    assert handle.refresh().status == "stuck"
    assert "first_undo" in str(handle.refresh().waiting_for)
    assert _undone == []


# --- an operator's wish that comes at the last moment


@pytest.mark.parametrize(("wish", "end"), [("cancel", "cancelled"), ("undo", "undone")])
def test_an_end_that_is_asked_for_while_the_run_pauses_is_not_lost(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch, wish: str, end: str
) -> None:
    @perdure.durable(name="attacked.paused")
    def run() -> str:
        pay("flight")
        store.get_run("paused").pause()
        return pay("hotel") + pay("car")

    def at(point: hooks.Point) -> None:
        if (point.kind, point.when) == ("park", "before"):
            assert getattr(store.get_run("paused"), wish)() == "running"

    monkeypatch.setattr(hooks, "hook", at)
    handle = store.run(run, id="paused")
    monkeypatch.setattr(hooks, "hook", None)
    handle.resume()
    with pytest.raises((perdure.RunCancelled, perdure.RunUndone)):
        handle.result(timeout_s=20)
    assert handle.refresh().status == end


async def test_a_task_that_is_cancelled_while_its_intent_is_written_leaves_no_doubt(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[str] = []

    @perdure.effect(name="attacked.never")
    async def never(what: str) -> str:
        bodies.append(what)
        return what

    @perdure.durable(name="attacked.cancelling")
    async def run() -> str:
        task = asyncio.create_task(never("flight"))
        tasks.append(task)
        try:
            return await task
        except asyncio.CancelledError:
            return "broken off"

    tasks: list[asyncio.Task[str]] = []

    def at(point: hooks.Point) -> None:
        if (point.kind, point.when, point.name) == ("intent", "before", "attacked.never") and not tasks[0].cancelling():
            tasks[0].cancel()

    monkeypatch.setattr(hooks, "hook", at)
    handle = await store.arun(run, id="cancelling")
    assert await handle.aresult(timeout_s=20) == "broken off"
    assert bodies == []
    assert not await store.aquestions("cancelling")


# --- following a run


def test_an_entry_that_is_committed_after_a_later_number_is_followed_too() -> None:
    def event(seq: int) -> Recorded:
        return Recorded(1, seq, DONE, Entry(str(seq), "step", 0))

    class Row:
        since = origin_seq = 0

    row: Any = Row()
    ctx: Any = None
    follower = Follower(ctx, "r", "")

    def returned(*seqs: int) -> list[int]:
        new = [one.seq for one in follower._news(row, [event(seq) for seq in seqs])]
        for seq in new:
            follower._cursor.pass_entry(seq)
        return new

    assert returned(2) == [2]
    assert returned(1, 2, 3) == [1, 3]
    follower = Follower(ctx, "r", follower._cursor.text())
    assert returned(1, 2, 3) == []


def test_a_closed_store_leaves_nothing_that_says_it_lives(tmp_path: Path) -> None:
    @perdure.durable(name="attacked.brief")
    def run() -> int:
        return 1

    with perdure.open(str(tmp_path / "brief.db")) as opened:
        assert opened.run(run, id="brief").result() == 1
        assert list(tmp_path.glob("*-owner-*"))
    assert not list(tmp_path.glob("*-owner-*"))


def test_a_cancelled_run_can_be_undone_and_asks_again_what_it_did_not_know(store: perdure.Store) -> None:
    @perdure.effect(timeout_s=0.05, name="attacked.risky")
    def risky() -> str:
        raise TimeoutError("no answer")

    @perdure.durable(name="attacked.shop")
    def run() -> str:
        pay("flight")
        return risky()

    handle = store.run(run, id="shop")
    assert handle.cancel(undo=False) == "cancelled"
    assert store.questions("shop") == []
    assert handle.undo() == "queued"
    with pytest.raises(TimeoutError, match=r"did attacked\.risky happen"):
        handle.result(timeout_s=0.5)
    assert [ask.kind for ask in store.questions("shop")] == ["doubt"]
    handle.resolve("2", not_done=True)
    with pytest.raises(perdure.RunUndone):
        handle.result(timeout_s=20)
    assert _undone == ["flight"]
