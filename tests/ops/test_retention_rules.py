"""One stored policy says how long everything is kept. What it says when a sweep begins counts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from keeping_kit import PLACES, Clock, opened, place

import perdure


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[perdure.Store]:
    with opened(place(request, request.param), clock) as made:
        yield made


@perdure.durable(name="rules.agent")
def agent() -> int:
    return perdure.step(lambda: 1)()


def test_runs_that_finished_before_a_rule_was_set_follow_it(store: perdure.Store) -> None:
    run = store.run(agent, id="a")
    for rule, swept in ((None, 0), ("30d", 0), (None, 0), ("0s", 1), ("0s", 0)):
        store.ops.retention(runs=rule)
        assert store.ops.compact(dry_run=True).runs == store.ops.compact().runs == swept, rule
    assert (run.steps(), run.result()) == ([], 1)


def test_items_of_memory_expire_where_no_policy_says_otherwise(store: perdure.Store, clock: Clock) -> None:
    alice, own = store.memory("users", "alice"), store.memory("logs")
    own.policy(max_items=10)
    for memory in (alice, own):
        memory.put("a", 1)
    alice.put("pinned", 1, pinned=True)
    store.ops.retention(memory="90d")
    assert alice.policy().max_age == timedelta(days=90)
    clock.days(89)
    store.ops.compact()
    assert sorted(item.key for item in alice.list()) == ["a", "pinned"]
    clock.days(2)
    store.ops.compact()
    assert [item.key for item in alice.list()] == ["pinned"]
    assert [item.gone for item in alice.history("a")] == [None, "expired"]
    assert [item.key for item in own.list()] == ["a"], "its policy was made before, without an age"
    store.ops.retention(memory_history="1d")
    clock.days(2)
    store.ops.compact()
    assert alice.history("a") == []
    later = store.memory("later")
    assert later.policy(max_items=5).max_age == timedelta(days=90), "a first policy begins with the rules of the store"


def test_snapshots_are_released_unless_they_are_good_or_have_a_date(tmp_path: Path, clock: Clock) -> None:
    """On SQLite, where the test's clock dates them too."""
    with opened(str(tmp_path / "a.db"), clock) as store:
        _released(store, clock)


def _released(store: perdure.Store, clock: Clock) -> None:
    store.thread("t").save({})
    for name in ("old", "good"):
        store.snapshot(name)
    store.get_snapshot("good").mark_good()
    store.snapshot("dated", keep_until=datetime(2100, 1, 1, tzinfo=UTC))
    store.ops.retention(snapshots="30d")
    clock.days(29)
    store.ops.compact()
    assert {one.name for one in store.snapshots()} == {"old", "good", "dated"}
    clock.days(2)
    store.ops.compact()
    assert {one.name for one in store.snapshots()} == {"good", "dated"}
