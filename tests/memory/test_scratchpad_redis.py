"""A scratchpad in Redis, on a real server: shared by processes, bounded, gone after its time, refused in a run."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import perdure
from perdure.errors import Unavailable
from perdure.memory import RedisPad, Scratchpad
from perdure.testing.ports import free_port


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Redis server on loopback: Debian's, which the Makefile installs."""
    program, number = shutil.which("redis-server"), free_port()
    assert program, "these tests need redis-server: sudo apt-get install redis-server, or brew install redis"
    options = ["--port", str(number), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *options], cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=number) as client:
            while process.poll() is None:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.005)
        yield number
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def client(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=port) as client:
        client.flushdb()
        yield client


def words(text: str) -> int:
    return len(text.split())


def test_two_processes_share_a_pad_and_lose_no_entry(client: redis.Redis, port: int) -> None:
    with redis.Redis(port=port, decode_responses=True) as other:
        pads = [Scratchpad(10_000, backend=RedisPad(one, "task-7")) for one in (client, other)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda n: pads[n % 2].add("thought", f"idea {n}"), range(40)))
        assert sorted(int(entry.text.split()[1]) for entry in pads[0].entries if entry.text) == [*range(40)]
        assert [entry.n for entry in pads[1].entries] == [*range(1, 41)]
        assert pads[0].render() == pads[1].render()
        assert Scratchpad(10_000, backend=RedisPad(client, "task-8")).entries == []


async def test_its_budget_holds_and_it_expires(client: redis.Redis) -> None:
    backend = RedisPad(client, "task-7", ttl_s=60)
    pad = Scratchpad(400, tokens=words, backend=backend)
    for n in range(30):
        await pad.aadd("observation", f"{n} " + "x " * 20, source="shell")
    assert words(pad.render()) == pad.tokens <= 400
    assert pad.full(1).startswith("0 x")
    assert 0 < client.pttl("perdure:scratchpad:task-7") <= 60_000
    backend.clear()
    assert pad.entries == []


def test_a_run_refuses_it_and_a_lost_server_is_named(client: redis.Redis) -> None:
    before = Scratchpad(100, backend=RedisPad(client, "task-7"))

    @perdure.durable
    def padded_run(makes_one: bool) -> None:
        pad = Scratchpad(100, backend=RedisPad(client, "task-7")) if makes_one else before
        pad.add("thought", "hm")

    for makes_one in (True, False):
        with perdure.open(":memory:") as store, pytest.raises(perdure.RunStuck, match="survives a kill"):
            store.run(padded_run, makes_one, id="run-1").result()
    assert before.entries == []
    with pytest.raises(perdure.UsageError, match="wants a RedisPad"):
        Scratchpad(100, backend=client)  # type: ignore[arg-type]
    with (
        redis.Redis(port=free_port(), retry=Retry(NoBackoff(), 0)) as nobody,
        pytest.raises(Unavailable, match="task-7"),
    ):
        Scratchpad(100, backend=RedisPad(nobody, "task-7")).add("thought", "hm")
