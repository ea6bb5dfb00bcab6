"""LangGraph's store: puts in bulk, and async operations that wait together, beside LangGraph's own stores on SQLite.

Neither side embeds. Ours also indexes the words of every item and keeps its versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from langgraph.store.base import BaseStore, Op, PutOp
from langgraph.store.sqlite import AsyncSqliteStore, SqliteStore

from bench.measure import Row, Run, in_turns, milliseconds
from perdure.langgraph import PerdureStore

PUTS_BAR = 1.0
ASYNC_BAR = 1.0
SPACE = ("test", "foo", "bar", "baz")


def langgraph_store(run: Run) -> list[Row]:
    puts, waiting = run.count(500, 20), run.count(360, 12)
    with (
        PerdureStore(str(run.folder / "ours.db")) as ours,
        SqliteStore.from_conn_string(str(run.folder / "stock.db")) as stock,
    ):
        stock.setup()
        took, theirs = map(milliseconds, in_turns(run.count(20, 2), _puts(ours, puts), _puts(stock, puts)))
    awaited, stock_awaited = asyncio.run(_awaited(run, waiting))
    return [
        Row(f"a batch of {puts} puts of PerdureStore", took, "ms", theirs, None, theirs / took, PUTS_BAR, "at least",
            note="peer: SqliteStore; ours also keeps versions, hashes and words (numbers.md says what each costs)"),
        Row(f"{waiting} async operations that wait together", awaited, "ms", stock_awaited, None,
            stock_awaited / awaited, ASYNC_BAR, "at least", note="peer: AsyncSqliteStore"),
    ]  # fmt: skip


def _puts(store: BaseStore, size: int) -> Callable[[], object]:
    rounds = count()

    def put() -> object:
        number = next(rounds)
        ops: list[Op] = [
            PutOp(
                ("users", str(place % 5)), f"k{number}-{place}", {"fact": f"Item {place} of round {number}, in prose"}
            )
            for place in range(size)
        ]
        return store.batch(ops)

    return put


async def _awaited(run: Run, size: int) -> tuple[float, float]:
    async with (
        PerdureStore(str(run.folder / "ours-async.db")) as ours,
        AsyncSqliteStore.from_conn_string(str(run.folder / "stock-async.db")) as stock,
    ):
        await stock.setup()
        times: dict[int, list[float]] = {0: [], 1: []}
        loop = asyncio.get_running_loop()
        for _ in range(run.count(15, 3)):
            for place, store in enumerate((ours, stock)):
                before = loop.time()
                await _together(store, size)
                times[place].append(loop.time() - before)
    took, theirs = (sorted(each)[len(each) // 2] * 1000 for each in times.values())
    return took, theirs


async def _together(store: Any, size: int) -> None:
    work: list[Any] = []
    for number in range(size // 6):
        space, key = (*SPACE, str(number % 2)), f"key{number}"
        work += [store.aput(space, key, {"foo": f"bar{number}"}), store.aget(space, key)]
        work += [store.alist_namespaces(max_depth=3), store.asearch(("test",))]
        work += [store.aput(space, key, {"foo": f"bar{number}"}), store.adelete(space, key)]
    await asyncio.gather(*work)
