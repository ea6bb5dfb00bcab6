"""What the tests of backups share: a store with something of every kind in it."""

from __future__ import annotations

from copy_kit import make_thread

import perdure
from perdure import Store


@perdure.step(name="copied step")
def add(a: int, b: int) -> int:
    return a + b


@perdure.durable(name="copied run")
def run_of(n: int) -> int:
    total = 0
    for number in range(n):
        total = add(total, number)
    return total


@perdure.durable(name="copied question")
def asking() -> str:
    return str(perdure.ask("Go on?", options=["yes", "no"]))


def fill(store: Store) -> None:
    """Something of every kind, of two tenants."""
    make_thread(store, count=40)
    store.thread("rich").prune(keep=15)
    store.tenant("acme").thread("theirs", metadata={"user": "bob"}).save({"blob": "x" * 5000})
    store.run(run_of, 12, id="done")
    store.start(run_of, 3, id="queued")
    store.run(asking, id="asks")
