"""A sandbox has what the snapshot had, changes none of it, and reaches nothing outside."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from snapshot_kit import asks, change_everything, fill, seen

import perdure

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
    with snapshot.sandbox() as box:
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
        store.run(asks, id="live")  # the store itself is not in the sandbox
        assert "live" not in [info.id for info in box.store.runs()]
    assert seen(snapshot.store) == before


def test_recorded_effects_answer_and_others_are_refused(store: perdure.Store) -> None:
    store.run(sandbox_twice, "1A", id="trip")
    snapshot = store.snapshot("s")
    booked.clear()
    with snapshot.sandbox() as box:
        assert box.replay("trip", sandbox_twice).result == "ticket 1A-return"
        assert box.replay("trip").is_complete
        fork = box.fork("trip", at=2, keys="new")
        with pytest.raises(perdure.RunStuck, match="effect sandbox_book at step 3 is not recorded"):
            fork.result()
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
    with store.get_snapshot("s").sandbox() as box:
        assert box.get_run("c").status == "done"
        assert box.get_run("p").status == "running"
        assert box.replay("p").name == "freeze"
        assert box.replay("c").result == "ticket 1A"


def test_no_socket_and_no_process(store: perdure.Store) -> None:
    store.run(sandbox_travel, "1A", id="trip")
    store.run(sandbox_tasks, "1A", id="tasks")
    snapshot = store.snapshot("s")
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    def thread() -> None:
        worker = threading.Thread(target=touch_inside)
        worker.start()
        worker.join()

    def touch_inside() -> None:
        worker = threading.Thread(target=_each, args=(direct,))
        worker.start()
        worker.join()

    direct: list[Callable[[], Any]] = [
        lambda: _with_socket("connect", address),
        lambda: _with_socket("sendto", b"x", address),
        lambda: _with_socket("bind", ("127.0.0.1", 0)),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: os.system("true"),
        lambda: subprocess.run(["true"], check=False),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: multiprocessing.get_context("fork").Process(target=print).start(),
        lambda: os.execv("/nothing/there", ["there"]),
    ]
    reach.extend([*direct, thread])
    with snapshot.sandbox() as box:
        assert box.replay("trip", sandbox_travel).is_complete
        assert len(refused) == 2 * len(direct)
        assert box.replay("tasks", sandbox_tasks).is_complete
        assert len(refused) == 2 * len(direct) * 4
        with pytest.raises(perdure.UsageError, match=r"subprocess\.Popen: a sandbox"):
            subprocess.run(["true"], check=False)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    socket.create_server(("127.0.0.1", 0)).close()  # outside it is as ever
    subprocess.run(["true"], check=True)


def _with_socket(what: str, *args: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if what == "sendto" else socket.SOCK_STREAM) as made:
        getattr(made, what)(*args)


def _each(attempts: list[Callable[[], Any]]) -> None:
    for attempt in attempts:
        try:
            attempt()
        except perdure.UsageError as error:
            refused.append(str(error))


def test_other_threads_are_not_in_it(store: perdure.Store) -> None:
    store.run(sandbox_travel, "1A", id="trip")
    snapshot, entered, done = store.snapshot("s"), threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        entered.wait()
        found.append(subprocess.run(["true"], check=False).returncode)
        done.set()

    worker = threading.Thread(target=other)
    worker.start()
    with snapshot.sandbox() as box:
        box.replay("trip")
        entered.set()
        done.wait(10)
    worker.join()
    assert found == [0]
