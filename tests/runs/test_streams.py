"""What steps emit: other processes read it, each value once and in order, and nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
import stream_worker
from lab import Lab
from soak import SOAK

import perdure
from perdure.errors import UsageError
from perdure.runs.engine import following
from perdure.runs.streams import rows, writer
from perdure.storage.domains import all_tables
from perdure.storage.program import Batch, Program, Sql, Transaction, drive
from perdure.storage.sqlite.opening import remove_volatile
from perdure.storage.table_sql import create_table

WORKER = Path(stream_worker.__file__)
KILLS = 5 if SOAK else 1
SIGNIFICANT = ("chunk", "reset", "lost", "done", "status")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, lease_s=1.0) as opened:
        yield opened


@contextmanager
def worker(url: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(WORKER), url])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stored(store: perdure.Store) -> int:
    def program() -> Program[int]:
        [found] = yield Batch(Sql("SELECT count(*) FROM emitted")(tenant=None), last=True)
        return found[0][0] if found else 0

    count: int = store._context.driver.run(Transaction(program, volatile=True))
    return count


def test_other_processes_read_values_once_in_order_and_with_the_results(url: str, store: perdure.Store) -> None:
    run = store.start(stream_worker.agent, 10, 0.01, id="r")
    with worker(url):
        events = [event for event in run.stream() if event.kind in SIGNIFICANT]
    numbers = [event.value["number"] if event.kind == "chunk" else event.value for event in events]
    assert numbers == [*range(10), 10, *range(10), 10, "done"]
    assert {event.path for event in events[:11]} == {"1"}
    assert {(step.name, step.kind) for step in run.steps()} == {("streamed.talk", "step")}  # nothing else is recorded


def test_a_reader_of_what_runs_now_begins_with_the_step_that_runs(url: str, store: perdure.Store) -> None:
    run = store.start(stream_worker.agent, 30, 0.02, id="r")
    with worker(url):
        for event in run.stream():
            if event.kind == "done":
                break
        events = [event for event in run.stream(recorded=False) if event.kind in SIGNIFICANT]
    assert {event.path for event in events} == {"2", ""}  # the chunks of step 1 are still stored
    assert [event.value["number"] for event in events[:-2]] == [*range(30)]
    again = [event.kind for event in run.stream(events[-3].cursor, recorded=False)]
    assert again == ["done", "status"]


def test_a_reader_that_reconnects_while_owners_are_killed_sees_one_attempt_whole(
    url: str, store: perdure.Store
) -> None:
    """No value twice, none missing, none of an earlier owner after a value of a later one."""
    chance = random.Random(7)
    run = store.start(stream_worker.agent, 60, 0.01, id="r")
    events: list[perdure.Event] = []
    kills = 0
    while not events or events[-1].kind != "status":
        with worker(url):
            until = chance.randint(10, 40) if kills < KILLS else 10**6  # values until this owner is killed
            while until > 0:
                for event in run.stream(after=events[-1].cursor if events else ""):
                    events.append(event)
                    until -= event.kind == "chunk"
                    if until <= 0 or event.kind == "status" or chance.random() < 0.05:  # the connection is lost
                        break
                if events[-1].kind == "status":
                    break
        kills += 1
    assert kills == KILLS + 1
    text: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event.kind != "lost"
        if event.kind == "reset":
            text.pop(event.path)
        elif event.kind == "chunk":
            so_far = text.setdefault(event.path, [])
            assert event.value["number"] == len(so_far), event
            assert not so_far or so_far[-1]["from"] == event.value["from"]
            so_far.append(event.value)
        elif event.kind == "done":
            assert len(text[event.path]) == event.value
    assert sorted(text) == ["1", "2"]
    assert any(event.kind == "reset" for event in events)


def test_a_failed_attempt_is_reset_before_the_next_one(lab: Lab) -> None:
    tried: list[int] = []

    @lab.step(retries=1, backoff_s=0.01)
    def talk() -> str:
        perdure.emit(f"{len(tried)}a")
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("no")
        perdure.emit(f"{len(tried)}b")
        return "ok"

    @lab.durable
    async def agent() -> Any:
        return await lab(talk())

    run = lab.run(agent, id="r")
    seen = [(event.kind, event.value) for event in run.stream() if event.kind != "failed"]
    assert seen == [
        ("chunk", "0a"), ("reset", None), ("chunk", "1a"), ("chunk", "2b"), ("done", "ok"), ("status", "done"),
    ]  # fmt: skip


def test_parallel_steps_have_streams_of_their_own(lab: Lab) -> None:
    @lab.step()
    def talk(name: str) -> str:
        for number in range(20):
            perdure.emit(f"{name}{number}")
        return name

    @lab.durable
    async def agent() -> Any:
        return await lab(perdure.gather(talk("a"), talk("b")) if lab.is_async else perdure.map(talk, ["a", "b"]))

    seen: dict[str, list[Any]] = {}
    for event in lab.run(agent, id="r").stream():
        if event.kind in ("chunk", "done"):
            seen.setdefault(event.path, []).append(event.value)
    assert sorted(seen.values()) == [[*(f"{name}{number}" for number in range(20)), name] for name in "ab"]


def test_a_step_keeps_its_newest_values_and_says_how_many_are_lost(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STEP_VALUES_MAX", 100)
    emitted, read = threading.Event(), threading.Event()

    @perdure.step
    def talk() -> str:
        for number in range(1000):
            perdure.emit(number)
        emitted.set()
        assert read.wait(30)
        return "ok"

    @perdure.durable
    def bounded() -> str:
        return talk()

    thread = threading.Thread(target=store.run, args=(bounded,), kwargs={"id": "r"})
    thread.start()
    assert emitted.wait(30)
    seen = []
    for event in store.get_run("r").stream():
        seen.append((event.kind, event.value))
        if event.value == 999:
            read.set()
    thread.join()
    lost = [value for kind, value in seen if kind == "lost"]
    chunks = [value for kind, value in seen if kind == "chunk"]
    assert sum(lost) + len(chunks) == 1000
    assert chunks[-100:] == list(range(900, 1000))
    assert stored(store) <= 100


def test_values_are_gone_after_the_step_and_those_of_dead_owners_are_swept(
    url: str, store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_GRACE_S", 0.0)
    run = store.start(stream_worker.agent, 30, 0.01, id="r")
    with worker(url):
        assert next(event for event in run.stream() if event.kind == "chunk")
    left = stored(store)
    assert left > 0
    later_us = store._context.clock_us() + 60_000_000
    drive(store._context.driver, rows.sweep(1, later_us))
    assert stored(store) == left  # as far as the store knows, their owner lives
    assert store.run(stream_worker.agent, 30, 0.01, id="r").result() == 60
    drive(store._context.driver, rows.sweep(1, later_us))
    deadline = time.monotonic() + 30
    while stored(store):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_stored_is_encrypted_and_never_in_the_store_itself(tmp_path: Path) -> None:
    secret = "token-of-ann"

    @perdure.step
    def talk() -> None:
        perdure.emit(secret)

    @perdure.durable
    def private() -> None:
        talk()

    for keys in ({}, {"keys": os.urandom(32)}):
        path = tmp_path / f"{len(keys)}.db"
        with perdure.open(str(path), **keys) as opened:  # type: ignore[arg-type]
            path.chmod(0o660)
            run = opened.run(private, id="r")
            assert secret in [event.value for event in run.stream()]
            assert secret.encode() not in path.read_bytes() + Path(f"{path}-wal").read_bytes()
            beside = Path(f"{path}-live").read_bytes() + Path(f"{path}-live-wal").read_bytes()
            assert (secret.encode() in beside) == (not keys)
            assert oct(os.stat(f"{path}-live").st_mode & 0o777) == "0o660"  # as the store's
            with perdure.open(str(path), read_only=True, **keys) as reading:  # type: ignore[arg-type]
                assert secret in [event.value for event in reading.get_run("r").stream()]


def test_a_new_store_has_nothing_of_the_one_that_was_there(tmp_path: Path) -> None:
    path, live, backup = tmp_path / "a.db", tmp_path / "a.db-live", tmp_path / "b.db"
    live.write_bytes(b"left")
    with perdure.open(path) as opened:
        assert not live.exists()
        opened.ops.backup(backup)
    path.unlink()
    live.write_bytes(b"left")
    perdure.ops.restore_backup(backup, path)
    assert not live.exists()


def garbage(live: Path) -> None:
    live.write_bytes(os.urandom(8192))


def other_schema(live: Path) -> None:
    with closing(apsw.Connection(str(live))) as connection:
        connection.execute("CREATE TABLE emitted (x)")


def hostile_schema(live: Path) -> None:
    with closing(apsw.Connection(str(live))) as connection:
        for table in all_tables().values():
            if table.volatile:
                connection.execute(create_table(table, "sqlite"))
        connection.execute("CREATE TRIGGER hides AFTER INSERT ON emitted BEGIN DELETE FROM emitted; END")


@pytest.mark.parametrize("damage", [garbage, other_schema, hostile_schema])
def test_an_unusable_file_of_values_is_replaced(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as opened:
        opened.run(stream_worker.agent, 0, 0.0, id="first")
    damage(Path(f"{path}-live"))
    with perdure.open(path) as opened, perdure.open(path, read_only=True) as reading:
        assert [event.kind for event in reading.get_run("first").stream()] == ["done", "done", "status"]
        opened.run(stream_worker.agent, 2, 0.0, id="r")
        for store in (opened, reading):
            assert [event.kind for event in store.get_run("r").stream()].count("chunk") == 4
        if damage is garbage:
            damage(Path(f"{path}-live"))
        opened.delete_run("first")
        opened.ops.erase_run("r")
        assert opened.runs() == []


@pytest.mark.parametrize("kind", ["folder", "fifo", "symlink", "itself"])
def test_something_else_of_its_name_is_left_alone_and_fails_nothing(tmp_path: Path, kind: str) -> None:
    path, live, victim = tmp_path / "a.db", tmp_path / "a.db-live", tmp_path / "victim"
    with perdure.open(path) as opened:
        if kind == "folder":
            live.mkdir()
        elif kind == "fifo":
            os.mkfifo(live)
        else:
            live.symlink_to(path if kind == "itself" else victim)
        run = opened.run(stream_worker.agent, 2, 0.0, id="r")
        assert [event.kind for event in run.stream()] == ["done", "done", "status"]
        opened.ops.erase_run("r")
        assert (os.path.lexists(live), victim.exists()) == (True, False)
    with closing(apsw.Connection(str(path))) as connection:
        assert not list(connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'emitted'"))


def test_processes_go_on_when_the_file_was_removed_or_a_value_is_damaged(url: str, store: perdure.Store) -> None:
    run = store.start(stream_worker.agent, 200, 0.01, id="r")
    removed = False
    with worker(url):
        for event in run.stream():
            if event.kind == "chunk" and not removed:
                removed = True
                if Path(f"{url}-live").exists():
                    remove_volatile(url)
                else:
                    damage = Sql("UPDATE emitted SET body = :body")(body=b"\xc1")
                    store._context.driver.run(rows.write([damage]))
            if event.kind == "chunk" and event.path == "2":
                break
        else:
            pytest.fail("no value came after that")
        assert run.result(30) == 400


def test_a_step_does_not_depend_on_its_readers(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that cannot be stored is dropped."""

    def fail(statements: Any) -> Any:
        raise perdure.Busy("no")

    monkeypatch.setattr(rows, "write", fail)
    assert store.run(stream_worker.agent, 3, 0.0, id="r").result() == 6


def test_large_values_and_foreign_cursors_are_refused(store: perdure.Store) -> None:
    @perdure.step
    def talk() -> None:
        perdure.emit("x" * writer.VALUE_BYTES_MAX)

    @perdure.durable
    def large() -> None:
        talk()

    run = store.run(large, id="r")
    with pytest.raises(perdure.RunStuck, match="at most"):
        run.result()
    foreign = following._Cursor(floor=1 << 63).text()
    for cursor in ("12", "é", foreign, 5):
        for stream in (run.stream, run.astream):
            with pytest.raises(UsageError, match="cursor"):  # before the first event is asked for
                stream(after=cursor)  # type: ignore[arg-type]


async def test_an_async_reader_of_an_async_step(store: perdure.Store) -> None:
    @perdure.step
    async def talk() -> Any:
        for number in range(3):
            yield number
            await asyncio.sleep(0)

    @perdure.durable
    async def agent() -> Any:
        return await talk()

    running = asyncio.create_task(store.arun(agent, id="r"))
    while not await store.aruns():
        await asyncio.sleep(0.001)
    events = await _read(store.get_run("r"))
    await running
    assert events == [("chunk", 0), ("chunk", 1), ("chunk", 2), ("done", [0, 1, 2]), ("status", "done")]


async def _read(run: Any) -> list[tuple[str, Any]]:
    return [(event.kind, event.value) async for event in run.astream()]
