"""Who asks a provider, how often, and what becomes of those who wait: many tenants at once, asks that never end, tasks
that are cancelled meanwhile, key files that cannot be read, and texts that come when their key has gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sealed_kit import NEW, OLD, Raw

import perdure
from perdure import KeyFile, Keys, Store
from perdure.errors import KeyMissing, Unavailable
from perdure.log.branches import create_thread
from perdure.storage.key_asking import ASKERS_MAX, Asker
from perdure.storage.keyring import StaticKeys
from perdure.storage.program import Batch, Program, Sql, Transaction, adrive
from perdure.storage.sealing import SealedDriver
from perdure.storage.vault import KeysWanted, Vault
from perdure.threads.thread_cache import ThreadCache


def opened(url: str, keys: Any, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


def vault_of(store: Store) -> Vault:
    driver = store._context.driver
    assert isinstance(driver, SealedDriver)
    return driver.vault


# --- asks that never end


class Hanging:
    """The first ask of all does not end before it is let go, and then says that there is no key, or an old one."""

    timeout_s = 0.05

    def __init__(self, late: Keys | None = None) -> None:
        self.asked, self.go, self.late = 0, threading.Event(), late

    def keys_for(self, tenant: str) -> Keys:
        self.asked += 1
        if self.asked > 1:
            return Keys(OLD)
        assert self.go.wait(60)
        if self.late is None:
            raise KeyMissing(f"no key for {tenant}", tenant=tenant)
        return self.late


@pytest.mark.parametrize("late", [None, Keys(NEW)])
def test_an_ask_that_hangs_does_not_lock_a_tenant_out(url: str, late: Keys | None) -> None:
    keys = Hanging(late)
    with opened(url, keys) as store:
        thread = store.thread("t")
        with pytest.raises(Unavailable, match=r"0\.05 s"):
            thread.save({"n": 1})
        vault = vault_of(store)
        [hung] = [ask.answer for ask in vault.asker._asking.values()]
        later = time.monotonic() + 1000
        vault._monotonic = lambda: later
        vault.asker.timeout_s = 60.0  # a slow machine may take more than it had
        thread.save({"n": 2})
        keys.go.set()
        with pytest.raises(Unavailable):
            hung.result(30)  # what it says at last is nobody's answer any more
        assert thread.load().state == {"n": 2}
        thread.save({"n": 3})


def test_an_older_answer_does_not_replace_a_newer_one() -> None:
    vault = Vault(StaticKeys(OLD))
    wanted = KeysWanted(1, "default", frozenset(), 100.0)
    vault.took(wanted, Keys(NEW), 200.0)
    vault.took(wanted, Keys(OLD), 150.0)
    assert vault._held[1].keys == Keys(NEW)


def test_so_many_are_asked_at_once_and_no_more() -> None:
    go, count, most, lock = threading.Event(), [0], [0], threading.Lock()
    full = threading.Event()

    class Counting:
        def keys_for(self, tenant: str) -> Keys:
            with lock:
                count[0] += 1
                most[0] = max(most[0], count[0])
                if count[0] >= ASKERS_MAX:
                    full.set()
            assert go.wait(60)
            with lock:
                count[0] -= 1
            return Keys(OLD)

    asker = Asker(Counting())
    answers = [asker.begin(str(number))[0] for number in range(3 * ASKERS_MAX)]
    assert full.wait(30)
    go.set()
    assert [answer.result(30) for answer in answers] == [Keys(OLD)] * len(answers)
    assert most[0] == ASKERS_MAX


def test_those_that_hang_do_not_keep_others_from_being_asked() -> None:
    now, go = [0.0], threading.Event()

    class Partly:
        def keys_for(self, tenant: str) -> Keys:
            assert tenant == "fine" or go.wait(60)
            return Keys(OLD)

    asker = Asker(Partly(), lambda: now[0])
    hung = [asker.begin(str(number))[0] for number in range(ASKERS_MAX)]
    now[0] += asker.timeout_s
    assert asker.begin("fine")[0].result(30) == Keys(OLD)
    go.set()
    assert [answer.result(30) for answer in hung] == [Keys(OLD)] * ASKERS_MAX


# --- many tenants


@perdure.durable(name="sealing_asked.double")
def double(word: str) -> str:
    return word * 2


class Counted:
    """Counts how often it is asked for whom; those that it has no answer for fail."""

    def __init__(self, *lost: str) -> None:
        self.asked: list[str] = []
        self.lost = lost

    def keys_for(self, tenant: str) -> Keys:
        self.asked.append(tenant)
        if tenant in self.lost:
            raise ConnectionError
        return Keys(OLD)


def test_a_fresh_worker_meets_any_number_of_tenants_at_once(url: str) -> None:
    names = [f"tenant{number}" for number in range(30)]
    with opened(url, OLD) as store:
        for name in names:
            store.tenant(name).start(double, name, id="r")
    keys = Counted("tenant3")
    with opened(url, keys) as store:
        vault, sizes = vault_of(store), [0]
        real = vault._patience_s

        def patience_s(wanted: KeysWanted) -> float:
            sizes.append(len(wanted.each))
            return real(wanted)

        vault._patience_s = patience_s  # type: ignore[method-assign]
        perdure.Worker(store, [double], all_tenants=True, concurrency=40).run(until_idle=True)
    with opened(url, OLD) as store:
        done = [name for name in names if store.tenant(name).get_run("r").status == "done"]
        assert done == [name for name in names if name != "tenant3"]
    assert {name: keys.asked.count(name) for name in done} == dict.fromkeys(done, 1)
    assert max(sizes) == len(names), "they were asked for at once"


def test_an_operation_does_not_ask_again_for_what_it_has_asked_for_in_vain(url: str) -> None:
    """Though the provider takes so long to fail that by the last tenant the first one's error is an old one."""
    lost = [f"lost{number}" for number in range(4)]
    with opened(url, OLD) as store:
        for name in [*lost, "fine"]:
            store.tenant(name).start(double, name, id="r")
    keys = Counted(*lost)
    with opened(url, keys) as store:
        vault, now = vault_of(store), [1000.0]
        real = vault._failed

        def failed(tenant: int, error: perdure.PerdureError) -> None:
            real(tenant, error)
            now[0] += 2.0  # until the next one

        vault._monotonic = lambda: now[0]
        vault._failed = failed  # type: ignore[method-assign]
        perdure.Worker(store, [double], all_tenants=True, concurrency=10).run(until_idle=True)
    assert sorted(keys.asked) == ["fine", *lost]
    with opened(url, OLD) as store:
        assert store.tenant("fine").get_run("r").status == "done"


_TENANTS = Sql("SELECT tenant FROM tenant ORDER BY tenant")


def one_by_one(name: str) -> Program[list[str]]:
    """A program that meets one tenant after the other, each in a batch of its own."""
    found = []
    [tenants] = yield Batch(_TENANTS())
    for (tenant,) in tenants:
        row = yield from create_thread(tenant, name, {"of": "it"}, 1)
        found.append(row.name if row is not None else "")
    return found


async def test_an_operation_may_meet_tenants_one_by_one(url: str) -> None:
    count = 12
    with opened(url, OLD) as store:
        for number in range(count):
            store.tenant(f"tenant{number}").thread("t").save({})
    with opened(url, Counted()) as store:
        assert store._context.driver.run(Transaction(partial(one_by_one, "a"), write=True)) == ["a"] * count
    async with opened(url, Counted()) as store:
        made = await store._context.driver.arun(Transaction(partial(one_by_one, "b"), write=True))
        assert made == ["b"] * count


def test_keys_that_change_with_every_ask_are_given_up(url: str) -> None:
    keys = Counted()
    with opened(url, keys) as store:
        vault = vault_of(store)
        vault.took = lambda *_: None  # type: ignore[method-assign] # as if another thread dropped it each time
        with pytest.raises(Unavailable, match="change faster"):
            store.thread("t").save({})
    assert 2 <= len(keys.asked) <= 8


# --- tasks that are cancelled meanwhile


class Gate:
    """Something that a thread waits in, and a task waits for."""

    def __init__(self) -> None:
        self.met, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.met.set()
        assert self.go.wait(60)

    async def cancel_in_it(self, task: asyncio.Task[Any]) -> BaseException:
        """Cancel a task while its thread is here, thrice; what it ends with."""
        while not self.met.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        self.go.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return caught.value


async def whole(store: Store, op: Callable[[int], Program[Any]]) -> asyncio.Task[Any]:
    driver = store._context.driver
    tenant = await adrive(driver, store._context.ensure_tenant())
    return asyncio.create_task(driver.arun(Transaction(partial(op, tenant), write=True, whole=True)))


def make_thread(tenant: int) -> Program[Any]:
    return create_thread(tenant, "made", {"of": "it"}, 1)


async def test_a_cancel_while_keys_are_tended_does_not_stop_what_must_be_written(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "a.db"), OLD) as store:
        gate, vault = Gate(), vault_of(store)
        await store.thread("t").asave({})
        vault.tend, vault._tend_at = gate, 0.0  # type: ignore[method-assign]
        error = await gate.cancel_in_it(await whole(store, make_thread))
        assert error.answer.name == "made"  # type: ignore[attr-defined]
        assert ("made",) in Raw(str(tmp_path / "a.db"))("SELECT name FROM thread")


class Waiting:
    """Waits at a gate when it is asked, and then has no key."""

    timeout_s = 60.0

    def __init__(self) -> None:
        self.gate = Gate()

    def keys_for(self, tenant: str) -> Keys:
        self.gate()
        raise KeyMissing(f"no key for {tenant}", tenant=tenant)


async def test_a_cancel_while_keys_are_asked_for_is_not_swallowed_by_what_comes_after(tmp_path: Path) -> None:
    keys = Waiting()
    async with opened(str(tmp_path / "a.db"), keys) as store:
        error = await keys.gate.cancel_in_it(await whole(store, make_thread))
        assert not hasattr(error, "answer")
        assert isinstance(error.__cause__, KeyMissing)


async def test_nor_by_giving_up(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "a.db"), Counted()) as store:
        gate, vault = Gate(), vault_of(store)

        vault.took = lambda *_: gate.met.set()  # type: ignore[method-assign]
        real, waits = vault.aanswer, asyncio.Event()

        async def slow(wanted: KeysWanted) -> None:
            await real(wanted)
            await waits.wait()

        vault.aanswer = slow  # type: ignore[method-assign]
        task = await whole(store, make_thread)
        while not gate.met.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        waits.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, Unavailable)


async def test_a_cancel_without_whole_stops_at_once(url: str) -> None:
    keys = Waiting()
    async with opened(url, keys) as store:
        task = asyncio.create_task(store.thread("t").asave({}))
        while not keys.gate.met.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert not hasattr(caught.value, "answer")
        keys.gate.go.set()


# --- key files that cannot be read


def spoil_with_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def spoil_with_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [spoil_with_a_folder, spoil_with_a_loop])
def test_a_key_file_that_cannot_be_read_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    with opened(str(tmp_path / "a.db"), KeyFile(file.path)) as store:
        thread = store.thread("t")
        thread.save({"n": 1})
        spoil(file.path)
        vault_of(store).tend()
        assert "could not be asked for again" in caplog.text
        assert thread.load().state == {"n": 1}, "for a moment: it may come back"
    with opened(str(tmp_path / "a.db"), KeyFile(file.path)) as store, pytest.raises(Unavailable, match=r"keys\.json"):
        store.thread("t").load()
    with pytest.raises(Unavailable, match=r"keys\.json"):
        file.tenants()


# --- threads beside each other


def test_problems_may_come_while_old_ones_go() -> None:
    vault = Vault(StaticKeys(OLD))
    newer = KeyMissing("no key", tenant="b"), vault._monotonic() + 1000

    class Meanwhile(float):
        """Another thread comes while its age is looked at."""

        def __rsub__(self, now: float) -> float:
            vault._problems[2] = newer
            return now - float(self)

    vault._problems = {1: (KeyMissing("no key", tenant="a"), Meanwhile(0.0)), 3: newer}
    vault.tend()
    assert vault._problems == {2: newer, 3: newer}


def test_a_text_that_comes_when_its_key_has_gone_is_not_kept(url: str) -> None:
    """A load has read, another thread hears that the key is gone, then the first one keeps what it read."""

    class Service(Counted):
        gone = False

        def keys_for(self, tenant: str) -> Keys:
            if self.gone:
                raise KeyMissing(f"no key for {tenant}", tenant=tenant)
            return super().keys_for(tenant)

    keys = Service()
    with opened(url, keys) as store:
        thread, vault, cache = store.thread("t"), vault_of(store), store._context.cache
        thread.save({"n": 1})
        thread.load()
        [(key, base)] = cache._bases.items()
        keys.gone = True
        vault.tend()
        vault.asker.wait()
        assert not cache._bases
        cache.put(key, base)
        assert not cache._bases, "its key is gone"
        keys.gone = False
        vault._problems.clear()  # as after a second
        assert store.thread("t").load().state == {"n": 1}
        assert list(cache._bases) == [key], "it is there again, and so may be what it opens"


def test_nor_is_what_a_checkpointer_knows() -> None:
    known = ThreadCache()
    known.note(1, "graph", 2, 3, {"of": "acme"})
    known.forget_tenant(1)
    assert known.note(1, "graph", 2, 3, {"of": "acme"}).metadata == {"of": "acme"}
    assert known.get("graph") is None, "its key is gone"
    known.know_tenant(1)
    known.note(1, "graph", 2, 3, {"of": "acme"})
    assert known.get("graph") is not None
