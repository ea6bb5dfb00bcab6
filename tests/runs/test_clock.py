"""`perdure.testing.Clock`: waits, deadlines, retries, schedules, leases and expiry, without waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, blocks

import perdure
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine import flows
from perdure.runs.journal import rows
from perdure.storage.program import drive, write
from perdure.testing import Clock

tries: list[int] = []


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


@pytest.fixture
def clock(store: perdure.Store) -> Clock:
    tries.clear()
    return Clock(store)


@perdure.durable(name="clock.nap")
def nap(seconds: float) -> str:
    perdure.sleep(seconds)
    perdure.sleep(0.5)
    return perdure.now().isoformat()


@perdure.durable(name="clock.naps")
async def naps() -> list[int]:
    async def one(number: int) -> int:
        await perdure.sleep(600 * (3 - number))
        return number

    return list(await asyncio.gather(*(one(number) for number in range(3))))


@perdure.step(name="clock.flaky", retries=3, backoff_s=60)
def flaky() -> int:
    tries.append(1)
    if len(tries) < 4:
        raise ConnectionError("no")
    return len(tries)


@perdure.durable(name="clock.retried")
def retried() -> int:
    return flaky()


@perdure.durable(name="clock.asks")
def asks() -> Any:
    return perdure.ask("ok?", timeout_s=86_400, on_timeout="no answer")


@perdure.durable(name="clock.limited", timeout_s=600)
def limited() -> None:
    perdure.sleep(3600)


@perdure.durable(name="clock.parent")
def parent() -> list[str]:
    return [child.result() for child in [perdure.spawn(nap, seconds) for seconds in (60, 30)]]


def test_a_sleep_of_an_hour(store: perdure.Store, clock: Clock) -> None:
    run = store.run(nap, 3600)
    clock.advance("59m")
    assert run.refresh().status == "waiting"
    with pytest.raises(TimeoutError, match="no result yet"):
        run.result()
    clock.advance("1m")
    assert run.refresh().status == "waiting", "the half second is left"
    clock.advance("1s")
    assert run.result() == "2026-01-01T01:00:00.500000+00:00"
    assert run.refresh().created_at == datetime(2026, 1, 1, tzinfo=UTC)


def test_parallel_sleeps_children_and_delays(store: perdure.Store, clock: Clock) -> None:
    runs = [store.start(naps), store.start(parent, queue="other"), store.start(nap, 1, delay_s=7200)]
    clock.advance("1h")
    assert [run.refresh().status for run in runs] == ["done", "done", "queued"]
    clock.advance("2h")
    assert [run.result() for run in runs] == [
        [0, 1, 2],
        ["2026-01-01T00:01:00.500000+00:00", "2026-01-01T00:00:30.500000+00:00"],
        "2026-01-01T02:00:01.500000+00:00",
    ]


def test_retries_questions_and_deadlines(store: perdure.Store, clock: Clock) -> None:
    runs = [store.run(fn) for fn in (retried, asks, limited)]
    assert len(tries) == 1
    clock.advance("29s")
    assert len(tries) == 1
    clock.advance("23h")
    assert [run.refresh().status for run in runs] == ["done", "waiting", "failed"]
    clock.advance("1h")
    assert [run.result() for run in runs[:2]] == [4, "no answer"]


def test_a_week_of_a_schedule(store: perdure.Store, clock: Clock) -> None:
    store.schedule("nightly", nap, "0 7 * * MON-FRI", args=(1,), timezone="Europe/Lisbon")
    clock.advance("7d")
    assert sorted(run.id for run in store.runs()) == [f"nightly@2026-01-0{day}T07:00:00Z" for day in (1, 2, 5, 6, 7)]
    assert {run.status for run in store.runs()} == {"done"}


def test_a_run_whose_process_has_vanished_is_taken_up_when_its_lease_ends(store: perdure.Store, clock: Clock) -> None:
    context = store._context
    new = flows.new_run(context, durable_spec(nap), (0,), {}, "lost", "default", 0, here=True)
    tenant = drive(context.driver, context.ensure_tenant())
    lost = lambda: rows.create(tenant, new, now=context.clock_us(), owner="elsewhere", lease=30_000_000)  # noqa: E731
    drive(context.driver, write(lost))
    run = store.get_run("lost")
    clock.advance("29s")
    assert run.refresh().status == "running"
    clock.advance("2s")
    assert run.refresh().status == "done"


def test_a_body_that_runs_keeps_its_lease(store: perdure.Store, clock: Clock) -> None:
    began, gate = threading.Event(), threading.Event()

    @perdure.step
    def blocked() -> int:
        began.set()
        gate.wait(30)
        return 1

    @perdure.durable
    def holding() -> int:
        return blocked()

    thread = threading.Thread(target=lambda: store.run(holding, id="held"))
    thread.start()
    assert began.wait(30)
    clock.advance("3h")
    assert store.get_run("held").refresh().status == "running"
    gate.set()
    thread.join()
    assert store.get_run("held").result() == 1


def test_memory_expires(store: perdure.Store, clock: Clock) -> None:
    memory = store.memory("users")
    memory.put("fact", {"a": 1}, ttl_s=60)
    clock.advance("59s")
    assert memory.get("fact") is not None
    clock.advance("2s")
    assert memory.get("fact") is None


def test_the_fixtures_as_the_page_uses_them(tmp_path: Path) -> None:
    for block in blocks((ROOT / "docs/how-to/testing.md").read_text()):
        if block.rest.startswith("file "):
            (tmp_path / block.rest.removeprefix("file ")).write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
