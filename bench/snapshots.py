"""Snapshots: what they cost a save, how long taking one takes, reading at one, and the difference to one.

The peer of each figure is the same store without snapshots, or the live store, in the same run. Bytes are pages that a
save writes to SQLite's log, the amount that grows when old rows are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import apsw

import perdure
from bench.measure import Row, Run, compare, in_turns, milliseconds, small_states
from perdure.log.thread_table import find_thread
from perdure.storage.program import drive, read

_STATE_BYTES = 1000


def snapshots(run: Run) -> list[Row]:
    return [*_saves(run), *_many_threads(run), _beside(run)]


def _saves(run: Run) -> list[Row]:
    """Saves of 1 KB: without triggers, with them, and the first one after each snapshot."""
    with perdure.open(str(run.folder / "plain.db")) as plain, perdure.open(str(run.folder / "kept.db")) as kept:
        kept.snapshot("first")
        states = small_states(50, _STATE_BYTES)
        one, other = _saver(plain, states), _saver(kept, states)
        saves = compare(run.count(8000, 60), other, one)
        pages = median(_pages(run.folder / "kept.db", other) for _ in range(15))
        first = median(_pages(run.folder / "kept.db", _after(kept, other)) for _ in range(15))
    return [
        Row("save of 1 KB with triggers", saves.ours, "ms", floor=saves.floor, ratio=saves.ratio, bar=1.05,
            note=f"{saves.interval}; 10th percentiles; floor: a store that never had a snapshot"),
        Row("first save after a snapshot: pages", first, "pages", floor=pages, ratio=first / pages, bar=2.2,
            note="of SQLite's log, medians of 15; floor: any other save"),
    ]  # fmt: skip


def _saver(store: perdure.Store, states: list[dict[str, object]]) -> Callable[[], object]:
    thread = store.thread("agent")
    numbers = iter(range(10**9))
    return lambda: thread.save({**states[next(numbers) % len(states)], "n": time.perf_counter_ns()})


def _after(store: perdure.Store, save: Callable[[], object]) -> Callable[[], object]:
    """The save after a snapshot."""
    store.snapshot()
    return save


def _pages(path: Path, save: Callable[[], object]) -> int:
    """How many pages one save adds to the log."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    save()
    [(_, pages, _)] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    connection.close()
    return int(pages)


def _many_threads(run: Run) -> list[Row]:
    """A store of 100,000 threads, of which 1,000 change."""
    threads, changed = run.count(100_000, 50), run.count(1000, 5)
    with perdure.open(str(run.folder / "few.db")) as few, perdure.open(str(run.folder / "many.db")) as many:
        few.thread("t0").save({"n": 0})
        many.thread("t0").save({"n": 0})
        _copy_rows(run.folder / "many.db", threads)
        for store in (few, many):
            store.snapshot("first")  # prepares the store, once
        numbers = iter(range(10**9))
        few_s, many_s = in_turns(
            run.count(30, 3),
            lambda: few.snapshot(f"f{next(numbers)}"),
            lambda: many.snapshot(f"m{next(numbers)}"),
        )
        snapshot = many.snapshot("base")
        for number in range(1, changed + 1):
            many.thread(f"t{number}").save({"n": 1})
        diff_s = in_turns(run.count(20, 2), lambda: len(snapshot.diff()))[0]
        assert len(snapshot.diff()) == changed
        name = f"t{threads // 2}"
        at_s, live_s = in_turns(run.count(300, 5), _finder(snapshot.store, name), _finder(many, name))
    return [
        Row("take beside 100,000 threads", milliseconds(many_s), "ms", floor=milliseconds(few_s), bar=10,
            ratio=median(many_s) / median(few_s), judged="ours", note="floor: beside one thread"),
        Row("find a thread by name at a snapshot", milliseconds(at_s), "ms", floor=milliseconds(live_s),
            ratio=median(at_s) / median(live_s), bar=1.5, note="floor: live"),
        Row("diff, 1,000 of 100,000 changed", milliseconds(diff_s), "ms", bar=20, judged="ours"),
    ]  # fmt: skip


def _finder(store: perdure.Store, name: str) -> Callable[[], object]:
    driver = store._context.driver
    tenant = drive(driver, store._context.ensure_tenant())
    return lambda: drive(driver, read(partial(find_thread, tenant, name)))


def _copy_rows(path: Path, count: int) -> None:
    """Forks of one thread, made by the database itself: making them one by one would take minutes."""
    connection = apsw.Connection(str(path))
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('thread') ORDER BY cid")]
    changed = {"thread": "thread + n", "name": "'t' || n", "origin": "head"}
    values = ", ".join(changed.get(column, column) for column in columns)
    connection.execute(
        f"""WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count:d})
        INSERT INTO thread ({", ".join(columns)}) SELECT {values} FROM thread, c WHERE name = 't0'"""
    )
    connection.execute("UPDATE counter SET number = (SELECT max(thread) FROM thread)")
    connection.close()


def _beside(run: Run) -> Row:
    """The slowest saves while ten snapshots are taken each second, and without."""
    with perdure.open(str(run.folder / "beside.db")) as store:
        store.snapshot("first").release()
        save = _saver(store, small_states(50, _STATE_BYTES))
        calm: list[float] = []
        busy: list[float] = []
        for part in range(run.count(6, 2)):
            ended = threading.Event()
            taker = threading.Thread(target=_take, args=(store, part, ended))
            into = busy if part % 2 else calm
            if part % 2:
                taker.start()
            until = time.perf_counter() + run.count(3, 1) * 0.5
            while time.perf_counter() < until:
                began = time.perf_counter()
                save()
                into.append(time.perf_counter() - began)
            ended.set()
            if part % 2:
                taker.join()
    slow_calm, slow_busy = quantiles(calm, n=100)[98], quantiles(busy, n=100)[98]
    return Row("save p99 beside 10 snapshots a second", slow_busy * 1e3, "ms", floor=slow_calm * 1e3,
               ratio=slow_busy / slow_calm, bar=1.5, note="floor: without snapshots")  # fmt: skip


def _take(store: perdure.Store, part: int, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(0.1):
        store.snapshot(f"p{part}-{number}")
        number += 1
