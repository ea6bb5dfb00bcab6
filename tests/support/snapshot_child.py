"""A process that takes, reads and releases snapshots beside changes, until it is killed. Each thing that it says is a
fact: what a snapshot showed when it was new, or that a release returned."""

from __future__ import annotations

import json
from hashlib import blake2b

from snapshot_kit import seen

import perdure
from perdure.testing.processes import Say


def digest(store: object) -> str:
    return blake2b(json.dumps(seen(store), default=str, sort_keys=True).encode(), digest_size=16).hexdigest()


def work(say: Say, url: str, start: int) -> None:
    with perdure.open(url, durability="normal") as store:
        for number in range(start, start + 1000):
            store.thread("a").save({"n": number})
            store.memory("users", "alice").put("drink", {"fact": f"tea {number}"})
            snapshot = store.snapshot(f"s{number}")
            say(["taken", snapshot.name, digest(snapshot)])
            store.thread("a").prune(keep=2)
            store.memory("users", "alice").put("seat", {"fact": f"seat {number}"})
            if number % 3 == 0:
                say(["releases", snapshot.name])
                snapshot.release()
