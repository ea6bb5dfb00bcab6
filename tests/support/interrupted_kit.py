"""Durable functions with tasks that end their process, as Ctrl-C and sys.exit() do."""

from __future__ import annotations

import asyncio

import perdure


@perdure.step
async def ends_the_process(kind: str) -> None:
    await asyncio.sleep(0)
    raise KeyboardInterrupt if kind == "KeyboardInterrupt" else SystemExit


@perdure.durable
async def ends_in_a_group(kind: str) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ends_the_process(kind))
        group.create_task(asyncio.sleep(60))


@perdure.durable
async def ends_in_a_group_of_a_task(kind: str) -> None:
    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ends_the_process(kind))

    await asyncio.gather(inner(), asyncio.sleep(60))


@perdure.durable
async def ends_in_a_wait_for(kind: str) -> None:
    await asyncio.wait_for(ends_the_process(kind), 60)


IN_TASKS = [ends_in_a_group, ends_in_a_group_of_a_task, ends_in_a_wait_for]
