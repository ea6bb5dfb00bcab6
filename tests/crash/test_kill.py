"""`kill -9` at any instant, hundreds of times: whatever was acknowledged is there, as it was saved.

A child writes without pause. The parent kills it after a random number of acknowledgements and a random moment
more, opens the store, checks it, and starts the next child, which goes on. PERDURE_SOAK=1: 20 times as many.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import writer

import perdure
from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ForkServer

SOAK = 20 if os.environ.get("PERDURE_SOAK") else 1
KILLS_SQLITE, KILLS_POSTGRES = (15, 10) if SOAK == 1 else (2400, 1600)
VERIFY_EVERY = 20


@dataclass(frozen=True)
class Saved:
    """An acknowledged checkpoint."""

    thread: str
    id: str
    digest: str
    number: int


@dataclass
class Ledger:
    """What the store must hold, according to what was acknowledged."""

    must: dict[str, list[Saved]] = field(default_factory=dict)
    may: dict[str, Saved] = field(default_factory=dict)  # old ones of a thread that a prune was started on
    fresh: list[Saved] = field(default_factory=list)
    count: int = 0

    def hear(self, said: dict[str, Any]) -> None:
        if "prune" in said:
            line = self.must.get(said["prune"], [])
            # Along a line ids grow.
            self.may.update({saved.id: saved for saved in line if saved.id < said["oldest"]})
            self.must[said["prune"]] = [saved for saved in line if saved.id >= said["oldest"]]
            return
        saved = Saved(said["thread"], said["id"], said["digest"], said["number"])
        self.must.setdefault(saved.thread, []).append(saved)
        self.fresh.append(saved)
        self.count += 1

    def sample(self, chance: random.Random, everything: bool) -> list[Saved]:
        all_ = [saved for line in self.must.values() for saved in line]
        if everything:
            return all_
        fresh = [saved for saved in self.fresh if saved.id not in self.may]
        return fresh + chance.sample(all_, min(10, len(all_)))


def check(store: perdure.Store, ledger: Ledger, chance: random.Random, everything: bool) -> None:
    for saved in ledger.sample(chance, everything):
        loaded = store.thread(saved.thread).load(saved.id, strict=True)
        assert writer.digest_of(loaded.state) == saved.digest, saved
    for saved in chance.sample(list(ledger.may.values()), min(3, len(ledger.may))):
        try:
            state = store.thread(saved.thread).load(saved.id, strict=True).state
        except perdure.NotFound:
            continue
        assert writer.digest_of(state) == saved.digest, saved
    going_on = {*writer.LINES, *writer.TASKS, *(saved.thread for saved in ledger.fresh)}
    for name in going_on & set(ledger.must) if not everything else list(ledger.must):
        check_head(store.thread(name), name, ledger.must[name])
    ledger.fresh.clear()
    if everything:
        report = store.ops.verify()
        assert report.ok, report.problems


def check_head(thread: perdure.Thread, name: str, line: list[Saved]) -> None:
    """The head is what was acknowledged last, or the one save whose acknowledgement the kill cut off."""
    last = line[-1]
    head = thread.load(strict=True)
    assert head.is_head
    if name == writer.SHARED:  # eight at once: up to eight acknowledgements were cut off
        assert last.id in [checkpoint.id for checkpoint in thread.history(limit=30)]
        return
    if head.id == last.id:
        return
    assert head.parent == last.id
    assert head.state == writer.state_of(name, last.number + 1)
    line.append(Saved(name, head.id, writer.digest_of(head.state), last.number + 1))  # seen once, never to be lost


def kill_loop(url: str, kills: int, seed: int) -> None:
    chance, ledger = random.Random(seed), Ledger()
    started = time.perf_counter()
    with ForkServer("writer:write_both") as fork_server:
        for number in range(kills):
            child = fork_server.start(url, number)
            wanted = chance.randint(1, 25)
            for said in child.lines():
                ledger.hear(said)
                wanted -= 1
                if not wanted:
                    break
            until = time.perf_counter() + chance.random() ** 2 * 0.004
            while time.perf_counter() < until:
                pass  # a moment that no acknowledgement marks; too short for a wait
            for said in child.kill():
                ledger.hear(said)
            everything = number % VERIFY_EVERY == 0 or number == kills - 1
            with perdure.open(url) as store:
                check(store, ledger, chance, everything)
    took = time.perf_counter() - started
    print(f"\n{kills} kills, {ledger.count} acknowledged saves, {took:.1f} s")
    assert ledger.count > kills * 8


@pytest.mark.timeout(0 if SOAK > 1 else 120)
def test_nothing_acknowledged_is_lost_when_the_process_is_killed_sqlite(tmp_path: Path) -> None:
    kill_loop(str(tmp_path / "a.db"), KILLS_SQLITE, 1)


@pytest.mark.timeout(0 if SOAK > 1 else 120)
def test_nothing_acknowledged_is_lost_when_the_process_is_killed_postgres(postgres_url: str) -> None:
    kill_loop(postgres_url, KILLS_POSTGRES, 2)


# --- the server dies


@dataclass
class Outcomes:
    """What a writer was told, by number of the save."""

    saved: dict[int, str] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    refused: int = 0


class Server:
    """A server that is killed and started again while writers work; they wait until it is back."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.up = threading.Event()
        self.up.set()
        self.stop = threading.Event()
        self.saves = threading.Semaphore(0)

    def cut(self) -> None:
        for _ in range(40):
            assert self.saves.acquire(timeout=60)
        self.up.clear()
        self.server.kill()
        self.server.start()
        self.up.set()


def write_through(server: Server, store: perdure.Store, name: str, outcomes: Outcomes) -> None:
    thread, number = store.thread(name), 0
    while not server.stop.is_set():
        try:
            outcomes.saved[number] = thread.save(writer.state_of(name, number)).id
            server.saves.release()
        except perdure.errors.OutcomeUnknown:
            outcomes.unknown.add(number)
        except perdure.errors.Unavailable:
            outcomes.refused += 1
        else:
            number += 1
            continue
        assert server.up.wait(60)


async def awrite_through(server: Server, store: perdure.Store, name: str, outcomes: Outcomes) -> None:
    thread, number = store.thread(name), 0
    while not server.stop.is_set():
        try:
            outcomes.saved[number] = (await thread.asave(writer.state_of(name, number))).id
            server.saves.release()
        except perdure.errors.OutcomeUnknown:
            outcomes.unknown.add(number)
        except perdure.errors.Unavailable:
            outcomes.refused += 1
        else:
            number += 1
            continue
        assert await asyncio.to_thread(server.up.wait, 60)


@pytest.fixture
def durable_server() -> Iterator[PostgresServer]:
    """A server of its own, with fsync on: it is going to be killed."""
    with PostgresServer(max_connections=50) as server:
        yield server


def test_killing_the_server_loses_nothing_and_gives_no_wrong_answer(durable_server: PostgresServer) -> None:
    """Saved is saved, `Unavailable` is not saved, and only `OutcomeUnknown` may be either."""
    url = durable_server.create_database("killed")
    server, outcomes = Server(durable_server), {name: Outcomes() for name in ("p0", "p1", "p2", "q0", "q1", "q2")}
    failures: list[BaseException] = []

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    def run_async(store: perdure.Store) -> None:
        async def run() -> None:
            await asyncio.gather(
                *(awrite_through(server, store, name, outcomes[name]) for name in outcomes if name[0] == "q")
            )

        asyncio.run(run())

    with perdure.open(url) as store:
        works: list[tuple[Any, ...]] = [
            (write_through, server, store, name, outcomes[name]) for name in outcomes if name[0] == "p"
        ]
        workers = [threading.Thread(target=guarded, args=work) for work in [*works, (run_async, store)]]
        for worker in workers:
            worker.start()
        try:
            for _ in range(3):
                server.cut()
        finally:
            server.stop.set()
            for worker in workers:
                worker.join(60)
    assert not failures, failures
    told = [(len(o.saved), len(o.unknown), o.refused) for o in outcomes.values()]
    print(f"\n(saved, outcome unknown, unavailable) per writer: {told}")
    assert any(len(o.unknown) + o.refused for o in outcomes.values())
    with perdure.open(url) as store:
        there = {thread.name for thread in store.threads()}
        assert {name for name, outcome in outcomes.items() if outcome.saved} <= there
        for name in there:  # on a busy machine, the server may die before a writer's first save
            check_outcomes(store.thread(name), name, outcomes[name])
        assert store.ops.verify().ok


def check_outcomes(thread: perdure.Thread, name: str, outcomes: Outcomes) -> None:
    for number, at in outcomes.saved.items():
        assert thread.load(at, strict=True).state == writer.state_of(name, number)
    found: dict[int, int] = {}
    line = list(thread.history())
    for checkpoint in line:
        number = checkpoint.state["number"]
        found[number] = found.get(number, 0) + 1
    for number, times in found.items():
        # A save that was refused and done again must be there once.
        assert times == 1 or number in outcomes.unknown, f"{name}: save {number} is there {times} times"
    assert {*found} - {*outcomes.saved} <= outcomes.unknown
    assert thread.branches() == line[:1]
