"""What the commands show of runs that wait: that they were answered, why they are in doubt, which are not listed."""

from __future__ import annotations

from types import ModuleType

from cli_runs_kit import Run, lines

import perdure


def test_an_answered_run_is_shown_as_waiting_for_a_worker(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("runs")[1].splitlines()[1].endswith("Which flight? (step 3)")
    assert run("answer", "trip", "NYC 1")[0] == 0
    assert run("runs")[1].splitlines()[1].endswith("answered, waiting for a worker")
    assert lines(run("runs", "--json")[1])[0]["is_due"] is True
    assert "waits for   answered, waiting for a worker" in run("run", "show", "trip")[1]


def test_a_verdict_counts_as_an_answer(run: Run, store: perdure.Store, doubt: perdure.Run) -> None:
    assert run("run", "resolve", "doubt", "1", "--done", "B-1")[0] == 0
    assert run("runs")[1].splitlines()[1].endswith("answered, waiting for a worker")


def test_why_reconcile_could_not_tell(run: Run, store: perdure.Store, app: ModuleType) -> None:
    def look(key: str) -> perdure.outcome.Unknown:
        return perdure.outcome.Unknown("the airline is closed")

    @perdure.effect(name="cli.book", reconcile=look)
    def book(key: perdure.IdempotencyKey) -> None:
        raise TimeoutError

    @perdure.durable(name="cli.doubtful")
    def doubtful() -> None:
        book()

    store.run(doubtful, id="doubt")
    key = f"key {store.questions()[0].key}"
    assert run("questions")[1].rstrip().endswith("(the airline is closed)")
    assert lines(run("questions", "--json")[1])[0]["reason"] == "the airline is closed"
    assert f"in doubt    step 1: cli.book, {key}: the airline is closed\n" in run("run", "show", "doubt")[1]
    assert run("steps", "doubt")[1].rstrip().endswith(f"{key}: the airline is closed")
    assert run("runs")[1].rstrip().endswith(f"(step 1, {key}): the airline is closed")
