"""Random programs out of steps and effects, in a child that is killed at one of its points, and other versions of them.

A program is a tree of nodes: `[kind, name, [node, …]]`. An async one uses what asyncio offers: tasks, task groups,
`wait_for`, `as_completed`, queues, `shield`, beside tasks that do nothing for the run and whose number depends on time.
What an effect does is a line in a file, with its key; `reconcile` looks for the key there.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from striking import die_at

import perdure
from perdure.runs.execution import hooks, replay_order
from perdure.runs.execution.execution import Execution
from perdure.testing.processes import Say

Node = list[Any]
LIMIT_S = 30  # for one execution: one that takes longer hangs
DEADLINE_S = 5.0
LEAVES = ("eff", "eff", "st", "tok", "now", "twice")
SYNC = ("seq", "pg", "pmap")
LIKE_SEQ = (*SYNC, "gather", "tg", "bg", "wf", "beat", "late", "shield")  # each child once, so exchangeable
ASYNC = (*LIKE_SEQ, "asc", "queue", "workers", "pool")
chance = random.Random()
ledger = Path()


# --- what programs do


def _write(id: str, key: str) -> str:
    with ledger.open("a") as file:
        file.write(f"{id} {key}\n")
    return f"done {id}"


def _find(id: str, key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    done = any(line.split()[1] == key for line in ledger.read_text().splitlines())
    return perdure.outcome.Done(f"done {id}") if done else perdure.outcome.NotDone()


async def _moment() -> None:
    await asyncio.sleep(chance.choice((0, 0, 0.001, 0.003)))


@perdure.effect(name="random_programs.eff", reconcile=_find, timeout_s=DEADLINE_S)
async def eff(id: str, key: perdure.IdempotencyKey) -> str:
    await _moment()
    found = _write(id, str(key))
    await _moment()
    return found


@perdure.effect(name="random_programs.sync_eff", reconcile=_find, timeout_s=DEADLINE_S)
def sync_eff(id: str, key: perdure.IdempotencyKey) -> str:
    return _write(id, str(key))


@perdure.effect(name="random_programs.pay", reconcile=_find, timeout_s=DEADLINE_S)
async def pay(id: str, token: str, key: perdure.IdempotencyKey) -> str:
    """Its arguments are what an equal call in parallel returned: that must be its own again."""
    await _moment()
    return _write(id, str(key))


@perdure.effect(name="random_programs.sync_pay", reconcile=_find, timeout_s=DEADLINE_S)
def sync_pay(id: str, token: str, key: perdure.IdempotencyKey) -> str:
    return _write(id, str(key))


@perdure.step(name="random_programs.note")
async def note(id: str) -> str:
    await _moment()
    return id


@perdure.step(name="random_programs.sync_note")
def sync_note(id: str) -> str:
    return id


@perdure.step(name="random_programs.token")
async def token() -> str:
    await _moment()
    return f"{chance.getrandbits(32):08x}"


@perdure.step(name="random_programs.sync_token")
def sync_token() -> str:
    return f"{chance.getrandbits(32):08x}"


# --- programs


class Programs:
    """Draws programs."""

    def __init__(self, chance: random.Random, kinds: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        self._chance, self._kinds, self._leaves, self._count = chance, kinds, leaves, 0

    def draw(self) -> Node:
        return ["seq", "root", [self._node(3), self._node(1)]]

    def _node(self, depth: int) -> Node:
        self._count += 1
        name = f"e{self._count}"
        if depth == 0 or self._chance.random() < 0.25:
            return [self._chance.choice(self._leaves), name, []]
        return [
            self._chance.choice(self._kinds),
            name,
            [self._node(depth - 1) for _ in range(self._chance.randint(2, 3))],
        ]


def effects_of(node: Node) -> Counter[str]:
    """How often each effect of a program is to happen."""
    kind, name, children = node
    found: Counter[str] = Counter()
    if kind in ("eff", "seff", "tok", "now"):
        found[name] += 1
    elif kind == "twice":
        found[name] += 2
    for number, child in enumerate(children):
        found += effects_of(child)
        if kind in ("asc", "queue") or kind == "workers":
            found[f"{name}.{number}"] += 1
    return found


def changed(node: Node, chance: random.Random, kinds: tuple[str, ...]) -> Node:
    """Another version of a program: the same effects elsewhere or in another order, one more, or some less."""
    picked = chance.choice(list(_walk(node)))
    how = chance.choice(("kind", "kind", "wrap", "unwrap", "shuffle", "insert", "drop"))
    alike = [kind for kind in kinds if kind in LIKE_SEQ]

    def change(node: Node) -> Node:
        kind, name, children = node
        if node is not picked:
            return [kind, name, [change(child) for child in children]]
        if how == "wrap":
            return [chance.choice(alike), f"w{name}", [node]]
        if how == "insert":
            return ["seq", f"i{name}", [["eff", f"new{name}", []], node]]
        if kind not in alike:
            return node
        if how == "unwrap":
            return ["seq", name, children]
        if how == "shuffle":
            return [kind, name, chance.sample(children, len(children))]
        if how == "drop":
            return [kind, name, children[1:]]
        return [chance.choice(alike), name, children]

    return change(node)


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node[2]:
        yield from _walk(child)


# --- an async program


async def run_node(node: Node) -> None:
    kind, name, _ = node
    if chance.random() < 0.2:
        for _ in range(chance.randint(0, 3)):
            await asyncio.create_task(_moment())
    if kind == "eff":
        await eff(name)
    elif kind == "seff":
        sync_eff(name)
    elif kind == "st":
        await note(name)
    elif kind == "tok":
        await pay(name, await token())
    elif kind == "now":
        await pay(name, perdure.now().isoformat())
    elif kind == "twice":
        await asyncio.gather(eff(name), eff(name))
    else:
        await _PARENTS[kind](name, node[2])


async def _named(name: str, child: Node) -> str:
    await run_node(child)
    return name


async def _seq(name: str, children: list[Node]) -> None:
    for child in children:
        await run_node(child)


async def _gather(name: str, children: list[Node]) -> None:
    await asyncio.gather(*map(run_node, children))


async def _tg(name: str, children: list[Node]) -> None:
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(_named(name, child))


async def _bg(name: str, children: list[Node]) -> None:
    background = [asyncio.create_task(run_node(child)) for child in children[:1]]
    await _seq(name, children[1:])
    for task in background:
        await task


async def _wf(name: str, children: list[Node]) -> None:
    for child in children:
        await asyncio.wait_for(run_node(child), 60)


async def _shield(name: str, children: list[Node]) -> None:
    await asyncio.shield(asyncio.gather(*map(run_node, children)))


async def _beat(name: str, children: list[Node]) -> None:
    async def beat() -> None:
        while True:
            await asyncio.create_task(asyncio.sleep(0.001))

    heart = asyncio.create_task(beat())
    try:
        for child in children:
            await asyncio.create_task(run_node(child))
    finally:
        heart.cancel()


async def _late(name: str, children: list[Node]) -> None:
    async def late(child: Node) -> None:
        await _moment()
        await run_node(child)

    await asyncio.gather(*map(late, children))


async def _asc(name: str, children: list[Node]) -> None:
    calls = [_named(f"{name}.{number}", child) for number, child in enumerate(children)]
    for earliest in asyncio.as_completed(calls):
        await eff(await earliest)


async def _queue(name: str, children: list[Node]) -> None:
    queue = asyncio.Queue[str]()

    async def produce(number: int, child: Node) -> None:
        queue.put_nowait(await _named(f"{name}.{number}", child))

    tasks = [asyncio.create_task(produce(number, child)) for number, child in enumerate(children)]
    for _ in children:
        await eff(await queue.get())
    await asyncio.gather(*tasks)


async def _workers(name: str, children: list[Node]) -> None:
    async def worker(number: int, child: Node) -> None:
        await pay(f"{name}.{number}", await token())
        await run_node(child)

    await asyncio.gather(*(worker(number, child) for number, child in enumerate(children)))


async def _pool(name: str, children: list[Node]) -> None:
    todo = list(children)

    async def worker() -> None:
        while todo:
            await run_node(todo.pop(0))

    await asyncio.gather(worker(), worker())


async def _pg(name: str, children: list[Node]) -> None:
    await perdure.gather(*map(run_node, children))


async def _pmap(name: str, children: list[Node]) -> None:
    await perdure.map(run_node, children, concurrency=chance.choice((None, 1, 2)))


_PARENTS: dict[str, Callable[[str, list[Node]], Awaitable[None]]] = {
    "seq": _seq,
    "gather": _gather,
    "tg": _tg,
    "bg": _bg,
    "wf": _wf,
    "shield": _shield,
    "beat": _beat,
    "late": _late,
    "asc": _asc,
    "queue": _queue,
    "workers": _workers,
    "pool": _pool,
    "pg": _pg,
    "pmap": _pmap,
}


# --- a sync program


def run_sync(node: Node) -> None:
    kind, name, children = node
    if kind in ("eff", "seff"):
        sync_eff(name)
    elif kind == "st":
        sync_note(name)
    elif kind == "tok":
        sync_pay(name, sync_token())
    elif kind == "now":
        sync_pay(name, perdure.now().isoformat())
    elif kind == "twice":
        perdure.gather(lambda: sync_eff(name), lambda: sync_eff(name))
    elif kind == "pg":
        perdure.gather(*(lambda child=child: run_sync(child) for child in children))
    elif kind == "pmap":
        perdure.map(run_sync, children, concurrency=chance.choice((None, 1, 2)))
    else:
        for child in children:
            run_sync(child)


# --- one execution


def live(say: Say, folder: str, program: Node, mode: str, seed: int, life: int, at: int) -> None:
    """Execute a program as far as it goes; die at the `at`-th point. Says its status, and why it is stuck."""
    global ledger
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    logging.disable()
    ledger = Path(folder) / "ledger"
    chance.seed(seed)
    replay_order.REFUSAL_S = 1.0
    Execution.ahead_us = life * int(DEADLINE_S * 2e6)  # the deadlines of effects in earlier lives have passed

    @perdure.durable(name="random_programs.program")
    async def program_async() -> None:
        await run_node(program)

    @perdure.durable(name="random_programs.program")
    def program_sync() -> None:
        run_sync(program)

    with perdure.open(Path(folder) / "runs.db", durability="normal") as store:
        hooks.hook = die_at(at)
        run = store.run(program_async if mode == "async" else program_sync, id="r")
        hooks.hook = None
        why = ""
        try:
            run.result()
        except perdure.PerdureError as error:
            why = f"{type(error).__name__}: {error}"
        say({"status": run.refresh().status, "why": why})


def main() -> None:
    """Execute one program for a process that uses another Python: the arguments of `live` as JSON."""
    import json

    live(lambda end: print(json.dumps(end)), *json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
