"""What the tests of erasing share: secrets, and where they are found."""

from __future__ import annotations

import random
from pathlib import Path

from keeping_kit import (
    text,
)

import perdure
from perdure.runs.journal.blobs import BLOB_MIN_BYTES


def secrets_of(name: str) -> list[bytes]:
    """What is searched for: something of every place that data of a thread is kept in."""
    return [text(f"{name} {what}").encode() for what in ("state", "late", "note", "about", "metadata")]


def confide(store: perdure.Store, name: str) -> list[perdure.Checkpoint]:
    """A thread with secrets in its states, notes, metadata and pins."""
    state, late, note, about, metadata = (secret.decode() for secret in secrets_of(name))
    thread = store.thread(name, metadata={"of": metadata})
    saved = [thread.save({"first": state, "n": 0}, note=note, metadata={"about": about})]
    saved += [thread.save({"first": state, "n": n, "late": [late] * (n > 3)}) for n in range(1, 9)]
    thread.pin(saved[2], name="kept")
    return saved


def found_in(path: Path, secrets: list[bytes]) -> set[bytes]:
    """Which of these are in any file of a store."""
    data = [file.read_bytes() for file in path.parent.glob(path.name + "*")]
    return {secret for secret in secrets if any(secret in part for part in data)}


@perdure.step(name="erasing.large")
def large(secret: str) -> bytes:
    return secret.encode() + random.Random(secret).randbytes(BLOB_MIN_BYTES)


@perdure.step(name="erasing.small")
def small(secret: str) -> str:
    perdure.emit(secret)
    return secret[::-1]


@perdure.durable(name="erasing.agent")
def agent(secret: str, ask: bool) -> str:
    state = perdure.state({"secret": ""})
    state["secret"] = secret
    small(secret)
    large(secret)
    if ask:
        perdure.ask(secret, options=["yes"])
    return secret
