"""Retention: what `compact` removes, what it never removes, and that a dry run says what a real one does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from keeping_kit import PLACES, Clock, fill, hashes, opened, place, query, rows, seen, sound, steps, text

import perdure
from perdure.errors import NotFound, UsageError


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[perdure.Store]:
    with opened(place(request, request.param), clock) as made:
        made.ops.retention(runs="1d")
        yield made


# --- policies


def kept(threads: timedelta | None = None, checkpoints: int | None = None, **more: Any) -> perdure.ops.Retention:
    """The policy of a thread, or of the store, whose runs are kept for a day."""
    return perdure.ops.Retention(threads, checkpoints, runs=timedelta(days=1), **more)


def test_a_threads_own_fields_go_before_the_stores(store: perdure.Store) -> None:
    thread = store.thread("a")
    fill(thread, 1)
    both = ("threads", "checkpoints")
    assert store.ops.retention() == thread.retention() == kept()
    assert store.ops.retention(threads=timedelta(days=30), checkpoints=10) == kept(timedelta(days=30), 10)
    assert thread.retention() == kept(timedelta(days=30), 10)
    assert thread.retention(threads="1h") == kept(timedelta(hours=1), 10, own=("threads",))
    assert thread.retention(threads=None, checkpoints=None) == kept(None, None, own=both)
    assert thread.retention(threads="inherit", checkpoints="inherit") == kept(timedelta(days=30), 10)
    assert store.ops.retention(threads=None, checkpoints=None) == thread.retention() == kept()


def test_only_the_named_fields_of_a_policy_change(store: perdure.Store) -> None:
    store.ops.retention(threads=timedelta(days=30))
    assert store.ops.retention(checkpoints=5) == store.ops.retention() == kept(timedelta(days=30), 5)
    thread = store.thread("a")
    fill(thread, 1)
    thread.retention(threads="1h")
    assert thread.retention(checkpoints=2) == kept(timedelta(hours=1), 2, own=("threads", "checkpoints"))
    assert thread.retention(threads="inherit") == kept(timedelta(days=30), 2, own=("checkpoints",))


def test_a_policy_is_the_tenants_own_and_outlives_the_process(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.ops.retention(checkpoints=3)
        assert store.tenant("other").ops.retention() == perdure.ops.Retention()
    with perdure.open(path) as store:
        assert store.ops.retention() == perdure.ops.Retention(None, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"threads": value} for value in (0, 30, "0s", "-1d", "soon", "30", True, timedelta(0), timedelta(days=-1))),
        {"checkpoint_age": 30},
        *({"checkpoints": value} for value in (0, 1.5, "5d", True)),
    ],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            store.ops.retention(**wrong)
        fill(store.thread("a"), 1)
        with pytest.raises(UsageError, match=next(iter(wrong))):
            store.thread("a").retention(**wrong)


async def test_the_async_twins(store: perdure.Store) -> None:
    thread = store.thread("a")
    saved = fill(thread, 5)
    await asyncio.to_thread(store.ops.retention, checkpoints=2)
    assert await asyncio.to_thread(store.ops.retention) == kept(None, 2)
    await thread.aretention(checkpoints=3, checkpoint_age="8w")
    assert (await thread.aretention()).checkpoints == 3
    assert (await thread.aretention()).checkpoint_age == timedelta(weeks=8)
    assert (await thread.apin(saved[0], name="first")).checkpoint == saved[0].id
    assert [pin.name for pin in await thread.apins()] == ["first"]
    assert (await asyncio.to_thread(store.ops.compact, dry_run=True)).checkpoints == 1
    assert (await asyncio.to_thread(store.ops.compact)).checkpoints == 1
    await thread.aunpin("first")
    assert await thread.apins() == []


# --- what goes


def test_without_a_policy_nothing_goes(store: perdure.Store, clock: Clock) -> None:
    fill(store.thread("a"), 5)
    clock.days(10_000)
    before = seen(store)
    done = store.ops.compact()
    assert (done.threads, done.checkpoints, done.runs, done.held) == (0, 0, 0, 0)
    assert seen(store) == before


def test_a_thread_that_nobody_writes_to_expires(store: perdure.Store, clock: Clock) -> None:
    store.ops.retention(threads=timedelta(days=30))
    fill(store.thread("old"), 3)
    fill(store.thread("kept"), 3)
    store.thread("kept").retention(threads=None)
    late = store.thread("old")
    late.load()
    clock.days(29)
    fill(store.thread("new"), 3)
    assert store.ops.compact().threads == 0
    clock.days(2)
    done = store.ops.compact()
    assert (done.threads, done.checkpoints, done.expired) == (1, 3, ("old",))
    assert set(seen(store)) == {"kept", "new"}
    with pytest.raises(perdure.errors.ThreadDeleted):
        late.save({"late": True})
    sound(store)
    assert store.ops.compact().threads == 0


def test_the_newest_checkpoints_stay(store: perdure.Store) -> None:
    fill(store.thread("a"), 20)
    fill(store.thread("all"), 20)
    store.thread("all").retention(checkpoints=None)
    store.ops.retention(checkpoints=4)
    before = hashes(store)
    done = store.ops.compact()
    assert (done.threads, done.checkpoints) == (0, 16)
    assert steps(store.thread("a")) == [19, 18, 17, 16]
    assert len(steps(store.thread("all"))) == 20
    sound(store)
    after = hashes(store)
    assert all(before[key] == found for key, found in after.items())
    generation = query(store, "SELECT max(generation) FROM thread")
    assert store.ops.compact().checkpoints == 0
    assert query(store, "SELECT max(generation) FROM thread") == generation  # writers noticed nothing
    fill(store.thread("a"), 1, start=20)
    assert store.ops.compact().checkpoints == 1


def test_checkpoints_of_a_thread_in_use_go_by_their_age(store: perdure.Store, clock: Clock) -> None:
    thread, idle, own = store.thread("a"), store.thread("idle"), store.thread("own")
    saved = fill(thread, 4)
    thread.pin(saved[1], name="good")
    fill(idle, 3)
    fill(own, 2)
    own.retention(checkpoint_age=None)
    clock.days(20)
    branch = thread.save({"turn": "branch"}, parent=saved[2])
    clock.days(5)
    thread.load()
    fill(thread, 2, start=4)
    assert store.ops.retention(checkpoint_age="30d").checkpoint_age == timedelta(days=30)
    assert store.ops.compact().checkpoints == 0
    clock.days(10)
    assert store.ops.compact(dry_run=True).checkpoints == store.ops.compact().checkpoints == 3 + 2
    assert steps(thread) == [5, 4]
    assert thread.load(saved[1]).step == 1, "a pin holds it"
    assert thread.load(branch).state == {"turn": "branch"}, "a branch is as old as its own checkpoints"
    assert (steps(idle), len(steps(own))) == ([2], 2)
    assert store.ops.compact().checkpoints == 0
    store.ops.retention(checkpoints=1)
    assert (store.ops.compact().checkpoints, steps(thread)) == (3, [5])
    sound(store)


def test_what_a_fork_needs_stays_until_the_fork_goes(store: perdure.Store, clock: Clock) -> None:
    store.ops.retention(threads=timedelta(days=30))
    saved = fill(store.thread("main"), 10)
    clock.days(20)
    fork = store.thread("main").fork(saved[5], name="fork")
    fill(fork, 2, start=100)
    clock.days(15)
    line = seen(store)["fork"]
    done = store.ops.compact()
    assert (done.threads, done.checkpoints) == (1, 4)
    assert seen(store) == {"fork": line}
    sound(store)
    clock.days(30)
    assert store.ops.compact().checkpoints == 8
    assert rows(store)["record"] == 0


def test_a_fork_is_shortened_too(store: perdure.Store) -> None:
    saved = fill(store.thread("main"), 10)
    fill(store.thread("main").fork(saved[5], name="fork"), 2, start=100)
    store.ops.retention(checkpoints=1)
    foreseen = store.ops.compact(dry_run=True)
    done = store.ops.compact()
    assert done.checkpoints == foreseen.checkpoints == 10
    assert (steps(store.thread("main")), steps(store.thread("fork"))) == ([9], [7])
    sound(store)
    assert store.ops.compact().checkpoints == 0


# --- pins


def test_a_pinned_checkpoint_stays_whatever_happens(store: perdure.Store, clock: Clock) -> None:
    thread = store.thread("a")
    saved = fill(thread, 12)
    pin = thread.pin(saved[3], name="good")
    assert (pin.name, pin.checkpoint) == ("good", saved[3].id)
    assert thread.pin(saved[3], name="good") == pin
    assert thread.pin(name="newest").checkpoint == saved[11].id
    state = saved[3].state
    store.ops.retention(threads=timedelta(days=1), checkpoints=2)
    clock.days(3)
    done = store.ops.compact()
    assert (done.threads, done.held, done.checkpoints) == (0, 1, 9)
    assert steps(thread) == [11, 10]
    assert thread.load(saved[3]).state == state
    thread.prune(keep=1)
    assert thread.load(saved[3]).state == state
    sound(store)
    with pytest.raises(perdure.errors.Pinned, match="'good'"):
        store.delete_thread("a")
    thread.unpin("good")
    thread.unpin("newest")
    assert store.ops.compact().threads == 1
    assert rows(store)["record"] == 0


def test_pins_are_refused_where_they_cannot_be(store: perdure.Store) -> None:
    thread = store.thread("a")
    with pytest.raises(NotFound):
        thread.pin(name="x")
    saved = fill(thread, 3)
    thread.pin(saved[0], name="x")
    with pytest.raises(UsageError, match="unpin it first"):
        thread.pin(saved[1], name="x")
    with pytest.raises(NotFound, match="no pin 'y'"):
        thread.unpin("y")
    with pytest.raises(NotFound):
        thread.pin("0000000000001", name="z")
    with pytest.raises(UsageError):
        thread.pin(saved[1], name="")


def test_a_thread_with_pins_is_deleted_if_that_is_said(store: perdure.Store) -> None:
    thread = store.thread("a")
    fill(thread, 3)
    thread.pin(name="x")
    assert store.delete_thread("a", force=True).removed == 3
    assert rows(store)["pin"] == 0
    sound(store)


def test_a_fork_keeps_what_it_has_pinned_of_its_origin(store: perdure.Store) -> None:
    saved = fill(store.thread("main"), 8)
    fork = store.thread("main").fork(saved[5], name="fork")
    fork.pin(saved[2], name="before")
    fork.prune(keep=1)
    store.thread("main").prune(keep=1)
    assert fork.load(saved[2]).state == saved[2].state
    store.delete_thread("main")
    assert fork.load(saved[2]).state == saved[2].state
    sound(store)


def test_a_thread_pins_only_what_it_has(store: perdure.Store) -> None:
    """Its own lines and branches, and what it shares with its origin: not what another thread of the tree has saved."""
    main = store.thread("main")
    saved = fill(main, 6)
    fork = main.fork(saved[2], name="fork")
    own = fill(fork, 3, start=10)
    branch = main.save({"branch": 1}, parent=saved[3])
    for thread, foreign in ((fork, saved[3]), (fork, saved[5]), (fork, branch), (main, own[0]), (main, own[2])):
        with pytest.raises(NotFound, match="nothing was pinned; it is one of another thread"):
            thread.pin(foreign, name="foreign")
    assert not main.pins()
    assert not fork.pins()
    for number, (thread, good) in enumerate([(fork, saved[2]), (fork, saved[0]), (fork, own[1]), (main, branch)]):
        thread.pin(good, name=f"good {number}")
    deeper = fork.fork(own[1], name="deeper")
    assert deeper.pin(saved[1], name="x").checkpoint == saved[1].id
    with pytest.raises(NotFound):
        deeper.pin(own[2], name="y")
    deeper.save({"deeper": 1})
    deeper.prune(keep=1)
    assert deeper.pin(saved[1], name="x").checkpoint == saved[1].id  # the same pin again
    sound(store)


async def test_the_async_twin_pins_only_what_it_has_too(store: perdure.Store) -> None:
    main = store.thread("main")
    saved = fill(main, 3)
    fork = main.fork(saved[0], name="fork")
    assert (await fork.apin(saved[0], name="x")).checkpoint == saved[0].id
    with pytest.raises(NotFound):
        await fork.apin(saved[1], name="y")


# --- unfinished runs


@perdure.durable(name="retention.saver")
def saves_and_asks(url: str, name: str) -> str:
    thread = _stores[url].thread(name)
    thread.save({"by": "the run"}, note="first")
    answer = perdure.ask("Go on?", options=["yes", "no"])
    thread.save({"by": "the run", "answer": answer}, note="second")
    return str(answer)


@perdure.durable(name="retention.stateful")
def keeps_a_state() -> str:
    state = perdure.state({"count": 0})
    for number in range(5):
        state["count"] = number
        state_step(number)
    return str(perdure.ask("Go on?", options=["yes", "no"]))


@perdure.step(name="retention.step")
def state_step(number: int) -> int:
    return number


_stores: dict[str, perdure.Store] = {}


def test_what_an_unfinished_run_saved_stays(store: perdure.Store, clock: Clock) -> None:
    _stores["here"] = store
    run = store.run(saves_and_asks, "here", "notes", id="asks")
    assert run.refresh().status == "waiting"
    fill(store.thread("notes"), 6)
    store.ops.retention(threads=timedelta(days=1), checkpoints=2)
    clock.days(5)
    assert store.ops.compact(dry_run=True).held == 1
    done = store.ops.compact()
    assert (done.threads, done.held, done.checkpoints) == (0, 1, 0)
    assert [one.note for one in store.thread("notes").history()][-1] == "first"
    store.answer("asks", "yes")
    assert store.get_run("asks").refresh().status in ("queued", "waiting")
    store.run(saves_and_asks, "here", "notes", id="asks").result()
    tips = {one.note for one in store.thread("notes").branches()}
    assert "second" in tips
    clock.days(5)
    assert store.ops.compact().threads == 1
    sound(store)


def test_the_states_of_a_run_go_with_its_journal_and_not_before(store: perdure.Store, clock: Clock) -> None:
    run = store.run(keeps_a_state, id="r")
    assert run.refresh().status == "waiting", run.result()
    assert len(steps(store.thread("run:r"))) > 3
    before = seen(store)
    store.ops.retention(threads="1s", checkpoints=1)
    clock.days(400)
    assert store.ops.compact().threads == 0
    assert seen(store) == before
    store.answer("r", "yes")
    store.run(keeps_a_state, id="r").result()
    store.ops.compact()
    assert "run:r" in seen(store)
    assert store.get_run("r").refresh().status == "done"


def test_a_dry_run_counts_runs_as_a_sweep_does(request: pytest.FixtureRequest) -> None:
    for where in PLACES:
        with perdure.open(place(request, where)) as store:
            store.ops.retention(runs="0s")
            for number in range(3):
                store.run(saves_nothing, number, id=f"r{number}").result()
            fork = store.fork("r0", at="1", id="fork", keys="new")
            store.fork("fork", at="1", id="fork of fork", keys="new").result()
            store.fork("r1", at="1", id="open", keys="new")
            fork.result()
            store.run(keeps_a_state, id="waiting")
            foreseen = store.ops.compact(dry_run=True)
            done = store.ops.compact()
            assert foreseen.runs == done.runs == 4  # r0, r2, the fork, and its fork; r1's fork still runs
            assert store.ops.compact(dry_run=True).runs == store.ops.compact().runs == 0


@perdure.durable(name="retention.plain")
def saves_nothing(number: int) -> int:
    return state_step(number)


# --- the dry run, and daily maintenance


def scene(store: perdure.Store, clock: Clock) -> None:
    """Old and new threads, forks of both, pins, branches, own policies."""
    for name in ("old", "older", "pinned", "forked"):
        saved = fill(store.thread(name), 9)
        store.thread(name).save({"branch": name}, parent=saved[4], note="branch")
    store.thread("pinned").pin(name="p")
    clock.days(40)
    fork = store.thread("forked").fork(next(c for c in store.thread("forked").history() if c.step == 5), name="fork")
    fill(fork, 6, start=50)
    fork.fork(name="fork of fork")
    fill(store.thread("new"), 12)
    fill(store.thread("mine"), 12)
    store.thread("mine").retention(checkpoints=7)
    store.ops.retention(threads=timedelta(days=30), checkpoints=3)


def test_a_dry_run_writes_nothing_and_tells_the_truth(store: perdure.Store, clock: Clock) -> None:
    scene(store, clock)
    before, counted = seen(store), rows(store)
    foreseen = store.ops.compact(dry_run=True)
    assert (seen(store), rows(store)) == (before, counted)
    assert foreseen.dry_run
    assert foreseen.bytes_after < foreseen.bytes_before
    done = store.ops.compact()
    assert (foreseen.threads, foreseen.checkpoints, foreseen.runs, foreseen.held, foreseen.expired) == (
        done.threads,
        done.checkpoints,
        done.runs,
        done.held,
        done.expired,
    )
    assert done.threads == 3
    assert done.held == 1
    assert not done.dry_run
    sound(store)
    again = store.ops.compact(dry_run=True)
    assert (again.threads, again.checkpoints) == (0, 0)


def test_progress_counts_threads(store: perdure.Store, clock: Clock) -> None:
    scene(store, clock)
    told: list[tuple[int, int]] = []
    store.ops.compact(progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == 8
    assert told == sorted(told)


def test_vacuum_gives_space_back(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        thread = store.thread("a")
        for number in range(300):
            thread.save({"n": number, "text": text(number, 3000)})
    size = path.stat().st_size
    with perdure.open(str(path)) as store:
        store.ops.retention(checkpoints=1)
        done = store.ops.compact()
        assert done.bytes_after < done.bytes_before
        store.ops.compact(vacuum=True)
        assert path.stat().st_size < size / 2


def test_a_worker_does_it_daily(store: perdure.Store, clock: Clock) -> None:
    store.ops.retention(threads=timedelta(days=30))
    fill(store.thread("old"), 3)
    clock.days(31)
    worker = perdure.Worker(store, [saves_nothing], poll_s=0.01)
    worker.run(until_idle=True)
    worker._maintain()
    assert seen(store) == {}


def test_a_large_store_is_gone_through_in_pages(
    store: perdure.Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.log import retention

    monkeypatch.setattr(retention, "_PAGE", 3)
    for number in range(7):
        saved = fill(store.thread(f"t{number}"), 3)
        for fork in range(number % 4):
            fill(store.thread(f"t{number}").fork(saved[1], name=f"t{number}-{fork}"), 1)
    store.ops.retention(threads=timedelta(days=1))
    clock.days(2)
    foreseen = store.ops.compact(dry_run=True)
    done = store.ops.compact()
    assert (foreseen.threads, foreseen.checkpoints) == (done.threads, done.checkpoints) == (16, 30)
    assert seen(store) == {}
