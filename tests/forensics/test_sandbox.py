"""A sandbox has what the snapshot had, changes none of it, and reaches nothing outside."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from snapshot_kit import asks, change_everything, fill, seen

import perdure
from perdure.forensics import sandbox

booked: list[str] = []
reach: list[Callable[[], Any]] = []  # what the code under test does outside of its steps
refused: list[str] = []


@perdure.step
def sandbox_price(seat: str) -> int:
    return 100


@perdure.effect
def sandbox_book(seat: str) -> str:
    booked.append(seat)
    return f"ticket {seat}"


def touch_the_world() -> None:
    _each(reach)


@perdure.durable
def sandbox_travel(seat: str) -> str:
    touch_the_world()
    sandbox_price(seat)
    return sandbox_book(seat)


@perdure.durable
def sandbox_twice(seat: str) -> str:
    perdure.state()["sandbox_price"] = sandbox_price(seat)
    sandbox_book(seat)
    return sandbox_book(seat + "-return")


@perdure.durable
async def sandbox_tasks(seat: str) -> int:
    touch_the_world()
    await asyncio.gather(asyncio.to_thread(touch_the_world), _task())
    return sandbox_price(seat)


async def _task() -> None:
    touch_the_world()


@perdure.durable
def sandbox_branches(seat: str) -> list[None]:
    return perdure.gather(touch_the_world, touch_the_world)


@pytest.fixture(autouse=True)
def _clean() -> Any:
    booked.clear()
    refused.clear()
    yield
    reach.clear()


def test_it_answers_as_the_snapshot_and_changes_nothing(store: perdure.Store) -> None:
    fill(store)
    snapshot = store.snapshot("s")
    before = seen(snapshot.store)
    change_everything(store)
    with sandbox(snapshot) as box:
        assert box.thread("a").load().state == {"n": 4, "text": "x" * 500}
        assert box.get_run("done").status == "done"
        assert box.get_run("waits").status == "waiting"
        assert [item.key for item in box.memory("users").search("seat")] == ["seat"]
        box.thread("a").save({"n": -1})
        box.memory("users", "alice").put("seat", {"fact": "a window seat"})
        assert box.thread("a").load().state == {"n": -1}
        assert box.memory("users").get("nothing") is None
        assert box.memory("users", "alice").get("seat").value == {"fact": "a window seat"}  # type: ignore[union-attr]
        assert box.thread("never").save({"n": 0}).state == {"n": 0}
        with pytest.raises(perdure.NotFound):
            box.get_run("never")
        for write in (lambda: store.thread("a").save({"n": 9}), lambda: store.run(asks, id="live")):
            with pytest.raises(perdure.UsageError, match="writes to no other store"):
                write()
        with pytest.raises(perdure.UsageError, match="writes to no other store"):
            asyncio.run(store.memory("users").aput("seat", {"fact": "a window seat"}))
    assert store.thread("a").save({"n": 10}).state == {"n": 10}
    assert seen(snapshot.store) == before


def test_recorded_effects_answer_and_others_are_refused(store: perdure.Store) -> None:
    store.run(sandbox_twice, "1A", id="trip")
    snapshot = store.snapshot("s")
    booked.clear()
    with sandbox(snapshot) as box:
        assert box.replay("trip", sandbox_twice).result == "ticket 1A-return"
        assert box.replay("trip").is_complete
        fork = box.fork("trip", at=2, keys="new")
        with pytest.raises(
            perdure.RunStuck, match=r"effect sandbox_book at step 3 is not recorded, and a sandbox runs no effects$"
        ):
            fork.result()
        later = box.fork("trip", at=3, changes={"1": 90, "3": "ticket 2B"}, keys="new")
        assert [step.result for step in later.steps()][2] == "ticket 2B"
        assert fork.state_at() == {"sandbox_price": 100}
        assert box.fork("trip", changes={"1": 90}).result() == "ticket 1A-return"
    assert booked == []


def test_runs_under_way_and_their_children(store: perdure.Store) -> None:
    @perdure.step
    def freeze() -> None:
        store.snapshot("s")

    @perdure.durable(name="child")
    def child(seat: str) -> str:
        return sandbox_book(seat)

    @perdure.durable(name="parent")
    def parent() -> str:
        made = perdure.spawn(child, "1A", id="c")
        ticket = made.result()
        freeze()
        return str(ticket)

    store.run(parent, id="p")
    with sandbox(store.get_snapshot("s")) as box:
        assert box.get_run("c").status == "done"
        assert box.get_run("p").status == "running"
        assert box.replay("p").name == "freeze"
        assert box.replay("c").result == "ticket 1A"


def test_threads_of_a_sandbox_wait_for_what_one_of_them_brings(store: perdure.Store) -> None:
    for number in range(5):
        store.thread(f"t{number}").save({"n": number})
    with sandbox(store.snapshot("s")) as box, ThreadPoolExecutor(5) as pool:
        found = pool.map(lambda number: box.thread(f"t{number // 5}").load().state["n"], range(25))
        assert list(found) == [number // 5 for number in range(25)]


def test_a_fork_that_asks_says_so_at_once(store: perdure.Store) -> None:
    fill(store)
    with sandbox(store.snapshot("s")) as box:
        fork = box.fork("waits", id="fork")
        with pytest.raises(perdure.RunStuck, match=r"waits for an answer: .*box\.store\.answer\('fork', …\)"):
            fork.result()
        box.store.answer("fork", "yes")
        assert fork.result() == "yes"


def test_the_guard_is_in_runs_their_tasks_and_branches(store: perdure.Store) -> None:
    store.run(sandbox_travel, "1A", id="trip")
    store.run(sandbox_tasks, "1A", id="tasks")
    store.run(sandbox_branches, "1A", id="branches")
    reach.append(lambda: subprocess.run(["true"], check=False))
    with sandbox(store.snapshot("s")) as box:
        assert box.replay("trip", sandbox_travel).is_complete
        assert len(refused) == 1
        assert box.replay("tasks", sandbox_tasks).is_complete
        assert len(refused) == 4
        assert box.replay("branches", sandbox_branches).is_complete
        assert len(refused) == 6
    touch_the_world()
    assert len(refused) == 6  # outside it is as ever


def _each(attempts: list[Callable[[], Any]]) -> None:
    for attempt in attempts:
        try:
            attempt()
        except perdure.UsageError as error:
            refused.append(str(error))


def test_two_at_once_and_other_threads(store: perdure.Store) -> None:
    """Each block is one by itself; what other threads do is not refused."""
    store.run(sandbox_travel, "1A", id="trip")
    snapshot = store.snapshot("s")
    found: list[Any] = []
    with ThreadPoolExecutor(1) as other:
        with sandbox(snapshot) as box, sandbox(snapshot) as inner:
            assert box.replay("trip").is_complete
            assert inner.replay("trip").is_complete
        with pytest.raises(KeyError), sandbox(snapshot) as box:
            raise KeyError
        entered, done = threading.Barrier(2), threading.Event()

        def sandboxed() -> None:
            with sandbox(snapshot) as box:
                entered.wait()
                done.wait(10)
                found.append(box.replay("trip").is_complete)

        job = other.submit(sandboxed)
        entered.wait()
        found.append(subprocess.run(["true"], check=False).returncode)
        done.set()
        job.result()
    assert found == [0, True]


def test_nothing_is_left_in_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in a sandbox leaves no copy of an encrypted store behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with perdure.open(tmp_path / "a.db", keys=b"k" * 32, tenant="t") as store:
        store.thread("a").save({"n": 1})
        store.memory("users").put("seat", {"fact": "an aisle seat"})
        store.run(sandbox_twice, "1A", id="trip")
        with sandbox(store.snapshot("s")) as box:
            assert box.thread("a").load().state == {"n": 1}
            assert box.thread("a").save({"n": 2}).state == {"n": 2}
            assert box.memory("users").get("seat").value == {"fact": "an aisle seat"}  # type: ignore[union-attr]
            assert box.replay("trip").is_complete
            assert list((tmp_path / "tmp").iterdir()) == []
