"""A key that is forgotten is forgotten by running processes too, within a bound: nothing is read or written with it,
and what was in memory because of it is dropped."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from sealed_kit import NEW, OLD, OTHER, Raw

import perdure
from perdure import Store
from perdure.encryption import KeyFile, Keys
from perdure.errors import KeyMissing, Unavailable
from perdure.langgraph import PerdureSaver
from perdure.memory.scopes import searcher_of
from perdure.testing.processes import ForkServer, Say


def opened(url: str, keys: Any, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self, store: Store) -> None:
        self.now = time.monotonic() + 1000
        store._context.driver.keys._monotonic = lambda: self.now  # type: ignore[attr-defined]
        store._context.driver.keys.forget()  # type: ignore[attr-defined]


class Service:
    """Gives keys by tenant; may be told to fail."""

    refresh_s = 60.0

    def __init__(self, **kept: bytes) -> None:
        self.kept = kept
        self.asked = 0
        self.fails: Exception | None = None

    def keys_for(self, tenant: str) -> Keys:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        if tenant not in self.kept:
            raise KeyMissing(f"no key for {tenant}", tenant=tenant)
        return Keys(self.kept[tenant])


def cached(store: Store) -> list[int]:
    """The tenants whose texts are in memory."""
    return sorted({key[0] for key in store._context.cache._known})


def cache_of(store: Store) -> Any:
    return store._context.driver.keys  # type: ignore[attr-defined]


# --- a key file


def test_a_running_process_forgets_what_the_key_file_forgot(url: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("acme")
    file.new("globex")
    with opened(url, KeyFile(file.path)) as store:
        clock = Clock(store)
        acme, globex = store.tenant("acme").thread("t"), store.tenant("globex").thread("t")
        acme.save({"of": "acme"})
        globex.save({"of": "globex"})
        memories = [store.tenant(name).memory("users") for name in ("acme", "globex")]
        for memory in memories:
            memory.put("hobby", "hiking")
            for _ in range(3):  # the index is kept
                memory.search("hiking")
        assert len(cached(store)) == len(searcher_of(store._context).scopes._known) == 2
        file.forget("acme")
        clock.now += 1.01  # what the documents say: a second
        for call in (
            acme.load,
            lambda: acme.save({"n": 1}),
            lambda: store.tenant("acme").threads(),
            lambda: memories[0].search("hiking"),
            lambda: memories[0].get("hobby"),
            lambda: memories[0].put("hobby", "sailing"),
        ):
            with pytest.raises(KeyMissing, match="acme"):
                call()
        assert len(memories[1].search("hiking")) == 1
        assert globex.load().state == {"of": "globex"}
        globex.save({"of": "globex", "n": 2})
        assert len(cached(store)) == len(searcher_of(store._context).scopes._known) == 1, "texts went with the key"
        assert len(cache_of(store)._names) == 1


async def test_an_async_process_forgets_what_the_key_file_forgot(url: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    async with opened(url, KeyFile(file.path)) as store:
        clock = Clock(store)
        thread = store.thread("t")
        await thread.asave({"n": 1})
        file.forget("default")
        clock.now += 1.01
        with pytest.raises(KeyMissing):
            await thread.aload()
        with pytest.raises(KeyMissing):
            await thread.asave({"n": 2})
        assert cached(store) == []


def test_a_key_file_that_is_gone_or_opened_to_others_stops_a_running_process(url: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    with opened(url, KeyFile(file.path)) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        file.path.chmod(0o644)
        clock.now += 1.01
        assert thread.load().state == {"n": 1}, "for a moment: somebody may be writing the file"
        clock.now += 1.01
        with pytest.raises(perdure.UsageError, match="chmod 600"):
            thread.load()
        file.path.chmod(0o600)
        clock.now += 1.01
        assert thread.load().state == {"n": 1}
        file.path.rename(tmp_path / "elsewhere.json")
        clock.now += 1.01
        with pytest.raises(KeyMissing, match="no key file"):
            thread.load()


def test_a_langgraph_checkpointer_forgets_too(url: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    with opened(url, KeyFile(file.path)) as store:
        clock = Clock(store)
        saver = PerdureSaver(store)
        config: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": ""}}
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": ["hello"]}
        checkpoint["channel_versions"] = {"messages": 1}
        stored = saver.put(config, checkpoint, {"source": "input", "step": -1, "parents": {}}, {"messages": 1})
        assert saver.get_tuple(stored) is not None
        file.forget("default")
        clock.now += 1.01
        with pytest.raises(KeyMissing):
            saver.get_tuple(config)
        with pytest.raises(KeyMissing):
            saver.put_writes(stored, [("messages", "more")], "task")
        assert cached(store) == []
        assert not saver.store._context.threads._threads, "metadata of threads is no less secret"


def keeper(say: Say, url: str, path: str) -> None:
    """In a child: reads and writes until it cannot, and says why."""
    with opened(url, KeyFile(path, refresh_s=0.05)) as store:
        thread = store.thread("t")
        said = False
        number = 0
        while True:
            try:
                number += 1
                thread.save({"n": number})
                thread.load()
            except KeyMissing:
                say("forgotten")
                return
            if not said:
                say("at work")
                said = True


def test_another_process_forgets_by_itself(tmp_path: Path) -> None:
    """With the real clock: it goes on until it hears of it, and ends by itself."""
    url = str(tmp_path / "a.db")
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    with ForkServer("test_encryption_forgotten:keeper") as fork_server:
        child = fork_server.start(url, str(file.path))
        lines = child.lines()
        assert next(lines) == "at work"
        file.forget("default")
        assert next(lines) == "forgotten"


# --- a provider of one's own


def test_a_provider_is_asked_again_after_refresh_s(url: str) -> None:
    keys = Service(default=OLD)
    with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        asked = keys.asked
        for _ in range(20):
            clock.now += 2.0
            thread.load()
        assert keys.asked == asked, "not before"
        del keys.kept["default"]
        clock.now += 2 * keys.refresh_s
        with pytest.raises(KeyMissing, match="no key for default"):
            thread.load()
        assert cached(store) == []
        with pytest.raises(KeyMissing):
            thread.save({"n": 2})
        keys.kept["default"] = OLD  # it was a mistake
        clock.now += 1.01
        assert thread.load().state == {"n": 1}


def test_a_busy_process_does_not_wait_for_the_provider_that_it_asks_again(url: str) -> None:
    keys = Service(default=OLD)
    with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        thread.load()
        del keys.kept["default"]
        clock.now += keys.refresh_s + 1
        with pytest.raises(KeyMissing):
            thread.load()
        assert cached(store) == []


def test_a_provider_that_fails_is_given_time_but_not_for_ever(url: str) -> None:
    keys = Service(default=OLD)
    with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        thread.load()
        keys.fails = ConnectionError("key service secret-host is down")
        clock.now += keys.refresh_s + 1
        thread.load()
        assert thread.load().state == {"n": 1}, "what is known is used for twice refresh_s"
        clock.now += keys.refresh_s
        with pytest.raises(Unavailable, match="ConnectionError") as caught:
            thread.load()
        assert "secret-host" not in str(caught.value), "the text of a stranger's error is in its cause only"
        assert isinstance(caught.value.__cause__, ConnectionError)
        keys.fails = None
        clock.now += 1.01
        assert thread.load().state == {"n": 1}


def test_a_new_key_of_a_provider_comes_into_use_by_itself(url: str) -> None:
    keys = Service(default=OLD)
    with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        keys.keys_for = lambda tenant: Keys(NEW, [OLD])  # type: ignore[method-assign]
        clock.now += 2 * keys.refresh_s
        thread.save({"n": 2})
        assert [info.current for info in store.ops.list_keys()] == [False]
        store.ops.rotate_keys()
        assert [info.current for info in store.ops.list_keys()] == [True]
        assert thread.load().state == {"n": 2}


async def test_an_async_task_waits_for_an_ask_without_holding_up_the_loop(url: str) -> None:
    keys = Service(default=OLD)
    async with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        await thread.asave({"n": 1})
        del keys.kept["default"]
        clock.now += 2 * keys.refresh_s
        results = await asyncio.gather(*(thread.aload() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, KeyMissing) for result in results), results


def test_another_key_for_a_tenant_is_refused_by_a_running_process(url: str) -> None:
    """Not the one that the data was encrypted with: as if it had none."""
    keys = Service(default=OLD)
    with opened(url, keys) as store:
        clock = Clock(store)
        thread = store.thread("t")
        thread.save({"n": 1})
        keys.kept["default"] = OTHER
        clock.now += 2 * keys.refresh_s
        with pytest.raises(KeyMissing, match="the keys that were given are others"):
            thread.load()
        with pytest.raises(KeyMissing, match="the keys that were given are others"):
            thread.save({"n": 2})
    assert len(Raw(url)("SELECT 1 FROM tenant_key")) == 1
