"""Work that keeps a processor busy does not hold up the event loop: a flow puts it aside.

While a pack is made, the loop is asked to do something, and the work waits for that: on the loop itself it would wait
in vain.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from packing_kit import check, grow, scene

import perdure
from perdure.errors import Damaged
from perdure.log import pack_writer
from perdure.log.packs import make_pack
from perdure.storage.program import Flow, adrive, aside, drive

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
    packs = Turns(asyncio.get_running_loop())
    monkeypatch.setattr(pack_writer, "make_pack", packs.around(make_pack))
    assert (await asyncio.to_thread(store.ops.compact)).packed > 100
    assert packs.seen
    assert all(packs.seen)
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
