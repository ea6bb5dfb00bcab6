"""A process that is killed while it writes: what it acknowledged is there, search finds it, and nothing is half."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import perdure
from perdure.testing.processes import ForkServer

PUTS = """
import sys, perdure
store = perdure.open(sys.argv[1], embedder=lambda texts: [[float(len(text)), 1.0] for text in texts])
grams = perdure.open(sys.argv[1], words="ngrams")
memory, other = store.memory("users", "alice"), store.memory("users", "alice", "other")
others = [
    lambda: other.put_many({"a": "hiking", "b": "sailing"}),
    lambda: other.update("a", lambda value: "hiking again"),
    lambda: other.policy(max_items=1),
    lambda: other.delete("b"),
    lambda: other.put("c", "hiking", pinned=True),
    lambda: store.memory("users").reembed(),
    lambda: grams.memory("users").reindex(),
    lambda: other.forget({}),
    lambda: other.erase("a"),
]
for n in range(100000):
    memory.put(f"k{n % 50}", {"fact": f"hiking number{n}"})
    print(n, flush=True)
    others[n % len(others)]()
"""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("scripts:script") as started:
        yield started


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_what_was_acknowledged_is_there_and_found(url: str, fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "puts.py").write_text(PUTS)
    for after in (3, 60, 17):
        child = fork_server.start(str(tmp_path / "puts.py"), url)
        said = [int(line) for line in islice(child.lines(), after)]
        said += [int(line) for line in child.kill()]
        with perdure.open(url) as store:
            memory = store.memory("users", "alice")
            last = said[-1]
            numbers = [version.value["fact"] for version in memory.history(f"k{last % 50}") if version.value]
            assert f"hiking number{last}" in numbers
            newest = memory.get(f"k{last % 50}")
            assert newest is not None
            found = memory.search(newest.value["fact"].split()[-1], limit=1)
            assert [item.key for item in found] == [newest.key]
            assert store.ops.verify().ok
