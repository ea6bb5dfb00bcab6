"""Work that keeps a processor busy does not hold up the event loop: a flow puts it aside.

While a pack is made, or a keyframe compressed again, the loop is asked to do something, and the work waits for that: on
the loop itself it would wait in vain.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packing_kit import check, grow, scene

import perdure
from perdure.errors import Damaged
from perdure.log import pack_writer, recompress
from perdure.log.packs import make_pack
from perdure.storage.program import Batch, Flow, Program, Solo, Sql, adrive, aside, drive, write
from perdure.storage.sqlite.driver import SqliteDriver
from perdure.values.compress import compress_hard

_LONG_S = 5.0  # waited for only if the test fails


class Turns:
    """Lets work wait until the event loop has turned."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.seen: list[bool] = []

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            turned = threading.Event()
            self.loop.call_soon_threadsafe(turned.set)
            self.seen.append(all(self.seen) and turned.wait(_LONG_S))
            return work(*args, **kwargs)

        return waiting


async def test_the_loop_turns_while_a_store_is_compacted(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(store.thread("a"), 150)
    before = scene(store)
    store._context.clock_us = lambda: time.time_ns() // 1000 + 3_600_000_000
    loop = asyncio.get_running_loop()
    packs, keyframes = Turns(loop), Turns(loop)
    monkeypatch.setattr(pack_writer, "make_pack", packs.around(make_pack))
    monkeypatch.setattr(recompress, "compress_hard", keyframes.around(compress_hard))
    assert (await asyncio.to_thread(store.ops.compact)).packed > 100
    assert packs.seen
    assert all(packs.seen)
    assert keyframes.seen
    assert all(keyframes.seen)
    assert scene(store) == before
    check(store)


def _flow(work: Callable[[], int]) -> Flow[int]:
    try:
        return (yield from aside(work))
    except Damaged:
        return -1


def test_in_a_blocking_flow_it_is_done_in_place(store: perdure.Store) -> None:
    driver = store._context.driver
    assert drive(driver, _flow(threading.get_ident)) == threading.get_ident()


async def test_the_flow_gets_what_went_wrong(store: perdure.Store) -> None:
    def work() -> int:
        raise Damaged("something is wrong")

    driver = store._context.driver
    assert await asyncio.to_thread(drive, driver, _flow(work)) == -1
    assert await adrive(driver, _flow(work)) == -1


def test_what_can_wait_does_not_wait_for_the_disk_and_all_else_does(tmp_path: Path) -> None:
    """A slack transaction joins nobody, and leaves the connection as durable as it was, also when it fails."""
    driver = SqliteDriver(tmp_path / "a.db")
    assert driver._writer is not None
    connection, seen = driver._writer.connection, list[tuple[str, int]]()
    put = Sql("INSERT INTO meta (key, value) VALUES (:key, 'x')")

    def level(name: str) -> Program[None]:
        yield Batch(put(key=name))
        seen.append((name, connection.pragma("synchronous")))

    def failing() -> Program[None]:
        yield Batch(put(key="twice"), put(key="twice"))

    solos: dict[str, Solo] = {"s": "slack", "u": False}
    drive(driver, write(lambda: level("usual")))
    drive(driver, write(lambda: level("slack"), solo="slack"))
    with pytest.raises(perdure.errors.StoreError):
        drive(driver, write(failing, solo="slack"))
    drive(driver, write(lambda: level("after")))
    threads = [
        threading.Thread(target=drive, args=(driver, write(partial(level, f"{kind}{number}"), solo=solo)))
        for number in range(20)
        for kind, solo in solos.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    full, normal = 2, 1
    assert [found for name, found in seen if name[0] == "s"] == [normal] * 21
    assert [found for name, found in seen if name[0] != "s"] == [full] * 22
    driver.close()
