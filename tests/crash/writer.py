"""The child of the kill tests: saves, updates, forks and prunes, and says what was acknowledged.

Every state can be computed from its thread's name and its number, so the parent knows what each checkpoint must
hold without trusting the store. A line is said only after the call returned; a prune is said before it starts,
because from then on old checkpoints may be gone.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
from blake3 import blake3

import perdure
from perdure.testing.processes import Say

LINES = ("s0", "s1", "s2")
TASKS = tuple(f"t{number}" for number in range(8))
SHARED = "shared"
KEEP = 10


def state_of(thread: str, number: int) -> dict[str, Any]:
    """Grows for 30 saves, then starts over."""
    size = number % 30
    log = [f"{thread} {n} {n * 7919 % 1000003} " * 3 for n in range(number - size, number + 1)]
    return {"thread": thread, "number": number, "log": log, "size": {"of": {"log": size}}}


def digest_of(state: Any) -> str:
    return blake3(orjson.dumps(state)).hexdigest(16)


def write_sync(say: Say, url: str, seed: int) -> None:
    """One thread of execution: saves mixed with updates, forks and prunes."""
    chance = random.Random(seed)
    with perdure.open(url) as store:
        threads = {name: store.thread(name) for name in LINES}
        numbers = {name: _go_on(thread) for name, thread in threads.items()}
        while True:
            name = chance.choice(LINES)
            _act(say, chance, name, threads[name], numbers)


def _go_on(thread: perdure.Thread) -> int:
    """The next number: where the thread stands now, whoever wrote it."""
    head = thread.get_head()
    return 0 if head is None else int(thread.load(strict=True).state["number"]) + 1


def _act(say: Say, chance: random.Random, name: str, thread: perdure.Thread, numbers: dict[str, int]) -> None:
    number, what = numbers[name], chance.random()
    if what < 0.04 and number > 2:
        # Not all of these were acknowledged: the kill may have come in between.
        say({"prune": name, "oldest": list(thread.history(limit=KEEP))[-1].id})
        thread.prune(keep=KEEP)
        return
    if what < 0.08 and number > 2:
        _fork(say, chance, name, thread)
        return
    state = state_of(name, number)
    if what < 0.3 and number > 0:
        saved = thread.update({key: value for key, value in state.items() if key != "thread"})
    else:
        saved = thread.save(state, note=str(number))
    _acknowledge(say, name, saved.id, state, number)
    numbers[name] = number + 1


def _fork(say: Say, chance: random.Random, name: str, thread: perdure.Thread) -> None:
    new = f"{name}/{chance.getrandbits(40):x}"
    fork = thread.fork(name=new)
    for number in range(3):
        state = state_of(new, number)
        _acknowledge(say, new, fork.save(state).id, state, number)


def _acknowledge(say: Say, name: str, checkpoint: str, state: Any, number: int) -> None:
    say({"thread": name, "id": checkpoint, "digest": digest_of(state), "number": number})


def write_async(say: Say, url: str, seed: int) -> None:
    """Eight tasks that save at once, each to its own thread and, through one handle, to a shared one."""
    asyncio.run(_write_async(say, url, seed))


async def _write_async(say: Say, url: str, seed: int) -> None:
    async with perdure.open(url) as store:
        shared = store.thread(SHARED)
        await asyncio.gather(*(_task(say, store, shared, name, seed) for name in TASKS))


async def _task(say: Say, store: perdure.Store, shared: perdure.Thread, name: str, seed: int) -> None:
    chance = random.Random(f"{seed} {name}")
    thread = store.thread(name)
    head = await thread.aget_head()
    number = 0 if head is None else int((await thread.aload(strict=True)).state["number"]) + 1
    while True:
        state = state_of(name, number)
        if chance.random() < 0.2:
            saved = await shared.asave(state)
            _acknowledge(say, SHARED, saved.id, state, number)
        if chance.random() < 0.3 and number:
            saved = await thread.aupdate({key: value for key, value in state.items() if key != "thread"})
        else:
            saved = await thread.asave(state)
        _acknowledge(say, name, saved.id, state, number)
        number += 1


def write_both(say: Say, url: str, seed: int) -> None:
    """What the fork server calls: one sort of writer or the other."""
    (write_sync if seed % 2 else write_async)(say, url, seed)
