"""A store with a bit of everything, what its reads answer, and changes of all of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import perdure


@perdure.step
def look_up(number: int) -> int:
    return number * 2


@perdure.durable
def count(to: int) -> int:
    return sum(look_up(number) for number in range(to))


@perdure.durable
def asks() -> Any:
    return perdure.ask("Which seat?")


def fill(store: perdure.Store) -> None:
    thread = store.thread("a", metadata={"team": "one"})
    for number in range(5):
        thread.save({"n": number, "text": "x" * 500})
    store.memory("users", "alice").put("drink", {"fact": "Alice likes tea"})
    store.memory("users", "alice").put("seat", {"fact": "Alice wants an aisle seat"}, pinned=True)
    store.run(count, 3, id="done")
    store.run(asks, id="waits")


def seen(store: Any) -> dict[str, Any]:
    """What the reads of a store answer."""
    memory = store.memory("users", "alice")
    return {
        "threads": [(info.name, info.metadata) for info in store.threads()],
        "history": [
            [(point.id, point.state) for point in store.thread(info.name).history()] for info in store.threads()
        ],
        "runs": sorted((info.id, info.status) for info in store.runs()),
        "steps": [[(step.name, step.result) for step in store.get_run(info.id).steps()] for info in store.runs()],
        "asks": [(ask.run, ask.text) for ask in store.questions()],
        "items": sorted((item.key, item.value["fact"], item.version) for item in memory.list()),
        "found": [item.key for item in store.memory("users").search("seat")],
        "versions": [item.value for item in memory.history("drink")],
    }


def change_everything(store: perdure.Store) -> None:
    store.thread("a").save({"n": 99})
    store.thread("b").save({"n": 1})
    store.thread("a").pin(name="p")
    memory = store.memory("users", "alice")
    memory.put("drink", {"fact": "Alice likes coffee"})
    memory.delete("seat")
    store.memory("users", "bob").put("x", {"fact": "a seat for Bob"})
    store.answer("waits", "aisle")
    store.run(asks, id="waits")
    store.run(count, 2, id="later")
    store.delete_run("done")


def remove_everything(store: perdure.Store) -> None:
    store.thread("b").prune(keep=1)
    store.thread("a").unpin("p")
    store.thread("a").prune(keep=1)
    store.ops.compact()
    store.memory("users", "alice").forget({"fact": {"exists": True}})
    for info in store.threads():
        store.delete_thread(info.name)
    for run in store.runs():
        store.delete_run(run.id)


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of a private and a public key."""
    key = Ed25519PrivateKey.generate()
    pem, raw = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, raw))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def moment_between(store: perdure.Store) -> datetime:
    """A time that is a millisecond after all that was written, and before what is written next."""
    clock = store._context.clock_us
    at = clock() + 2000
    while clock() < at + 2000:
        pass
    return datetime.fromtimestamp(at / 1e6, UTC)
