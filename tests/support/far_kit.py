"""Stores with an object store for tests: something cold in it, and everything that can be seen of it."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import perdure
from perdure.log.packing import pack_tenant
from perdure.runs.journal.blobs import read_blob
from perdure.storage.far_cells import MARK, wanted_of
from perdure.storage.objects import Objects
from perdure.storage.program import Batch, Program, Sql, Transaction, drive, read

ALL_COLD = 2**61
WORDS = [f"word{number:04}" for number in range(3000)]
LARGE = 70_000  # bytes: results from 64 KB on are kept apart
KEY = bytes(range(32))


@perdure.step(name="far_kit.large")
def large(seed: int) -> str:
    return random.Random(seed).randbytes(LARGE).hex()


@perdure.durable(name="far_kit.fetch")
def fetch(seed: int) -> int:
    return len(large(seed))


def at(folder: Path, **options: Any) -> Objects:
    """A folder, in which everything is cold and worth it."""
    return Objects(f"file://{folder}", **{"cold_s": 0.0, "min_bytes": 1024, "keep_s": 0.0, **options})


def prose(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def grow(thread: perdure.Thread, count: int, seed: int = 1, words: int = 6000) -> list[str]:
    chance = random.Random(seed)
    state: dict[str, Any] = {"text": prose(chance, words), "log": [], "n": 0}
    ids = []
    for number in range(count):
        state["n"] = number
        state["log"].append(prose(chance, 40))
        ids.append(thread.save(state, note=f"step {number}").id)
    return ids


def fill(store: perdure.Store, count: int = 140) -> list[str]:
    """A thread with packs, a fork, a run with a large result. The thread's ids."""
    ids = grow(store.thread("a"), count)
    grow(store.thread("a").fork(ids[count // 2], name="fork"), 20, seed=2)
    grow(store.thread("other"), 40, seed=3)
    store.run(fetch, 1, id="big").result(timeout_s=30)
    pack(store)
    return ids


def pack(store: perdure.Store) -> None:
    tenant = store._context.known_tenant
    assert tenant is not None
    drive(store._context.driver, pack_tenant(tenant, ALL_COLD))


def scene(store: perdure.Store) -> dict[str, Any]:
    """Everything that can be seen."""
    seen: dict[str, Any] = {}
    for info in store.threads(limit=None):
        thread = store.thread(info.name)
        for checkpoint in thread.history(limit=None):
            loaded = thread.load(checkpoint.id, strict=True)
            seen[f"{info.name} {checkpoint.id}"] = (loaded.state, loaded._record.hash, loaded.note)
    for (key,) in rows(store, "SELECT hash FROM blob"):
        seen[bytes(key).hex()] = blob(store, bytes(key))
    return seen


def blob(store: perdure.Store, key: bytes | None = None) -> bytes:
    """A large result: the only one, if none is named."""
    if key is None:
        [(key,)] = rows(store, "SELECT hash FROM blob")
    tenant = store._context.known_tenant or 1
    found: bytes = drive(store._context.driver, read(partial(read_blob, tenant, bytes(key or b""))))
    return found


def rows(store: perdure.Store, text: str, **params: Any) -> list[Any]:
    """Past everything that encrypts or fetches."""

    def program() -> Program[list[Any]]:
        [found] = yield Batch(Sql(text)(**params))
        return found

    return list(store._context.driver.run(Transaction(program, write=True)))


def cells(store: perdure.Store) -> list[bytes]:
    """The cells that name objects."""
    found = rows(store, "SELECT data FROM pack ORDER BY pack") + rows(store, "SELECT body FROM blob ORDER BY hash")
    return [bytes(cell) for (cell,) in found if bytes(cell).startswith(MARK)]


def named(store: perdure.Store) -> set[str]:
    return {wanted_of(cell).name for cell in cells(store)}


def loose(store: perdure.Store) -> dict[str, int]:
    return dict(rows(store, "SELECT name, state FROM far_loose"))


def stored(folder: Path) -> set[str]:
    """The objects that are there."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check(store: perdure.Store) -> None:
    report = store.verify()
    assert report.ok, report.problems
