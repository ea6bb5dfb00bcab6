"""Writes the store that later versions must be able to open: tests/data/v1/store.db and expected.json.

    .venv/bin/python tests/migration/make_store.py

Run it once per format, into a folder of its own (`… make_store.py tests/data/v2`), and never again for an old one: the
point of those files is that this version's code did not write them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Checkpoint, Store, Thread
from holdfast.testing.samples import every_type

FOLDER = Path(__file__).parent.parent / "data" / "v1"
TENANTS = ("default", "acme")
LARGE_CHARACTERS = 3_000


def growing(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [f"message {n}: {'word ' * (n % 17)}" for n in range(size)], "phase": "ab"[size % 2]}
        for size in range(count)
    ]


def write(store: Store) -> None:
    """Threads with keyframes and long chains, forks, branches, tombstones, large and small states, every type."""
    main = store.thread("main", metadata={"user": "ann", "n": 1})
    saved = [main.save(state, note=f"step {n}" if n % 3 == 0 else None) for n, state in enumerate(growing(60))]
    main.save({"branch": True}, parent=saved[20], note="a branch", metadata={"why": ["test"]})
    fork = main.fork(saved[30], name="fork", metadata={"kind": "fork"})
    for n in range(5):
        fork.save({**growing(60)[30], "fork": n})
    fork.update({"deep": {"er": {"est": 1}}}, remove=["phase"], note="updated")
    main.load()
    main.rollback(saved[10], note="back to ten")

    pruned = store.thread("pruned")
    lines = [pruned.save(state) for state in growing(40)]
    store.thread("pruned").save({"late branch": 1}, parent=lines[-3])
    kept = pruned.fork(lines[12], name="kept by a fork")
    kept.save({"own": 1})
    pruned.prune(keep=5)
    gone = store.thread("gone")
    gone.save({"gone": 1})
    store.delete(gone)

    types = store.thread("types")
    types.save(every_type(), note="every type")
    changed = every_type()
    changed["plan"].steps.append("rest")
    types.save(changed)
    other = store.thread("states that are no mappings")
    states: list[Any] = [None, 1, "text", [1, 2], (1, 2), {}]
    for state in states:
        other.save(state)
    sizes = store.thread("sizes")
    for n in range(8):
        sizes.save({"text": "large " * 20_000 if n % 2 else "small", "n": n})


def describe(store: Store) -> list[dict[str, Any]]:
    """Everything the store shows, in a form that JSON holds; states as `raw`, which needs no classes."""
    found = []
    for info in sorted(store.threads(limit=None), key=lambda info: info.name):
        thread = store.thread(info.name)
        found.append(
            {
                "name": info.name,
                "metadata": info.metadata,
                "head": info.head,
                "forked_at": info.forked_at,
                "created_at": info.created_at.isoformat(),
                "updated_at": info.updated_at.isoformat(),
                "history": [_checkpoint(thread, one) for one in thread.history()],
                "branches": sorted(one.id for one in thread.branches()),
            }
        )
    return found


def _checkpoint(thread: Thread, one: Checkpoint) -> dict[str, Any]:
    raw = thread.load(one, strict=True, raw=True).state
    return {
        "id": one.id,
        "parent": one.parent,
        "step": one.step,
        "kind": one.kind,
        "note": one.note,
        "metadata": one.metadata,
        "at": one.at.isoformat(),
        "raw": brief(plain(raw)),
    }


def brief(value: Any) -> Any:
    """A large state by its hash: the file is kept in the repository."""
    text = json.dumps(value)
    if len(text) <= LARGE_CHARACTERS:
        return json.loads(text)
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "characters": len(text)}


def plain(value: Any) -> Any:
    """A raw state as JSON holds it, the same in every process: sets have no order, keys may be anything."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(inner) for key, inner in value.items()}
        return [[plain(key), plain(inner)] for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(ascii(inner) for inner in value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return ascii(value)


def make(folder: Path) -> None:
    """Write both files, or, if anything is wrong with what was written, none."""
    expected = {}
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "store.db"
        with holdfast.open(str(made)) as store:
            for tenant in TENANTS:
                write(store.tenant(tenant))
                expected[tenant] = describe(store.tenant(tenant))
                assert store.tenant(tenant).verify().ok
        assert not list(made.parent.glob("*-wal")), "not closed cleanly"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "store.db"
        shutil.copyfile(made, path)
    text = json.dumps({"holdfast": holdfast.__version__, "tenants": expected}, indent=1)
    (folder / "expected.json").write_text(text + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes; {folder / 'expected.json'}: {len(text):,} bytes")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
