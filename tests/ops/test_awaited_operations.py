"""Every operation of `store.ops` can be awaited: it answers as the blocking one, and the event loop stays free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import perdure


@perdure.durable
def awaited_sum(numbers: list[int]) -> int:
    return sum(numbers)


async def test_the_awaited_operations_answer_as_the_blocking_ones(store: perdure.Store, tmp_path: Path) -> None:
    await store.thread("a").asave({"n": 1})
    await store.arun(awaited_sum, [1, 2], id="sum")
    await store.asnapshot("s")
    ops = store.ops
    assert await ops.averify() == ops.verify()
    assert await ops.astats() == ops.stats()
    assert [found.message for found in await ops.adoctor()] == [found.message for found in ops.doctor()]
    assert (await ops.ahealth()).threads == 1
    assert await ops.asweep_runs() == 0
    await ops.adeploy(awaited_sum, "v2")
    assert await ops.adeployments() == ops.deployments()
    assert await ops.amove_runs(awaited_sum) == []
    backup = await ops.abackup(tmp_path / "backup.db")
    assert (await ops.atest_backup(backup.path)).ok
    assert (await ops.atransfer(tmp_path / "copy.db", threads=["a"])).threads == 1
    await ops.aarchive("a", tmp_path / "archive.db")
    assert [one.name for one in await ops.aarchives()] == ["a"]
    await ops.aunarchive("a")
    assert (await ops.acompact()).threads == 0
    assert (await ops.aerase("a")).threads == ("a",)
    assert (await ops.aerase_run("sum")).runs == ("sum",)


async def test_a_copy_that_is_awaited_leaves_the_loop_free(store: perdure.Store, tmp_path: Path) -> None:
    await store.thread("a").asave("x")
    loop, threads = asyncio.get_running_loop(), []

    def look(_done: int, _total: int) -> None:
        threads.append(asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "free"), loop).result(10))

    await store.ops.abackup(tmp_path / "backup.db", progress=look)
    assert set(threads) == {"free"}
