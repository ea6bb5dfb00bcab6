"""The log of what operators did: calls with `who=`, recorded with what they changed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import perdure
from perdure.storage.program import Sql
from perdure.threads import actions


@perdure.durable(name="actions.asking")
def asking(number: int = 0) -> object:
    return perdure.ask("Go on?")


@perdure.durable(name="actions.failing")
def failing() -> None:
    raise ValueError("no")


def _recorded(store: perdure.Store, **page: object) -> list[tuple[str, str, str]]:
    return [(one.who, one.action, one.subject) for one in store.ops.actions(**page)]  # type: ignore[arg-type]


def test_every_action_of_an_operator_is_recorded_with_who_did_it(store: perdure.Store) -> None:
    run = store.start(asking, id="r")
    run.pause(who="ann")
    run.resume(who="ann")
    store.send("r", {"secret": 1}, topic="news", who="bob")
    run.cancel(who="bob")
    store.run(failing, id="f")
    store.get_run("f").retry(who="ann")
    store.run(asking, 2, id="q")
    store.answer("q", "yes", who="eve")
    store.bulk("pause", statuses="queued", who="bob")
    thread = store.thread("t")
    first = thread.save({"n": 1})
    thread.save({"n": 2})
    thread.rollback(first, who="ann")
    thread.fork(name="t2", who="ann")
    store.ops.deploy("actions.asking", "v2", canary=None, who="eve")
    schedule = store.schedule("nightly", asking, "0 7 * * *")
    schedule.pause(who="ann")
    schedule.resume(who="ann")
    schedule.trigger(who="ann")
    schedule.backfill(new_year := datetime(2026, 1, 1, tzinfo=UTC), new_year + timedelta(days=1), who="bob")
    snapshot = store.snapshot("s", who="bob")
    store.snapshot(who="bob")
    thread.save({"n": 3})
    store.restore("s", who="eve")
    snapshot.release(who="eve")
    assert _recorded(store, limit=None)[::-1] == [
        ("ann", "pause", "run r"),
        ("ann", "resume", "run r"),
        ("bob", "send", "run r"),
        ("bob", "cancel", "run r"),
        ("ann", "retry", "run f"),
        ("eve", "answer", "run q"),
        ("bob", "pause", "runs"),
        ("ann", "rollback", "thread t"),
        ("ann", "fork", "thread t"),
        ("eve", "deploy", "function actions.asking"),
        ("ann", "pause", "schedule nightly"),
        ("ann", "resume", "schedule nightly"),
        ("ann", "trigger", "schedule nightly"),
        ("bob", "backfill", "schedule nightly"),
        ("bob", "take", "snapshot s"),
        ("bob", "take", "snapshot"),
        ("eve", "restore", "snapshot s"),
        ("eve", "release", "snapshot s"),
    ]
    shown = {one.action: one.details for one in store.ops.actions(limit=None)}
    assert (shown["send"], shown["rollback"]) == ({"topic": "news"}, {"to": first.id})
    assert store.ops.verify().ok


def test_pages_and_subjects(store: perdure.Store) -> None:
    for number in range(6):
        store.start(asking, number, id=f"r{number}").pause(who="ann")
    first = store.ops.actions(limit=4)
    second = asyncio.run(store.ops.aactions(limit=4, before=first[-1].cursor))
    assert [one.subject for one in (*first, *second)] == [f"run r{number}" for number in (5, 4, 3, 2, 1, 0)]
    assert _recorded(store, subject="run r3") == [("ann", "pause", "run r3")]
    with pytest.raises(perdure.UsageError, match="cursor"):
        store.ops.actions(before="x")


def test_a_refused_call_and_one_without_who_are_not_recorded(store: perdure.Store) -> None:
    run = store.run(asking, id="r")
    run.pause()
    with pytest.raises(perdure.UsageError):
        run.pause(who="")
    with pytest.raises(perdure.NotFound):
        store.ops.deploy("unknown", None, who="ann")
    with pytest.raises(perdure.NotFound):
        store.thread("nothing").rollback("0d3k9qx2m7w1a", who="ann")
    store.snapshot("s")
    with pytest.raises(perdure.UsageError):
        store.snapshot("s", who="ann")
    store.restore("s", dry_run=True, who="ann")
    assert store.ops.actions() == []


def test_the_record_is_written_with_the_change_or_not_at_all(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.start(asking, id="r")
    monkeypatch.setattr(actions, "_TRIM", Sql("SELECT nothing FROM nowhere"))
    with pytest.raises(perdure.PerdureError):
        run.pause(who="ann")
    assert (run.refresh().status, store.ops.actions()) == ("queued", [])


def test_only_the_newest_are_kept(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "KEPT_MAX", 3)
    run = store.start(asking, id="r")
    for number in range(6):
        (run.resume if number % 2 else run.pause)(who=f"who {number}")
    assert [one.who for one in store.ops.actions()] == ["who 5", "who 4", "who 3"]


def test_erasing_a_thread_or_a_run_removes_what_was_recorded_about_it(store: perdure.Store) -> None:
    thread = store.thread("secret name")
    first = thread.save({"n": 1})
    thread.save({"n": 2})
    thread.rollback(first, who="ann")
    run = store.start(asking, id="secret run")
    run.cancel(who="ann")
    store.start(asking, id="other").pause(who="ann")
    store.ops.erase("secret name")
    store.ops.erase_run("secret run")
    assert _recorded(store) == [("ann", "pause", "run other")]
