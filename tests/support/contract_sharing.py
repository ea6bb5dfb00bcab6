"""The contract, part five: tenants side by side, several stores and loops on one database, opening and closing."""

from __future__ import annotations

import asyncio
import threading

import pytest
from harness import Harness, call

from perdure.errors import NotFound, StoreClosed, UsageError
from perdure.ops.store import Store


class TenantContract:
    """A tenant sees its own, and nothing else."""

    async def test_the_same_names_side_by_side(self, harness: Harness) -> None:
        tenants = {name: harness.tenant(name) for name in ("acme", "umbrella")}
        for name, store in tenants.items():
            await harness.save(store.thread("t", metadata={"of": name}), {"of": name})
        await harness.save(harness.thread(), {"of": "default"})
        for name, store in tenants.items():
            assert await harness.state(store.thread("t")) == {"of": name}
            assert await harness.names(store) == ["t"]
            assert await harness.names(store, where={"of": name}) == ["t"]
            assert (await harness.stats(store)).checkpoints == 1
            assert (await harness.verify(store)).checkpoints == 1
        assert await harness.names(where={"of": "acme"}) == []
        assert await harness.state(harness.thread()) == {"of": "default"}

    async def test_a_tenant_is_the_same_however_it_is_opened(self, harness: Harness) -> None:
        await harness.save(harness.tenant("acme").thread("t"), {"n": 1})
        assert await harness.state(harness.open(tenant="acme").thread("t")) == {"n": 1}
        assert await harness.state(harness.tenant("other").tenant("acme").thread("t")) == {"n": 1}
        assert await harness.state(harness.store.tenant("acme").thread("t")) == {"n": 1}

    @pytest.mark.parametrize("has_data", [False, True])
    async def test_other_tenants_data_cannot_be_reached(self, harness: Harness, has_data: bool) -> None:
        theirs = harness.thread("secret", metadata={"k": 1})
        saved = await harness.save_all(theirs, [{"secret": n} for n in range(3)])
        mine = harness.tenant("mine")
        if has_data:
            await harness.save(mine.thread("own"), {"n": 1})
        listed = ["own"] if has_data else []
        assert await harness.names(mine) == listed
        assert await harness.names(mine, where={"k": 1}) == []
        for name in ("secret", "own"):
            for at in (saved[1], saved[1].id):
                for refused in (
                    call(mine.thread(name), "load", at),
                    call(mine.thread(name), "rollback", at),
                    call(mine.thread(name), "fork", at, name="f"),
                    call(mine.thread(name), "diff", at),
                    call(mine.thread(name), "save", {}, parent=at),
                ):
                    with pytest.raises(NotFound):
                        await harness.run(refused)
                with pytest.raises(NotFound):
                    await harness.history(mine.thread(name), start=at)
        for refused in (
            call(mine.thread("secret"), "load"),
            call(mine.thread("secret"), "prune", keep=1),
            call(mine.thread("secret"), "annotate", {"k": 2}),
            call(mine, "delete_thread", "secret"),
        ):
            with pytest.raises(NotFound):
                await harness.run(refused)
        with pytest.raises(UsageError):
            await harness.delete(theirs, mine)
        assert await harness.names(mine) == listed
        assert await harness.history(theirs) == saved[::-1]
        assert (await harness.info(theirs)).metadata == {"k": 1}

    async def test_deleting_and_pruning_touch_one_tenant_only(self, harness: Harness) -> None:
        stores = [harness.tenant("a"), harness.tenant("b"), harness.tenant("c")]
        for store in stores:
            await harness.save_all(store.thread("t"), [{"n": n, "x": "y" * 200} for n in range(12)])
        await harness.delete("t", stores[0])
        await harness.prune(stores[1].thread("t"), keep=2)
        assert [(await harness.stats(store)).checkpoints for store in stores] == [0, 2, 12]
        assert (await harness.state(stores[2].thread("t")))["n"] == 11

    async def test_concurrent_first_saves_of_a_tenant_make_one(self, harness: Harness) -> None:
        calls = [call(harness.tenant("new").thread(f"t{n}"), "save", {"n": n}) for n in range(6)]
        await harness.together(calls)
        assert sorted(await harness.names(harness.tenant("new"))) == [f"t{n}" for n in range(6)]


class LifecycleContract:
    """Opening, closing, sharing a database."""

    async def test_a_new_store_is_empty_and_sound(self, harness: Harness) -> None:
        stats = await harness.stats()
        assert (stats.threads, stats.checkpoints, stats.stored_bytes, stats.ratio) == (0, 0, 0, 1.0)
        assert await harness.threads() == []
        assert (await harness.verify(harness.store)).ok

    async def test_stats_count_what_is_kept(self, harness: Harness) -> None:
        thread = harness.thread()
        saved = await harness.save_all(thread, [{"text": "word " * 500, "n": n} for n in range(10)])
        stats = await harness.stats()
        assert (stats.threads, stats.checkpoints) == (1, 10)
        assert 1 <= stats.keyframes < 10
        assert stats.state_bytes == sum(one.size_bytes for one in saved)
        assert stats.stored_bytes == stats.difference_bytes + stats.keyframe_bytes
        assert stats.ratio > 3

    async def test_verify_reports_what_it_looked_at(self, harness: Harness) -> None:
        for name in ("a", "b"):
            await harness.save_all(harness.thread(name), [{"n": n} for n in range(3)])
        await harness.fork(harness.thread("a"), name="c")
        seen: list[tuple[int, int]] = []
        report = await harness.verify(harness.store, progress=lambda *at: seen.append(at))
        assert (report.ok, report.threads, report.checkpoints) == (True, 3, 6)
        assert seen[-1] == (2, 2)
        for name in ("a", "c"):  # a fork with what it shares
            report = await harness.verify(harness.thread(name), progress=lambda *at: seen.append(at))
            assert (report.ok, report.threads, report.checkpoints) == (True, 1, 3)
            assert seen[-1] == (3, 3)

    async def test_everything_is_there_after_reopening(self, harness: Harness) -> None:
        thread = harness.thread(metadata={"k": 1})
        states = [{"log": ["entry"] * n} for n in range(20)]
        saved = await harness.save_all(thread, states)
        await harness.fork(thread, saved[5], name="fork")
        before = await harness.threads()
        await harness.reopen()
        assert await harness.threads() == before
        thread = harness.thread()
        assert await harness.history(thread) == saved[::-1]
        for checkpoint, state in zip(saved, states, strict=True):
            assert await harness.state(thread, checkpoint) == state
        assert (await harness.save(thread, {"after": 1})).parent == saved[-1].id
        assert await harness.state(harness.thread("fork")) == states[5]

    async def test_two_stores_see_each_others_work_at_once(self, harness: Harness) -> None:
        other = harness.open()
        mine, theirs = harness.thread(), other.thread("t")
        for n in range(5):
            made = await harness.save(mine, {"n": n})
            assert (await harness.load(theirs)).id == made.id
            await harness.save(theirs, {"n": -n})
            assert await harness.state(mine) == {"n": -n}
        assert len(await harness.history(mine)) == 10

    async def test_closing_twice_is_fine_and_use_after_close_is_refused(self, harness: Harness) -> None:
        store = harness.open()
        thread = store.thread("t")
        await harness.save(thread, {"n": 1})
        [listed] = await harness.history(thread)
        tenant = store.tenant("acme")
        for _ in range(2):
            await harness.close(store)
        for refused in (
            call(thread, "save", {}),
            call(thread, "load"),
            call(thread, "get_head"),
            call(thread, "prune", keep=1),
            call(store.thread("new"), "save", {}),
            call(store, "threads"),
            call(store, "delete_thread", "t"),
            call(tenant, "threads"),
        ):
            with pytest.raises(StoreClosed):
                await harness.run(refused)
        with pytest.raises(StoreClosed):
            _ = listed.state
        await harness.close(store)
        assert await harness.state(harness.thread()) == {"n": 1}

    async def test_a_store_is_a_context_manager_in_both_modes(self, harness: Harness) -> None:
        with harness.open() as store:
            store.thread("t").save({"n": 1})
        with pytest.raises(StoreClosed):
            store.threads()
        async with harness.open() as store:
            assert (await store.thread("t").aload()).state == {"n": 1}
        with pytest.raises(StoreClosed):
            await store.athreads()

    async def test_two_event_loops_in_a_row_on_one_store(self, harness: Harness) -> None:
        """In a thread of their own, because one event loop runs here already."""
        store = harness.open()

        async def work(n: int) -> int:
            thread = store.thread("t")
            await asyncio.gather(*(store.thread(f"t{n}").asave({"n": n}) for _ in range(4)))
            await thread.asave({"n": n})
            return len([one async for one in thread.ahistory()])

        def loops() -> list[int]:
            return [asyncio.run(work(n)) for n in range(3)]

        assert await asyncio.to_thread(loops) == [1, 2, 3]
        assert await harness.state(store.thread("t")) == {"n": 2}

    async def test_blocking_calls_on_the_loops_thread_while_async_ones_run(self, harness: Harness) -> None:
        """Neither waits for the other for ever: an async operation needs the loop, which a blocking one holds."""
        store = harness.store

        async def async_work(n: int) -> None:
            thread = store.thread(f"async {n}")
            for step in range(8):
                await thread.asave({"step": step})
                await thread.aload()

        tasks = [asyncio.create_task(async_work(n)) for n in range(4)]
        blocking = store.thread("blocking")
        for step in range(16):
            blocking.save({"step": step})
            assert blocking.load().state == {"step": step}
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert len(await harness.names()) == 5
        for n in range(4):
            assert len(await harness.history(store.thread(f"async {n}"))) == 8

    async def test_threads_of_the_process_share_a_store(self, harness: Harness) -> None:
        store: Store = harness.store
        failures: list[BaseException] = []

        def work(n: int) -> None:
            try:
                thread = store.thread(f"t{n % 3}")
                for step in range(5):
                    thread.save({"by": n, "step": step})
                    thread.load()
                list(thread.history())
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            await asyncio.to_thread(worker.join)
        assert failures == []
        assert (await harness.stats()).checkpoints == 30
