"""What the tests of packing share: a thread with branches and forks, and all that is to be seen of it."""

from __future__ import annotations

import random
from typing import Any

import perdure
from perdure.log.pack_writer import PackResult, pack_tree
from perdure.storage.program import Batch, Program, Sql, Transaction, drive

ALL_COLD = 2**61
WORDS = [f"word{number:04}" for number in range(3000)]


def prose(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def grow(thread: perdure.Thread, count: int, seed: int = 1, size: int = 2000) -> list[str]:
    """Checkpoints of a state that grows, with edits in its middle."""
    chance = random.Random(seed)
    state: dict[str, Any] = {"text": prose(chance, size), "log": [], "n": 0}
    ids = []
    for number in range(count):
        state["n"] = number
        state["log"].append(prose(chance, 30))
        if number % 7 == 0:
            state["log"][chance.randrange(len(state["log"]))] = prose(chance, 30)
        ids.append(thread.save(state, note=f"step {number}").id)
    return ids


def scene(store: perdure.Store) -> dict[str, Any]:
    """Everything that can be seen of all threads."""
    seen: dict[str, Any] = {}
    for info in store.threads(limit=None):
        thread = store.thread(info.name)
        for tip in thread.branches():
            for checkpoint in thread.history(start=tip.id, limit=None):
                loaded = thread.load(checkpoint.id, strict=True)
                seen[f"{info.name} {checkpoint.id}"] = (loaded.state, loaded._record.hash, loaded.parent, loaded.note)
    return seen


def rows(store: perdure.Store, text: str, **params: Any) -> list[Any]:
    def program() -> Program[list[Any]]:
        [found] = yield Batch(Sql(text)(**params))
        return found

    return list(store._context.driver.run(Transaction(program)))


def pack(store: perdure.Store) -> PackResult:
    """Everything, however new it is, and whatever was looked at before."""
    tenant = store._context.known_tenant
    assert tenant is not None
    driver, total = store._context.driver, PackResult()
    for (tree,) in rows(store, "SELECT DISTINCT tree FROM thread WHERE tenant = :tenant", tenant=tenant):
        total = total.plus(drive(driver, pack_tree(tenant, tree, ALL_COLD))[0])
    return total


def check(store: perdure.Store) -> None:
    report = store.ops.verify()
    assert report.ok, report.problems
