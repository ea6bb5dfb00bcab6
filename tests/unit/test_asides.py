"""Work that a flow puts aside: in place where the flow blocks, on another thread where an event loop drives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import perdure
from perdure.errors import Damaged
from perdure.storage.program import Driver, Flow, adrive, aside, drive


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with perdure.open(str(tmp_path / "a.db")) as store:
        yield store._context.driver


def _flow(work: Callable[[], int]) -> Flow[int]:
    try:
        return (yield from aside(work))
    except Damaged:
        return -1


async def test_a_blocking_flow_works_in_place_and_an_async_one_beside_its_loop(driver: Driver) -> None:
    assert drive(driver, _flow(threading.get_ident)) == threading.get_ident()
    assert await adrive(driver, _flow(threading.get_ident)) != threading.get_ident()


async def test_the_flow_gets_what_went_wrong(driver: Driver) -> None:
    def work() -> int:
        raise Damaged("something is wrong")

    assert await asyncio.to_thread(drive, driver, _flow(work)) == -1
    assert await adrive(driver, _flow(work)) == -1
