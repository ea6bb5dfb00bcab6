"""A store that is dropped without close() is collected: its connections are closed, its liveness lock is released."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import perdure


@perdure.step
def one() -> int:
    return 1


@perdure.durable
def forgetting_agent() -> int:
    perdure.progress(done="begun")
    return one()


@perdure.durable
async def async_agent() -> int:
    return one()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_store_that_ran_something_and_was_not_closed_is_collected(tmp_path: Path, is_async: bool) -> None:
    store = perdure.open(str(tmp_path / "agent.db"), durability="normal")
    if is_async:
        asyncio.run(arun(store))
    else:
        assert store.run(forgetting_agent, id="a").result() == 1
    driver = weakref.ref(store._context.driver)
    assert open_files(tmp_path)
    assert list(tmp_path.glob("*-owner-*"))
    del store
    assert is_collected(driver)
    assert not open_files(tmp_path)
    assert not list(tmp_path.glob("*-owner-*"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_store_on_postgresql_that_was_not_closed_is_collected(postgres_url: str) -> None:
    store = perdure.open(postgres_url)
    assert store.run(forgetting_agent, id="a").result() == 1
    driver = weakref.ref(store._context.driver)
    del store
    assert is_collected(driver)


async def arun(store: perdure.Store) -> None:
    run = await store.arun(async_agent, id="a")
    assert await run.aresult() == 1


def is_collected(driver: weakref.ref[Any]) -> bool:
    """Whether it goes, once the threads that worked for it have put down what they did last."""
    until = time.monotonic() + 10
    while driver() is not None and time.monotonic() < until:
        gc.collect()
    return driver() is None


def open_files(folder: Path) -> list[str]:
    """What this process has open in a folder."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # that of listdir itself
    return [link for link in links if link.startswith(str(folder))]
