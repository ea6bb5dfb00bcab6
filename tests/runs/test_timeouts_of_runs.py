"""`@durable(timeout_s=)` ends a whole run, with its waits and restarts. `start(debounce_s=, singleton=)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from workshop import until

import perdure
from perdure.runs.engine import runtime
from perdure.storage.program import Batch, Program, Sql, drive, write

HOUR = 3600


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


def let_pass(store: perdure.Store, seconds: int) -> None:
    """Move all runs into the past, as if that time had passed."""
    far = 2**60
    shift = Sql(
        f"""UPDATE run SET created_at = created_at - :by,
            wake_at = CASE WHEN wake_at > 0 AND wake_at < {far} THEN wake_at - :by ELSE wake_at END"""
    )

    def program() -> Program[None]:
        yield Batch(shift(by=seconds * 1_000_000), last=True)

    drive(store._context.driver, write(program))


def work(store: perdure.Store) -> None:
    perdure.Worker(store).run(until_idle=True)


def agents(undone: list[str]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @perdure.effect(undo=lambda: undone.append("undone"))
    def book() -> str:
        return "booked"

    @perdure.durable(name="stands", timeout_s=HOUR)
    def stands() -> Any:
        book()
        return perdure.ask("?")

    @perdure.durable(name="undoes", timeout_s=HOUR, undo_on=TimeoutError)
    async def undoes() -> Any:
        book()
        return await perdure.ask("?")

    return stands, undoes


def test_a_run_that_waits_too_long_fails_and_its_effects_stand_unless_declared(store: perdure.Store) -> None:
    undone: list[str] = []
    stands, undoes = agents(undone)
    runs = [store.start(stands, id="stands"), store.start(undoes, id="undoes")]
    work(store)
    let_pass(store, HOUR - 60)
    work(store)
    assert [run.refresh().status for run in runs] == ["waiting", "waiting"]
    let_pass(store, 61)
    work(store)
    for run in runs:
        with pytest.raises(perdure.RunFailed, match="did not end within 3600 s") as failed:
            run.result()
        assert isinstance(failed.value.__cause__, TimeoutError)
    assert undone == ["undone"]
    assert store.questions() == []


def test_the_children_of_a_run_that_took_too_long_are_cancelled(store: perdure.Store) -> None:
    @perdure.durable
    def child() -> Any:
        return perdure.ask("?")

    @perdure.durable(timeout_s=HOUR)
    def parent() -> Any:
        return perdure.spawn(child, id="child").result()

    run = store.start(parent)
    work(store)
    let_pass(store, HOUR + 1)
    work(store)
    assert (run.refresh().status, store.get_run("child").status) == ("failed", "cancelled")
    assert store.questions() == []


def test_code_that_catches_everything_is_stopped(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "TICK_S", 0.01)

    @perdure.step
    def look() -> None: ...

    @perdure.durable(timeout_s=0.2)
    def stubborn() -> None:
        while True:
            try:
                look()
            except Exception:
                pass

    run = store.run(stubborn)
    assert run.status == "failed"


def test_a_run_that_waited_in_its_queue_for_too_long_does_not_begin(store: perdure.Store) -> None:
    began: list[int] = []

    @perdure.durable(timeout_s=60)
    def late() -> None:
        began.append(1)

    run = store.start(late)
    let_pass(store, 61)
    work(store)
    assert (run.refresh().status, began) == ("failed", [])


# --- debounce, singletons


@perdure.durable(name="keyed.told")
def told(what: str) -> str:
    return what


def test_of_debounced_calls_the_last_one_runs(store: perdure.Store) -> None:
    runs = [store.start(told, what, key="c-42", debounce_s=HOUR) for what in ("a", "b", "c")]
    other = store.start(told, "other", key="c-43", debounce_s=HOUR)
    assert len({run.id for run in runs}) == 1
    work(store)
    assert runs[0].refresh().status == "queued"
    let_pass(store, HOUR)
    late = store.start(told, "late", key="c-42", debounce_s=HOUR)  # the window is over: it has one of its own
    work(store)
    assert [run.result() for run in (runs[0], other)] == ["c", "other"]
    assert late.refresh().status == "queued"
    assert store.ops.verify().ok


def test_a_debounced_run_has_the_queue_and_the_priority_of_the_last_call(store: perdure.Store) -> None:
    store.start(told, "a", debounce_s=HOUR)
    run = store.start(told, "b", debounce_s=HOUR, queue="urgent", priority=5)
    info = run.refresh()
    assert (info.queue, info.priority) == ("urgent", 5)
    assert store.count_runs("queue") == {"urgent": 1}


def test_a_key_of_debounced_calls_is_not_one_of_singletons(store: perdure.Store) -> None:
    single = store.start(told, "single", key="k", singleton="refuse", delay_s=HOUR)
    assert store.start(told, "later", key="k", debounce_s=HOUR).id != single.id


def test_a_failed_singleton_is_not_retried_beside_an_open_one(store: perdure.Store) -> None:
    @perdure.durable(name="keyed.asks")
    def asks() -> None:
        if perdure.ask("?") == 0:
            raise ValueError("no")

    first, second = (store.start(asks, key="k", singleton="refuse"), None)
    work(store)
    store.answer(first, 0)
    work(store)
    second = store.start(asks, key="k", singleton="refuse")
    refused = store.retry(first).refused
    assert f"'{second.id}' of keyed.asks is open" in refused[first.id]
    second.cancel()
    assert store.retry(first).statuses == {"queued": 1}


def test_the_id_of_a_singleton_stands_for_the_same_work(store: perdure.Store) -> None:
    run = store.start(told, "a", id="mine", key="k", singleton="join")
    assert store.start(told, "a", id="mine", key="k", singleton="join").id == run.id
    with pytest.raises(perdure.errors.RunMismatch, match="other arguments"):
        store.start(told, "b", id="mine", key="other", singleton="join")


def test_one_open_run_of_a_key(store: perdure.Store) -> None:
    @perdure.durable(name="keyed.waits")
    def waits(what: str) -> Any:
        return perdure.ask(what)

    def start(what: str) -> str:
        return store.start(waits, what, key="k", singleton="join").id

    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(start, "abcdefgh"))
    assert len(ids) == 1
    work(store)
    with pytest.raises(perdure.Conflict, match="is open, and only one may be"):
        store.start(waits, "x", key="k", singleton="refuse")
    store.start(waits, "x", key="other", singleton="refuse")
    [first] = ids
    store.answer(first, 1)
    work(store)
    assert store.start(waits, "x", key="k", singleton="refuse").id != first
    until(lambda: store.get_run(first).status == "done")


def test_the_same_singleton_again_is_the_same_run_and_no_other_work(store: perdure.Store) -> None:
    def start(what: str, mode: Any, run: str = "one") -> str:
        return store.start(told, what, id=run, key="k", singleton=mode).id

    for mode in ("join", "refuse"):
        assert start("a", mode) == "one"  # as if the process had been killed after the first call
    with pytest.raises(perdure.errors.RunMismatch, match="other arguments"):
        start("b", "join")
    work(store)
    assert start("c", "refuse", "two") == "two"
    assert start("a", "join") == "one"  # it has ended, and the other one is open
    with pytest.raises(perdure.errors.RunMismatch, match="other arguments"):
        start("b", "join")


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "k"},
        {"debounce_s": 1, "singleton": "join"},
        {"singleton": "maybe"},
        {"debounce_s": 0},
        {"debounce_s": 1, "id": "x"},
    ],
)
def test_what_is_refused(store: perdure.Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(perdure.UsageError):
        store.start(told, "a", **wrong)
