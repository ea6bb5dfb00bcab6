"""What is erased is gone from snapshots too; what was not erased is still there."""

from __future__ import annotations

import random

import pytest
from snapshot_kit import change_everything, count, fill

import perdure

SECRET = "the password is swordfish"


@perdure.step
def large_secret() -> bytes:
    return random.Random(1).randbytes(300_000)  # apart from the journal


@perdure.durable
def keeps_a_secret() -> str:
    large_secret()
    perdure.state()["said"] = SECRET
    return SECRET


def leftovers(store: perdure.Store) -> list[str]:
    """Tables of the past that hold something of an erased owner."""
    driver = store._context.driver.capabilities.base
    from perdure.storage.domains import owned_tables
    from perdure.storage.program import Batch, Program, Sql, drive, read

    def look() -> Program[list[str]]:
        found = []
        for table in owned_tables():
            [[(rows,)]] = yield Batch(Sql(f"SELECT count(*) FROM {table}_past")())
            found += [table] if rows else []
        return found

    return drive(driver, read(look))


def test_an_erased_thread_run_and_item(store: perdure.Store) -> None:
    for number in range(3):
        store.thread("secret").save({"n": number, "said": SECRET})
    store.run(keeps_a_secret, id="secret")
    store.memory("users").put("secret", {"fact": SECRET})
    snapshot = store.snapshot("s")
    store.thread("secret").save({"n": 4, "said": SECRET})
    store.memory("users").put("secret", {"fact": "changed"})
    store.ops.erase("secret")
    store.ops.erase_run("secret")
    store.memory("users").erase("secret")
    with pytest.raises(perdure.NotFound, match="erased since"):
        snapshot.thread("secret").load(strict=True)
    with pytest.raises(perdure.NotFound):
        snapshot.get_run("secret").steps()
    assert snapshot.memory("users").get("secret") is None
    assert set(leftovers(store)) <= {"memory_space"}  # a namespace's counters: no content
    told = [problem.what for problem in snapshot.verify().problems]
    assert all("counters" in what for what in told), told  # of the namespace: an item of it was erased


def test_an_erased_checkpoint_takes_its_thread_out_of_snapshots(store: perdure.Store) -> None:
    fill(store)
    points = list(store.thread("a").history())
    snapshot = store.snapshot("s")
    change_everything(store)
    store.thread("a").erase(points[2])
    assert [info.name for info in snapshot.threads()] == []
    assert sorted(info.id for info in snapshot.runs()) == ["done", "waits"]
    assert snapshot.get_run("done").steps()
    assert store.run(count, 3, id="again").result() == 6
