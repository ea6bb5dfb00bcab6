"""Providers that take long or fail: no transaction is open while one is asked, and a failure is a clear error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sealed_kit import NEW, OLD

import perdure
from perdure import Store, UsageError
from perdure.encryption import Keys
from perdure.errors import Unavailable
from perdure.storage.program import Transaction


def opened(url: str, keys: Any, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


class Slow:
    """Gives no key for "slow" before it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def keys_for(self, tenant: str) -> Keys:
        if tenant == "slow":
            self.asked.set()
            assert self.go.wait(60)
        return Keys(OLD)


class InThread:
    """A call on a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None

        def run() -> None:
            try:
                self.result = call()
            except BaseException as error:
                self.result = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def test_while_a_provider_thinks_others_save(url: str) -> None:
    """The same handle and another one: nobody holds the writers' gate, nor a row, nor the last connection."""
    keys = Slow()
    with opened(url, keys) as store, opened(url, OLD, timeout_s=5) as other:
        store.tenant("quick").thread("t").save({"n": 0})
        waiting = [InThread(lambda: store.tenant("slow").thread("t").save({"n": 1})) for _ in range(3)]
        assert keys.asked.wait(30)
        for number in range(3):
            store.tenant("quick").thread("t").save({"n": number})
            other.tenant("quick").thread("u").save({"n": number})
            assert store.tenant("quick").thread("t").load().state == {"n": number}
        keys.go.set()
        for one in waiting:
            assert one.join().id
        assert store.tenant("slow").thread("t").load().state == {"n": 1}


def test_a_provider_is_never_asked_while_a_transaction_is_open(url: str) -> None:
    open_now: set[int] = set()
    inside: list[str] = []

    class Watching:
        def keys_for(self, tenant: str) -> Keys:
            inside.extend([tenant] * bool(open_now))
            return Keys(OLD) if not self.rotated else Keys(NEW, [OLD])

        rotated = False

    keys = Watching()
    with opened(url, keys) as store:
        inner: Any = store._context.driver.capabilities.base
        real = inner.run

        def run(transaction: Transaction) -> Any:
            open_now.add(threading.get_ident())
            try:
                return real(transaction)
            finally:
                open_now.discard(threading.get_ident())

        inner.run = run
        store.thread("t").save({"n": 1})
        store.thread("t").load()
        keys.rotated = True
        with opened(url, keys) as rotator:
            rotator.ops.rotate_keys()
            rotator.thread("t").save({"n": 2})
        assert store.thread("t").load().state == {"n": 2}
        assert [info.available for info in store.ops.list_keys()] == [True]
        assert store.ops.doctor()
        assert store.ops.rotate_keys().key
    assert inside == []


async def test_a_provider_that_hangs_does_not_hold_up_the_event_loop(url: str) -> None:
    keys = Slow()
    async with opened(url, keys) as store:
        waiting = asyncio.create_task(store.tenant("slow").thread("t").asave({"n": 1}))
        while not keys.asked.is_set():
            await asyncio.sleep(0)
        await store.tenant("quick").thread("t").asave({"n": 1})  # the loop is free, and so is the gate
        assert not waiting.done()
        keys.go.set()
        await waiting


async def test_a_task_that_is_cancelled_while_it_waits_for_keys_leaves_the_ask_to_others(url: str) -> None:
    keys = Slow()
    async with opened(url, keys) as store:
        thread = store.tenant("slow").thread("t")
        first = asyncio.create_task(thread.asave({"n": 1}))
        while not keys.asked.is_set():
            await asyncio.sleep(0)
        second = asyncio.create_task(thread.asave({"n": 2}))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        keys.go.set()
        await second
        assert (await thread.aload()).state == {"n": 2}


@pytest.mark.parametrize("given", [None, OLD, [OLD], "text"])
def test_what_is_no_keys_is_named_and_not_shown(url: str, given: Any) -> None:
    class Wrong:
        def keys_for(self, tenant: str) -> Any:
            return given

    with (
        opened(url, Wrong()) as store,
        pytest.raises(UsageError, match=r"Wrong\.keys_for.*perdure\.encryption\.Keys") as caught,
    ):
        store.thread("t").save({})
    assert repr(OLD) not in str(caught.value)


def test_a_provider_that_raises_is_unavailable_and_nothing_is_written(url: str) -> None:
    class Broken:
        def keys_for(self, tenant: str) -> Keys:
            raise RuntimeError("token=abc")

    with opened(url, Broken()) as store:
        with pytest.raises(Unavailable, match="RuntimeError") as caught:
            store.thread("t").save({})
        assert "token" not in str(caught.value)
        with pytest.raises(Unavailable):
            store.ops.rotate_keys()
    with opened(url, OLD) as store:
        store.thread("t").save({"n": 1})


def test_a_provider_may_use_the_store_it_gives_keys_for(tmp_path: Path, url: str) -> None:
    """Keys wrapped in a tenant of their own: that could only hang while a transaction was open."""

    class Wrapped:
        store: Store

        def keys_for(self, tenant: str) -> Keys:
            if tenant == "keys":
                return Keys(NEW)
            return Keys(bytes.fromhex(self.store.tenant("keys").thread(tenant).load().state["key"]))

    keys = Wrapped()
    with opened(url, keys) as store:
        keys.store = store
        store.tenant("keys").thread("acme").save({"key": OLD.hex()})
        store.tenant("acme").thread("t").save({"n": 1})
        assert store.tenant("acme").thread("t").load().state == {"n": 1}


@pytest.mark.parametrize(("name", "value"), [("refresh_s", 0), ("refresh_s", "soon")])
def test_a_providers_times_are_checked_when_the_store_is_opened(tmp_path: Path, name: str, value: Any) -> None:
    keys = Slow()
    setattr(keys, name, value)
    with pytest.raises(UsageError, match=name):
        opened(str(tmp_path / "a.db"), keys)
    assert not (tmp_path / "a.db").exists()


@perdure.durable(name="sealing_providers.double")
def double(word: str) -> str:
    return word * 2


def test_a_worker_goes_on_with_others_while_the_keys_of_one_tenant_cannot_be_got(url: str) -> None:
    class Partly:
        broken = False

        def keys_for(self, tenant: str) -> Keys:
            if tenant == "lost" and self.broken:
                raise ConnectionError
            return Keys(OLD)

    keys = Partly()
    with opened(url, keys) as store:
        for name in ("lost", "fine"):
            store.tenant(name).start(double, name, id=name)
    keys.broken = True
    with opened(url, keys) as store:
        perdure.Worker(store, [double], all_tenants=True).run(until_idle=True)
        assert store.tenant("fine").get_run("fine").result() == "finefine"
    with opened(url, OLD) as store:
        assert store.tenant("lost").get_run("lost").status == "queued"
